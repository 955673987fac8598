//! The operations: from float matrices to numbers with shared scales, and back.

use burn_backend::{FloatDType, tensor::FloatTensor};
use cubecl_kernels::quantize::QuantizeSpec;

use super::{
    delayed::DelayedMaximum,
    fallback::{Fallback, FallbackQuantized, Residual, fallback_block},
    matrix::{Format, Quantized},
    source::MatrixSource,
};
use crate::data::{
    composition::{OperatorInput, operations::rows_and_columns},
    kernels::Kernels,
    operation::{DataBackend, Operation},
    tensors::{FloatMeta, IntMeta, On, Outline, Tensors, matrix_shape},
};

/// Quantizes the matrix `x`: see [`QuantizeKernels::quantize_matrix`](super::QuantizeKernels::quantize_matrix).
///
/// # Panics
///
/// If `x` does not have two dimensions, or the kernels do not have the spec or the dtype of `x`.
pub fn quantize<B: DataBackend>(x: FloatTensor<B>, spec: &QuantizeSpec) -> Quantized<B> {
    B::run(Quantize { spec: *spec }, x)
}

#[derive(Debug, Clone)]
struct Quantize {
    spec: QuantizeSpec,
}

impl Operation for Quantize {
    const NAME: &'static str = "quantize";
    type Inputs = FloatMeta;
    type Outputs = Quantized<Outline>;

    fn outline<T: Tensors>(&self, x: &T::Float) -> Quantized<Outline> {
        Quantized::outline(matrix_shape(x, Self::NAME), &self.spec)
    }

    fn run<K: Kernels>(self, x: FloatTensor<K>) -> Quantized<K> {
        K::quantize_matrix(x, &self.spec)
    }
}

/// Quantizes a matrix, or what it is computed from, of any shape `[.., cols]`: see
/// [`QuantizeKernels::quantize_source`](super::QuantizeKernels::quantize_source).
///
/// # Panics
///
/// As that.
pub(crate) fn quantize_source<B: DataBackend>(
    x: MatrixSource<B>,
    spec: &QuantizeSpec,
) -> Quantized<B> {
    B::run(QuantizeSource { spec: *spec }, x)
}

#[derive(Debug, Clone)]
struct QuantizeSource {
    spec: QuantizeSpec,
}

impl Operation for QuantizeSource {
    const NAME: &'static str = "quantize_source";
    type Inputs = MatrixSource<Outline>;
    type Outputs = Quantized<Outline>;

    fn outline<T: Tensors>(&self, x: &MatrixSource<T>) -> Quantized<Outline> {
        Quantized::outline(rows_and_columns(&x.shape()), &self.spec)
    }

    fn run<K: Kernels>(self, x: MatrixSource<K>) -> Quantized<K> {
        K::quantize_source(x.flattened(), &self.spec)
    }
}

/// Quantizes the matrix `x` by the scale of a delayed maximum: see
/// [`QuantizeKernels::quantize_delayed`](super::QuantizeKernels::quantize_delayed).
///
/// # Panics
///
/// If `x` does not have two dimensions, if `spec` has not one FP32 scale for the matrix, if the kernels do not have the
/// number or the dtype of `x`, or if the layer is not among those of the maxima.
pub fn quantize_delayed<B: DataBackend>(
    x: FloatTensor<B>,
    spec: &QuantizeSpec,
    delayed: DelayedMaximum<B>,
) -> Quantized<B> {
    B::run(QuantizeDelayed { spec: *spec }, (x, delayed))
}

#[derive(Debug, Clone)]
struct QuantizeDelayed {
    spec: QuantizeSpec,
}

impl Operation for QuantizeDelayed {
    const NAME: &'static str = "quantize_delayed";
    type Inputs = (FloatMeta, DelayedMaximum<Outline>);
    type Outputs = Quantized<Outline>;

    fn outline<T: Tensors>(&self, (x, delayed): &On<Self::Inputs, T>) -> Quantized<Outline> {
        delayed.check(Self::NAME);
        Quantized::delayed_outline(matrix_shape(x, Self::NAME), &self.spec)
    }

    fn run<K: Kernels>(self, (x, delayed): On<Self::Inputs, K>) -> Quantized<K> {
        K::quantize_delayed(MatrixSource::Floats(x), &self.spec, &delayed)
    }
}

/// Quantizes the matrix `x` with fallback: see
/// [`QuantizeKernels::quantize_fallback`](super::QuantizeKernels::quantize_fallback).
///
/// # Panics
///
/// If `x` does not have two dimensions, if `spec` is not INT8 to nearest in square blocks, row-major, or if the
/// fallback's shapes do not fit.
pub fn quantize_fallback<B: DataBackend>(
    x: FloatTensor<B>,
    spec: &QuantizeSpec,
    fallback: Fallback<B>,
) -> FallbackQuantized<B> {
    B::run(QuantizeFallback { spec: *spec }, (x, fallback))
}

