//! The squares of the integers from 0 to 255: what holds a second moment by its root.

use cubecl::prelude::*;

use crate::{fast, philox, rounding::uniform16};

/// The largest square.
pub(crate) const LARGEST: f32 = 65_025.0;

/// The code of a magnitude.
pub(super) fn encode(x: f32, dither: Option<u32>) -> u32 {
    let x = x.abs().min(LARGEST);
    match dither {
        None => level(x),
        Some(dither) => dithered_level(x, dither),
    }
}

/// The square of a code.
pub(crate) fn decode(code: u32) -> f32 {
    (code * code) as f32
}

/// The integer nearest to the root of `x`, a half rounded up.
#[inline]
pub(crate) fn level(x: f32) -> u32 {
    let estimate = (x.sqrt() + 0.5).floor();
    let below = (estimate - 0.5) * (estimate - 0.5);
    let above = (estimate + 0.5) * (estimate + 0.5);
    let level = estimate as u32;
    if x < below && level > 0 {
        level - 1
    } else if x >= above {
        level + 1
    } else {
        level
    }
}

/// One of the two integers around the root of `x`, so that with a random dither the mean of its square is `x`.
#[inline]
pub(crate) fn dithered_level(x: f32, dither: u32) -> u32 {
    let nearest = level(x) as f32;
    let lower = if nearest * nearest > x {
        nearest - 1.0
    } else {
        nearest
    };
    let above = philox::uniform16(dither) * (2.0 * lower + 1.0) < x - lower * lower;
    lower as u32 + u32::from(above)
}

/// [`level`] in a kernel.
///
/// The device's root may be off by a little; the squares that decide are exact.
#[cube]
pub(crate) fn level_cube(x: f32) -> u32 {
    let estimate = (fast::root(x) + 0.5f32).floor();
    let below = (estimate - 0.5f32) * (estimate - 0.5f32);
    let above = (estimate + 0.5f32) * (estimate + 0.5f32);
    let level = u32::cast_from(estimate);
    let raised = select(x >= above, level + 1, level);
    select(x < below && level > 0, level - 1, raised)
}

/// [`dithered_level`] in a kernel, where `nearest` is [`level_cube`] of `x`.
#[cube]
pub(crate) fn dithered_level_cube(x: f32, nearest: u32, dither: u32) -> u32 {
    let nearest = f32::cast_from(nearest);
    let lower = select(nearest * nearest > x, nearest - 1.0, nearest);
    let gone = x - lower * lower;
    let above = uniform16(dither) * (2.0 * lower + 1.0) < gone;
    u32::cast_from(select(above, lower + 1.0, lower))
}
