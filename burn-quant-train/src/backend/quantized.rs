//! Burn's own post-training quantized tensors: all forwarded to the inner backend.

use burn_backend::{
    BoolDType, ExecutionError, FloatDType, IntDType, Scalar, Shape, Slice, TensorData,
    TensorPrimitive,
    ops::QTensorOps,
    quantization::{QuantScheme, QuantizationParametersPrimitive},
    tensor::{BoolTensor, Device, FloatTensor, IntTensor, QuantizedTensor},
};

use super::{QuantTrain, forward::forward};
use crate::{operations::quantized_operations, recipe::Recipe, saved::recorded::QuantBackend};

impl<B: QuantBackend, R: Recipe> QTensorOps<Self> for QuantTrain<B, R> {
    quantized_operations! { forward }

    async fn q_into_data(tensor: QuantizedTensor<Self>) -> Result<TensorData, ExecutionError> {
        <B::Inside>::q_into_data(tensor).await
    }

    fn quantize(
        tensor: FloatTensor<Self>,
        scheme: &QuantScheme,
        qparams: QuantizationParametersPrimitive<Self>,
    ) -> QuantizedTensor<Self> {
        let _scope = Self::scope();
        let qparams = QuantizationParametersPrimitive {
            scales: qparams.scales.into_primitive(),
        };
        <B::Inside>::quantize(tensor.into_primitive(), scheme, qparams)
    }
}
