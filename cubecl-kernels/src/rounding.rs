//! From a block's largest magnitude to its scale, and from a value to its integer: the rules of
//! [`reference`](mod@crate::reference) as kernel functions.

use cubecl::prelude::*;

use crate::{
    arguments::Arguments,
    exact,
    format::{MIN_ABSMAX, Rounding, STOCHASTIC_OFFSET, StochasticKey},
    philox::{NEIGHBOURS, philox4x32_cube},
};

pub(crate) const MAGNITUDE: u32 = 0x7fff_ffff;
const INFINITY: u32 = 0x7f80_0000;
const NAN: u32 = 0x7fc0_0000;
const MIN_ABSMAX_BITS: u32 = MIN_ABSMAX.to_bits();
/// 1.5 * 2^23. Adding it to a value below 2^22 leaves the value, rounded half to even, in the low bits of the sum.
pub(crate) const ROUND_TO_EVEN: f32 = 12_582_912.0;
const ROUND_TO_EVEN_BITS: i32 = 0x4B40_0000;
const STOCHASTIC_OFFSET_BITS: u32 = STOCHASTIC_OFFSET.to_bits();
/// Bits behind the point of an `f32` in `[256, 512)`.
pub(crate) const FRACTION_BITS: u32 = 15;
const FRACTION_MASK: u32 = (1 << FRACTION_BITS) - 1;
const SIGN_BITS: u32 = 0x8080_8080;
/// Turns the sum of `(ROUND_TO_EVEN_BITS + q) * 256^i` over four integers into that of `(q + 128) * 256^i`, whose bytes
/// do not borrow from each other.
const PACK_NEAREST: u32 =
    SIGN_BITS.wrapping_sub((ROUND_TO_EVEN_BITS as u32).wrapping_mul(0x0101_0101));
/// The same for sums over [`stochastic_integer`]s.
const PACK_STOCHASTIC: u32 =
    SIGN_BITS.wrapping_sub((STOCHASTIC_OFFSET_BITS >> FRACTION_BITS).wrapping_mul(0x0101_0101));

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
    let key = match rounding {
        Rounding::Nearest => StochasticKey { seed: 0, stream: 0 },
        Rounding::Stochastic(key) => key,
    };
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

/// Whether a block's maximum is neither NaN nor infinite.
#[cube]
pub(crate) fn is_finite(absmax_bits: u32) -> bool {
    absmax_bits < INFINITY
}

/// Scale and inverse scale of a block from the bits of its maximum. Inverse 0 stands for "all values are 0".
#[cube]
pub(crate) fn scale_and_inverse(absmax_bits: u32, #[comptime] q_max: i32) -> (f32, f32) {
    let mut scale = 0.0f32;
    let mut inverse = 0.0f32;
    if absmax_bits >= INFINITY {
        // Or-ing keeps it an expression of a variable: the CUDA compiler cannot reinterpret a constant.
        scale = f32::reinterpret(absmax_bits | NAN);
    } else if absmax_bits >= MIN_ABSMAX_BITS {
        let absmax = f32::reinterpret(absmax_bits);
        let q = f32::cast_from(q_max);
        scale = absmax / q;
        inverse = q / absmax;
    }
    (scale, inverse)
}

/// One value as an integer, to nearest even.
///
/// `Round` of a kernel differs between backends in what it does with ties; the sum with [`ROUND_TO_EVEN`] does not.
#[cube]
pub(crate) fn round_nearest(x: f32, inverse: f32, zero: u32, #[comptime] q_max: i32) -> i32 {
    // A product of inverse 0 with NaN or infinity is NaN: take it out before it becomes an integer.
    let v = select(inverse == 0.0, 0.0f32, exact::product(x, inverse, zero));
    let q = i32::reinterpret(nearest_sum(v)) - ROUND_TO_EVEN_BITS;
    clamp(q, -q_max, q_max)
}

/// A value below 2^22, not the result of a product that could be contracted, plus [`ROUND_TO_EVEN`]: the low byte of
/// the sum's bits is that of the nearest integer, ties to even.
#[cube]
pub(crate) fn nearest_sum(v: f32) -> f32 {
    v + ROUND_TO_EVEN
}

/// A value in `[-127, 127]`, as [`exact::product`] gives it, rounded stochastically: the floor of its sum with
/// `offset`, which comes from [`stochastic_offset`]. The low byte is that of the integer plus 128.
#[cube]
pub(crate) fn stochastic_integer(v: f32, offset: f32) -> u32 {
    u32::reinterpret(v + offset) >> FRACTION_BITS
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

/// The integer of a [`nearest_sum`], exactly.
///
/// `zero` hides the constant, which a compiler may take for the one of the sum and drop both.
#[cube]
pub(crate) fn integer_of(sum: f32, zero: u32) -> f32 {
    sum - f32::reinterpret(comptime!(ROUND_TO_EVEN_BITS as u32) + zero)
}

/// Puts the bits of a [`nearest_sum`], or a [`stochastic_integer`], below those that `word` holds; [`packed`] makes
/// bytes of four.
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

/// One value as an integer, up with the probability of its fractional part; see [`stochastic_offset`], and
/// [`dither`](crate::philox::dither) for how exactly.
#[cube]
fn round_stochastic(x: f32, inverse: f32, offset: f32, zero: u32, #[comptime] q_max: i32) -> i32 {
    let v = select(inverse == 0.0, 0.0f32, exact::product(x, inverse, zero));
    let q = i32::cast_from((v + offset).floor() - STOCHASTIC_OFFSET);
    clamp(q, -q_max, q_max)
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

/// Rounds four neighbours of a row in place of their values; `col` is a multiple of four, `row` counts through the
/// batch.
#[cube]
pub(crate) fn round_quad(
    x: &Array<f32>,
    inverse: &Array<f32>,
    row: u32,
    col: u32,
    random: &RandomStream,
    zero: u32,
    #[comptime] stochastic: bool,
    #[comptime] q_max: i32,
) -> Array<i32> {
    let mut q = Array::<i32>::new(4usize);
    if comptime!(stochastic) {
        let (low, high) = random_quad(row, col, random, false);
        #[unroll]
        for lane in 0..4usize {
            let offset =
                stochastic_offset(if comptime!(lane < 2) { low } else { high }, zero, lane);
            q[lane] = round_stochastic(x[lane], inverse[lane], offset, zero, q_max);
        }
    } else {
        #[unroll]
        for lane in 0..4usize {
            q[lane] = round_nearest(x[lane], inverse[lane], zero, q_max);
        }
    }
    q
}

/// [`philox::uniform16`](crate::philox::uniform16) in a kernel.
#[cube]
pub(crate) fn uniform16(bits: u32) -> f32 {
    f32::cast_from(bits >> 16) * (1.0 / 65_536.0)
}
