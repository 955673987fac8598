//! The kernels that measure matrices.

use burn_backend::{Backend, tensor::FloatTensor};

use crate::data::{quantize::Scales, tensors::Tensors};

/// The magnitudes of a matrix: see [`cubecl_kernels::magnitude`].
#[derive(Debug, Clone)]
pub struct Magnitudes<T: Tensors> {
    /// The largest one, FP32 `[1]`.
    pub absmax: T::Float,
    /// Elements in each bin, INT32 `[BINS]`: bits of a U32.
    pub histogram: T::Int,
}

/// The comparison of a matrix with what it became: see
/// [`cubecl_kernels::quantization_error`](mod@cubecl_kernels::quantization_error).
#[derive(Debug, Clone)]
pub struct QuantizationError<T: Tensors> {
    /// FP32 `[SUMS]`.
    pub sums: T::Float,
    /// INT32 `[COUNTS]`: bits of a U32.
    pub counts: T::Int,
}

/// Measurements on a backend that holds data. Matrices have two dimensions and any strides. Counts are the same on all
/// backends; sums are to rounding.
pub trait HealthKernels: Backend {
    /// The magnitudes of the matrix `x`, of any float dtype.
    ///
    /// # Panics
    ///
    /// If `x` does not have two dimensions.
    fn magnitudes(x: FloatTensor<Self>) -> Magnitudes<Self>;

    /// Compares the matrix `x`, of any float dtype and of largest magnitude `absmax`, FP32 `[1]`, with `y`, FP32, what
    /// it became. `limit`, FP32 `[1]`: the magnitude from which on values saturate.
    ///
    /// # Panics
    ///
    /// If the shapes differ.
    fn quantization_error(
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        absmax: FloatTensor<Self>,
        limit: Option<FloatTensor<Self>>,
    ) -> QuantizationError<Self>;

    /// The smallest and the largest of scales, as they are stored, and the scale of scales, FP32 `[3]`. NaN is the
    /// largest.
    fn extremes(scales: &Scales<Self>) -> FloatTensor<Self>;
}
