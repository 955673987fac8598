//! The controller of the fallback rate.

use crate::delay_threshold::{DelayThreshold, MAX_THRESHOLD, MIN_THRESHOLD};

/// One step of the threshold of every layer (fallback-int8, Algorithm 2).
///
/// `counts` holds, for each layer, the blocks that fell back and all blocks since the last step; it is zeroed. A layer
/// without blocks keeps its threshold and its rate.
pub fn delay_threshold(
    thresholds: &mut [f32],
    counts: &mut [[i32; 2]],
    rates: &mut [f32],
    config: &DelayThreshold,
) {
    for ((threshold, counts), rate) in thresholds.iter_mut().zip(counts).zip(rates) {
        let [fallback, total] = std::mem::take(counts);
        if total == 0 {
            continue;
        }
        *rate = fallback as f32 / total as f32;
        if *rate < config.r_min {
            *threshold = (*threshold / config.alpha).max(MIN_THRESHOLD);
        } else if *rate > config.r_max {
            *threshold = (*threshold * config.alpha).min(MAX_THRESHOLD);
        }
    }
}
