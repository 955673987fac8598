//! Module operations: convolutions and attention in the compute dtype, linear layers quantized.

use burn_backend::{
    TensorMetadata,
    ops::{
        AttentionModuleOptions, ConvOptions, ConvTransposeOptions, DeformConv2dBackward,
        DeformConvOptions, InterpolateOptions, MaxPool1dBackward, MaxPool1dWithIndices,
        MaxPool2dBackward, MaxPool2dWithIndices, ModuleOps, UnfoldOptions,
    },
    tensor::{BoolTensor, FloatTensor, IntTensor},
};

use super::{
    QuantTrain, attention, composition, embedding,
    forward::forward,
    precision::{Class, Dtypes},
    products,
    tensor::QuantTensor,
};
use crate::{
    data::cast_to, operations::module_operations, recipe::Recipe, saved::recorded::QuantBackend,
};

impl<B: QuantBackend, R: Recipe> ModuleOps<Self> for QuantTrain<B, R> {
    module_operations! { forward }

    forward! {
    embedding_backward(weights: Float, output_grad: Float, indices: Int) -> Float => Promote;
    }

    fn linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        let _scope = Self::scope();
        Self::compress_pending();
        products::linear::<B, R>(x, weight, bias)
    }

    /// The rows that are looked up, in the compute dtype; a recipe may round them.
    fn embedding(weights: FloatTensor<Self>, indices: IntTensor<Self>) -> FloatTensor<Self> {
        let _scope = Self::scope();
        embedding::embedding::<B, R>(weights, indices)
    }

    /// Attention: one node in training where the backend has kernels, else Burn's composition.
    ///
    /// The node saves nothing of the size of the scores but a mask and a bias that were given, and its softmax is
    /// computed in FP32, in a kernel that has scores in registers only or, on devices where products on tensor cores
    /// are faster, between two products. Keys and values may have fewer heads than queries, a number that divides
    /// theirs: query head `h` reads head `h / (heads / heads of keys)`.
    ///
    /// Where kernels do not compute it, Burn builds attention from products and a softmax under autodiff, after keys
    /// and values are repeated for heads that share them; building it from *our* operations keeps the softmax in FP32.
    /// So it does with FP32 as the compute dtype, to change no bit. Without autodiff, and without a kernel that has
    /// scores in registers only, the inner backend's fused kernel runs on operands in the compute dtype.
    fn attention(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        mask: Option<BoolTensor<Self>>,
        attn_bias: Option<FloatTensor<Self>>,
        options: AttentionModuleOptions,
    ) -> FloatTensor<Self> {
        let _scope = Self::scope();
        Self::compress_pending();
        attention::attention::<B, R>(query, key, value, mask, attn_bias, options)
    }

    /// One operation, or Burn's with statistics in FP32. The output has the input's dtype, so that the residual
    /// stream keeps its width.
    fn layer_norm(
        tensor: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: Option<FloatTensor<Self>>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        let _scope = Self::scope();
        let whole = composition::layer_norm::<B, R>(&tensor, &gamma, beta.as_ref(), epsilon);
        if let Some(output) = whole {
            return output;
        }
        let tensor = tensor.into_primitive();
        let dtype = tensor.dtype();
        let mut dtypes = Dtypes::default();
        dtypes.see(&tensor);
        let full = Class::Full.target(R::row().compute, &dtypes);
        let output = <B::Inside>::layer_norm(
            cast_to::<B::Inside>(tensor, full),
            cast_to::<B::Inside>(gamma.into_primitive(), full),
            beta.map(|beta| cast_to::<B::Inside>(beta.into_primitive(), full)),
            epsilon,
        );
        QuantTensor::new(cast_to::<B::Inside>(output, Some(dtype.into())))
    }
}
