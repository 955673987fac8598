//! The small form of what the backward pass needs of an element, and back, in kernels.
//!
//! A group of 32 neighbours of a row is the runs of two neighbouring units, the first of which has an even index.

use cubecl::prelude::*;

use crate::{
    exact,
    number::{
        Integer,
        integer::{self, ROUND_TO_EVEN_BITS},
        storage::RUN,
    },
    quantize::{
        run::{is_nan, run_max},
        tile::{Tile, UNITS},
    },
    scale::is_finite,
};

use super::{FLAGS_OF_GROUP, LARGEST, RESIDUAL_UNITS, SATURATION_GROUP};

/// Runs of a group.
const RUNS_OF_GROUP: usize = SATURATION_GROUP / RUN;

/// The magnitude of `v` from which on a code can be 7 or -7.
const EXTREME: f32 = LARGEST - 0.5;
/// The lowest bit of each nibble of a word.
const NIBBLES: u32 = 0x1111_1111;

/// A run in units of the step size, before and after it was rounded.
#[derive(CubeType)]
pub(super) struct RoundedRun {
    /// The bits of the [`nearest_sum`](integer::nearest_sum) of each element: its code in the low ones.
    pub sums: Array<u32>,
    /// The numbers of the codes.
    pub numbers: Array<f32>,
    /// `v`.
    pub quotients: Array<f32>,
    /// The bits of the largest magnitude of `h`.
    pub largest: u32,
    /// True where a code may be 7 or -7.
    pub has_extremes: bool,
}

/// Divides a run by the step size of this inverse, and rounds it. `zero` is 0.
#[cube]
pub(super) fn round_run(run: &Array<f32>, inverse: f32, zero: u32) -> RoundedRun {
    let largest = run_max(run);
    let is_finite = is_finite(largest);
    let mut sums = Array::<u32>::new(RUN);
    let mut numbers = Array::<f32>::new(RUN);
    let mut quotients = Array::<f32>::new(RUN);
    #[unroll]
    for index in 0..RUN {
        quotients[index] = exact::product(run[index], inverse, zero);
    }
    if !is_finite {
        #[unroll]
        for index in 0..RUN {
            // A product of inverse 0 with an infinity is NaN.
            let is_zero = inverse == 0.0f32 || is_nan(run[index]);
            quotients[index] = select(is_zero, 0.0f32, quotients[index]);
        }
    }
    #[unroll]
    for index in 0..RUN {
        let sum = integer::nearest_sum(clamp(quotients[index], -LARGEST, LARGEST));
        sums[index] = u32::reinterpret(sum);
        numbers[index] = integer::integer_of(sum, zero);
    }
    RoundedRun {
        sums,
        numbers,
        quotients,
        largest,
        has_extremes: !is_finite || f32::reinterpret(largest) * inverse >= EXTREME,
    }
}

/// The codes of sums, packed as [`Storage::Nibbles`](crate::number::Storage): in an instruction for each. A sum is a
/// constant and an integer from -7 to 7. Eight of them, each shifted to its nibble, are added up; with 8 more for each,
/// no nibble borrows from the next one; and of an integer with 8 more, two's complement is all bits but the highest.
#[cube]
pub(super) fn pack_sums(sums: &Array<u32>) -> Array<u32> {
    let eights = comptime!(NIBBLES * 8);
    let constants = comptime!(eights.wrapping_sub(NIBBLES.wrapping_mul(ROUND_TO_EVEN_BITS as u32)));
    let mut words = Array::<u32>::new(comptime!(RUN / 8));
    #[unroll]
    for word in 0..comptime!(RUN / 8) {
        let mut packed = sums[comptime!(word * 8)];
        #[unroll]
        for nibble in 1..8usize {
            packed += sums[comptime!(word * 8 + nibble)] << comptime!(4 * nibble as u32);
        }
        words[word] = (packed + constants) ^ eights;
    }
    words
}

/// True where `|v| > 7`.
#[cube]
pub(super) fn is_clamped(v: f32) -> bool {
    f32::abs(v) > LARGEST
}

/// True for the numbers 7 and -7.
#[cube]
fn is_extreme(number: f32) -> bool {
    f32::abs(number) == LARGEST
}

/// How many codes of a packed run are 7 or -7: `0111` or `1001`.
#[cube]
fn extremes(words: &Array<u32>) -> u32 {
    let mut count = 0u32;
    #[unroll]
    for word in 0..comptime!(RUN / 8) {
        let bits = words[word];
        let (second, third, sign) = (bits >> 1, bits >> 2, bits >> 3);
        let is_largest = bits & second & third & !sign;
        let is_smallest = bits & !second & !third & sign;
        count += ((is_largest | is_smallest) & NIBBLES).count_ones();
    }
    count
}

