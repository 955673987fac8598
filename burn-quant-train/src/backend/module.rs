//! Module operations: convolutions and attention in the compute dtype, linear layers quantized.

use burn_backend::{
    DType, FloatDType, TensorMetadata,
    ops::{
        AttentionModuleOptions, ConvOptions, ConvTransposeOptions, DeformConv2dBackward,
        DeformConvOptions, InterpolateOptions, MaxPool1dBackward, MaxPool1dWithIndices,
        MaxPool2dBackward, MaxPool2dWithIndices, ModuleOps, UnfoldOptions,
        attention::attention_fallback,
    },
    tensor::{BoolTensor, FloatTensor, IntTensor},
};

use super::{
    QuantTrain,
    forward::forward,
    precision::{Class, Dtypes},
    products,
    tensor::QuantTensor,
};
use crate::{
    data::{
        DataBackend,
        attention::{AttentionKernels, AttentionScores},
        cast_to,
        recorded::QuantBackend,
    },
    ops::attention::Attention,
    recipe::Recipe,
};

/// Kernels index with 32 bits.
const MAX_SCORES: usize = u32::MAX as usize;

/// A tensor in the dtype of a class.
fn in_class<B: QuantBackend, R: Recipe>(class: Class, tensor: FloatTensor<B>) -> FloatTensor<B> {
    let mut dtypes = Dtypes::default();
    dtypes.see(&tensor);
    cast_to::<B>(tensor, class.target(R::ROW.compute, &dtypes))
}

impl<B: QuantBackend, R: Recipe> ModuleOps<Self> for QuantTrain<B, R> {
    forward! {
    embedding_backward(weights: Float, output_grad: Float, indices: Int) -> Float => Promote;
    linear_x_backward(weight: Float, output_grad: Float) -> Float => Promote;
    linear_weight_backward(x: Float, output_grad: Float) -> Float => Promote;
    linear_bias_backward(output_grad: Float) -> Float => Promote;
    conv1d(x: Float, weight: Float, bias: OptFloat, options: (ConvOptions<1>)) -> Float => Compute;
    conv1d_x_backward(x: Float, weight: Float, output_grad: Float, options: (ConvOptions<1>)) -> Float => Promote;
    conv1d_weight_backward(x: Float, weight: Float, output_grad: Float, options: (ConvOptions<1>)) -> Float => Promote;
    conv1d_bias_backward(x: Float, bias: Float, output_grad: Float) -> Float => Promote;
    conv2d(x: Float, weight: Float, bias: OptFloat, options: (ConvOptions<2>)) -> Float => Compute;
    conv2d_x_backward(x: Float, weight: Float, output_grad: Float, options: (ConvOptions<2>)) -> Float => Promote;
    conv2d_weight_backward(x: Float, weight: Float, output_grad: Float, options: (ConvOptions<2>)) -> Float => Promote;
    conv2d_bias_backward(x: Float, bias: Float, output_grad: Float) -> Float => Promote;
    deform_conv2d(x: Float, offset: Float, weight: Float, mask: OptFloat, bias: OptFloat,
        options: (DeformConvOptions<2>)) -> Float => Compute;
    conv3d(x: Float, weight: Float, bias: OptFloat, options: (ConvOptions<3>)) -> Float => Compute;
    conv3d_x_backward(x: Float, weight: Float, output_grad: Float, options: (ConvOptions<3>)) -> Float => Promote;
    conv3d_weight_backward(x: Float, weight: Float, output_grad: Float, options: (ConvOptions<3>)) -> Float => Promote;
    conv3d_bias_backward(x: Float, bias: Float, output_grad: Float) -> Float => Promote;
    conv_transpose1d(x: Float, weight: Float, bias: OptFloat, options: (ConvTransposeOptions<1>)) -> Float => Compute;
    conv_transpose1d_x_backward(weight: Float, output_grad: Float,
        options: (ConvTransposeOptions<1>)) -> Float => Promote;
    conv_transpose1d_weight_backward(x: Float, weight: Float, output_grad: Float,
        options: (ConvTransposeOptions<1>)) -> Float => Promote;
    conv_transpose1d_bias_backward(x: Float, bias: Float, output_grad: Float) -> Float => Promote;
    conv_transpose2d(x: Float, weight: Float, bias: OptFloat, options: (ConvTransposeOptions<2>)) -> Float => Compute;
    conv_transpose2d_x_backward(weight: Float, output_grad: Float,
        options: (ConvTransposeOptions<2>)) -> Float => Promote;
    conv_transpose2d_weight_backward(x: Float, weight: Float, output_grad: Float,
        options: (ConvTransposeOptions<2>)) -> Float => Promote;
    conv_transpose2d_bias_backward(x: Float, bias: Float, output_grad: Float) -> Float => Promote;
    conv_transpose3d(x: Float, weight: Float, bias: OptFloat, options: (ConvTransposeOptions<3>)) -> Float => Compute;
    conv_transpose3d_x_backward(weight: Float, output_grad: Float,
        options: (ConvTransposeOptions<3>)) -> Float => Promote;
    conv_transpose3d_weight_backward(x: Float, weight: Float, output_grad: Float,
        options: (ConvTransposeOptions<3>)) -> Float => Promote;
    conv_transpose3d_bias_backward(x: Float, bias: Float, output_grad: Float) -> Float => Promote;
    unfold4d(x: Float, kernel_size: ([usize; 2]), options: (UnfoldOptions)) -> Float;
    avg_pool1d(x: Float, kernel_size: (usize), stride: (usize), padding: (usize), count_include_pad: (bool),
        ceil_mode: (bool)) -> Float;
    avg_pool1d_backward(x: Float, grad: Float, kernel_size: (usize), stride: (usize), padding: (usize),
        count_include_pad: (bool), ceil_mode: (bool)) -> Float => Promote;
    avg_pool2d(x: Float, kernel_size: ([usize; 2]), stride: ([usize; 2]), padding: ([usize; 2]),
        count_include_pad: (bool), ceil_mode: (bool)) -> Float;
    avg_pool2d_backward(x: Float, grad: Float, kernel_size: ([usize; 2]), stride: ([usize; 2]), padding: ([usize; 2]),
        count_include_pad: (bool), ceil_mode: (bool)) -> Float => Promote;
    adaptive_avg_pool2d(x: Float, output_size: ([usize; 2])) -> Float;
    adaptive_avg_pool2d_backward(x: Float, grad: Float) -> Float => Promote;
    adaptive_avg_pool1d(x: Float, output_size: (usize)) -> Float;
    adaptive_avg_pool1d_backward(x: Float, grad: Float) -> Float => Promote;
    max_pool1d(x: Float, kernel_size: (usize), stride: (usize), padding: (usize), dilation: (usize),
        ceil_mode: (bool)) -> Float;
    max_pool2d(x: Float, kernel_size: ([usize; 2]), stride: ([usize; 2]), padding: ([usize; 2]),
        dilation: ([usize; 2]), ceil_mode: (bool)) -> Float;
    interpolate(x: Float, output_size: ([usize; 2]), options: (InterpolateOptions)) -> Float;
    interpolate_backward(x: Float, grad: Float, output_size: ([usize; 2]),
        options: (InterpolateOptions)) -> Float => Promote;
    ctc_loss(log_probs: Float, targets: Int, input_lengths: Int, target_lengths: Int, blank: (usize)) -> Float => Full;
    has_ctc_loss_backward() -> (bool);
    ctc_loss_backward(log_probs: Float, targets: Int, input_lengths: Int, target_lengths: Int, grad_loss: Float,
        blank: (usize)) -> Float => Full;
    rfft(signal: Float, dim: (usize), n: (Option<usize>)) -> FloatPair => Full;
    irfft(spectrum_re: Float, spectrum_im: Float, dim: (usize), n: (Option<usize>)) -> Float => Full;
    }

