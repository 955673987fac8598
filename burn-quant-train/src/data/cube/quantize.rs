//! Quantized matrices by kernels.

use burn_backend::{DType, FloatDType, tensor::FloatTensor};
use burn_cubecl::{
    CubeBackend, CubeRuntime, FloatElement, IntElement, element::BoolElement,
    kernel::into_contiguous, tensor::CubeTensor,
};
use cubecl::std::tensor::TensorHandle;
use cubecl_kernels::{
    fallback::{self, FallbackResidual, FallbackState},
    gelu::{quantize_gelu, quantize_gelu_gradient},
    granularity::Granularity,
    layer_norm::quantize_layer_norm,
    layout::Layout,
    linear_input::quantize_linear_input,
    quantize, random_hadamard,
    rms_norm::quantize_rms_norm,
    rounding::{Rounding, StochasticKey},
    shape::MatrixShape,
    swiglu::{quantize_swiglu, quantize_swiglu_gradients, quantize_swiglu_gradients_delayed},
};

use super::{
    composition::{Rows, flat},
    tensors::{Cube, handle, tensor},
};
use crate::data::{
    cast::cast_to,
    composition::OperatorInput,
    kernels::{Kernels, checked},
    quantize::{
        DelayedMaximum, Fallback, FallbackQuantized, Format, MatrixSource, QuantizeKernels,
        QuantizeSpec, Quantized, QuantizedInput, Residual, ScaleNumber, Scales, fallback_block,
        quantize_input_by_copies,
    },
    tensors::matrix_shape,
};

impl<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement> QuantizeKernels
    for CubeBackend<R, F, I, BT>
