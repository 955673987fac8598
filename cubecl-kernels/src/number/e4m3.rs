//! E4M3 (OCP OFP8): it has no infinities, and one NaN for each sign, so that 15 of the 16 codes with the largest
//! exponent are numbers.

use super::Minifloat;

impl Minifloat {
    /// 4 bits of exponent, 3 of mantissa: up to 448, in steps of 2^-9 near zero.
    pub const E4M3: Self = Self {
        exponent_bits: 4,
        mantissa_bits: 3,
        largest_code: 0x7e,
    };
}
