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

use crate::{exact, fast, philox, rounding::uniform16};

const DECADES: usize = 7;
/// Zero, the decades, and 1.
const SEGMENTS: usize = DECADES + 2;
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

    /// The inverse of the distance between neighbouring numbers of a segment, 0 where there is one number alone.
    #[inline]
    const fn slope(self, segment: usize) -> f32 {
        if segment == 0 || segment > DECADES {
            return 0.0;
        }
        (1.0 / (18.0 * self.unit(segment - 1))) as f32
    }

    /// The place that the line of a segment has at 0, and half a place more.
    #[inline]
    const fn intercept(self, segment: usize) -> f32 {
        if segment == 0 {
            return 0.0;
        }
        if segment > DECADES {
            return self.one() as f32;
        }
        ((16 * self.count(segment - 1)) as f64 / 18.0 - self.offset() as f64) as f32
    }

    /// The last place of a segment, or above the decades more than that.
    #[inline]
    const fn last(self, segment: usize) -> u32 {
        (self.first_count() << segment) - self.first_count()
    }

    /// Half way between the last number below a segment, which is not the first, and the segment's first.
    #[inline]
    const fn lower_bound(self, segment: usize) -> f32 {
        if segment == 1 {
            // Half way to the smallest positive number.
            return self.smallest() * 0.5;
        }
        if segment > DECADES {
            // Half way between 1 and the number below it.
            return 1.0 - 0.225 / self.count(DECADES - 1) as f32;
        }
        let below = segment - 2;
        // `10^(e - 6) * (1 + 0.9 / n)`, in units of the decade below.
        ((20 * self.count(below) + 18) as f64 * self.unit(below)) as f32
    }

    /// All segments, as tables of the host.
    #[inline]
    const fn segments(self) -> &'static [Segment; SEGMENTS] {
        match self {
            Signedness::Signed => &SIGNED_SEGMENTS,
            Signedness::Unsigned => &UNSIGNED_SEGMENTS,
        }
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

    /// The place among the numbers that are not negative of the one nearest to `x >= 0`.
    #[inline]
    pub(crate) fn level(self, x: f32) -> u32 {
        let x = x.min(1.0);
        let segments = self.segments();
        let above = segments[1..]
            .iter()
            .filter(|segment| x >= segment.lower_bound);
        let segment = &segments[above.count()];
        ((x * segment.slope + segment.intercept) as u32).min(segment.last)
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

/// The line of a segment.
#[derive(Debug, Clone, Copy)]
struct Segment {
    /// Where it starts; of no account for the first one.
    lower_bound: f32,
    slope: f32,
    intercept: f32,
    last: u32,
}

static SIGNED_SEGMENTS: [Segment; SEGMENTS] = segments_of(Signedness::Signed);
static UNSIGNED_SEGMENTS: [Segment; SEGMENTS] = segments_of(Signedness::Unsigned);

const fn segments_of(signedness: Signedness) -> [Segment; SEGMENTS] {
    let mut segments = [Segment {
        lower_bound: 0.0,
        slope: signedness.slope(0),
        intercept: signedness.intercept(0),
        last: signedness.last(0),
    }; SEGMENTS];
    let mut index = 1;
    while index < SEGMENTS {
        segments[index] = Segment {
            lower_bound: signedness.lower_bound(index),
            slope: signedness.slope(index),
            intercept: signedness.intercept(index),
            last: signedness.last(index),
        };
        index += 1;
    }
    segments
}

/// Entries of the table that [`fill_segments`] fills: one for each exponent of an `f32`, then the slopes of the
/// segments, then their intercepts, then their last places.
pub(crate) const SEGMENT_TABLE: usize = EXPONENTS + 3 * SEGMENTS;
const EXPONENTS: usize = 256;
/// Bits of the mantissa of an `f32`.
const MANTISSA_BITS: u32 = 23;

/// Fills the entries of a table from `at` on, for [`level`]. All units of a cube call it, one for each exponent.
///
/// No two bounds of segments share an exponent. So the segment of a number is that of its power of two, or where a
/// bound follows the next one from there on: a carry out of the mantissa. The entry of an exponent is what has to be
/// added to the bits of a number so that the segment takes the exponent's place.
#[cube]
pub(crate) fn fill_segments(
    table: &mut SharedMemory<u32>,
    at: u32,
    #[comptime] signedness: Signedness,
) {
    let exponent = UNIT_POS;
    let mut segment = 0u32;
    let mut carry = 0u32;
    #[unroll]
    for above in 1..comptime!(SEGMENTS) {
        let bound = comptime!(signedness.lower_bound(above).to_bits());
        let of_bound = comptime!(bound >> MANTISSA_BITS);
        let to_carry = comptime!((1 << MANTISSA_BITS) - (bound & ((1 << MANTISSA_BITS) - 1)));
        segment = select(exponent > of_bound, comptime!(above as u32), segment);
        carry = select(exponent == of_bound, to_carry, carry);
    }
    table[(at + exponent) as usize] = ((segment - exponent) << MANTISSA_BITS) + carry;
    if UNIT_POS == 0 {
        #[unroll]
        for segment in 0..comptime!(SEGMENTS) {
            let slope = comptime!(signedness.slope(segment).to_bits());
            let intercept = comptime!(signedness.intercept(segment).to_bits());
            table[at as usize + comptime!(EXPONENTS + segment)] = slope.runtime();
            let last = comptime!(signedness.last(segment));
            table[at as usize + comptime!(EXPONENTS + SEGMENTS + segment)] = intercept.runtime();
            table[at as usize + comptime!(EXPONENTS + 2 * SEGMENTS + segment)] = last.runtime();
        }
    }
}

/// [`Signedness::level`] in a kernel of `x` in `[0, 1]`, up to rounding, with a table that [`fill_segments`] filled
/// from `at` on.
///
/// The masks keep NaN, of which any level will do, from being looked up outside the table.
#[cube]
pub(crate) fn level(x: f32, zero: u32, table: &SharedMemory<u32>, at: u32) -> u32 {
    let bits = u32::reinterpret(x);
    let entry = at + ((bits >> MANTISSA_BITS) & comptime!(EXPONENTS as u32 - 1));
    let segment = ((bits + table[entry as usize]) >> MANTISSA_BITS) & 0xf;
    let line = at + comptime!(EXPONENTS as u32) + segment;
    let slope = f32::reinterpret(table[line as usize]);
    let intercept = f32::reinterpret(table[(line + comptime!(SEGMENTS as u32)) as usize]);
    let last = table[(line + comptime!(2 * SEGMENTS as u32)) as usize];
    min(
        u32::cast_from(exact::product(x, slope, zero) + intercept),
        last,
    )
}

/// The power of a number that is its *root*: as the places of the format do, roots double with each decade, so that
/// places lie almost evenly among them.
pub(crate) const ROOT: f32 = std::f32::consts::LOG10_2;
/// Bins of the roots in `[0, 1]` for each number of the lowest decade: so many that in no bin two places meet.
const ROOT_BINS: u32 = 256;
/// What is added to a root so that its bits are steps of 2^-22.
const ROOT_OFFSET: f32 = 2.0;
const ROOT_STEPS: u32 = 22;

impl Signedness {
    #[inline]
    const fn bins(self) -> u32 {
        ROOT_BINS * self.first_count()
    }

    /// Entries of the table that [`fill_roots`] fills: one for each bin, and one for the root 1.
    #[inline]
    pub(crate) const fn root_table(self) -> usize {
        self.bins() as usize + 1
    }

    /// The steps of a bin, as a shift.
    #[inline]
    const fn bin_shift(self) -> u32 {
        ROOT_STEPS - self.bins().ilog2()
    }
}

/// Fills the entries of a table from `at` on, for [`level_of_root`]. All units of a cube call it, one for each place.
///
/// The entry of a bin is what has to be added to the bits of an offset root so that they count places in bins: the
/// place at the start of the bin, and where a place ends in it, a carry from there on.
#[cube]
pub(crate) fn fill_roots(
    table: &mut SharedMemory<u32>,
    at: u32,
    #[comptime] signedness: Signedness,
) {
    let shift = comptime!(signedness.bin_shift());
    let place = UNIT_POS;
    let mut end = comptime!(signedness.bins() << signedness.bin_shift()).runtime();
    if place < comptime!(signedness.one()) {
        end = root_end(place, signedness);
    }
    let mut ends = SharedMemory::<u32>::new(comptime!(signedness.one() as usize + 1));
    if place <= comptime!(signedness.one()) {
        ends[place as usize] = end;
    }
    sync_cube();
    if place <= comptime!(signedness.one()) {
        let mut bin = 0u32;
        if place > 0 {
            bin = (ends[(place - 1) as usize] >> shift) + 1;
        }
        let last = end >> shift;
        while bin <= last {
            let start = bin << shift;
            let carry = select(
                bin == last && place < comptime!(signedness.one()),
                start + comptime!(1u32 << shift) - end,
                0u32,
            );
            table[(at + bin) as usize] =
                (place << shift) - start - comptime!(ROOT_OFFSET.to_bits()) + carry;
            bin += 1;
        }
    }
}

/// The root half way between a place and the next one, in steps.
#[cube]
fn root_end(place: u32, #[comptime] signedness: Signedness) -> u32 {
    let middle = (number(place, 0, signedness) + number(place + 1, 0, signedness)) * 0.5f32;
    u32::cast_from(fast::power(middle, ROOT) * comptime!((1u32 << ROOT_STEPS) as f32))
}

/// [`Signedness::level`] in a kernel of the number with a root, up to the rounding of the root, with a table that
/// [`fill_roots`] filled from `at` on. A root may be above 1 by its rounding; of NaN the result is any number.
#[cube]
pub(crate) fn level_of_root(
    root: f32,
    table: &SharedMemory<u32>,
    at: u32,
    #[comptime] signedness: Signedness,
) -> u32 {
    let shift = comptime!(signedness.bin_shift());
    let bits = u32::reinterpret(root + ROOT_OFFSET);
    let bin = min(
        (bits >> shift) - comptime!(ROOT_OFFSET.to_bits() >> signedness.bin_shift()),
        comptime!(signedness.bins()),
    );
    (bits + table[(at + bin) as usize]) >> shift
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

/// Whether a code's number is negative, in a kernel.
#[cube]
pub(crate) fn is_negative(code: u32, #[comptime] signedness: Signedness) -> bool {
    comptime!(signedness == Signedness::Signed) && code < SIGNED_ZERO
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An entry of the table of roots can tell two places apart, not three.
    #[test]
    fn no_two_places_end_in_one_bin() {
        for signedness in [Signedness::Signed, Signedness::Unsigned] {
            let bin = |root: f32| (root * signedness.bins() as f32) as u32;
            // Farther apart than a device's power may be off.
            let slack = 1e-5;
            let ends: Vec<f32> = (0..signedness.one())
                .map(|place| {
                    let middle = (signedness.number(place) + signedness.number(place + 1)) * 0.5;
                    middle.powf(ROOT)
                })
                .collect();
            for pair in ends.windows(2) {
                let (end, next) = (bin(pair[0] + slack), bin(pair[1] - slack));
                assert!(
                    end < next,
                    "{signedness:?}: {pair:?} end in bins {end}, {next}"
                );
            }
            let last = ends.last().expect("places below 1");
            assert!(
                bin(last + slack) < signedness.bins(),
                "{signedness:?}: {last}"
            );
        }
    }
}
