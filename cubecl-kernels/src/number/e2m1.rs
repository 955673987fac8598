//! E2M1, the element of MXFP4 and NVFP4 (OCP Microscaling Formats, section 5.3.3): 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their
//! negatives. It has neither infinities nor NaN, which a scale has to carry.

use super::Minifloat;

impl Minifloat {
    /// 2 bits of exponent, 1 of mantissa: up to 6, in steps of 0.5 near zero.
    pub const E2M1: Self = Self {
        exponent_bits: 2,
        mantissa_bits: 1,
        largest_code: 0x7,
    };
}
