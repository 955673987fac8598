//! The codes of values, and back: the rules of
//! [`reference::optimizer_state`](crate::reference::optimizer_state) as kernel functions.

use cubecl::prelude::*;

use crate::{
    dynamic_range_expansion::power_cube,
    fast,
    number::{
        Arithmetic, dynamic_exponent, integer,
        minifloat::{self, HALF},
        square,
    },
};

use super::{
    Moment, StateFormat,
    group::Loaded,
    group_scale::moment_bits,
    span::Span,
    table::{LOG2_ZERO, PLACES_AT},
};

const SIGN: u32 = 1 << 31;

/// The value of a code.
#[cube]
pub(super) fn decode(
    code: u32,
    scale: f32,
    power: f32,
    table: &SharedMemory<u32>,
    #[comptime] format: StateFormat,
    #[comptime] moment: Moment,
) -> f32 {
    let arithmetic = comptime!(format.encoding.arithmetic(moment));
    if comptime!(format.expand) {
        // The logarithm of the largest number is 0: the largest magnitude comes back exactly.
        let log2 = table[code as usize];
        let value = fast::exp2(f32::reinterpret(log2) * power) * scale;
        if comptime!(moment == Moment::First) {
            // The sum is an exclusive or with the last bit of the logarithm, which is the sign of the number.
            f32::reinterpret(u32::reinterpret(value) + log2 * SIGN)
        } else {
            value
        }
    } else {
        match comptime!(arithmetic) {
            Arithmetic::DynamicExponent(_) => f32::reinterpret(table[code as usize]) * scale,
            Arithmetic::Integer(_) | Arithmetic::Float(_) | Arithmetic::Square => {
                let value = magnitude(code, comptime!(moment == Moment::First), arithmetic) * scale;
                if comptime!(moment == Moment::First) {
                    f32::reinterpret(u32::reinterpret(value) | sign_bit(code, arithmetic))
                } else {
                    value
                }
            }
        }
    }
}

/// Gives back values that [`decode`] lost: however small the power, it stands for a value that is not zero. The
/// exponent 1/8 makes powers below the normal `f32`, which devices may flush.
#[cube]
pub(super) fn keep_small(
    held: &mut Array<f32>,
    loaded: &Loaded,
    table: &SharedMemory<u32>,
    #[comptime] span: Span,
    #[comptime] format: StateFormat,
    #[comptime] moment: Moment,
) {
    if loaded.power > comptime!(126.0 / format.encoding.range_log2(moment)) {
        let smallest = loaded.scale * f32::MIN_POSITIVE;
        #[unroll]
        for slot in 0..comptime!(span.held()) {
            let log2 = table[loaded.words[slot] as usize];
            if f32::reinterpret(log2) > LOG2_ZERO && f32::abs(held[slot]) < smallest {
                let sign = select(
                    comptime!(moment == Moment::First).runtime(),
                    log2 * SIGN,
                    0u32,
                );
                held[slot] = f32::reinterpret(u32::reinterpret(smallest) | sign);
            }
        }
    }
}

/// The magnitude of a code's number, `signed` telling whether some of the codes are negative.
#[cube]
pub(super) fn magnitude(
    code: u32,
    #[comptime] signed: bool,
    #[comptime] arithmetic: Arithmetic,
) -> f32 {
    match comptime!(arithmetic) {
        Arithmetic::Float(float) => {
            if comptime!(signed) {
                minifloat::decode_magnitude(code & 0x7f, float)
            } else {
                minifloat::decode_magnitude(code, float)
            }
        }
        Arithmetic::DynamicExponent(signedness) => {
            let level = dynamic_exponent::level_of(code, signedness);
            dynamic_exponent::number(level, 0, signedness)
        }
        Arithmetic::Integer(integer) => {
            f32::cast_from(min(code, comptime!(integer.codes()) - code))
        }
        Arithmetic::Square => f32::cast_from(code * code),
    }
}

/// The sign of a code's number as the sign of an `f32`.
#[cube]
pub(super) fn sign_bit(code: u32, #[comptime] arithmetic: Arithmetic) -> u32 {
    match comptime!(arithmetic) {
        Arithmetic::DynamicExponent(signedness) => {
            let negative = dynamic_exponent::is_negative(code, signedness);
            select(negative, 0x8000_0000u32, 0u32)
        }
        // Of squares nobody asks for one.
        Arithmetic::Integer(_) | Arithmetic::Float(_) | Arithmetic::Square => (code & 0x80) << 24,
    }
}

