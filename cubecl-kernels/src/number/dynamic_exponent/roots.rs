//! Places of numbers that are powers, from a table of places.

use cubecl::prelude::*;

use crate::fast;

use super::{Signedness, number};

/// The power of a number that is its *root*: as the places of the format do, roots double with each decade, so that
/// places lie almost evenly among them.
pub(crate) const ROOT: f32 = std::f32::consts::LOG10_2;
/// Bins of the roots in `[0, 1]` for each number of the lowest decade: so many that in no bin two places meet.
const ROOT_BINS: u32 = 256;
/// The sum of a root and this number has bits that are steps of 2^-22.
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
