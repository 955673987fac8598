//! Leverage score sampling of the rows of a split gradient (int4-hq-lss, sections 4.2 and A.2).

use rayon::prelude::*;

use crate::{
    bit_splitting::LOW_STEPS,
    error::KernelError,
    granularity::Granularity,
    leverage_score::{BELOW_ONE, DRAW_BITS, LANES, ROUNDS, SCALED_BLOCK, capacity, root},
    number::{Number, storage},
    philox,
    quantize::QuantizeSpec,
    rounding::{Rounding, StochasticKey},
};

use super::{
    HostQuantized, HostScales, HostValues,
    bit_splitting::{HostBitSplit, high_nibble, low_nibble},
    quantize,
};

/// The rows of stacked parts that a draw kept: what [`RowSample`](crate::leverage_score::RowSample) says of each field.
#[derive(Debug, Clone, PartialEq)]
pub struct HostRowSample {
    /// `[capacity]`: the kept rows, in `0..2 N`, in ascending order; -1 for padding.
    pub rows: Vec<i32>,
    /// `[capacity]`: the scale of each kept row's part divided by the row's probability; 0 for padding.
    pub factors: Vec<f32>,
    /// `[2 N]`: where in `rows` each row is; -1 where it was dropped.
    pub positions: Vec<i32>,
    /// The number of kept rows.
    pub count: i32,
    /// `[2 N]`: the probability of each row.
    pub probabilities: Vec<f32>,
}

impl HostRowSample {
    /// Accepts kept rows of a gradient of so many rows.
    fn check(&self, operation: &'static str, rows: usize) -> Result<(), KernelError> {
        let is_row = |&row: &i32| row < 2 * rows as i32;
        let fits = self.rows.len() == self.factors.len()
            && self.positions.len() == 2 * rows
            && self.rows.iter().all(is_row);
        if fits {
            return Ok(());
        }
        Err(KernelError::Shape {
            operation,
            got: format!(
                "{rows} rows with a sample of {} rows, {} factors and {} positions",
                self.rows.len(),
                self.factors.len(),
                self.positions.len()
            ),
            remedy: "pass what `host::sample_rows` made of this gradient's scores",
        })
    }
}

/// The squared Euclidean norms of the rows of an INT4 matrix, in integers:
/// [`reference::int4_row_norms`](crate::reference::int4_row_norms).
///
/// # Errors
///
/// When `x` is not INT4 with one FP32 scale, or does not have the values of its shape.
pub fn int4_row_norms(x: &HostQuantized<'_>) -> Result<Vec<u32>, KernelError> {
    let (values, _) = check_int4("host::int4_row_norms", x)?;
    let row_bytes = x.number.storage().stored_cols(x.shape[1]);
    if row_bytes == 0 {
        return Ok(vec![0; x.shape[0]]);
    }
    let square = |q: i8| (i32::from(q) * i32::from(q)) as u32;
    let of_byte = |&byte: &u8| square(low_nibble(byte)) + square(high_nibble(byte));
    let norm = |row: &[u8]| row.iter().map(of_byte).sum();
    Ok(values.par_chunks(row_bytes).map(norm).collect())
}

/// The stored values and the scale of an INT4 matrix.
fn check_int4<'a>(
    operation: &'static str,
    x: &'a HostQuantized<'_>,
) -> Result<(&'a [u8], f32), KernelError> {
    let is_int4 = (x.number, x.granularity) == (Number::Int4, Granularity::Tensor);
    match (&x.values, &x.scales) {
        (HostValues::U8(values), HostScales::F32(scales))
            if is_int4
                && scales.len() == 1
                && values.len() == x.shape[0] * x.number.storage().stored_cols(x.shape[1]) =>
        {
            Ok((values, scales[0]))
        }
        _ => Err(KernelError::Unsupported {
            operation,
            reason: format!(
                "{:?} of {:?} by {:?} with {} stored values",
                x.shape,
                x.number,
                x.granularity,
                x.values.len()
            ),
            remedy: "pass INT4 with one FP32 scale for the matrix, as `host::quantize` makes it",
        }),
    }
}