/// The random bits that round a moment, at the top of a word that both moments share.
#[cube]
pub(super) fn moment_dither(word: u32, #[comptime] moment: Moment) -> u32 {
    match comptime!(moment) {
        Moment::First => word << 16,
        Moment::Second => word & 0xffff_0000u32,
    }
}

/// The code of a value.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn encode(
    x: f32,
    inverse: f32,
    power: f32,
    nonzero_from: u32,
    dither: u32,
    zero: u32,
    table: &SharedMemory<u32>,
    #[comptime] format: StateFormat,
    #[comptime] moment: Moment,
    #[comptime] stochastic: bool,
) -> u32 {
    let bits = moment_bits(x, moment);
    let arithmetic = comptime!(format.encoding.arithmetic(moment));
    let scaled = f32::reinterpret(bits) * comptime!(format.headroom(moment)) * inverse;
    let mut number = scaled;
    if comptime!(format.expand) {
        number = power_cube(scaled, power) * comptime!(format.encoding.largest(moment));
    }
    let nearest = nearest_level(
        number,
        scaled,
        power,
        zero,
        table,
        arithmetic,
        comptime!(format.expand),
    );
    let level = if comptime!(stochastic) {
        dithered_level(number, nearest, dither, zero, arithmetic)
    } else {
        nearest
    };
    // Where the inverse is 0 the number may be NaN, and what becomes of it is of no account.
    let nonzero = bits >= nonzero_from;
    if comptime!(moment == Moment::Second) {
        select(nonzero, max(level, 1u32), 0u32)
    } else {
        signed_code(
            select(nonzero, level, 0u32),
            u32::reinterpret(x) >> 31,
            arithmetic,
        )
    }
}

/// The place among the numbers that are not negative of the one nearest to `x`, at most the largest. An `expanded` `x`,
/// which is a power of `scaled`, is not known to the last digit, and a cheaper rounding leaves half way between two
/// which of them it takes.
///
/// A minimum stands between `x`, which is a product, and every sum, so that no compiler contracts them.
#[cube]
fn nearest_level(
    x: f32,
    scaled: f32,
    power: f32,
    zero: u32,
    table: &SharedMemory<u32>,
    #[comptime] arithmetic: Arithmetic,
    #[comptime] expanded: bool,
) -> u32 {
    match comptime!(arithmetic) {
        Arithmetic::Float(float) => {
            if comptime!(expanded) {
                minifloat::cut_magnitude(x, HALF, float)
            } else {
                minifloat::encode_magnitude(x, float)
            }
        }
        Arithmetic::DynamicExponent(signedness) => {
            if comptime!(expanded) {
                let root = power_cube(scaled, power * dynamic_exponent::ROOT);
                dynamic_exponent::level_of_root(root, table, PLACES_AT, signedness)
            } else {
                dynamic_exponent::level(x, zero, table, PLACES_AT)
            }
        }
        Arithmetic::Integer(integer) => integer::level(x, integer),
        Arithmetic::Square => square::level_cube(min(x, square::LARGEST)),
    }
}

/// The place of one of the two numbers around `x`, at most the largest: of the upper one where `dither / 2^32` is below
/// the part of the way to it that `x` has gone. `nearest` is the place of the nearest. See [`nearest_level`] for the
/// minimum.
#[cube]
fn dithered_level(
    x: f32,
    nearest: u32,
    dither: u32,
    zero: u32,
    #[comptime] arithmetic: Arithmetic,
) -> u32 {
    match comptime!(arithmetic) {
        Arithmetic::Float(float) => {
            minifloat::cut_magnitude(min(x, comptime!(float.largest())), dither, float)
        }
        Arithmetic::DynamicExponent(signedness) => {
            dynamic_exponent::dithered_level(min(x, 1.0f32), nearest, dither, zero, signedness)
        }
        Arithmetic::Integer(integer) => integer::dithered_level(x, dither, integer),
        Arithmetic::Square => square::dithered_level_cube(min(x, square::LARGEST), nearest, dither),
    }
}

/// The code of a level with a sign, 1 for negative.
#[cube]
fn signed_code(level: u32, sign: u32, #[comptime] arithmetic: Arithmetic) -> u32 {
    match comptime!(arithmetic) {
        Arithmetic::Float(_) => level | (sign << 7),
        Arithmetic::DynamicExponent(signedness) => {
            dynamic_exponent::code(level, sign != 0, signedness)
        }
        Arithmetic::Integer(integer) => integer::signed_code(level, sign, integer),
        // The sign is dropped.
        Arithmetic::Square => level,
    }
}
