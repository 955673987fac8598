//! E5M2 (OCP OFP8): infinities and NaN as in IEEE 754.

use super::Minifloat;

impl Minifloat {
    /// 5 bits of exponent, 2 of mantissa: up to 57,344, in steps of 2^-16 near zero.
    pub const E5M2: Self = Self {
        exponent_bits: 5,
        mantissa_bits: 2,
        largest_code: 0x7b,
    };
}