/// The leverage scores of the rows of stacked parts, in units of the scale of the low part:
/// [`reference::leverage_scores`](crate::reference::leverage_scores), to the bit.
///
/// # Errors
///
/// When there are not twice as many norms of parts as of rows of X.
pub fn leverage_scores(
    part_norms: &[u32],
    x_norms: Option<&[u32]>,
) -> Result<Vec<f32>, KernelError> {
    let rows = x_norms.map_or(part_norms.len() / 2, <[u32]>::len);
    if part_norms.len() != 2 * rows {
        return Err(KernelError::Shape {
            operation: "host::leverage_scores",
            got: format!("{} norms of parts, {rows} of X", part_norms.len()),
            remedy: "pass 2 N norms of parts and N of X",
        });
    }
    let of_row = |(row, &norm): (usize, &u32)| {
        let mut score = root(norm);
        if let Some(x_norms) = x_norms {
            score *= root(x_norms[row % rows]);
        }
        if row < rows { score * LOW_STEPS } else { score }
    };
    Ok(part_norms.iter().enumerate().map(of_row).collect())
}

/// Draws the rows of stacked parts that are kept:
/// [`reference::sample_rows`](crate::reference::sample_rows), to the bit.
///
/// - `scores`: `[2 N]`.
/// - `scales`: of the high and of the low part.
/// - `expected`: the sum of the probabilities; `N` halves the rows.
///
/// # Errors
///
/// When the number of scores is odd.
pub fn sample_rows(
    scores: &[f32],
    scales: [f32; 2],
    expected: usize,
    key: StochasticKey,
) -> Result<HostRowSample, KernelError> {
    if scores.len() % 2 != 0 {
        return Err(KernelError::Shape {
            operation: "host::sample_rows",
            got: format!("{} scores", scores.len()),
            remedy: "pass scores of both parts, 2 N",
        });
    }
    let rows = scores.len() / 2;
    let capacity = capacity(rows, expected);
    let probabilities = match scales[1].is_nan() {
        true => vec![1.0; scores.len()],
        false => probabilities(scores, expected),
    };
    let mut sample = HostRowSample {
        rows: vec![-1; capacity],
        factors: vec![0.0; capacity],
        positions: vec![-1; scores.len()],
        count: 0,
        probabilities,
    };
    for (index, of_counter) in sample.probabilities.chunks(4).enumerate() {
        let words = philox::neighbours(key, 0, index);
        for ((lane, &probability), word) in of_counter.iter().enumerate().zip(words) {
            let below = (probability.min(BELOW_ONE) * (1u32 << DRAW_BITS) as f32) as u32;
            let is_kept = probability >= 1.0 || word >> (32 - DRAW_BITS) < below;
            let slot = sample.count as usize;
            if is_kept && slot < capacity {
                let row = 4 * index + lane;
                sample.rows[slot] = row as i32;
                sample.factors[slot] = scales[usize::from(row >= rows)] / probability;
                sample.positions[row] = slot as i32;
                sample.count += 1;
            }
        }
    }
    Ok(sample)
}

/// [`reference::leverage_score::probabilities`](crate::reference::leverage_score::probabilities), to the bit.
fn probabilities(scores: &[f32], expected: usize) -> Vec<f32> {
    let (scored, total) = sums_of(scores, 0.0, |score, _| score > 0.0);
    if scored <= expected {
        let certain = |&score: &f32| if score > 0.0 { 1.0 } else { 0.0 };
        return scores.iter().map(certain).collect();
    }
    let expected = expected as f32;
    let mut ratio = expected / total;
    let mut certain = 0;
    for _ in 0..ROUNDS {
        let (found, rest) = sums_of(scores, ratio, |_, is_below| !is_below);
        if found == certain {
            break;
        }
        certain = found;
        if rest > 0.0 {
            ratio = ratio.max((expected - certain as f32) / rest);
        }
    }
    scores
        .iter()
        .map(|score| (score * ratio).min(1.0))
        .collect()
}

/// How many rows are counted by their score and by whether the ratio leaves them below 1, and the sum of the scores of
/// those that it does, in lanes.
fn sums_of(scores: &[f32], ratio: f32, counts: impl Fn(f32, bool) -> bool) -> (usize, f32) {
    let mut count = 0;
    let mut lanes = [0f32; LANES];
    for scores in scores.chunks(LANES) {
        for (lane, &score) in lanes.iter_mut().zip(scores) {
            let is_below = score * ratio < 1.0;
            count += usize::from(counts(score, is_below));
            *lane += if is_below { score } else { 0.0 };
        }
    }
    let mut distance = LANES / 2;
    while distance > 0 {
        let (lower, upper) = lanes.split_at_mut(distance);
        for (lower, upper) in lower.iter_mut().zip(upper) {
            *lower += *upper;
        }
        distance /= 2;
    }
    (count, lanes[0])
}

