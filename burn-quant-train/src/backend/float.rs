//! Float tensor operations: the table of precision classes, and the operations that carry tags or run quantized.

use burn_backend::{
    BoolDType, Distribution, ExecutionError, FloatDType, IntDType, Scalar, Shape, Slice,
    TensorData, TensorMetadata,
    ops::{FloatTensorOps, GridSampleOptions},
    tensor::{BoolTensor, Device, FloatTensor, IndexingUpdateOp, IntTensor},
};

use super::{
    QuantTrain,
    composition::{self, compose},
    forward::forward,
    products,
    tensor::QuantTensor,
};
use crate::{
    operations::{composed_float_operations, float_operations},
    recipe::Recipe,
    saved::recorded::QuantBackend,
};

impl<B: QuantBackend, R: Recipe> QuantTrain<B, R> {
    /// A matrix product that is part of no composition.
    pub(super) fn product(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        let _scope = Self::scope();
        Self::compress_pending();
        products::matmul::<B, R>(lhs, rhs)
    }

    /// Random numbers that are part of no composition.
    pub(super) fn drawn(
        shape: Shape,
        distribution: Distribution,
        device: &Device<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let _scope = Self::scope();
        QuantTensor::new(<B::Inside>::float_random(
            shape,
            distribution,
            device,
            dtype,
        ))
    }
}

impl<B: QuantBackend, R: Recipe> FloatTensorOps<Self> for QuantTrain<B, R> {
    float_operations! { forward }
    composed_float_operations! { compose }

    fn float_random(
        shape: Shape,
        distribution: Distribution,
        device: &Device<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        composition::float_random::<B, R>(&shape, distribution, device, dtype)
            .unwrap_or_else(|| Self::drawn(shape, distribution, device, dtype))
    }

    async fn float_into_data(tensor: FloatTensor<Self>) -> Result<TensorData, ExecutionError> {
        <B::Inside>::float_into_data(tensor.into_primitive()).await
    }

    fn float_device(tensor: &FloatTensor<Self>) -> Device<Self> {
        tensor.device()
    }

    fn float_is_require_grad(tensor: &FloatTensor<Self>) -> bool {
        <B::Inside>::float_is_require_grad(tensor.primitive())
    }

    fn float_matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        let whole = products::of_activations::<B, R>(&lhs, &rhs)
            .or_else(|| composition::float_matmul::<B, R>(&lhs, &rhs));
        whole.unwrap_or_else(|| Self::product(lhs, rhs))
    }

    fn float_transpose(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        let _scope = Self::scope();
        let rank = tensor.rank();
        if rank < 2 {
            return QuantTensor::new(<B::Inside>::float_transpose(tensor.into_primitive()));
        }
        Self::float_swap_dims(tensor, rank - 2, rank - 1)
    }

    fn float_swap_dims(tensor: FloatTensor<Self>, dim1: usize, dim2: usize) -> FloatTensor<Self> {
        let _scope = Self::scope();
        tensor.swap_dims(dim1, dim2)
    }

    fn float_reshape(tensor: FloatTensor<Self>, shape: Shape) -> FloatTensor<Self> {
        composition::float_reshape::<B, R>(&tensor, &shape).unwrap_or_else(|| {
            let _scope = Self::scope();
            tensor.reshape(shape)
        })
    }

    fn float_to_device(tensor: FloatTensor<Self>, device: &Device<Self>) -> FloatTensor<Self> {
        let _scope = Self::scope();
        tensor.to_device(device)
    }

    fn float_detach(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        let _scope = Self::scope();
        tensor.map_same_value(<B::Inside>::float_detach)
    }

    fn float_set_require_grad(tensor: FloatTensor<Self>, require_grad: bool) -> FloatTensor<Self> {
        let _scope = Self::scope();
        tensor.set_require_grad(require_grad)
    }
}
