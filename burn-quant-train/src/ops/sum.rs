//! The sum and the mean of all elements, such as of losses, in FP32: dX = dY, or dY / n, for each of n.

use burn_backend::{FloatDType, Scalar, Shape, TensorMetadata, tensor::FloatTensor};
use cubecl_kernels::sum::Reduction;

use crate::{
    data::{DataBackend, cast_to, composition::SumOfElements},
    saved::{HeldTensor, recorded::Recorded},
};

/// The sum or the mean, on a device that has kernels. X has any float dtype.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sum(pub Reduction);

impl<B: DataBackend> Recorded<B, 1> for Sum {
    /// The shape and dtype of X, and what its gradient is of that of the output.
    type Saved = (Shape, FloatDType, f32);

    fn again(&mut self, _inputs: &[HeldTensor<B>; 1]) -> Option<Self> {
        Some(*self)
    }

    fn forward(self, [x]: [HeldTensor<B>; 1], _wanted: [bool; 1]) -> (HeldTensor<B>, Self::Saved) {
        let (Self(reduction), shape, dtype) = (self, x.shape(), x.dtype().into());
        let share = match reduction {
            Reduction::Sum => 1.0,
            Reduction::Mean => 1.0 / shape.num_elements() as f32,
        };
        let output = B::run(SumOfElements(reduction), x.into_value());
        (HeldTensor::of("sum", output), (shape, dtype, share))
    }

    fn backward(
        (shape, dtype, share): Self::Saved,
        gradient: FloatTensor<B>,
        _wanted: [bool; 1],
    ) -> [Option<FloatTensor<B>>; 1] {
        let gradient = match share {
            1.0 => gradient,
            share => B::float_mul_scalar(gradient, Scalar::from(share)),
        };
        let ones = Shape::new_raw(std::iter::repeat_n(1, shape.num_dims()).collect());
        let gradient = B::float_reshape(cast_to::<B>(gradient, Some(dtype)), ones);
        [Some(B::float_expand(gradient, shape))]
    }
}