    fn linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        products::linear::<B, R>(x, weight, bias)
    }

    /// Gathers FP32 rows, then casts them: the table itself is never copied to the compute dtype.
    fn embedding(weights: FloatTensor<Self>, indices: IntTensor<Self>) -> FloatTensor<Self> {
        let rows = B::embedding(weights.into_primitive(), indices);
        QuantTensor::new(in_class::<B, R>(Class::Compute, rows))
    }

    /// Attention: one node in training where the backend has kernels, else Burn's composition.
    ///
    /// The node saves Q, K and V, and its softmax is a kernel in FP32. It is taken where nothing is added to the
    /// scores. Otherwise Burn builds attention from products and a softmax under autodiff; building it from *our*
    /// operations keeps the softmax in FP32. So it does with FP32 as the compute dtype, to change no bit. Without
    /// autodiff the inner backend's fused kernel runs on operands in the compute dtype.
    fn attention(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        mask: Option<BoolTensor<Self>>,
        attn_bias: Option<FloatTensor<Self>>,
        options: AttentionModuleOptions,
    ) -> FloatTensor<Self> {
        let compute =
            |tensor: FloatTensor<Self>| in_class::<B, R>(Class::Compute, tensor.into_primitive());
        let device = B::float_device(query.primitive());
        if !B::ad_enabled(&device) {
            return QuantTensor::new(B::attention(
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
        let queries = query.shape()[..3].iter().product::<usize>();
        let scores = queries.checked_mul(key.shape()[2]);
        let by_kernels = mask.is_none()
            && attn_bias.is_none()
            && options.softcap.is_none()
            && R::ROW.compute != FloatDType::F32
            && !dtypes.contains(&DType::F64)
            && heads(&query) == heads(&key)
            && heads(&query) == heads(&value)
            && scores.is_some_and(|scores| (1..=MAX_SCORES).contains(&scores))
            && <B::Base as DataBackend>::Kernels::attention_kernels(&device).is_some();
        if by_kernels {
            let features = query.shape()[3] as f64;
            let scores = AttentionScores {
                scale: options.scale.unwrap_or_else(|| 1.0 / features.sqrt()) as f32,
                causal: options.is_causal,
            };
            let inputs = [query, key, value].map(compute);
            return QuantTensor::new(B::record(Attention { scores }, inputs));
        }
        attention_fallback::<Self>(query, key, value, mask, attn_bias, options)
    }

    /// Statistics in FP32; the output returns to the input's dtype, so that the residual stream keeps its width.
    fn layer_norm(
        tensor: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: Option<FloatTensor<Self>>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        let tensor = tensor.into_primitive();
        let dtype = tensor.dtype();
        let mut dtypes = Dtypes::default();
        dtypes.see(&tensor);
        let full = Class::Full.target(R::ROW.compute, &dtypes);
        let output = B::layer_norm(
            cast_to::<B>(tensor, full),
            cast_to::<B>(gamma.into_primitive(), full),
            beta.map(|beta| cast_to::<B>(beta.into_primitive(), full)),
            epsilon,
        );
        QuantTensor::new(cast_to::<B>(output, Some(dtype.into())))
    }

    fn deform_conv2d_backward(
        x: FloatTensor<Self>,
        offset: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        mask: Option<FloatTensor<Self>>,
        bias: Option<FloatTensor<Self>>,
        output_grad: FloatTensor<Self>,
        options: DeformConvOptions<2>,
    ) -> DeformConv2dBackward<Self> {
        let grads = B::deform_conv2d_backward(
            x.into_primitive(),
            offset.into_primitive(),
            weight.into_primitive(),
            mask.map(QuantTensor::into_primitive),
            bias.map(QuantTensor::into_primitive),
            output_grad.into_primitive(),
            options,
        );
        DeformConv2dBackward::new(
            QuantTensor::new(grads.x_grad),
            QuantTensor::new(grads.offset_grad),
            QuantTensor::new(grads.weight_grad),
            grads.mask_grad.map(QuantTensor::new),
            grads.bias_grad.map(QuantTensor::new),
        )
    }

    fn max_pool1d_with_indices(
        x: FloatTensor<Self>,
        kernel_size: usize,
        stride: usize,
        padding: usize,
        dilation: usize,
        ceil_mode: bool,
    ) -> MaxPool1dWithIndices<Self> {
        let pooled = B::max_pool1d_with_indices(
            x.into_primitive(),
            kernel_size,
            stride,
            padding,
            dilation,
            ceil_mode,
        );
        MaxPool1dWithIndices::new(QuantTensor::new(pooled.output), pooled.indices)
    }

    fn max_pool1d_with_indices_backward(
        x: FloatTensor<Self>,
        kernel_size: usize,
        stride: usize,
        padding: usize,
        dilation: usize,
        ceil_mode: bool,
        output_grad: FloatTensor<Self>,
        indices: IntTensor<Self>,
    ) -> MaxPool1dBackward<Self> {
        let grads = B::max_pool1d_with_indices_backward(
            x.into_primitive(),
            kernel_size,
            stride,
            padding,
            dilation,
            ceil_mode,
            output_grad.into_primitive(),
            indices,
        );
        MaxPool1dBackward::new(QuantTensor::new(grads.x_grad))
    }

    fn max_pool2d_with_indices(
        x: FloatTensor<Self>,
        kernel_size: [usize; 2],
        stride: [usize; 2],
        padding: [usize; 2],
        dilation: [usize; 2],
        ceil_mode: bool,
    ) -> MaxPool2dWithIndices<Self> {
        let pooled = B::max_pool2d_with_indices(
            x.into_primitive(),
            kernel_size,
            stride,
            padding,
            dilation,
            ceil_mode,
        );
        MaxPool2dWithIndices::new(QuantTensor::new(pooled.output), pooled.indices)
    }

    fn max_pool2d_with_indices_backward(
        x: FloatTensor<Self>,
        kernel_size: [usize; 2],
        stride: [usize; 2],
        padding: [usize; 2],
        dilation: [usize; 2],
        ceil_mode: bool,
        output_grad: FloatTensor<Self>,
        indices: IntTensor<Self>,
    ) -> MaxPool2dBackward<Self> {
        let grads = B::max_pool2d_with_indices_backward(
            x.into_primitive(),
            kernel_size,
            stride,
            padding,
            dilation,
            ceil_mode,
            output_grad.into_primitive(),
            indices,
        );
        MaxPool2dBackward::new(QuantTensor::new(grads.x_grad))
    }
}
