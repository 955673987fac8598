//! The operations: from float matrices to numbers with shared scales, and back.

use burn_backend::{FloatDType, tensor::FloatTensor};
use cubecl_kernels::quantize::QuantizeSpec;

use super::{
    delayed::DelayedMaximum,
    fallback::{Fallback, FallbackQuantized, Residual, fallback_block},
    matrix::{Format, Quantized},
};
use crate::data::{
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
        K::quantize_delayed(x, &self.spec, &delayed)
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
