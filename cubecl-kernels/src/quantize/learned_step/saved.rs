//! The small form of what the backward pass needs of an element, and back, in kernels.
//!
//! A group of 32 neighbours of a row is the runs of two neighbouring units, the first of which has an even index.

use cubecl::prelude::*;

use crate::{
    exact,
    number::{Integer, integer, storage::RUN},
    quantize::{
        run::is_nan,
        tile::{Tile, UNITS},
    },
};

use super::{FLAGS_OF_GROUP, LARGEST, RESIDUAL_UNITS, SATURATION_GROUP};

/// Runs of a group.
const RUNS_OF_GROUP: usize = SATURATION_GROUP / RUN;

/// A run in units of the step size, before and after it was rounded.
#[derive(CubeType)]
pub(super) struct RoundedRun {
    /// INT4 codes.
    pub codes: Array<u32>,
    /// Their numbers.
    pub numbers: Array<f32>,
    /// `v`.
    pub quotients: Array<f32>,
}

/// Divides a run by the step size of this inverse, and rounds it. `zero` is 0.
#[cube]
pub(super) fn round_run(run: &Array<f32>, inverse: f32, zero: u32) -> RoundedRun {
    let mut codes = Array::<u32>::new(RUN);
    let mut numbers = Array::<f32>::new(RUN);
    let mut quotients = Array::<f32>::new(RUN);
    #[unroll]
    for index in 0..RUN {
        let h = run[index];
        // A product of inverse 0 with an infinity is NaN.
        let is_zero = inverse == 0.0f32 || is_nan(h);
        let v = select(is_zero, 0.0f32, exact::product(h, inverse, zero));
        let sum = integer::nearest_sum(clamp(v, -LARGEST, LARGEST));
        codes[index] = u32::reinterpret(sum) & comptime!(Integer::INT4.mask());
        numbers[index] = integer::integer_of(sum, zero);
        quotients[index] = v;
    }
    RoundedRun {
        codes,
        numbers,
        quotients,
    }
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

/// How many elements of the run have code 7 or -7.
#[cube]
fn extremes(numbers: &Array<f32>) -> u32 {
    let mut count = 0u32;
    #[unroll]
    for index in 0..RUN {
        count += u32::cast_from(is_extreme(numbers[index]));
    }
    count
}

/// The byte of [`SavedRounding::saturation`](super::SavedRounding) of the group that the unit's run begins; of no
/// meaning in a unit whose run does not begin one. All units of the cube must call it together.
#[cube]
pub(super) fn group_flags(rounded: &RoundedRun, #[comptime] planes: bool) -> u32 {
    let mut flags = 0u32;
    let mut count = 0u32;
    #[unroll]
    for index in 0..RUN {
        let extreme = u32::cast_from(is_extreme(rounded.numbers[index]));
        let clamped = u32::cast_from(is_clamped(rounded.quotients[index]));
        // Only extreme numbers are clamped.
        flags |= clamped << count;
        count += extreme;
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

/// From what was saved: the numbers, the byte of the group, and `delta` of those that are not clamped. All units of the
/// cube must call it together.
#[cube]
pub(super) fn saved_run(
    numbers: &Array<f32>,
    flags: u32,
    residuals: &Array<f32>,
    #[comptime] planes: bool,
) -> StraightThroughRun {
    let before = of_other_run(extremes(numbers), planes);
    let mut count = select(begins_group(), 0u32, before);
    let mut passes = Array::<f32>::new(RUN);
    let mut deltas = Array::<f32>::new(RUN);
    #[unroll]
    for index in 0..RUN {
        let number = numbers[index];
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
    StraightThroughRun { passes, deltas }
}

/// Groups in the tiles' rows are whole: no group lies in two tiles, nor in the units of two rows.
pub(super) const fn holds_groups(tile: Tile) -> bool {
    tile.cols % SATURATION_GROUP == 0
}
