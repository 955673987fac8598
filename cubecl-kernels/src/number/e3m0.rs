//! E3M0, the powers of two of LUQ (logarithmic unbiased quantization: Chmiel et al., arXiv 2112.10769; a baseline of
//! int4-hq-lss): 0, 0.25, 0.5, 1, 2, 4, 8, 16 and their negatives.
//!
//! Stochastic rounding is LUQ's: between two powers it is linear in the value, and below the smallest power a value
//! becomes that or 0, so that the expectation is the value everywhere.

use super::Minifloat;

impl Minifloat {
    /// 3 bits of exponent and no mantissa: up to 16.
    pub const E3M0: Self = Self {
        exponent_bits: 3,
        mantissa_bits: 0,
        largest_code: 0x7,
    };
}
