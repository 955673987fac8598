//! The schedule of dynamic loss scaling.

use crate::loss_scaling::LossScaling;

/// Moves the scale, and the count of good steps since it last fell or was due to grow, at the end of a step. `good` is
/// false where a gradient was not finite.
pub fn update_loss_scale(scale: &mut f32, good_steps: &mut u32, good: bool, config: &LossScaling) {
    if !good {
        *scale = (*scale * config.backoff).max(config.minimum);
        *good_steps = 0;
        return;
    }
    *good_steps += 1;
    if *good_steps >= config.growth_interval {
        *scale = (*scale * config.growth).min(config.maximum);
        *good_steps = 0;
    }
}