where
    Self: Cube<R>,
{
    fn quantize_matrix(x: FloatTensor<Self>, spec: &QuantizeSpec) -> Quantized<Self> {
        matrix_shape(&x, "quantize");
        wrap(
            &x,
            checked(quantize::quantize(&x.client, &handle(&x), spec)),
        )
    }

    fn quantize_source(x: MatrixSource<Self>, spec: &QuantizeSpec) -> Quantized<Self> {
        match x {
            MatrixSource::Swiglu { gate, up } => {
                let factors = [gate, up].map(Rows::of);
                let like = factors[0].on_device();
                let factors = factors.each_ref().map(Rows::input);
                let quantized = quantize_swiglu(&like.client, factors, spec);
                wrap(like, checked(quantized))
            }
            MatrixSource::Gelu(x) => {
                let x = Rows::of(x);
                let like = x.on_device();
                wrap(like, checked(quantize_gelu(&like.client, x.input(), spec)))
            }
            MatrixSource::GeluGradient { x, gradient } => {
                let [x, gradient] = [x, gradient].map(Rows::of);
                let like = x.on_device();
                let gradient = gradient.input();
                let quantized = quantize_gelu_gradient(&like.client, x.input(), gradient, spec);
                wrap(like, checked(quantized))
            }
            MatrixSource::RmsNorm {
                x,
                gain,
                inverse_rms,
            } => {
                let x = Rows::of(x);
                let [gain, inverse_rms] = [gain, inverse_rms].map(|it| handle(&flat(it)));
                let like = x.on_device();
                let quantized =
                    quantize_rms_norm(&like.client, x.input(), &gain, &inverse_rms, spec);
                wrap(like, checked(quantized))
            }
            MatrixSource::LayerNorm {
                x,
                gain,
                bias,
                rows: (mean, inverse_deviation),
            } => {
                let x = Rows::of(x);
                let [gain, mean, inverse_deviation] =
                    [gain, mean, inverse_deviation].map(|it| handle(&flat(it)));
                let bias = bias.map(|bias| handle(&flat(bias)));
                let like = x.on_device();
                let of_rows = [&mean, &inverse_deviation];
                let quantized = quantize_layer_norm(
                    &like.client,
                    x.input(),
                    &gain,
                    bias.as_ref(),
                    of_rows,
                    spec,
                );
                wrap(like, checked(quantized))
            }
            MatrixSource::Product(factors) => factors.quantized(spec),
            MatrixSource::Floats(_) | MatrixSource::SwigluCompressing { .. } => {
                Self::quantize_matrix(x.into_floats(), spec)
            }
        }
    }

    fn quantize_both_ways(x: FloatTensor<Self>, spec: &QuantizeSpec) -> [Quantized<Self>; 2] {
        matrix_shape(&x, "quantize");
        let both = quantize::quantize_both_ways(&x.client, &handle(&x), spec);
        checked(both).map(|quantized| wrap(&x, quantized))
    }

    fn random_hadamard(x: FloatTensor<Self>) -> FloatTensor<Self> {
        matrix_shape(&x, "random_hadamard");
        let x = match x.dtype {
            DType::F32 | DType::F16 | DType::BF16 => x,
            _ => cast_to::<Self>(x, Some(FloatDType::F32)),
        };
        let transform = random_hadamard::random_hadamard(&x.client, &handle(&x));
        tensor(&x, checked(transform), DType::F32)
    }

    fn quantize_delayed(
        x: MatrixSource<Self>,
        spec: &QuantizeSpec,
        delayed: &DelayedMaximum<Self>,
    ) -> Quantized<Self> {
        let x = SourceHandles::of("quantize_delayed", x);
        let maxima = handle(&into_contiguous(delayed.maxima.clone()));
        let delayed = quantize::DelayedMaximum {
            maxima: &maxima,
            layer: delayed.layer,
        };
        let quantized = quantize::quantize_delayed(&x.like.client, x.source(), spec, delayed);
        wrap_delayed(&x.like, checked(quantized))
    }

    fn quantize_fallback(
        x: FloatTensor<Self>,
        spec: &QuantizeSpec,
        fallback: Fallback<Self>,
    ) -> FallbackQuantized<Self> {
        matrix_shape(&x, "quantize_fallback");
        let block = fallback_block("quantize_fallback", spec);
        let layer = layer_index("quantize_fallback", &fallback);
        let Fallback {
            thresholds, counts, ..
        } = fallback;
        let counts = into_contiguous(counts);
        let quantized = checked(fallback::quantize_fallback(
            &x.client,
            &handle(&x),
            block,
            spec.layout,
            &handle(&thresholds),
            layer,
            &handle(&counts),
        ));
        FallbackQuantized {
            base: wrap(&x, quantized.base),
            residual: wrap_residual(&x, quantized.residual),
            counts,
        }
    }

    fn quantize_input(
        x: MatrixSource<Self>,
        forward: &QuantizeSpec,
        saved: Option<&QuantizeSpec>,
        fallback: Option<Fallback<Self>>,
    ) -> QuantizedInput<Self> {
        let Some((block, key)) = one_read(forward, saved) else {
            return quantize_input_by_copies::<Self>(x, forward, saved, fallback);
        };
        let x = SourceHandles::of("quantize_input", x);
        // Kernels take the counters without padding between rows, and Burn pads the rows of tensors that it allocates
        // on CUDA. From then on the kernels' own buffer goes round.
        let fallback = fallback.map(|fallback| Fallback {
            counts: into_contiguous(fallback.counts),
            ..fallback
        });
        let tensors = fallback.as_ref().map(|it| {
            let layer = layer_index("quantize_input", it);
            (handle(&it.thresholds), handle(&it.counts), layer)
        });
        let state = tensors
            .as_ref()
            .map(|(thresholds, counts, layer)| FallbackState {
                thresholds,
                layer: *layer,
                counts,
            });
        let like = &x.like;
        let input = quantize_linear_input(&like.client, x.source(), block, key, state);
        let input = checked(input);
        let residual = input.residual.map(|residual| wrap_residual(like, residual));
        QuantizedInput {
            forward: wrap(like, input.forward),
            fallback: residual.zip(fallback.map(|fallback| fallback.counts)),
            saved: input.saved.map(|saved| wrap(like, saved)),
            contexts: input.contexts.map(|copies| {
                let [gate, up] = copies.map(|copy| wrap(like, copy));
                (gate, up)
            }),
        }
    }

    fn quantize_swiglu_gradients(
        factors: [OperatorInput<Self>; 2],
        gradient: OperatorInput<Self>,
        specs: [&QuantizeSpec; 2],
        delayed: Option<[&DelayedMaximum<Self>; 2]>,
    ) -> [Quantized<Self>; 2] {
        let factors = factors.map(Rows::of);
        let factors = factors.each_ref().map(Rows::input);
        let Some(delayed) = delayed else {
            let gradient = Rows::of(gradient);
            let (like, gradient) = (gradient.on_device(), gradient.input());
            let gradients = quantize_swiglu_gradients(&like.client, factors, gradient, specs);
            return checked(gradients).map(|it| wrap(like, it));
        };
        let like = &into_contiguous(gradient.into_floats());
        let gradient = &handle(like);
        let [spec, other] = specs;
        assert!(
            spec == other,
            "quantize_swiglu_gradients: one is delayed by {spec:?} and one by {other:?}; give both the same"
        );
        let maxima = delayed.map(|it| handle(&into_contiguous(it.maxima.clone())));
        let [of_gate, of_up] = [0, 1].map(|index: usize| quantize::DelayedMaximum {
            maxima: &maxima[index],
            layer: delayed[index].layer,
        });
        let delayed = [of_gate, of_up];
        let gradients =
            quantize_swiglu_gradients_delayed(&like.client, factors, gradient, spec, delayed);
        checked(gradients).map(|it| wrap_delayed(like, it))
    }

    fn dequantize_matrix(matrix: &Quantized<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        dequantize::<Self, R>(matrix, dtype)
    }
}

