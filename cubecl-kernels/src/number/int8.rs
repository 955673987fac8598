//! INT8: integers from -127 to 127 (fallback-int8, section 3.1), and the fast way to four of them in a word.

use cubecl::prelude::*;

use crate::rounding::{FRACTION_BITS, STOCHASTIC_OFFSET_BITS};

use super::integer::{Integer, ROUND_TO_EVEN_BITS};

impl Integer {
    /// INT8.
    pub const INT8: Self = Self { bits: 8 };
}

const SIGN_BITS: u32 = 0x8080_8080;
/// Turns the sum of `(ROUND_TO_EVEN_BITS + q) * 256^i` over four integers into that of `(q + 128) * 256^i`, whose bytes
/// do not borrow from each other.
const PACK_NEAREST: u32 =
    SIGN_BITS.wrapping_sub((ROUND_TO_EVEN_BITS as u32).wrapping_mul(0x0101_0101));
/// The same for sums over [`stochastic_integer`]s.
const PACK_STOCHASTIC: u32 =
    SIGN_BITS.wrapping_sub((STOCHASTIC_OFFSET_BITS >> FRACTION_BITS).wrapping_mul(0x0101_0101));

/// A value in `[-127, 127]`, as [`exact::product`] gives it, rounded stochastically: the floor of its sum with
/// `offset`, which comes from [`stochastic_offset`]. The low byte is that of the integer plus 128.
#[cube]
pub(crate) fn stochastic_integer(v: f32, offset: f32) -> u32 {
    u32::reinterpret(v + offset) >> FRACTION_BITS
}

/// Puts the bits of a [`nearest_sum`](super::integer::nearest_sum), or a [`stochastic_integer`], below those that
/// `word` holds; [`packed`] makes bytes of four.
///
/// Multiplications and additions modulo 2^32 in place of shifts: on CUDA they use another pipe than comparisons and
/// logic, of which there is more.
#[cube]
pub(crate) fn push_byte(word: u32, integer: u32) -> u32 {
    word * 256 + integer
}

/// The four integers that [`push_byte`] put into a word, as `i8`, the last one lowest; zeros under a zero `mask`.
#[cube]
pub(crate) fn packed(word: u32, mask: u32, #[comptime] stochastic: bool) -> u32 {
    let offset = if comptime!(stochastic) {
        PACK_STOCHASTIC
    } else {
        PACK_NEAREST
    };
    ((word + offset) ^ SIGN_BITS) & mask
}
