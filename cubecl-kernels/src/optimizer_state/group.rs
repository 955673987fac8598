//! A group's scale, and its values as codes and back: the rules of
//! [`reference::optimizer_state`](crate::reference::optimizer_state) as kernel functions.

use cubecl::prelude::*;

use crate::{
    dynamic_exponent,
    dynamic_range_expansion::{exponent_cube, inverse_power, power_cube, power_of_exponent},
    float8,
    format::MIN_ABSMAX,
    rounding::{ROUND_TO_EVEN, magnitude_bits},
};

use super::{
    Codec, MIN_NONZERO, Moment, NEUTRAL_EXPONENT, StateFormat,
    span::{Span, read_held, segment_max, write_held},
};

const INFINITY: u32 = f32::INFINITY.to_bits();
const NAN: u32 = f32::NAN.to_bits();
const MIN_ABSMAX_BITS: u32 = MIN_ABSMAX.to_bits();
const MIN_NONZERO_BITS: u32 = MIN_NONZERO.to_bits();
const ROUND_TO_EVEN_BITS: u32 = ROUND_TO_EVEN.to_bits();

/// What a group's values are encoded with.
#[derive(CubeType, Clone, Copy)]
struct GroupScale {
    /// As it is stored.
    scale: f32,
    /// What values are multiplied by; 0 for "all values are 0".
    inverse: f32,
    /// `k` in eighths.
    exponent: f32,
}

/// Reads the values of a unit as `f32`. `format` is `None` for values that are not compressed.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn read_state<S: Numeric, N: Size>(
    values: &Tensor<Vector<S, N>>,
    scales: &Tensor<f32>,
    exponents: &Tensor<u8>,
    start: u32,
    len: u32,
    #[comptime] span: Span,
    #[comptime] width: usize,
    #[comptime] format: Option<StateFormat>,
    #[comptime] moment: Moment,
) -> Array<f32> {
    if comptime!(format.is_none()) {
        read_held::<S, f32, N>(values, start, len, span, width, 0)
    } else {
        let format = comptime!(format.unwrap());
        let fill = comptime!(format.encoding.zero(moment));
        let codes = read_held::<S, u32, N>(values, start, len, span, width, fill);
        let group = group_index(start, span, format);
        let mut scale = 0.0f32;
        let mut power = 1.0f32;
        if group < len.div_ceil(comptime!(format.group as u32)) {
            scale = scales[group as usize];
            if comptime!(format.expand) {
                power = inverse_power(f32::cast_from(exponents[group as usize]));
            }
        }
        let mut held = Array::<f32>::new(comptime!(span.held()));
        #[unroll]
        for slot in 0..comptime!(span.held()) {
            held[slot] = decode(codes[slot], scale, power, format, moment);
        }
        held
    }
}

/// Writes the values of a unit, and from one unit of each group its scale.
///
/// Where there is a format, all units of a cube must call it together. Values of a unit that lie outside the tensor must
/// be 0.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn write_state<S: Numeric, N: Size>(
    values: &mut Tensor<Vector<S, N>>,
    scales: &mut Tensor<f32>,
    exponents: &mut Tensor<u8>,
    held: &Array<f32>,
    start: u32,
    len: u32,
    zero: u32,
    #[comptime] span: Span,
    #[comptime] width: usize,
    #[comptime] format: Option<StateFormat>,
    #[comptime] moment: Moment,
) {
    if comptime!(format.is_none()) {
        write_held::<f32, S, N>(values, held, start, len, span, width);
    } else {
        let format = comptime!(format.unwrap());
        let segment = comptime!(span.segment(format.group));
        let group_scale = group_scale(held, zero, span, format, moment);
        let group = group_index(start, span, format);
        if UNIT_POS % comptime!(segment as u32) == 0
            && group < len.div_ceil(comptime!(format.group as u32))
        {
            scales[group as usize] = group_scale.scale;
            if comptime!(format.expand) {
                exponents[group as usize] = u8::cast_from(u32::cast_from(group_scale.exponent));
            }
        }
        let power = power_of_exponent(group_scale.exponent);
        let mut codes = Array::<u32>::new(comptime!(span.held()));
        #[unroll]
        for slot in 0..comptime!(span.held()) {
            codes[slot] = encode(held[slot], group_scale.inverse, power, zero, format, moment);
        }
        write_held::<u32, S, N>(values, &codes, start, len, span, width);
    }
}

/// The group of a unit.
#[cube]
fn group_index(start: u32, #[comptime] span: Span, #[comptime] format: StateFormat) -> u32 {
    let run = start / comptime!(span.run as u32) + UNIT_POS / comptime!(span.lanes as u32);
    run / comptime!((format.group / span.run) as u32)
}

/// The scale of a unit's group, the same in all its units.
#[cube]
fn group_scale(
    held: &Array<f32>,
    zero: u32,
    #[comptime] span: Span,
    #[comptime] format: StateFormat,
    #[comptime] moment: Moment,
) -> GroupScale {
    let segment = comptime!(span.segment(format.group));
    let mut largest = 0u32;
    // The largest complement of a nonzero magnitude: its complement is the smallest.
    let mut complement = 0u32;
    #[unroll]
    for slot in 0..comptime!(span.held()) {
        let bits = magnitude_bits(held[slot]);
        largest = max(largest, bits);
        if comptime!(format.expand) {
            complement = max(
                complement,
                select(bits >= MIN_NONZERO_BITS, u32::MAX - bits, 0u32),
            );
        }
    }
    largest = segment_max(largest, span, segment);
    let mut group = GroupScale {
        scale: 0.0f32,
        inverse: 0.0f32,
        exponent: comptime!(NEUTRAL_EXPONENT as f32).runtime(),
    };
    if comptime!(format.expand) {
        complement = segment_max(complement, span, segment);
    }
    if largest >= INFINITY {
        // Or-ing keeps it an expression of a variable: the CUDA compiler cannot reinterpret a constant.
        group.scale = f32::reinterpret(largest | NAN);
    } else if largest >= MIN_ABSMAX_BITS {
        let absmax = f32::reinterpret(largest);
        let target = comptime!(format.target(moment)).runtime();
        if comptime!(format.expand) {
            let smallest = f32::reinterpret(u32::MAX - complement);
            let range = comptime!(format.encoding.range_log2(moment));
            group.scale = absmax;
            group.exponent = exponent_cube(absmax, smallest, zero, range);
        } else {
            group.scale = absmax / target;
        }
        group.inverse = comptime!(format.target(moment) / format.headroom(moment)) / absmax;
    }
    group
}

