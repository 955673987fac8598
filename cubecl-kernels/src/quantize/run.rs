//! The codes of a run: the rules of [`reference::number`](crate::reference::number) as kernel functions.

use cubecl::prelude::*;

use crate::{
    exact,
    number::{Symmetric, integer, minifloat, storage::RUN},
    rounding::{RandomStream, magnitude_bits, random_run, stochastic_dither, stochastic_offset},
};

/// How runs are encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct RunEncoding {
    pub number: Symmetric,
    pub stochastic: bool,
    /// True where the device multiplies to 64 bits.
    pub wide: bool,
    /// True where values that are not finite are encoded too. Under the scale of their own maximum they have the
    /// inverse scale 0.
    pub takes_nan: bool,
}

/// The largest magnitude of a run, as bits.
#[cube]
pub(super) fn run_max(run: &Array<f32>) -> u32 {
    largest_magnitude(run, RUN)
}

/// The largest magnitude of `len` values, as bits.
#[cube]
pub(super) fn largest_magnitude(values: &Array<f32>, #[comptime] len: usize) -> u32 {
    let mut bits = 0u32;
    #[unroll]
    for index in 0..len {
        bits = max(bits, magnitude_bits(values[index]));
    }
    bits
}

/// The codes of `len` values to nearest, by one inverse scale, of which 0 stands for "all values are 0".
#[cube]
pub(super) fn encode_nearest(
    values: &Array<f32>,
    inverse: f32,
    zero: u32,
    #[comptime] len: usize,
    #[comptime] encoding: RunEncoding,
) -> Array<u32> {
    let mut codes = Array::<u32>::new(len);
    #[unroll]
    for index in 0..len {
        codes[index] = code(values[index], inverse, 0u32, zero, index, encoding);
    }
    codes
}

/// The codes of a run, each from its inverse scale, of which 0 stands for "all values are 0"; `row` counts through the
/// batch, `col` is a multiple of 16.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn encode_run(
    run: &Array<f32>,
    inverses: &Array<f32>,
    row: u32,
    col: u32,
    random: &RandomStream,
    zero: u32,
    #[comptime] encoding: RunEncoding,
) -> Array<u32> {
    let words = random_run(row, col, random, encoding.stochastic, encoding.wide);
    let mut codes = Array::<u32>::new(RUN);
    #[unroll]
    for index in 0..RUN {
        let word = if comptime!(encoding.stochastic) {
            words[comptime!(index / 2)]
        } else {
            0u32.runtime()
        };
        codes[index] = code(run[index], inverses[index], word, zero, index, encoding);
    }
    codes
}

/// The code of the element at a place of its run, of which this is the random word.
#[cube]
fn code(
    x: f32,
    inverse: f32,
    word: u32,
    zero: u32,
    #[comptime] lane: usize,
    #[comptime] encoding: RunEncoding,
) -> u32 {
    match comptime!(encoding.number) {
        Symmetric::Integer(integer) => {
            integer_code(x, inverse, word, zero, lane, integer, encoding)
        }
        Symmetric::Float(float) => float_code(x, inverse, word, zero, lane, float, encoding),
    }
}

#[cube]
fn integer_code(
    x: f32,
    inverse: f32,
    word: u32,
    zero: u32,
    #[comptime] lane: usize,
    #[comptime] integer: integer::Integer,
    #[comptime] encoding: RunEncoding,
) -> u32 {
    // A product of inverse 0 with NaN or infinity is NaN: take it out before it becomes an integer.
    let mut is_zero = inverse == 0.0f32;
    if comptime!(encoding.takes_nan) {
        is_zero = is_zero || is_nan(x);
    }
    let v = select(is_zero, 0.0f32, exact::product(x, inverse, zero));
    let largest = comptime!(integer.largest() as f32);
    let v = clamp(v, -largest, largest);
    if comptime!(encoding.stochastic) {
        integer::encode_stochastic(v, stochastic_offset(word, zero, lane), integer)
    } else {
        integer::encode_nearest(v, integer)
    }
}

#[cube]
fn float_code(
    x: f32,
    inverse: f32,
    word: u32,
    zero: u32,
    #[comptime] lane: usize,
    #[comptime] float: minifloat::Minifloat,
    #[comptime] encoding: RunEncoding,
) -> u32 {
    let magnitude = f32::abs(exact::product(x, inverse, zero));
    let mut code = if comptime!(encoding.stochastic) {
        let dither = stochastic_dither(word, lane);
        minifloat::cut_magnitude(min(magnitude, comptime!(float.largest())), dither, float)
    } else {
        minifloat::encode_magnitude(magnitude, float)
    };
    if comptime!(encoding.takes_nan) {
        code = select(is_nan(x), comptime!(float.nan_code()), code);
    }
    select(inverse == 0.0f32, 0u32, minifloat::signed(x, code, float))
}

/// By the bits, since comparisons of NaN differ between backends.
#[cube]
pub(super) fn is_nan(x: f32) -> bool {
    magnitude_bits(x) > comptime!(f32::INFINITY.to_bits())
}
