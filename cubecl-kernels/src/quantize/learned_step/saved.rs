//! The saturation and the residuals that are kept of a rounded run beside its codes.
//!
//! A group of 32 neighbours of a row is the runs of two neighbouring units, the first of which has an even index.

use cubecl::prelude::*;

use crate::{
    exact,
    number::{integer, storage::RUN},
    quantize::tile::{Tile, UNITS},
};

use super::{
    FLAGS_OF_GROUP, LARGEST, RESIDUAL_UNITS, SATURATION_GROUP,
    rounded::{NIBBLES, RoundedRun, is_clamped, pack_sums},
};

/// Runs of a group.
const RUNS_OF_GROUP: usize = SATURATION_GROUP / RUN;

/// The byte of [`SavedRounding::saturation`](super::SavedRounding) of the group that the unit's run begins; of no
/// meaning in a unit whose run does not begin one. All units of the cube must call it together.
#[cube]
pub(super) fn group_flags(rounded: &RoundedRun, #[comptime] planes: bool) -> u32 {
    let mut flags = 0u32;
    let mut count = 0u32;
    if rounded.has_extremes {
        let words = pack_sums(&rounded.sums);
        #[unroll]
        for word in 0..comptime!(RUN / 8) {
            let mut extremes = extreme_nibbles(words[word]);
            let clamped = clamped_nibbles(&rounded.quotients, word);
            // Few of a run are extreme, so that a turn for each is shorter than one for each element.
            while extremes != 0 {
                let others = extremes & (extremes - 1);
                // Only extreme numbers are clamped.
                flags |= select(clamped & (extremes ^ others) == 0, 0u32, 1u32) << count;
                count += 1;
                extremes = others;
            }
        }
    }
    let next = of_other_run(flags, planes);
    (flags | (next << count)) & comptime!((1u32 << FLAGS_OF_GROUP) - 1)
}

/// The highest bit of each nibble of a word of codes that is 7 or -7.
#[cube]
pub(super) fn extreme_nibbles(codes: u32) -> u32 {
    let (second, third, lowest) = (codes << 1, codes << 2, codes << 3);
    // -7 is 1001, and there is no -8, 1000.
    ((!codes & second & third & lowest) | (codes & !second & !third)) & comptime!(NIBBLES * 8)
}

/// The highest bit of each nibble that the `word`-th eight elements of a run have in a word, where they are clamped;
/// the bits below have no meaning.
#[cube]
fn clamped_nibbles(quotients: &Array<f32>, #[comptime] word: usize) -> u32 {
    let mut nibbles = 0u32;
    #[unroll]
    for index in 0..8usize {
        let v = quotients[comptime!(8 * word + 7 - index)];
        // Negative where v is clamped. The shift of the two words takes one instruction.
        let room = LARGEST - f32::abs(v);
        nibbles = (nibbles << 4) | (u32::reinterpret(room) >> 28);
    }
    nibbles
}

/// The value of the unit that holds the other run of the group.
#[cube]
pub(super) fn of_other_run(value: u32, #[comptime] planes: bool) -> u32 {
    comptime!(assert!(RUNS_OF_GROUP == 2, "groups of two runs"));
    if comptime!(planes) {
        plane_shuffle_xor(value, 1u32)
    } else {
        let mut of_units = SharedMemory::<u32>::new(UNITS);
        of_units[UNIT_POS as usize] = value;
        sync_cube();
        of_units[(UNIT_POS ^ 1) as usize]
    }
}

/// True for a unit whose run begins a group.
#[cube]
pub(super) fn begins_group() -> bool {
    UNIT_POS % comptime!(RUNS_OF_GROUP as u32) == 0
}

/// The residuals of a run as bytes, four in a word.
#[cube]
pub(super) fn residual_words(rounded: &RoundedRun, zero: u32) -> Array<u32> {
    let mut words = Array::<u32>::new(comptime!(RUN / 4));
    #[unroll]
    for word in 0..comptime!(RUN / 4) {
        let mut bytes = 0u32;
        #[unroll]
        for byte in 0..4usize {
            let index = comptime!(word * 4 + byte);
            let v = rounded.quotients[index];
            let rest = exact::product(rounded.numbers[index] - v, RESIDUAL_UNITS, zero);
            let rest = select(is_clamped(v), 0.0f32, rest);
            let bits = u32::reinterpret(integer::nearest_sum(rest)) & 0xffu32;
            bytes |= bits << comptime!(8 * byte as u32);
        }
        words[word] = bytes;
    }
    words
}

/// Groups in the tiles' rows are whole: no group lies in two tiles, nor in the units of two rows.
pub(super) const fn holds_groups(tile: Tile) -> bool {
    tile.cols % SATURATION_GROUP == 0
}
