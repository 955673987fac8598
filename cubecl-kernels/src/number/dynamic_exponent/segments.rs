//! Places by segments, each a line: zero, the decades, and 1.

use cubecl::prelude::*;

use crate::exact;

use super::{DECADES, Signedness};

/// Zero, the decades, and 1.
const SEGMENTS: usize = DECADES + 2;
const EXPONENTS: usize = 256;
/// Bits of the mantissa of an `f32`.
const MANTISSA_BITS: u32 = 23;
/// Entries of the table that [`fill_segments`] fills: one for each exponent of an `f32`, then the slopes of the
/// segments, then their intercepts, then their last places.
pub(crate) const SEGMENT_TABLE: usize = EXPONENTS + 3 * SEGMENTS;

impl Signedness {
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
