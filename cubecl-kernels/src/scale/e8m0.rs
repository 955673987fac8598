//! E8M0 scales, the powers of two of OCP Microscaling Formats, rounded up.

use cubecl::prelude::*;

use super::{INFINITY, MIN_ABSMAX, MIN_ABSMAX_BITS};

/// The byte that stands for NaN.
const NAN_BYTE: u32 = 255;
const EXPONENT_BITS: u32 = 23;
const MANTISSA: u32 = (1 << EXPONENT_BITS) - 1;
/// The byte of 1, the exponent field of an `f32` 1.
const ONE: u32 = 127;
const QUIET: u32 = 1 << 22;

/// The byte of the scale of a region of this maximum, and the inverse scale. Inverse 0 stands for "all values are 0".
pub(crate) fn scale_and_inverse(absmax: f32, largest: f32) -> (u8, f32) {
    if !absmax.is_finite() {
        (NAN_BYTE as u8, 0.0)
    } else if absmax < MIN_ABSMAX {
        (0, 0.0)
    } else {
        let byte = rounded_up(absmax.to_bits(), largest.to_bits());
        (
            byte as u8,
            f32::from_bits((2 * ONE - byte) << EXPONENT_BITS),
        )
    }
}

/// The byte of the smallest power of two that is at least the quotient of two normal numbers.
///
/// The difference of the bits is that of the exponents, and in the bits behind it that of the mantissas, of which the
/// larger one decides whether the quotient lies above the power of the difference: rounded up, the difference counts
/// it.
const fn rounded_up(absmax_bits: u32, largest_bits: u32) -> u32 {
    (absmax_bits + (ONE << EXPONENT_BITS) + MANTISSA - largest_bits) >> EXPONENT_BITS
}

/// The number of a byte; 0 for byte 0.
pub(crate) fn decode(byte: u8) -> f32 {
    let byte = u32::from(byte);
    let quiet = if byte == NAN_BYTE { QUIET } else { 0 };
    f32::from_bits((byte << EXPONENT_BITS) | quiet)
}

/// [`scale_and_inverse`] in a kernel, from the bits of the maximum.
#[cube]
pub(crate) fn scale_and_inverse_cube(absmax_bits: u32, largest: f32) -> (u32, f32) {
    let mut byte = 0u32;
    let mut inverse = 0.0f32;
    if absmax_bits >= INFINITY {
        byte = NAN_BYTE.runtime();
    } else if absmax_bits >= MIN_ABSMAX_BITS {
        let sum = absmax_bits + comptime!((ONE << EXPONENT_BITS) + MANTISSA);
        byte = (sum - u32::reinterpret(largest)) >> EXPONENT_BITS;
        inverse = f32::reinterpret((2 * ONE - byte) << EXPONENT_BITS);
    }
    (byte, inverse)
}

/// [`decode`] in a kernel.
#[cube]
pub(crate) fn decode_cube(byte: u32) -> f32 {
    let quiet = select(byte == NAN_BYTE, QUIET, 0u32);
    f32::reinterpret((byte << EXPONENT_BITS) | quiet)
}
