//! The controller of the fallback rate.

use crate::delay_threshold::{DelayThreshold, GROWTH, MAX_THRESHOLD, MIN_THRESHOLD, SHRINK};

/// One step of the threshold of every layer (fallback-int8, Algorithm 2), with factors that adapt as Rprop's.
///
/// `moves` holds what the factor of each layer's last move had above 1, negative where the threshold fell, and 0 before
/// the first. `counts` holds, for each layer, the blocks that fell back and all blocks since the last step; it is
/// zeroed. A layer without blocks keeps its threshold, its move and its rate.
pub fn delay_threshold(
    thresholds: &mut [f32],
    moves: &mut [f32],
    counts: &mut [[i32; 2]],
    rates: &mut [f32],
    config: &DelayThreshold,
) {
    let layers = thresholds.iter_mut().zip(moves).zip(counts).zip(rates);
    for (((threshold, last), counts), rate) in layers {
        let [fallback, total] = std::mem::take(counts);
        if total == 0 {
            continue;
        }
        *rate = fallback as f32 / total as f32;
        if *rate < config.r_min {
            let excess = next_excess(-*last, config);
            *threshold = (*threshold / (1.0 + excess)).clamp(MIN_THRESHOLD, MAX_THRESHOLD);
            *last = -excess;
        } else if *rate > config.r_max {
            let excess = next_excess(*last, config);
            *threshold = (*threshold * (1.0 + excess)).clamp(MIN_THRESHOLD, MAX_THRESHOLD);
            *last = excess;
        }
    }
}

/// The next factor's part above 1. `along` is that of the last one, positive where the threshold goes on as before.
fn next_excess(along: f32, config: &DelayThreshold) -> f32 {
    let (largest, smallest) = (config.alpha - 1.0, config.alpha_min - 1.0);
    let adapted = if along == 0.0 {
        largest
    } else if along < 0.0 {
        -along * SHRINK
    } else {
        along * GROWTH
    };
    adapted.min(largest).max(smallest)
}
