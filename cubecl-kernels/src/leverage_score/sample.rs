//! Probabilities, masks and the list of kept rows: one launch of one cube.
//!
//! All of it depends on sums over all rows, one after the other, over a vector that fits into the cache of one
//! multiprocessor: a cube that waits for itself takes less than launches that wait for each other.

use cubecl::{prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{array, check_contiguous, check_dtype, empty, has_u64, storage, vector_width, zeros},
    error::KernelError,
    rounding::{
        RandomStream, Rounding, StochasticKey, magnitude_bits, random_stream, random_words,
    },
};

use super::{LANES, MAX_STACKED_ROWS, ROUNDS, RowSample, capacity};

const OPERATION: &str = "sample_rows";
/// Neighbouring rows that a unit draws for, and rows that share the words of a counter.
const ROWS_OF_UNIT: usize = 16;
const ROWS_OF_COUNTER: usize = 4;
/// High bits of a random word that decide: one less than there are, so that their number fits a signed integer too, by
/// way of which some devices convert.
pub(crate) const DRAW_BITS: u32 = 31;
/// Stands for no row, and for no place.
const NO_ROW: i32 = -1;
/// The largest `f32` below 1.
pub(crate) const BELOW_ONE: f32 = 1.0 - f32::EPSILON / 2.0;

/// Draws the rows of stacked parts that are kept, each independently, with probabilities proportional to its score, of
/// at most 1, that sum to `expected`: `N` halves the rows.
///
/// - `scores`: f32 `[2 N]`, contiguous: [`leverage_scores`](super::leverage_scores).
/// - `scales`: f32 `[2]`, contiguous: of the high and of the low part.
/// - `key`: of the draw, and of nothing else.
///
/// The numbers are those of [`reference::sample_rows`](crate::reference::leverage_score::sample_rows), to the bit. Rows
/// of score 0 have probability 0. Where no more than `expected` rows have a score, all of these are kept. If the scales
/// are NaN, all rows are, up to the capacity, so that the products become NaN.
///
/// # Errors
///
/// When shapes or element types differ from these, or there are more than 2^24 stacked rows.
pub fn sample_rows<R: Runtime>(
    client: &ComputeClient<R>,
    scores: &TensorHandle<R>,
    scales: &TensorHandle<R>,
    expected: usize,
    key: StochasticKey,
) -> Result<RowSample<R>, KernelError> {
    let remedy = "pass what `leverage_scores` and `bit_split` made";
    check_dtype(OPERATION, "scores", scores, storage::<f32>(), remedy)?;
    check_dtype(OPERATION, "scales", scales, storage::<f32>(), remedy)?;
    let stacked = check_contiguous(OPERATION, scores)?;
    let of_parts = check_contiguous(OPERATION, scales)?;
    if stacked % 2 != 0 || stacked > MAX_STACKED_ROWS || of_parts != 2 {
        return Err(KernelError::Shape {
            operation: OPERATION,
            got: format!("scores {:?}, scales {:?}", scores.shape(), scales.shape()),
            remedy: "pass scores [2 N], with N of at most 2^23, and scales [2]",
        });
    }
    let capacity = capacity(stacked / 2, expected);
    let sample = RowSample {
        rows: empty(client, vec![capacity], storage::<i32>()),
        factors: empty(client, vec![capacity], storage::<f32>()),
        positions: empty(client, vec![stacked], storage::<i32>()),
        count: zeros(client, vec![1], storage::<i32>()),
        probabilities: empty(client, vec![stacked], storage::<f32>()),
    };
    if stacked == 0 {
        return Ok(sample);
    }
    let units = client.properties().hardware.max_units_per_cube as usize;
    let units = (1 << units.ilog2()).min(LANES);
    let width = vector_width(stacked, &[scores, &sample.positions, &sample.probabilities]);
    // SAFETY: every access is guarded by the number of stacked rows and the capacity, for which the tensors were
    // checked and allocated.
    #[allow(unsafe_code)]
    unsafe {
        sample_rows_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(units as u32),
            width,
            array(scores.clone()),
            array(scores.clone()),
            array(scales.clone()),
            array(sample.rows.clone()),
            array(sample.factors.clone()),
            array(sample.positions.clone()),
            array(sample.count.clone()),
            array(sample.probabilities.clone()),
            stacked as u32,
            capacity as u32,
            // No more than all rows are expected, and f32 counts these.
            expected.min(stacked) as f32,
            random_stream(Rounding::Stochastic(key)),
            units,
            width,
            has_u64(client),
        );
    }
    Ok(sample)
}

