//! Burn's own post-training quantized tensors: primitives of the inner backend.

use burn_backend::{
    BoolDType, ExecutionError, FloatDType, IntDType, Scalar, Shape, Slice, TensorData,
    TensorPrimitive,
    ops::QTensorOps,
    quantization::{QuantScheme, QuantizationParametersPrimitive},
    tensor::{BoolTensor, Device, FloatTensor, IntTensor, QuantizedTensor},
};

use super::{Held, forward::forward};
use crate::{data::DataBackend, operations::quantized_operations};

impl<B: DataBackend> QTensorOps<Self> for Held<B> {
    quantized_operations! { forward }

    async fn q_into_data(tensor: QuantizedTensor<Self>) -> Result<TensorData, ExecutionError> {
        B::q_into_data(tensor).await
    }

    fn quantize(
        tensor: FloatTensor<Self>,
        scheme: &QuantScheme,
        qparams: QuantizationParametersPrimitive<Self>,
    ) -> QuantizedTensor<Self> {
        let qparams = QuantizationParametersPrimitive {
            scales: qparams.scales.into_value(),
        };
        B::quantize(tensor.into_value(), scheme, qparams)
    }
}
