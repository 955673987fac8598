//! ReLU that saves a bit an element.

use burn_backend::{Scalar, TensorMetadata, get_device_settings, tensor::FloatTensor};

use crate::{
    data::DataBackend,
    saved::{HeldTensor, recorded::Recorded},
};

/// `max(x, 0)`. As Burn has it, the gradient is 0 where x is 0, and passes where x is NaN.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Relu;

impl<B: DataBackend> Recorded<B, 1> for Relu {
    /// 1 where the gradient passes.
    type Saved = HeldTensor<B>;

    fn again(&mut self, _inputs: &[HeldTensor<B>; 1]) -> Option<Self> {
        Some(*self)
    }

    fn forward(self, [x]: [HeldTensor<B>; 1], _wanted: [bool; 1]) -> (HeldTensor<B>, Self::Saved) {
        let x = x.into_value();
        let bools = get_device_settings::<B>(&B::float_device(&x)).bool_dtype;
        let blocked = B::float_lower_equal_elem(x.clone(), Scalar::from(0.0f32), bools);
        let passes = B::bool_into_float(B::bool_not(blocked), x.dtype().into());
        (
            HeldTensor::of("relu", B::relu(x)),
            HeldTensor::mask("relu", passes),
        )
    }

    fn backward(
        passes: HeldTensor<B>,
        gradient: FloatTensor<B>,
        _wanted: [bool; 1],
    ) -> [Option<FloatTensor<B>>; 1] {
        let bools = get_device_settings::<B>(&B::float_device(&gradient)).bool_dtype;
        let zero = Scalar::from(0.0f32);
        let blocked = B::float_equal_elem(passes.into_value(), zero, bools);
        [Some(B::float_mask_fill(gradient, blocked, zero))]
    }
}