/// The value of a code.
#[cube]
fn decode(
    code: u32,
    scale: f32,
    power: f32,
    #[comptime] format: StateFormat,
    #[comptime] moment: Moment,
) -> f32 {
    let codec = comptime!(format.encoding.codec(moment));
    let magnitude = magnitude(code, comptime!(moment == Moment::First), codec);
    let mut value = magnitude * scale;
    if comptime!(format.expand) {
        let largest = comptime!(format.encoding.largest(moment));
        // However small the power, it stands for a value that is not zero, and no device flushes a normal number.
        let raised = max(
            power_cube(magnitude * comptime!(1.0 / largest), power),
            f32::MIN_POSITIVE,
        );
        // The largest magnitude comes back exactly, however the device rounds powers.
        let base = select(magnitude >= largest, 1.0f32, raised);
        value = select(magnitude == 0.0, 0.0f32, base) * scale;
    }
    if comptime!(moment == Moment::First) {
        value = f32::reinterpret(u32::reinterpret(value) | sign_bit(code, codec));
    }
    value
}

/// The magnitude of a code's number, `signed` telling whether some of the codes are negative.
#[cube]
fn magnitude(code: u32, #[comptime] signed: bool, #[comptime] codec: Codec) -> f32 {
    match comptime!(codec) {
        Codec::Float(format) => {
            if comptime!(signed) {
                float8::decode_magnitude(code & 0x7f, format)
            } else {
                float8::decode_magnitude(code, format)
            }
        }
        Codec::Dynamic(signedness) => {
            dynamic_exponent::number(dynamic_exponent::level_of(code, signedness), signedness)
        }
        Codec::Integer => f32::cast_from(min(code, 256 - code)),
        Codec::Square => f32::cast_from(code * code),
    }
}

/// The sign of a code's number as the sign of an `f32`.
#[cube]
fn sign_bit(code: u32, #[comptime] codec: Codec) -> u32 {
    match comptime!(codec) {
        Codec::Dynamic(signedness) => {
            let negative = dynamic_exponent::is_negative(code, signedness);
            select(negative, 0x8000_0000u32, 0u32)
        }
        _ => (code & 0x80) << 24,
    }
}

/// The code of a value.
#[cube]
fn encode(
    x: f32,
    inverse: f32,
    power: f32,
    zero: u32,
    #[comptime] format: StateFormat,
    #[comptime] moment: Moment,
) -> u32 {
    let bits = magnitude_bits(x);
    let mut number = f32::reinterpret(bits) * comptime!(format.headroom(moment)) * inverse;
    if comptime!(format.expand) {
        number = power_cube(number, power) * comptime!(format.encoding.largest(moment));
    }
    let codec = comptime!(format.encoding.codec(moment));
    // Where the inverse is 0 the number may be NaN, and what becomes of it is of no account.
    let nonzero = bits >= MIN_NONZERO_BITS && inverse != 0.0;
    let level = select(nonzero, magnitude_level(number, zero, codec), 0u32);
    if comptime!(moment == Moment::Second) {
        max(level, select(nonzero, 1u32, 0u32))
    } else {
        signed_code(level, u32::reinterpret(x) >> 31, codec)
    }
}

/// The place among the numbers that are not negative of the one nearest to `x`, at most the largest.
///
/// A minimum stands between `x`, which is a product, and every sum, so that no compiler contracts them.
#[cube]
fn magnitude_level(x: f32, zero: u32, #[comptime] codec: Codec) -> u32 {
    match comptime!(codec) {
        Codec::Float(format) => float8::encode_magnitude(x, format),
        Codec::Dynamic(signedness) => dynamic_exponent::level(x, zero, signedness),
        Codec::Integer => u32::reinterpret(min(x, 127.0f32) + ROUND_TO_EVEN) - ROUND_TO_EVEN_BITS,
        Codec::Square => square_level(min(x, 65_025.0f32)),
    }
}

/// The integer nearest to the root of `x`, a half rounded up.
///
/// The device's root may be off by a little; the squares that decide are exact.
#[cube]
fn square_level(x: f32) -> u32 {
    let estimate = (x.sqrt() + 0.5f32).floor();
    let below = (estimate - 0.5f32) * (estimate - 0.5f32);
    let above = (estimate + 0.5f32) * (estimate + 0.5f32);
    let level = u32::cast_from(estimate);
    let raised = select(x >= above, level + 1, level);
    select(x < below && level > 0, level - 1, raised)
}

/// The code of a level with a sign, 1 for negative.
#[cube]
fn signed_code(level: u32, sign: u32, #[comptime] codec: Codec) -> u32 {
    match comptime!(codec) {
        Codec::Float(_) => level | (sign << 7),
        Codec::Dynamic(signedness) => dynamic_exponent::code(level, sign != 0, signedness),
        Codec::Integer | Codec::Square => select(sign != 0, (256 - level) & 0xff, level),
    }
}
