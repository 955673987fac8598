//! FP32 scales: `absmax / largest number` (fallback-int8, section 3.1).

use cubecl::prelude::*;

use super::{INFINITY, MIN_ABSMAX, MIN_ABSMAX_BITS, NAN};

/// The inverse of the smallest and of the largest given scale is a normal number.
const SMALLEST_GIVEN: u32 = f32::MIN_POSITIVE.to_bits();
const LARGEST_GIVEN: u32 = (127 + 126) << 23;

/// Scale and inverse scale of a region of this maximum. Inverse 0 stands for "all values are 0".
pub(crate) fn scale_and_inverse(absmax: f32, largest: f32) -> (f32, f32) {
    if !absmax.is_finite() {
        (f32::NAN, 0.0)
    } else if absmax < MIN_ABSMAX {
        (0.0, 0.0)
    } else {
        (absmax / largest, largest / absmax)
    }
}

/// The inverse of a scale that was given: 0 unless it is between 2^-126 and 2^126.
pub(crate) fn given_inverse(scale: f32) -> f32 {
    // Bits of negative numbers and of NaN lie above.
    if (SMALLEST_GIVEN..=LARGEST_GIVEN).contains(&scale.to_bits()) {
        1.0 / scale
    } else {
        0.0
    }
}

/// [`scale_and_inverse`] in a kernel, from the bits of the maximum.
#[cube]
pub(crate) fn scale_and_inverse_cube(absmax_bits: u32, largest: f32) -> (f32, f32) {
    let mut scale = 0.0f32;
    let mut inverse = 0.0f32;
    if absmax_bits >= INFINITY {
        // Or-ing keeps it an expression of a variable: the CUDA compiler cannot reinterpret a constant.
        scale = f32::reinterpret(absmax_bits | NAN);
    } else if absmax_bits >= MIN_ABSMAX_BITS {
        let absmax = f32::reinterpret(absmax_bits);
        scale = absmax / largest;
        inverse = largest / absmax;
    }
    (scale, inverse)
}

/// [`given_inverse`] in a kernel.
#[cube]
pub(crate) fn given_inverse_cube(scale: f32) -> f32 {
    // Below the smallest one the difference wraps around.
    let above_smallest = u32::reinterpret(scale) - SMALLEST_GIVEN;
    let mut inverse = 0.0f32;
    if above_smallest <= comptime!(LARGEST_GIVEN - SMALLEST_GIVEN) {
        inverse = 1.0f32 / scale;
    }
    inverse
}

/// The scale that goes with values which were divided by a given scale: NaN if that has no inverse, or if what was
/// divided has NaN or an infinity, of which these are the bits of the maximum.
#[cube]
pub(crate) fn given_scale_cube(scale: f32, inverse: f32, absmax_bits: u32) -> f32 {
    let hidden = inverse == 0.0f32 || absmax_bits >= INFINITY;
    // Bits of NaN, added to those of a variable.
    f32::reinterpret(u32::reinterpret(scale) | select(hidden, NAN, 0u32))
}