/// The tensors of a source as kernels take them.
struct SourceHandles<R: CubeRuntime> {
    /// A tensor that says where they are.
    like: CubeTensor<R>,
    first: TensorHandle<R>,
    /// Where the first one is the gate.
    up: Option<TensorHandle<R>>,
    contexts: Option<QuantizeSpec>,
}

impl<R: CubeRuntime> SourceHandles<R> {
    fn of<B: Cube<R> + Kernels>(operation: &str, source: MatrixSource<B>) -> Self {
        let swiglu = |gate, up, contexts| {
            let up = handle(&into_contiguous(up));
            (into_contiguous(gate), Some(up), contexts)
        };
        let (like, up, contexts) = match source {
            MatrixSource::Floats(x) => (x, None, None),
            MatrixSource::Swiglu {
                gate: OperatorInput::Floats(gate),
                up: OperatorInput::Floats(up),
            } => swiglu(gate, up, None),
            MatrixSource::SwigluCompressing { gate, up, contexts } => {
                swiglu(gate, up, Some(contexts))
            }
            others @ (MatrixSource::Swiglu { .. }
            | MatrixSource::Gelu(_)
            | MatrixSource::GeluGradient { .. }
            | MatrixSource::Product(_)
            | MatrixSource::RmsNorm { .. }
            | MatrixSource::LayerNorm { .. }) => (others.into_floats(), None, None),
        };
        matrix_shape(&like, operation);
        Self {
            first: handle(&like),
            like,
            up,
            contexts,
        }
    }

    fn source(&self) -> quantize::MatrixSource<'_, R> {
        match &self.up {
            None => (&self.first).into(),
            Some(up) => quantize::MatrixSource::Swiglu {
                gate: &self.first,
                up,
                contexts: self.contexts,
            },
        }
    }
}

/// A matrix with its largest magnitude.
fn wrap_delayed<B: Cube<R>, R: CubeRuntime>(
    like: &CubeTensor<R>,
    (matrix, absmax): (quantize::Quantized<R>, TensorHandle<R>),
) -> Quantized<B> {
    Quantized {
        absmax: Some(tensor(like, absmax, DType::F32)),
        ..wrap(like, matrix)
    }
}

/// The layer as kernels take it, checked to be among those of the fallback state.
fn layer_index<B: Cube<R>, R: CubeRuntime>(operation: &str, fallback: &Fallback<B>) -> u32 {
    fallback.check(operation);
    u32::try_from(fallback.layer).expect("32 bits index the thresholds of all layers")
}

