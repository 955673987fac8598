//! INT8 block quantization and AdamW on slices in host memory: the numbers of [`reference`](mod@crate::reference), in
//! one pass and on all cores, for backends whose tensors live there.
//!
//! Matrices are contiguous and row-major; `block` is the rows and columns that share a scale. The inner loops have no
//! calls and no branches, so that the compiler turns them into vector instructions: rounding adds and takes away
//! 1.5 * 2^23 instead of calling the C library.

use rayon::prelude::*;

use crate::{
    format::{Format, Rounding, STOCHASTIC_OFFSET},
    optimizer_state::MAX_GROUP,
    philox,
    reference::{
        self,
        adamw::{MomentChunk, StateDither, Step},
    },
    rounding::{FRACTION_BITS, MAGNITUDE, ROUND_TO_EVEN},
};

const Q_MAX: i32 = Format::Int8.q_max();

/// A quantized matrix: each value is `values[i] * scale of its block`.
#[derive(Debug, Clone, PartialEq)]
pub struct Quantized {
    /// The integers in `[-127, 127]`, row-major.
    pub values: Vec<i8>,
    /// One scale for each block, row-major; NaN for a block with NaN or Inf.
    pub scales: Vec<f32>,
}

/// A matrix quantized with fallback.
#[derive(Debug, Clone, PartialEq)]
pub struct FallbackQuantized {
    /// The INT8 blocks.
    pub base: Quantized,
    /// The INT8 residual blocks; all 0, with scale 0, where a block did not fall back.
    pub residual: Quantized,
    /// Number of blocks that fell back.
    pub fallback_blocks: usize,
}

/// How a matrix is cut into blocks.
#[derive(Debug, Clone, Copy)]
struct Grid {
    cols: usize,
    block: (usize, usize),
}

impl Grid {
    fn new(len: usize, [rows, cols]: [usize; 2], block: (usize, usize)) -> Self {
        assert_eq!(
            len,
            rows * cols,
            "a slice with all elements of a [{rows}, {cols}] matrix is needed"
        );
        assert!(
            block.0 > 0 && block.1 > 0,
            "blocks of {} x {} elements; use at least one",
            block.0,
            block.1
        );
        Self { cols, block }
    }

    /// Elements of one row of blocks.
    fn stripe(&self) -> usize {
        (self.block.0 * self.cols).max(1)
    }

    fn blocks_across(&self) -> usize {
        self.cols.div_ceil(self.block.1).max(1)
    }

    fn blocks(&self, len: usize) -> usize {
        len.div_ceil(self.stripe()) * self.blocks_across()
    }

    /// The parts of each row of a stripe that lie in one of its blocks.
    fn block_rows<'a, T>(
        &self,
        stripe: &'a [T],
        index: usize,
    ) -> impl Iterator<Item = &'a [T]> + use<'a, T> {
        let (start, end) = self.columns(index);
        stripe.chunks(self.cols).map(move |row| &row[start..end])
    }

    fn columns(&self, index: usize) -> (usize, usize) {
        let start = index * self.block.1;
        (start, (start + self.block.1).min(self.cols))
    }
}

/// Quantizes `x`, `[rows, cols]` (fallback-int8, section 4.2).
///
/// # Panics
///
/// When `x` does not have as many elements as `shape`, or a block has none.
pub fn quantize(
    x: &[f32],
    shape: [usize; 2],
    block: (usize, usize),
    rounding: Rounding,
) -> Quantized {
    let grid = Grid::new(x.len(), shape, block);
    let mut quantized = Quantized {
        values: vec![0; x.len()],
        scales: vec![0.0; grid.blocks(x.len())],
    };
    (
        x.par_chunks(grid.stripe()),
        quantized.values.par_chunks_mut(grid.stripe()),
        quantized.scales.par_chunks_mut(grid.blocks_across()),
    )
        .into_par_iter()
        .enumerate()
        .for_each(|(stripe, (x, values, scales))| {
            let mut inverses = vec![0.0; scales.len()];
            for (index, (scale, inverse)) in scales.iter_mut().zip(&mut inverses).enumerate() {
                (*scale, *inverse) =
                    reference::scale_and_inverse(absmax(grid.block_rows(x, index)), Q_MAX);
            }
            let mut dithers = vec![0.0; grid.cols];
            for (row, (x, values)) in x
                .chunks(grid.cols)
                .zip(values.chunks_mut(grid.cols))
                .enumerate()
            {
                if let Rounding::Stochastic(key) = rounding {
                    philox::dither_row(key, stripe * grid.block.0 + row, &mut dithers);
                }
                for (index, &inverse) in inverses.iter().enumerate() {
                    let (start, end) = grid.columns(index);
                    let (x, values) = (&x[start..end], &mut values[start..end]);
                    match rounding {
                        _ if inverse == 0.0 => {}
                        Rounding::Nearest => round_nearest(x, inverse, values),
                        Rounding::Stochastic(_) => {
                            round_stochastic(x, inverse, &dithers[start..end], values);
                        }
                    }
                }
            }
        });
    quantized
}