#[derive(Debug, Clone)]
struct QuantizeFallback {
    spec: QuantizeSpec,
}

impl Operation for QuantizeFallback {
    const NAME: &'static str = "quantize_fallback";
    type Inputs = (FloatMeta, Fallback<Outline>);
    type Outputs = FallbackQuantized<Outline>;

    fn outline<T: Tensors>(&self, (x, fallback): &On<Self::Inputs, T>) -> Self::Outputs {
        fallback.check(Self::NAME);
        fallback_block(Self::NAME, &self.spec);
        let shape = matrix_shape(x, Self::NAME);
        FallbackQuantized {
            base: Quantized::outline(shape, &self.spec),
            residual: Residual::outline(shape, Format::of(&self.spec)),
            counts: IntMeta::of(&fallback.counts),
        }
    }

    fn run<K: Kernels>(self, (x, fallback): On<Self::Inputs, K>) -> FallbackQuantized<K> {
        K::quantize_fallback(x, &self.spec, fallback)
    }
}

/// Quantizes the gradients of SwiGLU's gate and of what it lets through, from both and the gradient of its output, of
/// any one shape `[.., cols]`, as matrices: see
/// [`QuantizeKernels::quantize_swiglu_gradients`](super::QuantizeKernels::quantize_swiglu_gradients).
pub(crate) fn quantize_swiglu_gradients<B: DataBackend>(
    ([gate, up], gradient): ([OperatorInput<B>; 2], OperatorInput<B>),
    specs: [QuantizeSpec; 2],
    delayed: Option<[DelayedMaximum<B>; 2]>,
) -> [Quantized<B>; 2] {
    let delayed = delayed.map(|[gate, up]| (gate, up));
    let operation = QuantizeSwigluGradients { specs };
    let (gate, up) = B::run(operation, (((gate, up), gradient), delayed));
    [gate, up]
}

#[derive(Debug, Clone)]
struct QuantizeSwigluGradients {
    specs: [QuantizeSpec; 2],
}

impl Operation for QuantizeSwigluGradients {
    const NAME: &'static str = "quantize_swiglu_gradients";
    /// Gate, up and the gradient of the output; the delayed maxima of both gradients, where there are some.
    type Inputs = (
        (
            (OperatorInput<Outline>, OperatorInput<Outline>),
            OperatorInput<Outline>,
        ),
        Option<(DelayedMaximum<Outline>, DelayedMaximum<Outline>)>,
    );
    type Outputs = (Quantized<Outline>, Quantized<Outline>);

    fn outline<T: Tensors>(&self, (inputs, delayed): &On<Self::Inputs, T>) -> Self::Outputs {
        let ((gate, _), _) = inputs;
        let matrix = rows_and_columns(&gate.shape());
        let [of_gate, of_up] = self.specs.each_ref().map(|spec| match delayed {
            None => Quantized::outline(matrix, spec),
            Some(_) => Quantized::delayed_outline(matrix, spec),
        });
        (of_gate, of_up)
    }

    fn run<K: Kernels>(self, (inputs, delayed): On<Self::Inputs, K>) -> On<Self::Outputs, K> {
        let ((gate, up), gradient) = inputs;
        let matrix = rows_and_columns(&gate.shape());
        let [gate, up, gradient] = [gate, up, gradient].map(|it| it.reshaped(matrix));
        let factors = [gate, up];
        let (specs, delayed) = (self.specs.each_ref(), delayed.as_ref());
        let delayed = delayed.map(|(gate, up)| [gate, up]);
        let [of_gate, of_up] = K::quantize_swiglu_gradients(factors, gradient, specs, delayed);
        (of_gate, of_up)
    }
}

/// The float matrix that a quantized one stands for: see
/// [`QuantizeKernels::dequantize_matrix`](super::QuantizeKernels::dequantize_matrix).
///
/// # Panics
///
/// If the device does not support `dtype`, or the matrix holds neither copy of its values, or other shapes than its
/// format says.
pub fn dequantize<B: DataBackend>(matrix: &Quantized<B>, dtype: FloatDType) -> FloatTensor<B> {
    B::run(Dequantize { dtype }, matrix.clone())
}

#[derive(Debug, Clone)]
struct Dequantize {
    dtype: FloatDType,
}

impl Operation for Dequantize {
    const NAME: &'static str = "dequantize";
    type Inputs = Quantized<Outline>;
    type Outputs = FloatMeta;

    fn outline<T: Tensors>(&self, matrix: &Quantized<T>) -> FloatMeta {
        FloatMeta::new(matrix.shape, self.dtype)
    }

    fn run<K: Kernels>(self, matrix: Quantized<K>) -> FloatTensor<K> {
        K::dequantize_matrix(&matrix, self.dtype)
    }
}
