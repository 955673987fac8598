//! Philox4x32-10, the counter-based random number generator of Salmon et al., "Parallel Random Numbers: As Easy as
//! 1, 2, 3" (SC 2011): ten rounds of a keyed bijection of a 128-bit counter. Any element's bits follow from its
//! coordinates alone, so they do not depend on the launch geometry or the device.

use cubecl::prelude::*;

use crate::rounding::StochasticKey;

const MULTIPLIER_0: u32 = 0xD251_1F53;
const MULTIPLIER_1: u32 = 0xCD9E_8D57;
const WEYL_0: u32 = 0x9E37_79B9;
const WEYL_1: u32 = 0xBB67_AE85;
const ROUNDS: u32 = 10;

/// The four 32-bit words that Philox4x32-10 gives for a counter and a key.
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let [mut c0, mut c1, mut c2, mut c3] = counter;
    let [mut k0, mut k1] = key;
    for _ in 0..ROUNDS {
        let p0 = u64::from(MULTIPLIER_0) * u64::from(c0);
        let p1 = u64::from(MULTIPLIER_1) * u64::from(c2);
        (c0, c1, c2, c3) = (
            (p1 >> 32) as u32 ^ c1 ^ k0,
            p1 as u32,
            (p0 >> 32) as u32 ^ c3 ^ k1,
            p0 as u32,
        );
        k0 = k0.wrapping_add(WEYL_0);
        k1 = k1.wrapping_add(WEYL_1);
    }
    [c0, c1, c2, c3]
}

/// A random number in `[0, 1)`, a multiple of 2^-24: the lane `col % 4` of the counter `(row, col / 4)`.
pub fn uniform(key: StochasticKey, row: usize, col: usize) -> f32 {
    uniform24(neighbours(key, row, col / 4)[col % 4])
}

/// The random number in `[0, 1)`, a multiple of 2^-15, that decides the rounding of one element.
///
/// `row` counts the rows of the whole batch (`batch * rows + row`) and `col` the columns; both are logical coordinates,
/// whatever the strides. Eight neighbours of a row share a counter: each word of its four serves two of them, the first
/// with its 15 low bits, the second with its 15 high ones. What 15 bits cannot tell of a fraction shifts the
/// expectation of a rounding by at most 2^-16 of the distance between two integers for INT8, and by at most 2^-15 for
/// INT10, whose sums with [`STOCHASTIC_OFFSET`](crate::rounding::STOCHASTIC_OFFSET) reach 512, from where an `f32` has
/// 14 bits behind the point. Floats take the middle of what 15 bits leave open, which shifts nothing on average.
pub fn dither(key: StochasticKey, row: usize, col: usize) -> f32 {
    halves(neighbours(key, row, col / NEIGHBOURS))[col % NEIGHBOURS]
}

/// [`dither`] for the columns `0..out.len()` of a row.
pub fn dither_row(key: StochasticKey, row: usize, out: &mut [f32]) {
    for (index, out) in out.chunks_mut(NEIGHBOURS).enumerate() {
        let dithers = halves(neighbours(key, row, index));
        out.copy_from_slice(&dithers[..out.len()]);
    }
}

/// Elements of a row that share the words of one counter, where 15 bits are enough for each.
pub(crate) const NEIGHBOURS: usize = 8;

fn halves(words: [u32; 4]) -> [f32; NEIGHBOURS] {
    std::array::from_fn(|lane| {
        let word = words[lane / 2];
        let bits = if lane % 2 == 0 {
            word & 0x7fff
        } else {
            word >> 17
        };
        bits as f32 * 2f32.powi(-15)
    })
}

/// The four random words that the `index`-th neighbours of a row share: eight elements, or four where each takes a
/// word.
pub(crate) fn neighbours(key: StochasticKey, row: usize, index: usize) -> [u32; 4] {
    let counter = [
        row as u32,
        index as u32,
        key.stream as u32,
        (key.stream >> 32) as u32,
    ];
    philox4x32(counter, [key.seed as u32, (key.seed >> 32) as u32])
}

/// A random number in `[0, 1)` from the 24 high bits of a word, exactly.
#[inline]
pub(crate) fn uniform24(word: u32) -> f32 {
    (word >> 8) as f32 * 2f32.powi(-24)
}

/// A random number in `[0, 1)` from the 16 high bits of a word, exactly.
#[inline]
pub(crate) fn uniform16(word: u32) -> f32 {
    (word >> 16) as f32 * (1.0 / 65_536.0)
}

/// [`philox4x32`] in a kernel, with products of 64 bits if `wide`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn philox4x32_cube(
    counter_0: u32,
    counter_1: u32,
    counter_2: u32,
    counter_3: u32,
    key_0: u32,
    key_1: u32,
    #[comptime] wide: bool,
) -> (u32, u32, u32, u32) {
    let mut c0 = counter_0;
    let mut c1 = counter_1;
    let mut c2 = counter_2;
    let mut c3 = counter_3;
    let mut k0 = key_0;
    let mut k1 = key_1;
    #[unroll]
    for _ in 0..ROUNDS {
        let (lo0, hi0) = product(c0, MULTIPLIER_0, wide);
        let (lo1, hi1) = product(c2, MULTIPLIER_1, wide);
        c0 = hi1 ^ c1 ^ k0;
        c1 = lo1;
        c2 = hi0 ^ c3 ^ k1;
        c3 = lo0;
        k0 += WEYL_0;
        k1 += WEYL_1;
    }
    (c0, c1, c2, c3)
}

/// The low and the high word of a product.
#[cube]
fn product(a: u32, #[comptime] b: u32, #[comptime] wide: bool) -> (u32, u32) {
    if comptime!(wide) {
        let product = u64::cast_from(a) * u64::cast_from(b);
        (u32::cast_from(product), u32::cast_from(product >> 32u64))
    } else {
        (a * b, u32::mul_hi(a, b))
    }
}
