//! ReLU that saves a bit an element.

use burn_backend::{Scalar, get_device_settings, tensor::FloatTensor};

use crate::{
    data::DataBackend,
    saved::{HeldTensor, bits::Bits, recorded::Recorded},
};

/// `max(x, 0)`. As Burn has it, the gradient is 0 where x is 0, and passes where x is NaN.
pub(crate) struct Relu;

impl<B: DataBackend> Recorded<B, 1> for Relu {
    type Saved = Bits<B>;

    fn forward(self, [x]: [HeldTensor<B>; 1], _wanted: [bool; 1]) -> (HeldTensor<B>, Self::Saved) {
        let x = x.into_value();
        let passes = Bits::of(x.clone());
        (HeldTensor::of("relu", B::relu(x)), passes)
    }

    fn backward(
        passes: Bits<B>,
        gradient: FloatTensor<B>,
        _wanted: [bool; 1],
    ) -> [Option<FloatTensor<B>>; 1] {
        let bools = get_device_settings::<B>(&B::float_device(&gradient)).bool_dtype;
        let zero = Scalar::from(0.0f32);
        let blocked = B::float_equal_elem(passes.into_floats(), zero, bools);
        [Some(B::float_mask_fill(gradient, blocked, zero))]
    }
}
