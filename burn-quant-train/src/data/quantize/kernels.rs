//! The kernels that quantize and dequantize.

use burn_backend::{Backend, FloatDType, tensor::FloatTensor};
use cubecl_kernels::quantize::QuantizeSpec;

use super::{
    delayed::DelayedMaximum,
    fallback::{Fallback, FallbackQuantized, Residual},
    matrix::Quantized,
    source::{MatrixSource, SwigluContexts},
};
use crate::data::{composition::OperatorInput, kernels::Kernels, tensors::Tensors};

/// Quantization on a backend that holds data. Matrices have two dimensions, any strides and any float dtype.
///
/// All backends give the numbers and scales of [`cubecl_kernels::reference`], bit for bit.
pub trait QuantizeKernels: Backend {
    /// Quantizes the matrix `x`.
    ///
    /// # Panics
    ///
    /// If `x` does not have two dimensions, or the kernels do not have the spec or the dtype of `x`.
    fn quantize_matrix(x: FloatTensor<Self>, spec: &QuantizeSpec) -> Quantized<Self>;

    /// Quantizes the matrix `x`, or what it is computed from, whose dimensions but the last are rows: in the launch that
    /// computes it where there is a kernel for that. Makes no copies of what it is computed from: see
    /// [`MatrixSource::with_contexts`].
    ///
    /// # Panics
    ///
    /// As [`Self::quantize_matrix`], and if what it is computed from differs in shape or dtype from what [`MatrixSource`]
    /// says.
    fn quantize_source(x: MatrixSource<Self>, spec: &QuantizeSpec) -> Quantized<Self>;

    /// Quantizes the matrix `x` and its transpose by one spec, from one read where there is a kernel for it.
    ///
    /// # Panics
    ///
    /// As [`Self::quantize_matrix`].
    fn quantize_both_ways(x: FloatTensor<Self>, spec: &QuantizeSpec) -> [Quantized<Self>; 2];

    /// The random Hadamard transform of each row of the matrix `x`: FP32 `[rows, whole]`, where the columns are filled
    /// up with zeros to whole blocks ([`cubecl_kernels::reference::hadamard::random_hadamard`], bit for bit, but for
    /// subnormal numbers).
    ///
    /// # Panics
    ///
    /// If `x` does not have two dimensions, or the kernels do not index as many elements.
    fn random_hadamard(x: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Quantizes the matrix `x`, or what it is computed from, by the scale of a maximum that earlier data had, or where
    /// there is none by that of its own, and finds its largest magnitude (delayed scaling:
    /// [`cubecl_kernels::reference::quantize_delayed`]).
    ///
    /// # Panics
    ///
    /// If `x` does not have two dimensions, if `spec` has not one FP32 scale for the matrix, if the kernels do not have
    /// the number or the dtype of `x`, or if the layer is not among those of the maxima.
    fn quantize_delayed(
        x: MatrixSource<Self>,
        spec: &QuantizeSpec,
        delayed: &DelayedMaximum<Self>,
    ) -> Quantized<Self>;

    /// Quantizes the matrix `x` with fallback: blocks whose largest magnitude exceeds the layer's threshold also get
    /// their residual quantized (fallback-int8, sections 4.3 and 4.4). The counters of the layer go up by the blocks
    /// that fell back and by all blocks.
    ///
    /// # Panics
    ///
    /// If `x` does not have two dimensions, if `spec` is not INT8 to nearest in square blocks, row-major, or if the
    /// fallback's shapes do not fit.
    fn quantize_fallback(
        x: FloatTensor<Self>,
        spec: &QuantizeSpec,
        fallback: Fallback<Self>,
    ) -> FallbackQuantized<Self>;

    /// Quantizes the matrix `x`, or what it is computed from, by `forward`, with fallback if there is one, and by `saved`
    /// if that is wanted: from one read where there is a kernel for it. Makes the copies of what it is computed from that
    /// are asked for.
    ///
    /// # Panics
    ///
    /// If `x` does not have two dimensions, or the kernels do not have one of the specs or the dtype of `x`. With a
    /// fallback also if `forward` is not INT8 to nearest in square blocks, row-major, or if the fallback's shapes do
    /// not fit.
    fn quantize_input(
        x: MatrixSource<Self>,
        forward: &QuantizeSpec,
        saved: Option<&QuantizeSpec>,
        fallback: Option<Fallback<Self>>,
    ) -> QuantizedInput<Self>;

    /// Quantizes the gradients of the gate of SwiGLU and of what it lets through, matrices as they come out of its
    /// backward pass, from both and the gradient of its output, in the numbers in which they wait or flow, by a spec each.
    /// Where both have a delayed maximum, by the scales of these, and with their own largest magnitudes.
    ///
    /// # Panics
    ///
    /// As [`Self::quantize_matrix`] and [`Self::quantize_delayed`], and if gate, up and gradient differ in shape or
    /// dtype.
    fn quantize_swiglu_gradients(
        factors: [OperatorInput<Self>; 2],
        gradient: OperatorInput<Self>,
        specs: [&QuantizeSpec; 2],
        delayed: Option<[&DelayedMaximum<Self>; 2]>,
    ) -> [Quantized<Self>; 2];

    /// The float matrix that a quantized one stands for: `q * scale`, rounded once to `dtype`.
    ///
    /// # Panics
    ///
    /// If the device does not support `dtype`, or the matrix holds neither copy of its values, or other shapes than its
    /// format says.
    fn dequantize_matrix(matrix: &Quantized<Self>, dtype: FloatDType) -> FloatTensor<Self>;
}

/// The input of a linear layer, quantized for its forward product and for its backward pass.
#[derive(Debug, Clone)]
pub struct QuantizedInput<T: Tensors> {
    /// The operand of the forward product.
    pub forward: Quantized<T>,
    /// Its residuals and the counters, if there was a fallback state.
    pub fallback: Option<(Residual<T>, T::Int)>,
    /// The copy for the backward pass, if it was wanted.
    pub saved: Option<Quantized<T>>,
    /// The copies of what it is computed from.
    pub contexts: SwigluContexts<T>,
}

/// [`QuantizeKernels::quantize_input`] with a kernel for each copy.
pub(crate) fn quantize_input_by_copies<K: Kernels>(
    x: MatrixSource<K>,
    forward: &QuantizeSpec,
    saved: Option<&QuantizeSpec>,
    fallback: Option<Fallback<K>>,
) -> QuantizedInput<K> {
    let (x, contexts) = x.with_contexts();
    let x = x.into_floats();
    let saved = saved.map(|saved| K::quantize_matrix(x.clone(), saved));
    let (forward, fallback) = quantize_operand::<K>(x, forward, fallback);
    QuantizedInput {
        forward,
        fallback,
        saved,
        contexts,
    }
}

/// A quantized matrix, and with fallback its residuals and the counters.
pub(crate) type QuantizedOperand<T> = (Quantized<T>, Option<(Residual<T>, <T as Tensors>::Int)>);

/// Quantizes a matrix, with fallback if there is one.
pub(crate) fn quantize_operand<K: QuantizeKernels>(
    x: FloatTensor<K>,
    spec: &QuantizeSpec,
    fallback: Option<Fallback<K>>,
) -> QuantizedOperand<K> {
    match fallback {
        None => (K::quantize_matrix(x, spec), None),
        Some(fallback) => {
            let FallbackQuantized {
                base,
                residual,
                counts,
            } = K::quantize_fallback(x, spec, fallback);
            (base, Some((residual, counts)))
        }
    }
}