/// Quantizes `x`, `[rows, cols]`, to nearest, and the residual of each block whose largest magnitude is above
/// `threshold` once more (fallback-int8, section 4.3, with the AbsMax criterion of section 4.4). A block that holds NaN
/// or an infinity does not fall back.
///
/// # Panics
///
/// When `x` does not have as many elements as `shape`, or a block has none.
pub fn quantize_fallback(
    x: &[f32],
    shape: [usize; 2],
    block: (usize, usize),
    threshold: f32,
) -> FallbackQuantized {
    let grid = Grid::new(x.len(), shape, block);
    let empty = || Quantized {
        values: vec![0; x.len()],
        scales: vec![0.0; grid.blocks(x.len())],
    };
    let (mut base, mut residual) = (empty(), empty());
    let fallback_blocks = (
        x.par_chunks(grid.stripe()),
        base.values.par_chunks_mut(grid.stripe()),
        base.scales.par_chunks_mut(grid.blocks_across()),
        residual.values.par_chunks_mut(grid.stripe()),
        residual.scales.par_chunks_mut(grid.blocks_across()),
    )
        .into_par_iter()
        .map(|(x, base, base_scales, residual, residual_scales)| {
            let mut rest = Vec::new();
            let mut fallback_blocks = 0;
            for (index, base_scale) in base_scales.iter_mut().enumerate() {
                let absmax_x = absmax(grid.block_rows(x, index));
                let (scale, inverse) = reference::scale_and_inverse(absmax_x, Q_MAX);
                *base_scale = scale;
                let (start, end) = grid.columns(index);
                if inverse != 0.0 {
                    for (x, base) in x.chunks(grid.cols).zip(base.chunks_mut(grid.cols)) {
                        round_nearest(&x[start..end], inverse, &mut base[start..end]);
                    }
                }
                if !(absmax_x.is_finite() && absmax_x > threshold) {
                    continue;
                }
                fallback_blocks += 1;
                rest.clear();
                for (x, base) in grid.block_rows(x, index).zip(grid.block_rows(base, index)) {
                    rest.extend(x.iter().zip(base).map(|(x, &q)| x - f32::from(q) * scale));
                }
                let (scale, inverse) =
                    reference::scale_and_inverse(absmax([&rest[..]].into_iter()), Q_MAX);
                residual_scales[index] = scale;
                if inverse != 0.0 {
                    let rows = residual.chunks_mut(grid.cols);
                    for (rest, residual) in rest.chunks(end - start).zip(rows) {
                        round_nearest(rest, inverse, &mut residual[start..end]);
                    }
                }
            }
            fallback_blocks
        })
        .sum();
    FallbackQuantized {
        base,
        residual,
        fallback_blocks,
    }
}

