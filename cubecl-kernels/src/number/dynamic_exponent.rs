//! The 8-bit dynamic exponent format of Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (ICLR 2022).
//!
//! Seven decades, `10^-6` to `10^0`. Decade `e` is the interval `(0.1, 1]` times `10^(e - 6)`, cut into `n` equal
//! pieces of which the middles are the numbers: `n = 2^e` for each sign, or `n = 2^(e + 1)` where there is none. Zero
//! and 1 make 256 in all; -1 is not among them. A code is the number's place in ascending order, so that 0 is code 127
//! of the signed format and code 0 of the unsigned one.
//!
//! With `u = n + j` for the `j`-th number of a decade, the number is `(18 u + 9 - 16 n)` units of `10^(e - 6) / (20
//! n)`: an exact integer and one rounded product, the same on every device. The place of a number follows from the same
//! line, `u = floor(x / (18 units) + 16 n / 18)` but at most `2 n - 1`, by a rounded product and a rounded sum: of two
//! neighbours it is the nearer, up to the rounding of `f32`. So places are found by *segments*, each a line: zero, the
//! decades, and 1. Kernels look up the segment of a number in shared memory; of a number that is a power, which is not
//! known to the last digit, they look up the place itself.

use cubecl::prelude::*;

use crate::{exact, philox, rounding::uniform16};

mod roots;
mod segments;

pub(crate) use roots::{ROOT, fill_roots, level_of_root};
pub(crate) use segments::{SEGMENT_TABLE, fill_segments, level};

const DECADES: usize = 7;
/// Half of the 256 codes less one: the code of 0 in the signed format.
const SIGNED_ZERO: u32 = 127;

/// The two kinds of dynamic exponents, with negative numbers and without.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Signedness {
    /// From -0.99297 to 1.
    Signed,
    /// From 0 to 1, twice as fine.
    Unsigned,
}

impl Signedness {
    /// Numbers of the lowest decade.
    #[inline]
    const fn first_count(self) -> u32 {
        match self {
            Signedness::Signed => 1,
            Signedness::Unsigned => 2,
        }
    }

    /// Numbers of a decade.
    #[inline]
    const fn count(self, decade: usize) -> u32 {
        self.first_count() << decade
    }

    /// `10^(e - 6) / (20 n)`, of which the numbers of a decade are multiples: `5^e / (2 * 10^7)` where `n = 2^e`.
    #[inline]
    const fn unit(self, decade: usize) -> f64 {
        5u32.pow(decade as u32) as f64 / (2e7 * self.first_count() as f64)
    }

    #[inline]
    const fn unit_f32(self, decade: usize) -> f32 {
        self.unit(decade) as f32
    }

    /// The smallest positive number.
    #[inline]
    pub const fn smallest(self) -> f32 {
        ((2 * self.count(0) + 9) as f64 * self.unit(0)) as f32
    }

    /// The place of 1 among the numbers that are not negative.
    #[inline]
    const fn one(self) -> u32 {
        match self {
            Signedness::Signed => 128,
            Signedness::Unsigned => 255,
        }
    }

    /// How far `u` lies above the place.
    #[inline]
    const fn offset(self) -> u32 {
        self.first_count() - 1
    }

    /// The code of 0.
    #[inline]
    pub const fn zero(self) -> u32 {
        match self {
            Signedness::Signed => SIGNED_ZERO,
            Signedness::Unsigned => 0,
        }
    }

    /// The code of the number nearest to `x`, which lies in `[-1, 1]`; what lies beyond is taken to the end. The
    /// unsigned format takes the magnitude.
    pub fn encode(self, x: f32) -> u8 {
        self.code(self.level(x.abs()), x < 0.0)
    }

    /// The code of one of the two numbers around `x`: of the upper magnitude where `dither / 2^32` is below the part of
    /// the way to it that `x` has gone.
    pub fn encode_stochastic(self, x: f32, dither: u32) -> u8 {
        self.code(self.dithered_level(x.abs().min(1.0), dither), x < 0.0)
    }

    /// The number of a code.
    pub fn decode(self, code: u8) -> f32 {
        match self {
            Signedness::Unsigned => self.number(u32::from(code)),
            Signedness::Signed => {
                let level = i32::from(code) - SIGNED_ZERO as i32;
                let number = self.number(level.unsigned_abs());
                if level < 0 { -number } else { number }
            }
        }
    }

