//! Leverage score sampling: the rows of a split gradient that a product keeps (int4-hq-lss, sections 4.2, A.2, A.6, B).
//!
//! A product with the stacked parts of a [`BitSplit`](crate::bit_splitting::BitSplit) is a sum over `2 N` rows. Row `i`
//! is kept with probability `p_i` and divided by it, which makes the sum unbiased, and `p_i` proportional to the
//! leverage score `c_i` makes its variance the least:
//!
//! | product | `c_i` | variance | source |
//! | --- | --- | --- | --- |
//! | `dW`, over rows of dY and X | `s_part \|part_i\| \|X_i\|` | `sum (1 - p_i) / p_i c_i^2` | Proposition 4.1 |
//! | `dX`, over rows of dY | `s_part \|part_i\|` | the same | Proposition B.2 |
//!
//! | step | function |
//! | --- | --- |
//! | norms of the rows of X | [`int4_row_norms`] |
//! | scores, from norms alone | [`leverage_scores`] |
//! | probabilities, masks and the list of kept rows, in one launch | [`sample_rows`] |
//! | operands of INT8 products of the kept rows | [`gather_parts`], [`gather_scaled`], [`gather_int4_rows`] |
//!
//! # Scores are exact up to their roots
//!
//! Squared norms are integers, from the codes (section A.6). Only ratios of scores matter, so they are in units of the
//! scale of the low part, which is a 14th of the other one. A square root is not the same to the bit on every device; a
//! score takes the root to 16 bits, which integers decide: see [`root`](crate::reference::leverage_score::root). An
//! error of 2^-16 in a score takes nothing from the estimate's expectation, and 2^-32 of the variance.
//!
//! # No host wait
//!
//! How many rows are kept is known on the device alone. Their list has room for [`capacity`] rows, and ends with
//! padding: rows of zeros, under a scale of 0. The number of kept rows has a standard deviation of `sqrt(N / 2)` at
//! most, and is above the capacity with a probability below 2e-14 (Hoeffding's inequality at eight times that); what
//! does not fit is dropped.
//!
//! # Where the division by the probability goes
//!
//! For `dX` a kept row is a row of the product, and its factor `s_part / p_i` a scale of that row: the integers stay
//! exact ([`gather_parts`]). For `dW` kept rows are the depth of the product, along which no integer product carries a
//! real factor for each element. So rows are scaled and rounded once more, to INT8 in square blocks and stochastically
//! ([`gather_scaled`]). Where `p_i < 1` it is proportional to the norm of the row, or to its product with that of X, so
//! that scaled rows have like magnitudes. In the tests' gradients of 256 rows, of magnitudes that differ by factors
//! from 1 to 55, this rounding adds 0.1% to 2% to the variance of splitting and sampling together.

use cubecl::{prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{check_dtype, is_contiguous, storage},
    error::KernelError,
};

mod gather;
mod sample;
mod scaled;
mod scores;

pub use gather::{gather_int4_rows, gather_parts};
pub use sample::sample_rows;
pub(crate) use sample::{BELOW_ONE, DRAW_BITS};
pub use scaled::gather_scaled;
pub(crate) use scores::root;
pub use scores::{int4_row_norms, leverage_scores};

/// Lanes of the sums over scores, which fix their order on every device.
pub const LANES: usize = 1024;
/// Rounds that scale probabilities up after others were cut off at 1.
pub const ROUNDS: usize = 32;
/// Rows and columns of the blocks of scaled rows, and of gathered rows of X.
pub const SCALED_BLOCK: usize = 128;
/// The capacity is a multiple of this where there are as many rows: the depth that kernels take at once.
const CAPACITY_STEP: usize = 128;
/// Most rows of stacked parts: `f32` counts them exactly.
pub(crate) const MAX_STACKED_ROWS: usize = 1 << 24;

/// Room for kept rows of a gradient of `rows` rows, `N`, of whose `2 N` stacked rows `expected` are kept on average:
/// `expected + 8 ceil(sqrt(N / 2))`, rounded up to a multiple of 128, but `2 N` at most.
pub fn capacity(rows: usize, expected: usize) -> usize {
    let deviation = (rows as f64 / 2.0).sqrt().ceil() as usize;
    let room = expected.saturating_add(8 * deviation);
    room.div_ceil(CAPACITY_STEP)
        .saturating_mul(CAPACITY_STEP)
        .min(2 * rows)
}

/// The rows of stacked parts that a draw kept, on the device.
#[derive(Debug)]
pub struct RowSample<R: Runtime> {
    /// i32 `[capacity]`: the kept rows, in `0..2 N`, in ascending order; -1 for padding.
    pub rows: TensorHandle<R>,
    /// f32 `[capacity]`: the scale of each kept row's part divided by the row's probability; 0 for padding, NaN if the
    /// scale is NaN.
    pub factors: TensorHandle<R>,
    /// i32 `[2 N]`: where in `rows` each row is; -1 where it was dropped.
    pub positions: TensorHandle<R>,
    /// i32 `[1]`: the number of kept rows.
    pub count: TensorHandle<R>,
    /// f32 `[2 N]`: the probability of each row.
    pub probabilities: TensorHandle<R>,
}

impl<R: Runtime> Clone for RowSample<R> {
    fn clone(&self) -> Self {
        Self {
            rows: self.rows.clone(),
            factors: self.factors.clone(),
            positions: self.positions.clone(),
            count: self.count.clone(),
            probabilities: self.probabilities.clone(),
        }
    }
}

impl<R: Runtime> RowSample<R> {
    /// Room for kept rows.
    pub fn capacity(&self) -> usize {
        self.rows.shape().iter().product()
    }

    /// Accepts kept rows of a gradient of so many rows, as [`sample_rows`] makes them.
    fn check(&self, operation: &'static str, rows: usize) -> Result<(), KernelError> {
        let remedy = "pass what `sample_rows` made of this gradient's scores";
        check_dtype(operation, "rows", &self.rows, storage::<i32>(), remedy)?;
        check_dtype(
            operation,
            "factors",
            &self.factors,
            storage::<f32>(),
            remedy,
        )?;
        let capacity = self.capacity();
        let fits = self.rows.shape()[..] == [capacity]
            && self.factors.shape()[..] == [capacity]
            && self.positions.shape()[..] == [2 * rows]
            && [&self.rows, &self.factors].into_iter().all(is_contiguous);
        if fits {
            return Ok(());
        }
        Err(KernelError::Shape {
            operation,
            got: format!(
                "{rows} rows with a sample of rows {:?}, factors {:?} and positions {:?}",
                self.rows.shape(),
                self.factors.shape(),
                self.positions.shape()
            ),
            remedy,
        })
    }
}
