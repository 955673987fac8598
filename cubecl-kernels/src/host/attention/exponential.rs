//! The exponential, without a call and without a branch: loops over it become vector instructions.

use std::f32::consts::{LN_2, LOG2_E};

/// 1.5 * 2^23: added to a small number, it leaves the nearest integer in the low bits.
const ROUND: f32 = 12_582_912.0;

/// `exp(x)` for `x` up to 88, to about one unit in the last place near 0; 0 below the logarithm of 2^-125; NaN for NaN.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    let exponent = x * LOG2_E;
    let lowest = -125.0;
    // A maximum would drop NaN.
    let clamped = if exponent < lowest { lowest } else { exponent };
    let shifted = clamped + ROUND;
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(1.0f32.to_bits()));
    let fraction = power_of_fraction(clamped - (shifted - ROUND));
    if exponent < lowest {
        0.0
    } else {
        power * fraction
    }
}

/// `2^x` for `x` from -1/2 to 1/2: Taylor's polynomial of `exp(x ln 2)`, whose remainder is below 6e-9.
#[inline(always)]
fn power_of_fraction(x: f32) -> f32 {
    let x = x * LN_2;
    let high = 1.0 / 120.0 + x * (1.0 / 720.0 + x * (1.0 / 5040.0));
    let middle = 0.5 + x * (1.0 / 6.0 + x * (1.0 / 24.0 + x * high));
    1.0 + x * (1.0 + x * middle)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_that_of_f64() {
        for step in 0..=1_000_000 {
            let x = -86.0 + step as f32 * 1e-4;
            let expected = f64::from(x).exp();
            let error = (f64::from(exp(x)) - expected).abs() / expected;
            // The product with log2(e) rounds an exponent of this size.
            let of_product = f64::from(x.abs()) * f64::from(f32::EPSILON);
            assert!(error < 2e-7 + of_product, "exp({x}): {error:e}");
        }
    }

    #[test]
    fn keeps_nan_and_goes_to_zero() {
        assert_eq!(exp(0.0), 1.0);
        for x in [f32::NEG_INFINITY, f32::MIN, -1e4, -88.0] {
            assert_eq!(exp(x), 0.0, "exp({x})");
        }
        for bits in [0x7fc0_0000, 0x7fc0_0001, 0xffff_ffff, 0x7f80_0001] {
            assert!(exp(f32::from_bits(bits)).is_nan());
        }
    }
}