    /// The 256 numbers, ascending.
    pub fn table(self) -> [f32; 256] {
        std::array::from_fn(|code| self.decode(code as u8))
    }

    /// The code of the `level`-th number that is not negative, or of its negative.
    #[inline]
    pub(crate) fn code(self, level: u32, negative: bool) -> u8 {
        match self {
            Signedness::Unsigned => level as u8,
            // There is no -1.
            Signedness::Signed if negative => (SIGNED_ZERO - level.min(SIGNED_ZERO)) as u8,
            Signedness::Signed => (SIGNED_ZERO + level) as u8,
        }
    }

    /// The place of one of the two numbers around `x`, in `[0, 1]`: of the upper one where `dither / 2^32` is below the
    /// part of the way to it that `x` has gone.
    #[inline]
    pub(crate) fn dithered_level(self, x: f32, dither: u32) -> u32 {
        let nearest = self.level(x);
        let below = u32::from(self.number(nearest) > x);
        let lower = (nearest - below).min(self.one() - 1);
        let step = self.number(lower + 1) - self.number(lower);
        let above = philox::uniform16(dither) * step < x - self.number(lower);
        lower + u32::from(above)
    }

    /// The `level`-th number that is not negative.
    #[inline]
    pub(crate) fn number(self, level: u32) -> f32 {
        if level == 0 {
            return 0.0;
        }
        if level == self.one() {
            return 1.0;
        }
        let u = level + self.offset();
        let decade = (u.ilog2() - self.first_count().ilog2()) as usize;
        (18 * u + 9 - 16 * self.count(decade)) as f32 * self.unit_f32(decade)
    }
}

/// [`Signedness::dithered_level`] in a kernel, where `nearest` is [`level`] or [`level_of_root`] of `x`.
#[cube]
pub(crate) fn dithered_level(
    x: f32,
    nearest: u32,
    dither: u32,
    zero: u32,
    #[comptime] signedness: Signedness,
) -> u32 {
    let one = comptime!(signedness.one());
    let above = number(nearest, zero, signedness) > x;
    let lower = min(select(above, nearest - 1, nearest), comptime!(one - 1));
    let number_below = number(lower, zero, signedness);
    let step = number(lower + 1, zero, signedness) - number_below;
    lower + select(uniform16(dither) * step < x - number_below, 1u32, 0u32)
}

/// [`Signedness::number`] in a kernel.
#[cube]
pub(crate) fn number(level: u32, zero: u32, #[comptime] signedness: Signedness) -> f32 {
    let u = level + comptime!(signedness.offset());
    let mut count = comptime!(signedness.first_count()).runtime();
    let mut unit = comptime!(signedness.unit_f32(0)).runtime();
    #[unroll]
    for decade in 1..comptime!(DECADES) {
        let above = u >= comptime!(signedness.count(decade));
        count = select(above, comptime!(signedness.count(decade)), count);
        unit = select(above, comptime!(signedness.unit_f32(decade)), unit);
    }
    let inside = exact::product(f32::cast_from(u * 18 + 9 - count * 16), unit, zero);
    let positive = select(level == comptime!(signedness.one()), 1.0f32, inside);
    select(level == 0, 0.0f32, positive)
}

/// [`Signedness::code`] in a kernel.
#[cube]
pub(crate) fn code(level: u32, negative: bool, #[comptime] signedness: Signedness) -> u32 {
    if comptime!(signedness == Signedness::Signed) {
        let level = i32::cast_from(level);
        let signed = select(negative, -level, level);
        u32::cast_from(max(signed + comptime!(SIGNED_ZERO as i32), 0i32))
    } else {
        level
    }
}

/// The place of a code's magnitude among the numbers that are not negative, in a kernel.
#[cube]
pub(crate) fn level_of(code: u32, #[comptime] signedness: Signedness) -> u32 {
    if comptime!(signedness == Signedness::Signed) {
        // Of the two differences the one that does not wrap.
        min(code - SIGNED_ZERO, SIGNED_ZERO - code)
    } else {
        code
    }
}

/// True where a code's number is negative, in a kernel.
#[cube]
pub(crate) fn is_negative(code: u32, #[comptime] signedness: Signedness) -> bool {
    comptime!(signedness == Signedness::Signed) && code < SIGNED_ZERO
}
