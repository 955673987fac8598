//! Dynamic range expansion (coat-fp8, section 4.2 and appendix G.4): before a group is quantized its values are raised
//! to a power `k` that stretches the group's range of magnitudes to that of the format.
//!
//! `f(x) = sign(x) |x|^k` with `k = log(range of the format) / log(largest / smallest of the group)`, rounded down to a
//! multiple of 1/8 so that the stretched group fits, and stored in one byte as that multiple, 1 to 255. The smallest
//! magnitude is taken over the nonzero values. A group of one magnitude has range 1 and gets the largest `k`; any `k`
//! does for it.
//!
//! The paper keeps `x^k` in the range of `f32` by dividing by `C = sqrt(smallest * largest)` first. Since the group is
//! then divided by the largest of the results, `C` cancels:
//! `(|x| / C)^k / (largest / C)^k = (|x| / largest)^k`. So `C` is neither computed nor stored: a code is
//! that of `Q (|x| / largest)^k`, and stands for `largest (code / Q)^(1/k)`. The base is in `[0, 1]`, where no power
//! overflows. A group carries its largest magnitude and `k`: 5 bytes.

use cubecl::prelude::*;

use crate::{exact, fast};

/// Steps of `k` in a unit.
const STEPS: f32 = 8.0;
const LARGEST: f32 = 255.0;
const LOG2_E_TWICE: f32 = 2.0 * std::f32::consts::LOG2_E;
/// The mantissa bits of sqrt(2).
const SQRT_2_MANTISSA: u32 = std::f32::consts::SQRT_2.to_bits() & MANTISSA;
const MANTISSA: u32 = 0x007f_ffff;
const ONE: u32 = 127 << 23;
const EXPONENT_STEP: u32 = 1 << 23;

/// The exponent of a group, in eighths: `8 k` for a format whose largest and smallest positive numbers are
/// `2^format_log2` apart.
///
/// `largest >= smallest > 0`, both normal and finite. The same number on every device.
pub fn exponent(largest: f32, smallest: f32, format_log2: f32) -> u8 {
    let range = (largest / smallest).min(f32::MAX);
    (STEPS * format_log2 / log2(range).max(1e-6))
        .floor()
        .clamp(1.0, LARGEST) as u8
}

/// The base-2 logarithm of a normal number, to 1e-7 of its exponent and in operations that round alike everywhere.
///
/// `x = 2^e m` with `m` in `[sqrt(1/2), sqrt(2)]`, and `log(m) = 2 artanh(s)` with `s = (m - 1) / (m + 1)`, at most
/// 0.172, by four terms of its series.
fn log2(x: f32) -> f32 {
    let bits = x.to_bits();
    let above = u32::from(bits & MANTISSA > SQRT_2_MANTISSA);
    let exponent = (bits >> 23) as i32 - 127 + above as i32;
    let m = f32::from_bits((bits & MANTISSA) + ONE - above * EXPONENT_STEP);
    let s = (m - 1.0) / (m + 1.0);
    let square = s * s;
    let mut series = square * (1.0 / 7.0) + 1.0 / 5.0;
    series = series * square + 1.0 / 3.0;
    series = series * square + 1.0;
    series * (s * LOG2_E_TWICE) + exponent as f32
}

/// `base^k` for a base in `[0, 1]`, with `k` in eighths. Only 0 becomes 0: other bases and powers below the normal
/// `f32` count as its smallest normal number, which no device flushes.
#[inline]
pub fn expand(base: f32, exponent: u8) -> f32 {
    power(base, f32::from(exponent) / STEPS)
}

/// `base^(1/k)` for a base in `[0, 1]`, with `k` in eighths: the inverse of [`expand`].
#[inline]
pub fn contract(base: f32, exponent: u8) -> f32 {
    power(base, STEPS / f32::from(exponent))
}

#[inline]
fn power(base: f32, exponent: f32) -> f32 {
    if base == 0.0 {
        return 0.0;
    }
    let log = base.max(f32::MIN_POSITIVE).ln();
    (log * exponent).exp().max(f32::MIN_POSITIVE)
}

/// [`exponent`] in a kernel, still a float: a whole number from 1 to 255.
#[cube]
pub(crate) fn exponent_cube(largest: f32, smallest: f32, zero: u32, format_log2: f32) -> f32 {
    // Infinity by its bits lies above the largest float.
    let range = min(
        u32::reinterpret(largest / smallest),
        comptime!(f32::MAX.to_bits()),
    );
    let steps = STEPS * format_log2 / max(log2_cube(range, zero), 1e-6f32);
    clamp(steps.floor(), 1.0f32, LARGEST)
}

/// [`log2`] in a kernel, of the number with these bits.
#[cube]
fn log2_cube(bits: u32, zero: u32) -> f32 {
    let above = select(bits & MANTISSA > SQRT_2_MANTISSA, 1u32, 0u32);
    let exponent = i32::cast_from((bits >> 23) + above) - 127;
    let m = f32::reinterpret((bits & MANTISSA) + ONE - above * EXPONENT_STEP);
    let s = (m - 1.0f32) / (m + 1.0f32);
    let square = exact::product(s, s, zero);
    let mut series = exact::product(square, 1.0f32 / 7.0f32, zero) + 1.0f32 / 5.0f32;
    series = exact::product(series, square, zero) + 1.0f32 / 3.0f32;
    series = exact::product(series, square, zero) + 1.0f32;
    exact::product(series, s * LOG2_E_TWICE, zero) + f32::cast_from(exponent)
}

/// `base^exponent` for a base in `[0, 1]` and a positive exponent, in a kernel; bases below the normal `f32`, 0 among
/// them, count as its smallest normal number.
///
/// CUDA's approximate logarithm and exponential are as exact as 8 bits need: the largest exponent, 32, makes 2e-5 of
/// the logarithm's 5e-7.
#[cube]
pub(crate) fn power_cube(base: f32, exponent: f32) -> f32 {
    fast::power(max(base, f32::MIN_POSITIVE), exponent)
}

/// The exponent of [`power_cube`] that undoes `k`, from `k` in eighths.
#[cube]
pub(crate) fn inverse_power(exponent: f32) -> f32 {
    fast::quotient(STEPS, exponent)
}

/// `k` from `k` in eighths.
#[cube]
pub(crate) fn power_of_exponent(exponent: f32) -> f32 {
    exponent * (1.0f32 / STEPS)
}
