//! The kernels that split and sample.

use burn_backend::{Backend, tensor::FloatTensor};
use cubecl_kernels::{layout::Layout, rounding::Rounding};

use crate::data::{StochasticKey, quantize::Quantized, tensors::Tensors};

/// A gradient in two INT4 parts (int4-hq-lss, equation 5): see [`cubecl_kernels::bit_splitting`].
#[derive(Debug, Clone)]
pub struct BitSplit<T: Tensors> {
    /// U8 `[rows, cols]`: the high part in the low nibble, the low part in the high nibble.
    pub parts: T::Int,
    /// FP32 `[2]`: the scales of the parts.
    pub scales: T::Float,
    /// U32 `[2 rows]`: the squared norms of the rows of both parts, in integers.
    pub squared_norms: T::Int,
    /// Rows and columns.
    pub shape: [usize; 2],
}

/// The rows of both parts that a draw kept: see [`cubecl_kernels::leverage_score::RowSample`].
#[derive(Debug, Clone)]
pub struct RowSample<T: Tensors> {
    /// INT32 `[capacity]`.
    pub rows: T::Int,
    /// FP32 `[capacity]`.
    pub factors: T::Float,
    /// INT32 `[2 rows]`.
    pub positions: T::Int,
    /// INT32 `[1]`.
    pub count: T::Int,
    /// FP32 `[2 rows]`.
    pub probabilities: T::Float,
}

/// Bit splitting and sampling on a backend that holds data.
///
/// All backends give the numbers of [`cubecl_kernels::reference`], bit for bit.
pub trait SamplingKernels: Backend {
    /// Splits the matrix `x`, of any strides and float dtype, in two INT4 parts; `rounding` is that of the low part.
    ///
    /// # Panics
    ///
    /// If `x` does not have two dimensions.
    fn bit_split(x: FloatTensor<Self>, rounding: Rounding) -> BitSplit<Self>;

    /// Both parts as one INT8 matrix.
    fn merge_parts(split: &BitSplit<Self>, layout: Layout) -> Quantized<Self>;

    /// The leverage score of each row of both parts, FP32 `[2 rows]`: its norm, times that of the row of the INT4
    /// matrix `x`, if there is one (int4-hq-lss, Propositions 4.1 and B.2).
    ///
    /// # Panics
    ///
    /// If `x` has another number of rows.
    fn leverage_scores(split: &BitSplit<Self>, x: Option<&Quantized<Self>>) -> FloatTensor<Self>;

    /// Draws `expected` rows on average, with probabilities proportional to their scores (int4-hq-lss, Appendix A.2).
    fn sample_rows(
        scores: FloatTensor<Self>,
        split: &BitSplit<Self>,
        expected: usize,
        key: StochasticKey,
    ) -> RowSample<Self>;

    /// The kept rows as INT8 with a scale for each row.
    fn gather_parts(split: &BitSplit<Self>, sample: &RowSample<Self>) -> Quantized<Self>;

    /// The kept rows by their scales, rounded again to INT8 in square blocks of 128.
    fn gather_scaled(
        split: &BitSplit<Self>,
        sample: &RowSample<Self>,
        rounding: Rounding,
        layout: Layout,
    ) -> Quantized<Self>;

    /// The rows of the INT4 matrix `x` beside those, as INT8 in square blocks of 128.
    fn gather_int4_rows(
        x: &Quantized<Self>,
        sample: &RowSample<Self>,
        layout: Layout,
    ) -> Quantized<Self>;
}
