//! Module operations: convolutions and attention in the compute dtype, linear layers quantized.

use burn_backend::{
    DType, FloatDType, TensorMetadata,
    ops::{
        AttentionModuleOptions, ConvOptions, ConvTransposeOptions, DeformConv2dBackward,
        DeformConvOptions, FloatTensorOps, InterpolateOptions, MaxPool1dBackward,
        MaxPool1dWithIndices, MaxPool2dBackward, MaxPool2dWithIndices, ModuleOps, UnfoldOptions,
        attention::attention_fallback,
    },
    tensor::{BoolTensor, FloatTensor, IntTensor},
};

use super::{
    QuantTrain, composition,
    forward::forward,
    precision::{Class, Dtypes, in_class},
    products,
    tensor::QuantTensor,
};
use crate::{
    data::{
        DataBackend,
        attention::{AttentionInputs, AttentionKernels, AttentionScores, is_flash},
        cast_to,
    },
    operations::module_operations,
    ops::attention::Attention,
    recipe::Recipe,
    saved::recorded::QuantBackend,
};

/// Kernels index with 32 bits.
const MAX_SCORES: usize = u32::MAX as usize;

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

    /// Gathers FP32 rows, then casts them: the table itself is never copied to the compute dtype.
    fn embedding(weights: FloatTensor<Self>, indices: IntTensor<Self>) -> FloatTensor<Self> {
        let _scope = Self::scope();
        let rows = <B::Inside>::embedding(weights.into_primitive(), indices);
        QuantTensor::new(in_class::<B, R>(Class::Compute, rows))
    }

    /// Attention: one node in training where the backend has kernels, else Burn's composition.
    ///
    /// The node saves nothing of the size of the scores, and its softmax is computed in FP32, in a kernel that has scores in
    /// registers only or, where there is none, between two products. It is taken where nothing is added to the scores.
    /// Otherwise Burn builds attention from products and a softmax under autodiff; building it from *our* operations keeps
    /// the softmax in FP32. So it does with FP32 as the compute dtype, to change no bit. Without autodiff the inner
    /// backend's fused kernel runs on operands in the compute dtype.
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
        let compute =
            |tensor: FloatTensor<Self>| in_class::<B, R>(Class::Compute, tensor.into_primitive());
        let device = <B::Inside>::float_device(query.primitive());
        if !B::ad_enabled(&device) {
            return QuantTensor::new(<B::Inside>::attention(
                compute(query),
                compute(key),
                compute(value),
                mask,
                attn_bias.map(compute),
                options,
            ));
        }
        let heads = |tensor: &FloatTensor<Self>| tensor.shape()[..2].to_vec();
        let dtypes = [&query, &key, &value].map(TensorMetadata::dtype);
        let has_kernels = mask.is_none()
            && attn_bias.is_none()
            && options.softcap.is_none()
            && R::ROW.compute != FloatDType::F32
            && !dtypes.contains(&DType::F64)
            && heads(&query) == heads(&key)
            && heads(&query) == heads(&value)
            && <B::Base as DataBackend>::Kernels::attention_kernels(&device).is_some();
        if !has_kernels {
            return attention_fallback::<Self>(query, key, value, mask, attn_bias, options);
        }
        let features = query.shape()[3] as f64;
        let scores = AttentionScores {
            scale: options.scale.unwrap_or_else(|| 1.0 / features.sqrt()) as f32,
            causal: options.is_causal,
        };
        let queries = query.shape()[..3].iter().product::<usize>();
        let count = queries.checked_mul(key.shape()[2]);
        let inputs = AttentionInputs::from([query, key, value]);
        let is_flash = is_flash::<<B::Base as DataBackend>::Kernels, _>(
            &device,
            R::ROW.compute.into(),
            &inputs,
            scores,
        );
        if is_flash || count.is_some_and(|count| (1..=MAX_SCORES).contains(&count)) {
            let attention = Attention { scores, is_flash };
            return QuantTensor::new(B::record(attention, inputs.map(compute).into_array()));
        }
        let AttentionInputs { query, key, value } = inputs;
        attention_fallback::<Self>(query, key, value, None, None, options)
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
        let full = Class::Full.target(R::ROW.compute, &dtypes);
        let output = <B::Inside>::layer_norm(
            cast_to::<B::Inside>(tensor, full),
            cast_to::<B::Inside>(gamma.into_primitive(), full),
            beta.map(|beta| cast_to::<B::Inside>(beta.into_primitive(), full)),
            epsilon,
        );
        QuantTensor::new(cast_to::<B::Inside>(output, Some(dtype.into())))
    }
}
