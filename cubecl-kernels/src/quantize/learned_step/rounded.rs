//! A run in units of the step size, rounded to INT4 and packed.

use cubecl::prelude::*;

use crate::{
    exact,
    number::{
        integer::{self, ROUND_TO_EVEN_BITS},
        storage::RUN,
    },
    quantize::run::{is_nan, run_max},
    scale::is_finite,
};

use super::LARGEST;

/// The magnitude of `v` from which on a code can be 7 or -7.
const EXTREME: f32 = LARGEST - 0.5;
/// The lowest bit of each nibble of a word.
pub(super) const NIBBLES: u32 = 0x1111_1111;

/// A run in units of the step size, before and after it was rounded.
#[derive(CubeType)]
pub(super) struct RoundedRun {
    /// The bits of the [`nearest_sum`](integer::nearest_sum) of each element: its code in the low ones.
    pub sums: Array<u32>,
    /// The numbers of the codes.
    pub numbers: Array<f32>,
    /// `v`.
    pub quotients: Array<f32>,
    /// The bits of the largest magnitude of `h`.
    pub largest: u32,
    /// True where a code may be 7 or -7.
    pub has_extremes: bool,
}

/// Divides a run by the step size of this inverse, and rounds it. `zero` is 0.
#[cube]
pub(super) fn round_run(run: &Array<f32>, inverse: f32, zero: u32) -> RoundedRun {
    let largest = run_max(run);
    let is_finite = is_finite(largest);
    let mut sums = Array::<u32>::new(RUN);
    let mut numbers = Array::<f32>::new(RUN);
    let mut quotients = Array::<f32>::new(RUN);
    #[unroll]
    for index in 0..RUN {
        quotients[index] = exact::product(run[index], inverse, zero);
    }
    if !is_finite {
        #[unroll]
        for index in 0..RUN {
            // A product of inverse 0 with an infinity is NaN.
            let is_zero = inverse == 0.0f32 || is_nan(run[index]);
            quotients[index] = select(is_zero, 0.0f32, quotients[index]);
        }
    }
    #[unroll]
    for index in 0..RUN {
        let sum = integer::nearest_sum(clamp(quotients[index], -LARGEST, LARGEST));
        sums[index] = u32::reinterpret(sum);
        numbers[index] = integer::integer_of(sum, zero);
    }
    RoundedRun {
        sums,
        numbers,
        quotients,
        largest,
        has_extremes: !is_finite || f32::reinterpret(largest) * inverse >= EXTREME,
    }
}

/// The codes of sums, packed as [`Storage::Nibbles`](crate::number::Storage): in an instruction for each. A sum is a
/// constant and an integer from -7 to 7. Eight of them, each shifted to its nibble, are added up; with 8 more for each,
/// no nibble borrows from the next one; and of an integer with 8 more, two's complement is all bits but the highest.
#[cube]
pub(super) fn pack_sums(sums: &Array<u32>) -> Array<u32> {
    let eights = comptime!(NIBBLES * 8);
    let constants = comptime!(eights.wrapping_sub(NIBBLES.wrapping_mul(ROUND_TO_EVEN_BITS as u32)));
    let mut words = Array::<u32>::new(comptime!(RUN / 8));
    #[unroll]
    for word in 0..comptime!(RUN / 8) {
        let mut packed = sums[comptime!(word * 8)];
        #[unroll]
        for nibble in 1..8usize {
            packed += sums[comptime!(word * 8 + nibble)] << comptime!(4 * nibble as u32);
        }
        words[word] = (packed + constants) ^ eights;
    }
    words
}

/// True where `|v| > 7`.
#[cube]
pub(super) fn is_clamped(v: f32) -> bool {
    f32::abs(v) > LARGEST
}

/// True for the numbers 7 and -7.
#[cube]
pub(super) fn is_extreme(number: f32) -> bool {
    f32::abs(number) == LARGEST
}
