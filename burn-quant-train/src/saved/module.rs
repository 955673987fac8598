//! Module operations on cells.

use burn_backend::{
    ops::{
        AttentionModuleOptions, ConvOptions, ConvTransposeOptions, DeformConv2dBackward,
        DeformConvOptions, InterpolateOptions, MaxPool1dBackward, MaxPool1dWithIndices,
        MaxPool2dBackward, MaxPool2dWithIndices, ModuleOps, UnfoldOptions,
    },
    tensor::{BoolTensor, FloatTensor, IntTensor},
};

use super::{Held, HeldTensor, forward::forward};
use crate::{
    data::{DataBackend, composition::embedding_gradient},
    operations::module_operations,
};

impl<B: DataBackend> ModuleOps<Self> for Held<B> {
    module_operations! { forward }

    forward! {
    linear(x: Float, weight: Float, bias: OptFloat) -> Float;
    embedding(weights: Float, indices: Int) -> Float;
    attention(query: Float, key: Float, value: Float, mask: (Option<BoolTensor<Self>>), attn_bias: OptFloat,
        options: (AttentionModuleOptions)) -> Float;
    layer_norm(tensor: Float, gamma: Float, beta: OptFloat, epsilon: (f64)) -> Float;
    }

    fn embedding_backward(
        weights: FloatTensor<Self>,
        output_grad: FloatTensor<Self>,
        indices: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let (table, gradient) = (weights.into_value(), output_grad.into_value());
        let gradient = embedding_gradient::<B>(table, gradient, indices);
        HeldTensor::of("embedding_backward", gradient)
    }
}
