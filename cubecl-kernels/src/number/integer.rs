//! Symmetric integers in two's complement, of which the most negative one is left out.

use cubecl::prelude::*;

use crate::rounding::{STOCHASTIC_OFFSET, uniform16};

/// 1.5 * 2^23. Adding it to a value below 2^22 leaves the value, rounded half to even, in the low bits of the sum.
pub(crate) const ROUND_TO_EVEN: f32 = 12_582_912.0;
pub(crate) const ROUND_TO_EVEN_BITS: i32 = 0x4B40_0000;

/// A format of integers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Integer {
    /// Bits of a code.
    pub(super) bits: u32,
}

impl Integer {
    /// The largest integer.
    #[inline]
    pub const fn largest(self) -> i32 {
        (1 << (self.bits - 1)) - 1
    }

    /// How many codes there are.
    #[inline]
    pub(crate) const fn codes(self) -> u32 {
        1 << self.bits
    }

    #[inline]
    pub(crate) const fn mask(self) -> u32 {
        self.codes() - 1
    }

    /// [`Number::encode`](super::Number::encode).
    #[inline]
    pub(crate) fn encode(self, value: f32, dither: Option<f32>) -> u32 {
        let largest = self.largest() as f32;
        let value = if value.is_nan() { 0.0 } else { value };
        let value = value.clamp(-largest, largest);
        let rounded = match dither {
            None => value.round_ties_even(),
            // The sum can be rounded up to the next integer where it has no more than 14 bits behind the point.
            Some(dither) => {
                ((value + (STOCHASTIC_OFFSET + dither)).floor() - STOCHASTIC_OFFSET).min(largest)
            }
        };
        rounded as i32 as u32 & self.mask()
    }

    /// The code of a magnitude with a sign.
    #[inline]
    pub(crate) fn code(self, magnitude: u32, negative: bool) -> u32 {
        let code = if negative {
            magnitude.wrapping_neg()
        } else {
            magnitude
        };
        code & self.mask()
    }

    /// The integer of a code.
    #[inline]
    pub(crate) fn decode(self, code: u32) -> f32 {
        let unused = 32 - self.bits;
        ((code << unused) as i32 >> unused) as f32
    }
}

/// The code of a value in `[-largest, largest]` that is not the result of a product which could be contracted, to
/// nearest.
///
/// `Round` of a kernel differs between backends in what it does with ties; the sum with [`ROUND_TO_EVEN`] does not.
#[cube]
pub(crate) fn encode_nearest(v: f32, #[comptime] integer: Integer) -> u32 {
    u32::reinterpret(nearest_sum(v)) & comptime!(integer.mask())
}

/// The same, up with the probability of the fractional part. `offset` is [`STOCHASTIC_OFFSET`] plus the random number.
#[cube]
pub(crate) fn encode_stochastic(v: f32, offset: f32, #[comptime] integer: Integer) -> u32 {
    let q = i32::cast_from((v + offset).floor() - STOCHASTIC_OFFSET);
    u32::reinterpret(min(q, comptime!(integer.largest()))) & comptime!(integer.mask())
}

/// [`Integer::decode`] in a kernel.
#[cube]
pub(crate) fn decode(code: u32, #[comptime] integer: Integer) -> f32 {
    let unused = comptime!(32 - integer.bits);
    f32::cast_from(i32::reinterpret(code << unused) >> comptime!(32 - integer.bits as i32))
}

/// A value below 2^22, not the result of a product that could be contracted, plus [`ROUND_TO_EVEN`]: the low bits of
/// the sum are those of the nearest integer in two's complement, ties to even.
#[cube]
pub(crate) fn nearest_sum(v: f32) -> f32 {
    v + ROUND_TO_EVEN
}

/// The integer of a [`nearest_sum`], exactly.
///
/// `zero` hides the constant, which a compiler may take for the one of the sum and drop both.
#[cube]
pub(crate) fn integer_of(sum: f32, zero: u32) -> f32 {
    sum - f32::reinterpret(comptime!(ROUND_TO_EVEN_BITS as u32) + zero)
}

/// The integer nearest to `x >= 0`, at most the largest, in a kernel. The minimum stands between `x`, which may be a
/// product, and the sum, so that no compiler contracts them.
#[cube]
pub(crate) fn level(x: f32, #[comptime] integer: Integer) -> u32 {
    let sum = nearest_sum(min(x, comptime!(integer.largest() as f32)));
    u32::reinterpret(sum) - comptime!(ROUND_TO_EVEN_BITS as u32)
}

/// [`Integer::code`] in a kernel, with the sign as a bit.
#[cube]
pub(crate) fn signed_code(level: u32, sign: u32, #[comptime] integer: Integer) -> u32 {
    select(
        sign != 0,
        (comptime!(integer.codes()) - level) & comptime!(integer.mask()),
        level,
    )
}

/// One of the two integers around `x >= 0`, in a kernel: the upper one where `dither / 2^32` and the fractional part
/// add up to 1.
#[cube]
pub(crate) fn dithered_level(x: f32, dither: u32, #[comptime] integer: Integer) -> u32 {
    u32::cast_from((min(x, comptime!(integer.largest() as f32)) + uniform16(dither)).floor())
}