/// The block size and the saved copy's key, if one kernel makes the copies: INT8 in blocks of one size, row-major to
/// nearest, and if there is a saved one, transposed and stochastic.
fn one_read(
    forward: &QuantizeSpec,
    saved: Option<&QuantizeSpec>,
) -> Option<(usize, Option<StochasticKey>)> {
    let Granularity::Block(block) = forward.granularity else {
        return None;
    };
    let int8 = QuantizeSpec::int8(forward.granularity);
    if *forward != int8 {
        return None;
    }
    let Some(saved) = saved else {
        return Some((block, None));
    };
    let Rounding::Stochastic(key) = saved.rounding else {
        return None;
    };
    let transposed = int8
        .with_rounding(saved.rounding)
        .with_layout(Layout::Transposed);
    (*saved == transposed).then_some((block, Some(key)))
}

/// FP32, FP16 or BF16.
pub(super) fn dequantize<B: Cube<R>, R: CubeRuntime>(
    matrix: &Quantized<B>,
    dtype: FloatDType,
) -> CubeTensor<R> {
    let (like, dtype) = (on_device(matrix), DType::from(dtype));
    let dequantized = quantize::dequantize(&like.client, &unwrap(matrix), dtype.into());
    tensor(like, checked(dequantized), dtype)
}

/// A tensor of the matrix, which says where it is.
pub(super) fn on_device<B: Cube<R>, R: CubeRuntime>(matrix: &Quantized<B>) -> &CubeTensor<R> {
    match &matrix.scales {
        Scales::F32(scales) | Scales::E8M0(scales) | Scales::E4M3 { scales, .. } => scales,
    }
}

pub(super) fn wrap<B: Cube<R>, R: CubeRuntime>(
    like: &CubeTensor<R>,
    matrix: quantize::Quantized<R>,
) -> Quantized<B> {
    let format = Format {
        number: matrix.number,
        scale: matrix.scale,
        granularity: matrix.granularity,
    };
    let values = |values| tensor(like, values, format.values_dtype());
    Quantized {
        shape: [matrix.shape.rows, matrix.shape.cols],
        format,
        absmax: None,
        values: matrix.values.map(values),
        transposed: matrix.transposed.map(values),
        scales: match matrix.scale {
            ScaleNumber::F32 => Scales::F32(tensor(like, matrix.scales, DType::F32)),
            ScaleNumber::E8M0 => Scales::E8M0(tensor(like, matrix.scales, DType::U8)),
            ScaleNumber::E4M3 => {
                let tensor_scale = matrix
                    .tensor_scale
                    .expect("E4M3 scales have one of the matrix");
                Scales::E4M3 {
                    scales: tensor(like, matrix.scales, DType::U8),
                    tensor_scale: tensor(like, tensor_scale, DType::F32),
                }
            }
        },
    }
}

/// The matrix as kernels take it.
pub(super) fn unwrap<B: Cube<R>, R: CubeRuntime>(matrix: &Quantized<B>) -> quantize::Quantized<R> {
    let [rows, cols] = matrix.shape;
    let (scales, tensor_scale) = match &matrix.scales {
        Scales::F32(scales) | Scales::E8M0(scales) => (scales, None),
        Scales::E4M3 {
            scales,
            tensor_scale,
        } => (scales, Some(tensor_scale)),
    };
    quantize::Quantized {
        values: matrix.values.as_ref().map(handle),
        transposed: matrix.transposed.as_ref().map(handle),
        scales: handle(scales),
        tensor_scale: tensor_scale.map(handle),
        number: matrix.format.number,
        scale: matrix.format.scale,
        granularity: matrix.format.granularity,
        shape: MatrixShape::new(rows, cols),
        batched: false,
    }
}

fn wrap_residual<B: Cube<R>, R: CubeRuntime>(
    like: &CubeTensor<R>,
    residual: FallbackResidual<R>,
) -> Residual<B> {
    Residual {
        values: tensor(like, residual.values, DType::I8),
        scales: tensor(like, residual.scales, DType::F32),
        indicator: Some(tensor(like, residual.flags, DType::U32)),
    }
}