/// The kept rows of the stacked parts as INT8 with a scale for each row:
/// [`reference::gather_parts`](crate::reference::gather_parts).
///
/// # Errors
///
/// When `split` and `sample` do not fit each other.
pub fn gather_parts(
    split: &HostBitSplit,
    sample: &HostRowSample,
) -> Result<HostQuantized<'static>, KernelError> {
    let integers = gathered_parts("host::gather_parts", split, sample, |q, _| q)?;
    Ok(HostQuantized {
        values: HostValues::I8(integers.into()),
        scales: HostScales::F32(sample.factors.clone().into()),
        number: Number::Int8,
        granularity: Granularity::Token,
        shape: [sample.rows.len(), split.shape[1]],
    })
}

/// The kept rows of the stacked parts times their factors, rounded to INT8 in blocks of 128:
/// [`reference::gather_scaled`](crate::reference::gather_scaled), to the bit.
///
/// # Errors
///
/// When `split` and `sample` do not fit each other.
pub fn gather_scaled(
    split: &HostBitSplit,
    sample: &HostRowSample,
    rounding: Rounding,
) -> Result<HostQuantized<'static>, KernelError> {
    let scaled = |q: i8, factor: f32| f32::from(q) * factor;
    let scaled = gathered_parts("host::gather_scaled", split, sample, scaled)?;
    let spec = QuantizeSpec::int8(Granularity::Block(SCALED_BLOCK)).with_rounding(rounding);
    quantize(&scaled, [sample.rows.len(), split.shape[1]], &spec)
}

/// The result of `value` for each integer of a kept row and the row's factor; the default for padding.
fn gathered_parts<T: Clone + Default + Send>(
    operation: &'static str,
    split: &HostBitSplit,
    sample: &HostRowSample,
    value: impl Fn(i8, f32) -> T + Sync,
) -> Result<Vec<T>, KernelError> {
    split.check(operation)?;
    let [rows, cols] = split.shape;
    sample.check(operation, rows)?;
    let mut out = vec![T::default(); sample.rows.len() * cols];
    each_kept_row(sample, &mut out, cols, |slot, row, out| {
        let factor = sample.factors[slot];
        let parts = split.parts[row % rows * cols..][..cols].iter().zip(out);
        match row < rows {
            true => parts.for_each(|(&byte, out)| *out = value(low_nibble(byte), factor)),
            false => parts.for_each(|(&byte, out)| *out = value(high_nibble(byte), factor)),
        }
    });
    Ok(out)
}

/// For each kept row of stacked parts its row of X, as INT8 in blocks of 128 that all have the scale of X:
/// [`reference::gather_int4_rows`](crate::reference::gather_int4_rows).
///
/// # Errors
///
/// When `x` is not INT4 with one FP32 scale, or does not have as many rows as the sample's parts.
pub fn gather_int4_rows(
    x: &HostQuantized<'_>,
    sample: &HostRowSample,
) -> Result<HostQuantized<'static>, KernelError> {
    const OPERATION: &str = "host::gather_int4_rows";
    let (values, scale) = check_int4(OPERATION, x)?;
    let [rows, cols] = x.shape;
    sample.check(OPERATION, rows)?;
    let row_bytes = x.number.storage().stored_cols(cols);
    let shape = [sample.rows.len(), cols];
    let mut integers = vec![0i8; shape[0] * cols];
    each_kept_row(sample, &mut integers, cols, |_, row, out| {
        let stored = &values[row % rows * row_bytes..][..row_bytes];
        for (col, out) in out.iter_mut().enumerate() {
            *out = low_nibble(storage::nibble(stored, col) as u8);
        }
    });
    let blocks = shape[0].div_ceil(SCALED_BLOCK) * cols.div_ceil(SCALED_BLOCK);
    Ok(HostQuantized {
        values: HostValues::I8(integers.into()),
        scales: HostScales::F32(vec![scale; blocks].into()),
        number: Number::Int8,
        granularity: Granularity::Block(SCALED_BLOCK),
        shape,
    })
}

/// Writes the kept rows, each by its place and its row among the stacked ones; padding is left alone.
fn each_kept_row<T: Send>(
    sample: &HostRowSample,
    out: &mut [T],
    cols: usize,
    write: impl Fn(usize, usize, &mut [T]) + Sync,
) {
    let rows = out
        .par_chunks_mut(cols.max(1))
        .zip(&sample.rows)
        .enumerate();
    rows.for_each(|(slot, (out, &row))| {
        if let Ok(row) = usize::try_from(row) {
            write(slot, row, out);
        }
    });
}
