//! Module operations on cells.

use burn_backend::{
    TensorMetadata,
    ops::{
        AttentionModuleOptions, ConvOptions, ConvTransposeOptions, DeformConv2dBackward,
        DeformConvOptions, InterpolateOptions, MaxPool1dBackward, MaxPool1dWithIndices,
        MaxPool2dBackward, MaxPool2dWithIndices, ModuleOps, UnfoldOptions,
    },
    tensor::{BoolTensor, FloatTensor, IntTensor},
};

use super::{Held, HeldTensor, forward::forward};
use crate::{
    data::{
        DataBackend,
        composition::{CompositionKernels, EmbeddingGradient},
    },
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

    /// By a kernel where there is one: Burn's adds one token after the other.
    fn embedding_backward(
        weights: FloatTensor<Self>,
        output_grad: FloatTensor<Self>,
        indices: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let (weights, gradient) = (weights.into_value(), output_grad.into_value());
        let has_kernel = B::Kernels::composition_kernels(&B::float_device(&weights)).is_some();
        let gradient = match has_kernel {
            true => {
                let rows = weights.shape()[0];
                B::run(EmbeddingGradient { rows }, (gradient, indices))
            }
            false => B::embedding_backward(weights, gradient, indices),
        };
        HeldTensor::of("embedding_backward", gradient)
    }
}
