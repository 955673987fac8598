//! Leverage score sampling of the rows of a split gradient (int4-hq-lss, sections 4.2 and A.2).

use crate::{
    bit_splitting::LOW_STEPS,
    granularity::Granularity,
    leverage_score::{LANES, ROUNDS, SCALED_BLOCK, capacity},
    philox,
    quantize::QuantizeSpec,
    rounding::{Rounding, StochasticKey},
    shape::MatrixShape,
};

use super::{
    bit_splitting::{ReferenceBitSplit, int8_zeros, squared_norm},
    matrix::ReferenceQuantized,
    number::Definition,
    quantize::quantize,
};

/// The rows that a draw kept; see [`RowSample`](crate::leverage_score::RowSample) for the fields.
#[derive(Debug, Clone, PartialEq)]
pub struct ReferenceRowSample {
    /// The kept rows of the stacked parts, in ascending order; -1 for padding.
    pub rows: Vec<i32>,
    /// The scale of each kept row's part divided by the row's probability; 0 for padding.
    pub factors: Vec<f32>,
    /// For each row of the stacked parts its index among the kept ones; -1 where it was dropped.
    pub positions: Vec<i32>,
    /// The number of kept rows.
    pub count: i32,
    /// The probability of each row of the stacked parts.
    pub probabilities: Vec<f32>,
}

/// The square root of an integer, to 16 bits: of `n 4^k`, where `k` is the largest with a product below 2^32, the
/// nearest integer to the square root, times `2^-k`. 0 for 0.
pub fn root(n: u32) -> f32 {
    if n == 0 {
        return 0.0;
    }
    let doublings = n.leading_zeros() / 2;
    let root = f64::from(n << (2 * doublings)).sqrt().round();
    (root * 2f64.powi(-(doublings as i32))) as f32
}

/// The leverage scores `c_i` of the rows of the stacked parts, in units of the scale of the low part: the product of
/// the [`root`]s of both squared norms, rounded to `f32`, and for the high part times 14, rounded again (int4-hq-lss,
/// Propositions 4.1 and B.2, equation 9).
///
/// - `part_norms`: squared norms of the `2 N` rows of the stacked parts.
/// - `x_norms`: squared norms of the `N` rows of X's integers, for the weight gradient; none for the gradient of the
///   activation.
///
/// # Panics
///
/// When there are not twice as many of the first as of the second.
pub fn leverage_scores(part_norms: &[u32], x_norms: Option<&[u32]>) -> Vec<f32> {
    let rows = part_norms.len() / 2;
    if let Some(x_norms) = x_norms {
        assert_eq!(part_norms.len(), 2 * x_norms.len(), "norms of both parts");
    }
    let of_row = |(row, &norm): (usize, &u32)| {
        let score = root(norm) * x_norms.map_or(1.0, |x_norms| root(x_norms[row % rows]));
        if row < rows { score * LOW_STEPS } else { score }
    };
    part_norms.iter().enumerate().map(of_row).collect()
}

/// Probabilities proportional to scores that sum to `expected`, but for those that this would put above 1: they are 1,
/// and the others are scaled up to keep the sum, until none is above 1 (int4-hq-lss, section A.2), at most [`ROUNDS`]
/// times.
///
/// Row `i` has probability `min(1, c_i * ratio)`, in `f32`. The ratio starts as `expected` divided by the sum of all
/// scores. A round finds the rows that it takes to 1 or above, and divides what of `expected` these leave by the sum of
/// the other scores; the ratio never falls. The rounds end where they find no further row. Where no more than
/// `expected` rows have a score above 0, all these have probability 1. Sums are those of [`sum_in_lanes`].
pub fn probabilities(scores: &[f32], expected: usize) -> Vec<f32> {
    let positive = scores.iter().filter(|&&score| score > 0.0).count();
    if positive <= expected {
        let certain = |&score: &f32| if score > 0.0 { 1.0 } else { 0.0 };
        return scores.iter().map(certain).collect();
    }
    let expected = expected as f32;
    let mut ratio = expected / sum_in_lanes(scores.iter().copied());
    let mut certain = 0;
    for _ in 0..ROUNDS {
        let found = scores.iter().filter(|&score| score * ratio >= 1.0).count();
        if found == certain {
            break;
        }
        certain = found;
        let others = scores
            .iter()
            .map(|&score| if score * ratio >= 1.0 { 0.0 } else { score });
        let rest = sum_in_lanes(others);
        if rest > 0.0 {
            ratio = ratio.max((expected - certain as f32) / rest);
        }
    }
    let probability = |score: &f32| (score * ratio).min(1.0);
    scores.iter().map(probability).collect()
}

/// A sum in a fixed order: of each of [`LANES`] lanes the elements whose index has that remainder, in ascending order;
/// then the upper half of the lanes is added to the lower half until one is left.
pub fn sum_in_lanes(values: impl Iterator<Item = f32>) -> f32 {
    let mut lanes = [0f32; LANES];
    for (index, value) in values.enumerate() {
        lanes[index % LANES] += value;
    }
    let mut distance = LANES / 2;
    while distance > 0 {
        for lane in 0..distance {
            lanes[lane] += lanes[lane + distance];
        }
        distance /= 2;
    }
    lanes[0]
}

