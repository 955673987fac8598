//! Int tensor operations: int primitives are the inner backend's own.

use std::ops::Range;

use burn_backend::{
    BoolDType, Distribution, ExecutionError, FloatDType, IntDType, Scalar, Shape, Slice,
    TensorData,
    ops::IntTensorOps,
    tensor::{BoolTensor, Device, FloatTensor, IndexingUpdateOp, IntTensor},
};

use super::{Held, forward::forward};
use crate::{data::DataBackend, operations::int_operations};

impl<B: DataBackend> IntTensorOps<Self> for Held<B> {
    int_operations! { forward }

    async fn int_into_data(tensor: IntTensor<Self>) -> Result<TensorData, ExecutionError> {
        B::int_into_data(tensor).await
    }
}