/// `pieces` is the buffer of the scores once more, `width` of them at once.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn sample_rows_kernel<N: Size>(
    scores: &Array<f32>,
    pieces: &Array<Vector<f32, N>>,
    scales: &Array<f32>,
    rows: &mut Array<i32>,
    factors: &mut Array<f32>,
    positions: &mut Array<Vector<i32, N>>,
    count: &mut Array<i32>,
    probabilities: &mut Array<Vector<f32, N>>,
    stacked: u32,
    capacity: u32,
    expected: f32,
    random: RandomStream,
    #[comptime] units: usize,
    #[comptime] width: usize,
    #[comptime] wide: bool,
) {
    let rule = find_rule(scores, scales, stacked, expected, units);
    let mut kept = 0u32;
    let mut first = 0u32;
    let mut shared = SharedMemory::<u32>::new(units);
    while first < stacked {
        let of_unit = first + UNIT_POS * comptime!(ROWS_OF_UNIT as u32);
        let mut drawn = Array::<f32>::new(ROWS_OF_UNIT);
        #[unroll]
        for piece in 0..comptime!(ROWS_OF_UNIT / width) {
            #[unroll]
            for lane in 0..width {
                drawn[comptime!(piece * width + lane)] = 0.0f32;
            }
            let row = of_unit + comptime!((piece * width) as u32);
            if row < stacked {
                let at = (row / comptime!(width as u32)) as usize;
                let of_piece = pieces[at];
                let mut vector = Vector::<f32, N>::empty();
                #[unroll]
                for lane in 0..width {
                    let probability = probability(of_piece[lane], &rule);
                    vector[lane] = probability;
                    drawn[comptime!(piece * width + lane)] = probability;
                }
                probabilities[at] = vector;
            }
        }
        let mut mask = 0u32;
        #[unroll]
        for part in 0..comptime!(ROWS_OF_UNIT / ROWS_OF_COUNTER) {
            let from = of_unit + comptime!((part * ROWS_OF_COUNTER) as u32);
            let index = from / comptime!(ROWS_OF_COUNTER as u32);
            let (w0, w1, w2, w3) = random_words(0u32, index, &random, wide);
            let mut words = Array::<u32>::new(ROWS_OF_COUNTER);
            words[0] = w0;
            words[1] = w1;
            words[2] = w2;
            words[3] = w3;
            #[unroll]
            for lane in 0..ROWS_OF_COUNTER {
                // Behind the last row the probability is 0.
                let of_rows = comptime!(part * ROWS_OF_COUNTER + lane);
                if is_kept(drawn[of_rows], words[lane]) {
                    mask |= comptime!(1u32 << of_rows as u32);
                }
            }
        }
        let (before, total) = sum_before(&mut shared, mask.count_ones(), units);
        let mut slot = kept + before;
        #[unroll]
        for piece in 0..comptime!(ROWS_OF_UNIT / width) {
            let first_of_piece = of_unit + comptime!((piece * width) as u32);
            let mut vector = Vector::<i32, N>::empty();
            #[unroll]
            for lane in 0..width {
                let of_rows = comptime!(piece * width + lane);
                let mut position = NO_ROW.runtime();
                if mask & comptime!(1u32 << of_rows as u32) != 0 {
                    if slot < capacity {
                        let row = first_of_piece + comptime!(lane as u32);
                        position = i32::cast_from(slot);
                        rows[slot as usize] = i32::cast_from(row);
                        let part = row / (stacked / 2);
                        factors[slot as usize] = scales[part as usize] / drawn[of_rows];
                    }
                    slot += 1;
                }
                vector[lane] = position;
            }
            if first_of_piece < stacked {
                positions[(first_of_piece / comptime!(width as u32)) as usize] = vector;
            }
        }
        kept += total;
        first += comptime!((units * ROWS_OF_UNIT) as u32);
    }
    kept = min(kept, capacity);
    if UNIT_POS == 0 {
        count[0] = i32::cast_from(kept);
    }
    let mut padding = kept + UNIT_POS;
    while padding < capacity {
        rows[padding as usize] = NO_ROW;
        factors[padding as usize] = 0.0f32;
        padding += comptime!(units as u32);
    }
}

/// How a score becomes a probability.
#[derive(CubeType, Clone, Copy)]
struct Rule {
    /// Probability 1 for every row.
    keeps_all: bool,
    /// Probability 1 for every row with a score.
    keeps_scored: bool,
    /// Else the score times this, up to 1.
    ratio: f32,
}

