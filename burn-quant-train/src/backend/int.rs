//! Int tensor operations: all forwarded; int primitives are the inner backend's own.

use std::ops::Range;

use burn_backend::{
    BoolDType, Distribution, ExecutionError, FloatDType, IntDType, Scalar, Shape, Slice,
    TensorData,
    ops::IntTensorOps,
    tensor::{BoolTensor, Device, FloatTensor, IndexingUpdateOp, IntTensor},
};

use super::{QuantTrain, forward::forward};
use crate::{operations::int_operations, recipe::Recipe, saved::recorded::QuantBackend};

impl<B: QuantBackend, R: Recipe> IntTensorOps<Self> for QuantTrain<B, R> {
    int_operations! { forward }

    async fn int_into_data(tensor: IntTensor<Self>) -> Result<TensorData, ExecutionError> {
        <B::Inside>::int_into_data(tensor).await
    }
}
