//! INT4: integers from -7 to 7 (int4-hq-lss, section 3.1, with Q_N = Q_P = 7), two in a byte.

use cubecl::prelude::*;

use super::Integer;

impl Integer {
    /// INT4.
    pub const INT4: Self = Self { bits: 4 };
}

/// The low nibbles of four bytes, and their sign bits.
pub(crate) const NIBBLES: u32 = 0x0f0f_0f0f;
pub(crate) const NIBBLE_SIGNS: u32 = 0x0808_0808;

/// Four nibbles in the lower half of a word as four bytes, with their signs.
#[cube]
pub(crate) fn spread(nibbles: u32) -> u32 {
    let pairs = (nibbles | (nibbles << 8)) & 0x00ff_00ff;
    signed_nibbles((pairs | (pairs << 4)) & NIBBLES)
}

/// The sign of each low nibble of four bytes in the high one, which must be 0 before.
#[cube]
pub(crate) fn signed_nibbles(nibbles: u32) -> u32 {
    nibbles | ((nibbles & NIBBLE_SIGNS) * 0x1e)
}