/// The byte of [`SavedRounding::saturation`](super::SavedRounding) of the group that the unit's run begins; of no
/// meaning in a unit whose run does not begin one. All units of the cube must call it together.
#[cube]
pub(super) fn group_flags(rounded: &RoundedRun, #[comptime] planes: bool) -> u32 {
    let mut flags = 0u32;
    let mut count = 0u32;
    if rounded.has_extremes {
        #[unroll]
        for index in 0..RUN {
            let extreme = u32::cast_from(is_extreme(rounded.numbers[index]));
            let clamped = u32::cast_from(is_clamped(rounded.quotients[index]));
            // Only extreme numbers are clamped.
            flags |= clamped << count;
            count += extreme;
        }
    }
    let next = of_other_run(flags, planes);
    (flags | (next << count)) & comptime!((1u32 << FLAGS_OF_GROUP) - 1)
}

/// The value of the unit that holds the other run of the group.
#[cube]
fn of_other_run(value: u32, #[comptime] planes: bool) -> u32 {
    comptime!(assert!(RUNS_OF_GROUP == 2, "groups of two runs"));
    if comptime!(planes) {
        plane_shuffle_xor(value, 1u32)
    } else {
        let mut of_units = SharedMemory::<u32>::new(UNITS);
        of_units[UNIT_POS as usize] = value;
        sync_cube();
        of_units[(UNIT_POS ^ 1) as usize]
    }
}

/// True for a unit whose run begins a group.
#[cube]
pub(super) fn begins_group() -> bool {
    UNIT_POS % comptime!(RUNS_OF_GROUP as u32) == 0
}

/// The residuals of a run as bytes, four in a word.
#[cube]
pub(super) fn residual_words(rounded: &RoundedRun, zero: u32) -> Array<u32> {
    let mut words = Array::<u32>::new(comptime!(RUN / 4));
    #[unroll]
    for word in 0..comptime!(RUN / 4) {
        let mut bytes = 0u32;
        #[unroll]
        for byte in 0..4usize {
            let index = comptime!(word * 4 + byte);
            let v = rounded.quotients[index];
            let rest = exact::product(rounded.numbers[index] - v, RESIDUAL_UNITS, zero);
            let rest = select(is_clamped(v), 0.0f32, rest);
            let bits = u32::reinterpret(integer::nearest_sum(rest)) & 0xffu32;
            bytes |= bits << comptime!(8 * byte as u32);
        }
        words[word] = bytes;
    }
    words
}

/// What the straight-through estimator makes of a run.
#[derive(CubeType)]
pub(super) struct StraightThroughRun {
    /// `I`, 1 or 0.
    pub passes: Array<f32>,
    /// `delta`, or its estimate.
    pub deltas: Array<f32>,
}

/// From `v` itself.
#[cube]
pub(super) fn exact_run(rounded: &RoundedRun) -> StraightThroughRun {
    let mut passes = Array::<f32>::new(RUN);
    let mut deltas = Array::<f32>::new(RUN);
    #[unroll]
    for index in 0..RUN {
        let (number, v) = (rounded.numbers[index], rounded.quotients[index]);
        let clamped = is_clamped(v);
        passes[index] = select(clamped, 0.0f32, 1.0f32);
        deltas[index] = select(clamped, number, number - v);
    }
    StraightThroughRun { passes, deltas }
}

/// From what was saved: the packed codes, the byte of the group, and `delta` of those that are not clamped. All units of
/// the cube must call it together.
#[cube]
pub(super) fn saved_run(
    words: &Array<u32>,
    flags: u32,
    residuals: &Array<f32>,
    #[comptime] planes: bool,
) -> StraightThroughRun {
    let own = extremes(words);
    let before = of_other_run(own, planes);
    let mut passes = Array::<f32>::new(RUN);
    let mut deltas = Array::<f32>::new(RUN);
    #[unroll]
    for index in 0..RUN {
        passes[index] = 1.0f32;
        deltas[index] = residuals[index];
    }
    if own > 0 {
        let mut count = select(begins_group(), 0u32, before);
        #[unroll]
        for index in 0..RUN {
            let code = words[comptime!(index / 8)] >> comptime!(index as u32 % 8 * 4);
            let number = integer::decode(code, comptime!(Integer::INT4));
            let extreme = is_extreme(number);
            // Those that have no flag count as clamped.
            let flag = select(
                count >= comptime!(FLAGS_OF_GROUP as u32),
                1u32,
                (flags >> count) & 1,
            );
            let clamped = extreme && flag == 1;
            count += u32::cast_from(extreme);
            passes[index] = select(clamped, 0.0f32, 1.0f32);
            deltas[index] = select(clamped, number, residuals[index]);
        }
    }
    StraightThroughRun { passes, deltas }
}

/// Groups in the tiles' rows are whole: no group lies in two tiles, nor in the units of two rows.
pub(super) const fn holds_groups(tile: Tile) -> bool {
    tile.cols % SATURATION_GROUP == 0
}
