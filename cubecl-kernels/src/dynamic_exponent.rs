//! The 8-bit dynamic exponent format of Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (ICLR 2022).
//!
//! Seven decades, `10^-6` to `10^0`. Decade `e` is the interval `(0.1, 1]` times `10^(e - 6)`, cut into `n` equal
//! pieces of which the middles are the numbers: `n = 2^e` for each sign, or `n = 2^(e + 1)` where there is none. Zero
//! and 1 make 256 in all; -1 is not among them. A code is the number's place in ascending order, so that 0 is code 127
//! of the signed format and code 0 of the unsigned one.
//!
//! With `u = n + j` for the `j`-th number of a decade, the number is `(18 u + 9 - 16 n)` units of `10^(e - 6) / (20
//! n)`: an exact integer and one rounded product, the same on every device. The code of a number follows from the same
//! line: of two neighbours it is the nearer, up to the rounding of `f32`. Kernels look up the decade of a number in
//! shared memory.

use cubecl::prelude::*;

use crate::{exact, rounding::uniform16};

const DECADES: usize = 7;
/// Half of the 256 codes less one: the code of 0 in the signed format.
const SIGNED_ZERO: u32 = 127;

/// Whether the format has negative numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Signedness {
    /// From -0.99297 to 1.
    Signed,
    /// From 0 to 1, twice as fine.
    Unsigned,
}

impl Signedness {
    /// Numbers of the lowest decade.
    const fn first_count(self) -> u32 {
        match self {
            Signedness::Signed => 1,
            Signedness::Unsigned => 2,
        }
    }

    /// Numbers of a decade.
    const fn count(self, decade: usize) -> u32 {
        self.first_count() << decade
    }

    /// `10^(e - 6) / (20 n)`, of which the numbers of a decade are multiples: `5^e / (2 * 10^7)` where `n = 2^e`.
    const fn unit(self, decade: usize) -> f64 {
        5u32.pow(decade as u32) as f64 / (2e7 * self.first_count() as f64)
    }

    const fn unit_f32(self, decade: usize) -> f32 {
        self.unit(decade) as f32
    }

    /// 0 above the decades, where 1 is the only number.
    const fn inverse_unit(self, decade: usize) -> f32 {
        if decade == DECADES {
            return 0.0;
        }
        (1.0 / self.unit(decade)) as f32
    }

    /// Half way between the last number of the decade below and the first of this one; above the decades between the
    /// last number and 1, and nothing beyond.
    const fn lower_bound(self, decade: usize) -> f32 {
        if decade > DECADES {
            return f32::MAX;
        }
        if decade == DECADES {
            return self.one_bound();
        }
        let below = decade - 1;
        // `10^(e - 6) * (1 + 0.9 / n)`, in units of the decade below.
        ((20 * self.count(below) + 18) as f64 * self.unit(below)) as f32
    }

    /// The smallest positive number.
    pub const fn smallest(self) -> f32 {
        ((2 * self.count(0) + 9) as f64 * self.unit(0)) as f32
    }

    /// Half way between 0 and the smallest positive number.
    const fn zero_bound(self) -> f32 {
        self.smallest() * 0.5
    }

    /// Half way between 1 and the number below it.
    const fn one_bound(self) -> f32 {
        1.0 - 0.225 / self.count(DECADES - 1) as f32
    }

    /// The place of 1 among the numbers that are not negative.
    const fn one(self) -> u32 {
        match self {
            Signedness::Signed => 128,
            Signedness::Unsigned => 255,
        }
    }

    /// How far `u` lies above the place.
    const fn offset(self) -> u32 {
        self.first_count() - 1
    }