#[cube]
fn probability(score: f32, rule: &Rule) -> f32 {
    let of_scored = select(score > 0.0f32, 1.0f32, 0.0f32);
    let sampled = min(score * rule.ratio, 1.0f32);
    select(
        rule.keeps_all,
        1.0f32,
        select(rule.keeps_scored, of_scored, sampled),
    )
}

/// True for a row that the mask keeps.
#[cube]
fn is_kept(probability: f32, word: u32) -> bool {
    let draws = comptime!((1u32 << DRAW_BITS) as f32);
    let below = u32::cast_from(min(probability, BELOW_ONE) * draws);
    probability >= 1.0f32 || word >> comptime!(32 - DRAW_BITS) < below
}

/// The rounds of [`reference::probabilities`](crate::reference::leverage_score::probabilities).
#[cube]
fn find_rule(
    scores: &Array<f32>,
    scales: &Array<f32>,
    stacked: u32,
    expected: f32,
    #[comptime] units: usize,
) -> Rule {
    let mut counts = SharedMemory::<f32>::new(LANES);
    let mut sums = SharedMemory::<f32>::new(LANES);
    let (scored, total) = sums_of(&mut counts, &mut sums, scores, stacked, 0.0f32, true, units);
    let keeps_scored = scored <= expected;
    let mut ratio = 0.0f32;
    let mut certain = 0.0f32;
    let mut searches = !keeps_scored;
    if searches {
        ratio = expected / total;
    }
    let mut round = 0u32;
    while searches && round < comptime!(ROUNDS as u32) {
        let (found, rest) = sums_of(&mut counts, &mut sums, scores, stacked, ratio, false, units);
        searches = found != certain;
        certain = found;
        if searches && rest > 0.0f32 {
            ratio = max(ratio, (expected - certain) / rest);
        }
        round += 1;
    }
    Rule {
        keeps_all: magnitude_bits(scales[1]) > comptime!(f32::INFINITY.to_bits()),
        keeps_scored,
        ratio,
    }
}

/// How many rows the ratio takes to a probability of 1 or, if `scored`, how many have a score above 0; and the sum of
/// the scores of those that the ratio leaves below 1. Sums are in the order of
/// [`reference::sum_in_lanes`](crate::reference::leverage_score::sum_in_lanes).
#[cube]
fn sums_of(
    counts: &mut SharedMemory<f32>,
    sums: &mut SharedMemory<f32>,
    scores: &Array<f32>,
    stacked: u32,
    ratio: f32,
    #[comptime] scored: bool,
    #[comptime] units: usize,
) -> (f32, f32) {
    // Units may still read what an earlier call left.
    sync_cube();
    #[unroll]
    for part in 0..comptime!(LANES / units) {
        let lane = UNIT_POS + comptime!((part * units) as u32);
        let mut count = 0.0f32;
        let mut sum = 0.0f32;
        let mut row = lane;
        while row < stacked {
            let score = scores[row as usize];
            let is_below = score * ratio < 1.0f32;
            let counted = if comptime!(scored) {
                score > 0.0f32
            } else {
                !is_below
            };
            count += select(counted, 1.0f32, 0.0f32);
            sum += select(is_below, score, 0.0f32);
            row += comptime!(LANES as u32);
        }
        counts[lane as usize] = count;
        sums[lane as usize] = sum;
    }
    sync_cube();
    #[unroll]
    for step in 0..comptime!(LANES.ilog2()) {
        let distance = comptime!(LANES >> (step + 1));
        #[unroll]
        for part in 0..comptime!(distance.div_ceil(units)) {
            let lane = UNIT_POS as usize + comptime!(part * units);
            if lane < distance {
                counts[lane] += counts[lane + distance];
                sums[lane] += sums[lane + distance];
            }
        }
        sync_cube();
    }
    (counts[0], sums[0])
}

/// The sum over the units before this one, and that over all units.
#[cube]
fn sum_before(shared: &mut SharedMemory<u32>, value: u32, #[comptime] units: usize) -> (u32, u32) {
    let unit = UNIT_POS as usize;
    let mut sum = value;
    // Units may still read what an earlier call left.
    sync_cube();
    shared[unit] = sum;
    sync_cube();
    #[unroll]
    for step in 0..comptime!(units.ilog2()) {
        let distance = comptime!(1usize << step);
        if unit >= distance {
            sum += shared[unit - distance];
        }
        sync_cube();
        shared[unit] = sum;
        sync_cube();
    }
    (sum - value, shared[comptime!(units - 1)])
}
