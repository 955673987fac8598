//! The straight-through estimator of a run: from `v` itself, or from what was saved of it.

use cubecl::prelude::*;

use crate::number::{Integer, integer, storage::RUN};

use super::{
    FLAGS_OF_GROUP,
    rounded::{RoundedRun, is_clamped, is_extreme},
    saved::{begins_group, extreme_nibbles, of_other_run},
};

/// The straight-through estimates of a run.
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

/// From what was saved: the packed codes, the byte of the group, and `delta` of those that are not clamped. All units
/// of the cube must call it together.
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

/// How many codes of a packed run are 7 or -7.
#[cube]
fn extremes(words: &Array<u32>) -> u32 {
    let mut count = 0u32;
    #[unroll]
    for word in 0..comptime!(RUN / 8) {
        count += extreme_nibbles(words[word]).count_ones();
    }
    count
}
