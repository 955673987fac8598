//! The Hadamard quantizer with a learned step size, and its backward pass (int4-hq-lss, sections 3.1 and 3.3, equation
//! 4, Appendices A.3 to A.5).
//!
//! A matrix is transformed, `h = x H`, divided by the step size, `v = h / s`, and `v` is clamped to `[-7, 7]` and
//! rounded to INT4. Its values `Z = s * code` stand for `h`, and never for `x`: in a product of two such matrices the
//! transforms cancel. The step size is a parameter that is learned. It lies on the device, in one buffer for all
//! layers, and the host does not read it.
//!
//! | function | what it computes | how often `x` is read |
//! | --- | --- | --- |
//! | [`quantize`] | the codes, and on request what the backward pass needs of them | once |
//! | [`backward`] | the gradients of `x` and of `s` from that of `Z` | once, or not at all |
//! | [`cold_step`] | the step size to begin with | once |
//! | [`squared_error`] | the error by which the size of `H` is chosen | once |
//!
//! The backward pass needs two things of an element. `I` says that it was not *clamped*, `|v| <= 7`, and `delta =
//! code - I v` is the derivative of `Z` by `s`. [`ElementSource::Exact`] finds them in `x` once more, to the bit. Where
//! `x` is not kept, [`ElementSource::Saved`] finds them in the codes and in a [`SavedRounding`], which is small: see
//! there.
//!
//! [`reference::learned_step`](crate::reference::learned_step) is the specification.

use cubecl::{prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{MatrixView, check_dtype, check_float, is_contiguous, storage},
    error::KernelError,
    hadamard::HadamardTransform,
    number::Integer,
    scale::MIN_ABSMAX,
};

mod backward;
mod forward;
mod rounded;
mod saved;
mod straight_through;
mod sums;
mod transformed;

pub use backward::{ElementSource, Gradient, LearnedStepGradients, backward};
pub use forward::quantize;
pub use sums::{cold_step, squared_error};

/// `Q`, the largest integer.
pub const LARGEST: f32 = Integer::INT4.largest() as f32;
/// Neighbours of a row that share a byte of [`SavedRounding::saturation`].
pub const SATURATION_GROUP: usize = 32;
/// Elements of code 7 or -7 of a group that the byte tells about.
pub const FLAGS_OF_GROUP: usize = 8;
/// Units of a residual in 1: a residual is at most 1/2, and 127 of them.
pub const RESIDUAL_UNITS: f32 = 254.0;

/// The largest step size that has a normal inverse.
const LARGEST_STEP: f32 = f32::from_bits((127 + 126) << 23);

/// The step size of one layer among those of all.
#[derive(Debug)]
pub struct LearnedStep<'a, R: Runtime> {
    /// f32 `[layers]`, contiguous.
    pub steps: &'a TensorHandle<R>,
    /// The index of the layer.
    pub layer: usize,
}

impl<R: Runtime> Clone for LearnedStep<'_, R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<R: Runtime> Copy for LearnedStep<'_, R> {}

impl<R: Runtime> LearnedStep<'_, R> {
    fn check(&self, operation: &'static str) -> Result<(), KernelError> {
        let Self { steps, layer } = self;
        check_dtype(operation, "steps", steps, storage::<f32>(), "pass f32")?;
        let shape = steps.shape();
        if shape.len() == 1 && *layer < shape[0] && is_contiguous(steps) {
            return Ok(());
        }
        Err(KernelError::Shape {
            operation,
            got: format!("layer {layer} of steps {shape:?}"),
            remedy: "pass contiguous steps [layers] and the index of a layer",
        })
    }
}

/// The rows of which the backward pass knows the residuals: `offset`, `offset + interval`, and so on. Where every
/// offset is as likely as any other, what is estimated from them is unbiased.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ResidualRows {
    interval: usize,
    offset: usize,
}

impl ResidualRows {
    /// Every row.
    pub const ALL: Self = Self {
        interval: 1,
        offset: 0,
    };

    /// Each `interval`-th row, from row `offset` on.
    ///
    /// # Errors
    ///
    /// When `offset` is not below `interval`, or `interval` does not fit 16 bits.
    pub fn new(interval: usize, offset: usize) -> Result<Self, KernelError> {
        if offset < interval && interval <= usize::from(u16::MAX) {
            return Ok(Self { interval, offset });
        }
        Err(KernelError::Unsupported {
            operation: "ResidualRows::new",
            reason: format!("each {interval}-th row from row {offset} on"),
            remedy: "use an interval from 1 to 65,535 and an offset below it",
        })
    }

    /// The distance of two sampled rows.
    pub const fn interval(self) -> usize {
        self.interval
    }

    /// The first sampled row.
    pub const fn offset(self) -> usize {
        self.offset
    }

    /// True for a sampled row.
    pub const fn contains(self, row: usize) -> bool {
        row % self.interval == self.offset
    }

    /// How many of these rows are sampled.
    pub const fn count(self, rows: usize) -> usize {
        rows.saturating_sub(self.offset).div_ceil(self.interval)
    }

    /// The term of a residual in `delta`, in the place of those of the rows that are not sampled too.
    pub(crate) fn residual_weight(self) -> f32 {
        self.interval as f32 / RESIDUAL_UNITS
    }
}

/// The values of a quantized matrix that the backward pass needs beside its codes. With an interval of 64 rows or more
/// both together take less than 0.05 byte an element.
#[derive(Debug)]
pub struct SavedRounding<R: Runtime> {
    /// u8 `[rows, ceil(cols / 32)]`: which elements are clamped. Only codes 7 and -7 leave that open. Bit `j` of a byte
    /// is 1 where the `j`-th element of such a code is, of the 32 neighbours of a row that the byte is for, in their
    /// order. The ninth element of such a code and those behind it count as clamped.
    pub saturation: TensorHandle<R>,
    /// i8 `[sampled rows, cols]`: `254 (code - v)` rounded to the nearest integer, ties to even; 0 for clamped
    /// elements, of which `delta` is the code.
    pub residuals: TensorHandle<R>,
    /// The rows that have residuals.
    pub sample: ResidualRows,
}

impl<R: Runtime> Clone for SavedRounding<R> {
    fn clone(&self) -> Self {
        Self {
            saturation: self.saturation.clone(),
            residuals: self.residuals.clone(),
            sample: self.sample,
        }
    }
}

/// The factor of a step size's gradient, `g(s) = 1 / sqrt(7 N)` for a matrix of `N` elements (Appendix A.3).
pub fn gradient_scale(elements: usize) -> f32 {
    (1.0 / (f64::from(LARGEST) * elements.max(1) as f64).sqrt()) as f32
}

/// True for a step size that [`cold_step`] sets: from 2^-100 to 2^126. It divides every matrix that has one without a
/// subnormal number on the way.
pub fn is_step(step: f32) -> bool {
    (MIN_ABSMAX..=LARGEST_STEP).contains(&step)
}

/// Reads `x` as one matrix of a float type, which the transform fits.
fn check_matrix<R: Runtime>(
    client: &ComputeClient<R>,
    operation: &'static str,
    x: &TensorHandle<R>,
    transform: HadamardTransform,
) -> Result<MatrixView, KernelError> {
    check_float(client, operation, "x", x.dtype)?;
    let view = MatrixView::one(operation, "x", x)?;
    transform.check(operation, [view.shape.rows, view.shape.cols])?;
    Ok(view)
}
