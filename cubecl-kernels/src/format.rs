//! The vocabulary of quantization: formats, granularities, rounding modes and layouts.

use crate::shape::MatrixShape;

/// Smallest block maximum that gets a scale, 2^-100.
///
/// Below it `absmax / Q` could leave the range of normal `f32` numbers, which some devices flush to zero, so a
/// block of a smaller maximum is all zeros with scale 0 everywhere.
pub const MIN_ABSMAX: f32 = f32::from_bits((127 - 100) << 23);

/// What stochastic rounding adds to a value beside a random number in `[0, 1)` before it takes the floor, and takes
/// away after it: 1.5 * 2^8.
///
/// It lifts `[-127, 127]` into `[257, 512)`, where the bits of an `f32` are a number with 15 bits behind the point: one
/// sum rounds the value to a multiple of 2^-15 and adds the random bits to it, and the floor is a shift.
pub const STOCHASTIC_OFFSET: f32 = 384.0;

/// A number format of quantized values: symmetric, in units of the scale of their block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Format {
    /// 8-bit integers in `[-127, 127]`, stored as `i8`.
    Int8,
    /// 10-bit integers in `[-511, 511]`, 16 of them packed in five `u32` words
    /// (fallback-int8, section 5.2: near-lossless context of the non-linear layers).
    Int10,
}

impl Format {
    /// Largest magnitude of a quantized value, in units of the scale.
    pub const fn q_max(&self) -> i32 {
        match self {
            Format::Int8 => 127,
            Format::Int10 => 511,
        }
    }
}

/// Which elements of a matrix share a scale. Blocks at the right and lower edges are smaller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Granularity {
    /// Square blocks of this size: 16, 32, 64 or 128.
    Block(usize),
    /// This many consecutive elements of a row, `1 x G`: a power of two from 16 to 1024.
    Group(usize),
    /// A whole row.
    Token,
    /// A whole column.
    Channel,
    /// A whole matrix; each matrix of a batch has its own scale.
    Tensor,
}

impl Granularity {
    /// Rows and columns of the region of one scale, in elements, for matrices of this shape. At least 1 x 1, but for a
    /// block or a group of size 0, which no operation accepts.
    pub fn scale_block(&self, shape: MatrixShape) -> (usize, usize) {
        let (rows, cols) = (shape.rows.max(1), shape.cols.max(1));
        match *self {
            Granularity::Block(size) => (size, size),
            Granularity::Group(size) => (1, size),
            Granularity::Token => (1, cols),
            Granularity::Channel => (rows, 1),
            Granularity::Tensor => (rows, cols),
        }
    }

    /// The shape of the scales of matrices of this shape.
    pub fn scales_shape(&self, shape: MatrixShape) -> MatrixShape {
        let (rows, cols) = self.scale_block(shape);
        MatrixShape::batched(
            shape.batch,
            shape.rows.div_ceil(rows),
            shape.cols.div_ceil(cols),
        )
    }
}

/// How a value is rounded to an integer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// To the nearest integer, ties to the even one.
    Nearest,
    /// Up or down at random, with the probabilities that make it unbiased: see [`STOCHASTIC_OFFSET`].
    Stochastic(StochasticKey),
}

/// Names a stream of random numbers. The same key gives the same rounding of the same element on every device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StochasticKey {
    /// The key of the generator: one for a run.
    pub seed: u64,
    /// Distinguishes the tensors and the steps of a run: never use one value for two tensors.
    pub stream: u64,
}

/// In which order the quantized values are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Layout {
    /// `[.., rows, cols]`.
    RowMajor,
    /// `[.., cols, rows]`: the same values transposed, for a product over the rows.
    Transposed,
    /// Both copies, from one read of the input.
    Both,
}

impl Layout {
    /// Whether the row-major copy is written.
    pub const fn row_major(&self) -> bool {
        matches!(self, Layout::RowMajor | Layout::Both)
    }

    /// Whether the transposed copy is written.
    pub const fn transposed(&self) -> bool {
        matches!(self, Layout::Transposed | Layout::Both)
    }
}