/// The values `q * scale` of a quantized `[rows, cols]` matrix, plus those of its residual, each product and the sum
/// rounded to `f32`.
///
/// # Panics
///
/// When the elements of the slices do not fit `shape` and `block`, or a block has none.
pub fn dequantize(
    (values, scales): (&[i8], &[f32]),
    residual: Option<(&[i8], &[f32])>,
    shape: [usize; 2],
    block: (usize, usize),
) -> Vec<f32> {
    let grid = Grid::new(values.len(), shape, block);
    for (values, scales) in [Some((values, scales)), residual].into_iter().flatten() {
        assert_eq!(
            (values.len(), scales.len()),
            (shape[0] * shape[1], grid.blocks(values.len())),
            "values and scales of a {shape:?} matrix"
        );
    }
    let mut out = vec![0.0; values.len()];
    out.par_chunks_mut(grid.stripe())
        .enumerate()
        .for_each(|(stripe, out)| {
            let (first, first_scale) = (stripe * grid.stripe(), stripe * grid.blocks_across());
            for (row, out) in out.chunks_mut(grid.cols).enumerate() {
                let row = first + row * grid.cols;
                for index in 0..grid.blocks_across() {
                    let (start, end) = grid.columns(index);
                    let out = &mut out[start..end];
                    let scale = scales[first_scale + index];
                    for (out, &q) in out.iter_mut().zip(&values[row + start..row + end]) {
                        *out = f32::from(q) * scale;
                    }
                    let Some((values, scales)) = residual else {
                        continue;
                    };
                    let scale = scales[first_scale + index];
                    if scale != 0.0 {
                        for (out, &q) in out.iter_mut().zip(&values[row + start..row + end]) {
                            *out += f32::from(q) * scale;
                        }
                    }
                }
            }
        });
    out
}

/// About as many elements as a thread takes at a time.
const CHUNK: usize = 4 * MAX_GROUP;

/// One AdamW step of a parameter, in place: [`reference::adamw::adamw`] on all cores. Groups are multiples of 4 where
/// there is a `dither`.
///
/// # Panics
///
/// When the tensors differ in length, a group is 0 or larger than [`MAX_GROUP`], or the smaller group does not divide
/// the larger.
pub fn adamw(
    step: &Step,
    parameter: &mut [f32],
    gradient: &[f32],
    first: MomentChunk<'_>,
    second: MomentChunk<'_>,
    dither: Option<StateDither>,
) {
    let lengths = [gradient.len(), first.len(), second.len()];
    assert_eq!(
        lengths,
        [parameter.len(); 3],
        "adamw: elements of the gradient and of both moments, beside the parameter's"
    );
    let groups = [first.group(), second.group()].into_iter().flatten();
    for group in groups.clone() {
        assert!(
            (1..=MAX_GROUP).contains(&group),
            "adamw: a group of {group} elements; use 1 to {MAX_GROUP}"
        );
    }
    let larger = groups.max().unwrap_or(1);
    let chunk = CHUNK / larger * larger;
    (
        parameter.par_chunks_mut(chunk),
        gradient.par_chunks(chunk),
        first.split(chunk),
        second.split(chunk),
    )
        .into_par_iter()
        .enumerate()
        .for_each(|(index, (parameter, gradient, first, second))| {
            let dither = dither.map(|dither| dither.behind(index * chunk));
            reference::adamw::adamw(step, parameter, gradient, first, second, dither);
        });
}

/// The largest magnitude, by the order of the bits without the sign: NaN above infinity above the rest.
fn absmax<'a>(rows: impl Iterator<Item = &'a [f32]>) -> f32 {
    // Signed, since a maximum of signed integers needs no newer vector instructions.
    let largest = |row: &[f32]| {
        row.iter()
            .map(|x| (x.to_bits() & MAGNITUDE) as i32)
            .fold(0, i32::max)
    };
    f32::from_bits(rows.map(largest).fold(0, i32::max) as u32)
}

fn round_nearest(x: &[f32], inverse: f32, values: &mut [i8]) {
    for (x, value) in x.iter().zip(values) {
        *value = integer(x * inverse);
    }
}

fn round_stochastic(x: &[f32], inverse: f32, dithers: &[f32], values: &mut [i8]) {
    for ((x, dither), value) in x.iter().zip(dithers).zip(values) {
        let sum = x * inverse + (STOCHASTIC_OFFSET + dither);
        // The floor, with 256 in the bits above the byte.
        let integer = (sum.to_bits() >> FRACTION_BITS) as u8;
        *value = integer.wrapping_sub(128) as i8;
    }
}

/// To nearest even, within the range of the format.
fn integer(v: f32) -> i8 {
    let q = (v + ROUND_TO_EVEN).to_bits() as i32 - ROUND_TO_EVEN.to_bits() as i32;
    q.clamp(-Q_MAX, Q_MAX) as i8
}
