//! Float tensor operations on cells.

use burn_backend::{
    BoolDType, Distribution, ExecutionError, FloatDType, IntDType, Scalar, Shape, Slice,
    TensorData,
    ops::{FloatTensorOps, GridSampleOptions},
    tensor::{BoolTensor, Device, FloatTensor, IndexingUpdateOp, IntTensor},
};

use super::{Held, HeldTensor, forward::forward};
use crate::{
    data::DataBackend,
    operations::{composed_float_operations, float_operations},
};

impl<B: DataBackend> FloatTensorOps<Self> for Held<B> {
    float_operations! { forward }
    composed_float_operations! { forward }

    forward! {
    float_matmul(lhs: Float, rhs: Float) -> Float;
    float_transpose(tensor: Float) -> Float [again];
    float_swap_dims(tensor: Float, dim1: (usize), dim2: (usize)) -> Float [again view swapped];
    float_reshape(tensor: Float, shape: (Shape)) -> Float [again view];
    float_to_device(tensor: Float, device: (&Device<Self>)) -> Float;
    }

    fn float_random(
        shape: Shape,
        distribution: Distribution,
        device: &Device<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let value = B::float_random(shape, distribution, device, dtype);
        match distribution {
            Distribution::Bernoulli(_) => HeldTensor::mask("float_random", value),
            Distribution::Default | Distribution::Uniform(..) | Distribution::Normal(..) => {
                HeldTensor::of("float_random", value)
            }
        }
    }

    async fn float_into_data(tensor: FloatTensor<Self>) -> Result<TensorData, ExecutionError> {
        B::float_into_data(tensor.into_value()).await
    }

    fn float_device(tensor: &FloatTensor<Self>) -> Device<Self> {
        tensor.cell().device().clone()
    }

    fn float_is_require_grad(_tensor: &FloatTensor<Self>) -> bool {
        false
    }

    // Without autodiff a tensor that is detached, or asked for its gradient, is the same value: the same cell.
    fn float_detach(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        tensor
    }

    fn float_set_require_grad(tensor: FloatTensor<Self>, _require_grad: bool) -> FloatTensor<Self> {
        tensor
    }
}