/// Draws the rows of the stacked parts that are kept: row `i` with its probability, independently of the others
/// (int4-hq-lss, section 4.2).
///
/// Row `i` is kept if its probability is 1, or if the 31 high bits of the `i % 4`-th of the four words of Philox's
/// counter `(0, i / 4)` are a number below `floor(probability * 2^31)`. Kept rows keep their order; those above
/// [`capacity`] are dropped. If a scale is NaN, all probabilities are 1.
///
/// - `scores`: those of [`leverage_scores`].
/// - `scales`: of both parts.
/// - `expected`: the sum of the probabilities.
pub fn sample_rows(
    scores: &[f32],
    scales: [f32; 2],
    expected: usize,
    key: StochasticKey,
) -> ReferenceRowSample {
    let rows = scores.len() / 2;
    let capacity = capacity(rows, expected);
    let probabilities = match scales[1].is_nan() {
        true => vec![1.0; scores.len()],
        false => probabilities(scores, expected),
    };
    let mut sample = ReferenceRowSample {
        rows: vec![-1; capacity],
        factors: vec![0.0; capacity],
        positions: vec![-1; scores.len()],
        count: 0,
        probabilities,
    };
    for (row, &probability) in sample.probabilities.iter().enumerate() {
        let word = philox::neighbours(key, 0, row / 4)[row % 4];
        let below = f64::from(probability) * 2f64.powi(31);
        let is_kept = probability >= 1.0 || f64::from(word >> 1) < below.floor();
        let slot = sample.count as usize;
        if is_kept && slot < capacity {
            sample.rows[slot] = row as i32;
            sample.factors[slot] = scales[usize::from(row >= rows)] / probability;
            sample.positions[row] = slot as i32;
            sample.count += 1;
        }
    }
    sample
}

/// The kept rows of the stacked parts as INT8 with a scale for each row, the factor; padding is 0.
pub fn gather_parts(split: &ReferenceBitSplit, sample: &ReferenceRowSample) -> ReferenceQuantized {
    let shape = MatrixShape::new(sample.rows.len(), split.shape.cols);
    ReferenceQuantized {
        values: gathered(sample, shape.cols, |row| split.part_row(row).0),
        scales: sample.factors.clone(),
        ..int8_zeros(shape, Granularity::Token)
    }
}

/// The kept rows of the stacked parts, each integer times the factor of its row, quantized to INT8 in blocks of
/// [`SCALED_BLOCK`]; padding is 0.
pub fn gather_scaled(
    split: &ReferenceBitSplit,
    sample: &ReferenceRowSample,
    rounding: Rounding,
) -> ReferenceQuantized {
    let shape = MatrixShape::new(sample.rows.len(), split.shape.cols);
    let integers = gathered(sample, shape.cols, |row| split.part_row(row).0);
    let scaled: Vec<f32> = integers
        .iter()
        .enumerate()
        .map(|(index, &integer)| integer as f32 * sample.factors[index / shape.cols])
        .collect();
    let spec = QuantizeSpec::int8(Granularity::Block(SCALED_BLOCK)).with_rounding(rounding);
    quantize(&scaled, shape, &spec)
}

/// For each kept row of the stacked parts its row of X, as INT8 in blocks of [`SCALED_BLOCK`] that all have the scale
/// of X; padding is 0.
///
/// # Panics
///
/// When `x` is not INT4 with one scale, or has fewer rows than the sample's parts.
pub fn gather_int4_rows(x: &ReferenceQuantized, sample: &ReferenceRowSample) -> ReferenceQuantized {
    assert_eq!(x.number, Definition::Integer { largest: 7 }, "INT4");
    let shape = MatrixShape::new(sample.rows.len(), x.shape.cols);
    let rows = sample.positions.len() / 2;
    let mut gathered_rows = int8_zeros(shape, Granularity::Block(SCALED_BLOCK));
    gathered_rows.values = gathered(sample, shape.cols, |row| int4_row(x, row % rows));
    gathered_rows.scales.fill(x.scales[0]);
    gathered_rows
}

/// The squared Euclidean norms of the rows of an INT4 matrix, in integers.
pub fn int4_row_norms(x: &ReferenceQuantized) -> Vec<u32> {
    (0..x.shape.rows)
        .map(|row| squared_norm(int4_row(x, row)))
        .collect()
}

fn int4_row(x: &ReferenceQuantized, row: usize) -> &[i32] {
    &x.values[row * x.shape.cols..][..x.shape.cols]
}

/// The kept rows of a matrix of integers; padding is 0.
fn gathered<'a>(
    sample: &ReferenceRowSample,
    cols: usize,
    row: impl Fn(usize) -> &'a [i32],
) -> Vec<i32> {
    sample
        .rows
        .iter()
        .flat_map(|&kept| match usize::try_from(kept) {
            Ok(kept) => row(kept).to_vec(),
            Err(_) => vec![0; cols],
        })
        .collect()
}
