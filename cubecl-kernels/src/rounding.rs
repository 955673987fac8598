//! How values are rounded, and the random numbers that stochastic rounding takes.

use cubecl::prelude::*;

use crate::{
    arguments::Arguments,
    number::{minifloat::MIDDLE, storage::RUN},
    philox::{NEIGHBOURS, philox4x32_cube},
};

/// How a value is rounded to a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// To the nearest number, of two equally near ones to the one with an even code.
    Nearest,
    /// Up or down at random, with the probabilities that make it unbiased: see
    /// [`reference::number`](crate::reference::number).
    Stochastic(StochasticKey),
}

impl Rounding {
    /// What names the random numbers; zeros where none are drawn.
    pub(crate) const fn key(self) -> StochasticKey {
        match self {
            Self::Nearest => StochasticKey { seed: 0, stream: 0 },
            Self::Stochastic(key) => key,
        }
    }
}

/// Names a stream of random numbers. The same key gives the same rounding of the same element on every device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StochasticKey {
    /// The key of the generator: one for a run.
    pub seed: u64,
    /// Distinguishes the tensors and the steps of a run: never use one value for two tensors.
    pub stream: u64,
}

/// The number that stochastic rounding adds to a value, beside a random one in `[0, 1)`, before it takes the floor, and
/// takes away after it: 1.5 * 2^8.
///
/// It lifts `[-127, 127]` into `[257, 512)`, where the bits of an `f32` are a number with 15 bits behind the point: one
/// sum rounds the value to a multiple of 2^-15 and adds the random bits to it, and the floor is a shift.
pub const STOCHASTIC_OFFSET: f32 = 384.0;

pub(crate) const STOCHASTIC_OFFSET_BITS: u32 = STOCHASTIC_OFFSET.to_bits();
/// Bits behind the point of an `f32` in `[256, 512)`, and those of a random number.
pub(crate) const FRACTION_BITS: u32 = 15;
const FRACTION_MASK: u32 = (1 << FRACTION_BITS) - 1;
/// The bits of an `f32` without its sign.
pub(crate) const MAGNITUDE: u32 = 0x7fff_ffff;

/// The random stream of a launch, as the four words that key the generator.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct RandomStream {
    seed_low: u32,
    seed_high: u32,
    stream_low: u32,
    stream_high: u32,
}

/// The launch argument of a rounding mode; nearest rounding reads no random number.
pub(crate) fn random_stream<R: Runtime>(rounding: Rounding) -> RandomStreamLaunch<R> {
    let [seed_low, seed_high, stream_low, stream_high] = key_words(rounding);
    RandomStreamLaunch::new(seed_low, seed_high, stream_low, stream_high)
}

/// Adds the launch argument of [`random_stream`].
pub(crate) fn add_random_stream(
    rounding: Rounding,
    arguments: &mut Arguments,
) -> RandomStreamCompilationArg {
    let [seed_low, seed_high, stream_low, stream_high] = key_words(rounding);
    RandomStreamCompilationArg {
        seed_low: arguments.scalar(seed_low),
        seed_high: arguments.scalar(seed_high),
        stream_low: arguments.scalar(stream_low),
        stream_high: arguments.scalar(stream_high),
    }
}

fn key_words(rounding: Rounding) -> [u32; 4] {
    let key = rounding.key();
    [
        key.seed as u32,
        (key.seed >> 32) as u32,
        key.stream as u32,
        (key.stream >> 32) as u32,
    ]
}

/// The bits of a value's magnitude. As integers they order NaN above infinity above every finite value.
#[cube]
pub(crate) fn magnitude_bits(x: f32) -> u32 {
    u32::reinterpret(x) & MAGNITUDE
}

/// [`STOCHASTIC_OFFSET`] plus the random number of an element: of the `lane`-th of those that share these words.
///
/// `zero` hides a constant from the compiler: CUDA's logic takes one constant and one register, but not two constants,
/// beside the word.
#[cube]
pub(crate) fn stochastic_offset(word: u32, zero: u32, #[comptime] lane: usize) -> f32 {
    let offset = STOCHASTIC_OFFSET_BITS + zero;
    if comptime!(lane % 2 == 0) {
        f32::reinterpret((word & FRACTION_MASK) | offset)
    } else {
        f32::reinterpret((word >> comptime!(32 - FRACTION_BITS)) + offset)
    }
}

/// The dither of [`Minifloat::cut_magnitude`](crate::number::Minifloat) of the `lane`-th of the elements that share
/// these words: [`stochastic_dither`](crate::number::minifloat::stochastic_dither) of its random number.
#[cube]
pub(crate) fn stochastic_dither(word: u32, #[comptime] lane: usize) -> u32 {
    if comptime!(lane % 2 == 0) {
        (word << comptime!(32 - FRACTION_BITS)) | MIDDLE
    } else {
        (word & comptime!(!(u32::MAX >> FRACTION_BITS))) | MIDDLE
    }
}

/// The four random words of the `index`-th neighbours of a row, from products of 64 bits if `wide`: half the
/// multiplications where the device has them.
#[cube]
pub(crate) fn random_words(
    row: u32,
    index: u32,
    random: &RandomStream,
    #[comptime] wide: bool,
) -> (u32, u32, u32, u32) {
    philox4x32_cube(
        row,
        index,
        random.stream_low,
        random.stream_high,
        random.seed_low,
        random.seed_high,
        wide,
    )
}

/// The two random words of four neighbours of a row; `col` is a multiple of four.
#[cube]
pub(crate) fn random_quad(
    row: u32,
    col: u32,
    random: &RandomStream,
    #[comptime] wide: bool,
) -> (u32, u32) {
    let (b0, b1, b2, b3) = random_words(row, col / comptime!(NEIGHBOURS as u32), random, wide);
    let upper = col % comptime!(NEIGHBOURS as u32) != 0;
    (select(upper, b2, b0), select(upper, b3, b1))
}

/// The eight random words of a run of 16 neighbours of a row, each for two of them; `col` is a multiple of 16. Without
/// stochastic rounding nothing that is read.
#[cube]
pub(crate) fn random_run(
    row: u32,
    col: u32,
    random: &RandomStream,
    #[comptime] stochastic: bool,
    #[comptime] wide: bool,
) -> Array<u32> {
    let mut words = Array::<u32>::new(comptime!(RUN / 2));
    if comptime!(stochastic) {
        #[unroll]
        for part in 0..comptime!(RUN / NEIGHBOURS) {
            let index = col / comptime!(NEIGHBOURS as u32) + comptime!(part as u32);
            let (b0, b1, b2, b3) = random_words(row, index, random, wide);
            let first = comptime!(part * NEIGHBOURS / 2);
            words[first] = b0;
            words[comptime!(first + 1)] = b1;
            words[comptime!(first + 2)] = b2;
            words[comptime!(first + 3)] = b3;
        }
    }
    words
}

/// [`philox::uniform16`](crate::philox::uniform16) in a kernel.
#[cube]
pub(crate) fn uniform16(bits: u32) -> f32 {
    f32::cast_from(bits >> 16) * (1.0 / 65_536.0)
}