    /// The code of the number nearest to `x`, which lies in `[-1, 1]`; what lies beyond is taken to the end. The
    /// unsigned format takes the magnitude.
    pub fn encode(self, x: f32) -> u8 {
        self.code(self.level(x.abs()), x < 0.0)
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

    /// The place among the numbers that are not negative of the one nearest to `x >= 0`.
    #[inline]
    pub(crate) fn level(self, x: f32) -> u32 {
        let mut count = self.first_count();
        let mut inverse_unit = self.inverse_unit(0);
        for decade in 1..DECADES {
            if x >= self.lower_bound(decade) {
                count = self.count(decade);
                inverse_unit = self.inverse_unit(decade);
            }
        }
        let place = (x * inverse_unit + (16 * count) as f32) * (1.0 / 18.0);
        let u = (place as u32).clamp(count, 2 * count - 1);
        if x < self.zero_bound() {
            0
        } else if x >= self.one_bound() {
            self.one()
        } else {
            u - self.offset()
        }
    }

    /// The place of one of the two numbers around `x`, in `[0, 1]`: of the upper one where `dither / 2^32` is below the
    /// part of the way to it that `x` has gone.
    #[inline]
    pub(crate) fn dithered_level(self, x: f32, dither: u32) -> u32 {
        let nearest = self.level(x);
        let above = u32::from(self.number(nearest) > x);
        let lower = (nearest - above).min(self.one() - 1);
        let step = self.number(lower + 1) - self.number(lower);
        let uniform = (dither >> 16) as f32 * (1.0 / 65_536.0);
        lower + u32::from(uniform * step < x - self.number(lower))
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

/// Entries of the table that [`fill_decades`] fills: for each of [`BINADES`] powers of two the decade that holds it and
/// the lower bound of the next decade, and for each decade the inverse of its unit.
pub(crate) const DECADE_TABLE: usize = INVERSE_UNITS_AT as usize + DECADES + 1;
/// Powers of two from 2^-24, below all bounds, to 1.
const BINADES: u32 = 25;
const LOWEST_BINADE: u32 = 127 - 24;
const INVERSE_UNITS_AT: u32 = 2 * BINADES;

/// Fills the entries of a table from `at` on, for [`level`]. All units of a cube, more than entries, call it.
#[cube]
pub(crate) fn fill_decades(
    table: &mut SharedMemory<f32>,
    at: u32,
    #[comptime] signedness: Signedness,
) {
    if UNIT_POS < BINADES {
        let power = f32::reinterpret((UNIT_POS + LOWEST_BINADE) << 23);
        let mut decade = 0.0f32;
        let mut next = comptime!(signedness.lower_bound(1)).runtime();
        #[unroll]
        for below in 1..comptime!(DECADES + 1) {
            let above = power >= comptime!(signedness.lower_bound(below));
            decade = select(above, comptime!(below as f32), decade);
            next = select(above, comptime!(signedness.lower_bound(below + 1)), next);
        }
        table[(at + UNIT_POS) as usize] = decade;
        table[(at + BINADES + UNIT_POS) as usize] = next;
    }
    if UNIT_POS == 0 {
        #[unroll]
        for decade in 0..comptime!(DECADES + 1) {
            table[(at + INVERSE_UNITS_AT) as usize + decade] =
                comptime!(signedness.inverse_unit(decade)).runtime();
        }
    }
}

/// [`Signedness::level`] in a kernel, with a table that [`fill_decades`] filled from `at` on.
///
/// No two bounds lie between neighbouring powers of two, so that a comparison with the next bound completes the decade.
#[cube]
pub(crate) fn level(
    x: f32,
    zero: u32,
    table: &SharedMemory<f32>,
    at: u32,
    #[comptime] signedness: Signedness,
) -> u32 {
    let binade = max(u32::reinterpret(x) >> 23, LOWEST_BINADE) - LOWEST_BINADE;
    let entry = at + min(binade, comptime!(BINADES - 1));
    let below = u32::cast_from(table[entry as usize]);
    let decade = select(x >= table[(entry + BINADES) as usize], below + 1, below);
    let count = comptime!(signedness.first_count()).runtime() << decade;
    let inverse_unit = table[(at + INVERSE_UNITS_AT + decade) as usize];
    let place =
        (exact::product(x, inverse_unit, zero) + f32::cast_from(count * 16)) * (1.0f32 / 18.0f32);
    let u = clamp(u32::cast_from(place), count, count * 2 - 1);
    let inside = u - comptime!(signedness.offset());
    select(x < comptime!(signedness.zero_bound()), 0u32, inside)
}

/// [`Signedness::dithered_level`] in a kernel, where `nearest` is [`level`] of `x`.
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
        select(
            negative,
            SIGNED_ZERO - min(level, SIGNED_ZERO),
            SIGNED_ZERO + level,
        )
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

/// Whether a code's number is negative, in a kernel.
#[cube]
pub(crate) fn is_negative(code: u32, #[comptime] signedness: Signedness) -> bool {
    comptime!(signedness == Signedness::Signed) && code < SIGNED_ZERO
}
