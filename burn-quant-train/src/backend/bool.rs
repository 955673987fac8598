//! Bool tensor operations: all forwarded; bool primitives are the inner backend's own.

use burn_backend::{
    BoolDType, ExecutionError, FloatDType, IntDType, Scalar, Shape, Slice, TensorData,
    ops::BoolTensorOps,
    tensor::{BoolTensor, Device, FloatTensor, IntTensor},
};

use super::{QuantTrain, forward::forward};
use crate::{operations::bool_operations, recipe::Recipe, saved::recorded::QuantBackend};

impl<B: QuantBackend, R: Recipe> BoolTensorOps<Self> for QuantTrain<B, R> {
    bool_operations! { forward }

    async fn bool_into_data(tensor: BoolTensor<Self>) -> Result<TensorData, ExecutionError> {
        <B::Inside>::bool_into_data(tensor).await
    }

    fn bool_argwhere(
        tensor: BoolTensor<Self>,
        out_dtype: IntDType,
    ) -> impl Future<Output = IntTensor<Self>> + 'static + Send {
        <B::Inside>::bool_argwhere(tensor, out_dtype)
    }
}
