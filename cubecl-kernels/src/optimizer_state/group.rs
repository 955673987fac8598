//! A group's scale, and its values as codes and back: the rules of
//! [`reference::optimizer_state`](crate::reference::optimizer_state) as kernel functions.

use cubecl::prelude::*;

use crate::{
    dynamic_range_expansion::{exponent_cube, inverse_power, power_cube, power_of_exponent},
    fast,
    number::{
        Arithmetic, dynamic_exponent, integer,
        minifloat::{self, HALF},
        square,
    },
    rounding::magnitude_bits,
    scale::MIN_ABSMAX_BITS,
};

use super::{
    MIN_NONZERO, Moment, NEUTRAL_EXPONENT, StateFormat,
    arrays::StateArrays,
    span::{Span, read_held, segment_max, segment_max_in_turn, write_held},
    table::{LOG2_ZERO, PLACES_AT},
};

const INFINITY: u32 = f32::INFINITY.to_bits();
const SIGN: u32 = 1 << 31;
const NAN: u32 = f32::NAN.to_bits();
const MIN_NONZERO_BITS: u32 = MIN_NONZERO.to_bits();

/// What a group's values are encoded with.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct GroupScale {
    /// As it is stored.
    scale: f32,
    /// What values are multiplied by; 0 for "all values are 0".
    inverse: f32,
    /// `k` in eighths.
    exponent: f32,
}

/// What a unit read of a state.
#[derive(CubeType)]
pub(crate) struct Loaded {
    /// The codes, or where there is no format the bits of the values.
    words: Array<u32>,
    scale: f32,
    /// `1 / k`
    power: f32,
}

/// Reads a state, for [`decode_state`]. `format` is `None` for values that are not compressed.
#[cube]
pub(crate) fn load_state<S: Numeric, N: Size>(
    state: &StateArrays<S, N>,
    start: u32,
    len: u32,
    #[comptime] span: Span,
    #[comptime] format: Option<StateFormat>,
    #[comptime] moment: Moment,
) -> Loaded {
    let mut scale = 0.0f32;
    let mut power = 1.0f32;
    if comptime!(format.is_none()) {
        let held = read_held::<S, f32, N>(&state.values, start, len, span, 0);
        let mut words = Array::<u32>::new(comptime!(span.held()));
        #[unroll]
        for slot in 0..comptime!(span.held()) {
            words[slot] = u32::reinterpret(held[slot]);
        }
        Loaded {
            words,
            scale,
            power,
        }
    } else {
        let format = comptime!(format.unwrap());
        let fill = comptime!(format.encoding.zero(moment));
        let words = read_held::<S, u32, N>(&state.values, start, len, span, fill);
        let group = group_index(start, span, format);
        if group_exists(group, len, span, format) {
            scale = state.scales[group as usize];
            if comptime!(format.expand) {
                power = inverse_power(f32::cast_from(state.exponents[group as usize]));
            }
        }
        Loaded {
            words,
            scale,
            power,
        }
    }
}

/// The values of a state that was read, as `f32`.
#[cube]
pub(crate) fn decode_state(
    loaded: &Loaded,
    table: &SharedMemory<u32>,
    #[comptime] span: Span,
    #[comptime] format: Option<StateFormat>,
    #[comptime] moment: Moment,
) -> Array<f32> {
    let mut held = Array::<f32>::new(comptime!(span.held()));
    #[unroll]
    for slot in 0..comptime!(span.held()) {
        held[slot] = if comptime!(format.is_none()) {
            f32::reinterpret(loaded.words[slot])
        } else {
            let format = comptime!(format.unwrap());
            decode(
                loaded.words[slot],
                loaded.scale,
                loaded.power,
                table,
                format,
                moment,
            )
        };
    }
    if comptime!(format.is_some_and(|format| format.expand)) {
        keep_small(
            &mut held,
            loaded,
            table,
            span,
            comptime!(format.unwrap()),
            moment,
        );
    }
    held
}

/// Writes the values of a unit, and from one unit of each group its scale.
///
/// Where there is a format, all units of a cube must call it together. Values of a unit that lie outside the tensor
/// must be 0, and second moments not negative. `dithers` are random bits for each value, read where the rounding is
/// `stochastic`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn write_state<S: Numeric, N: Size>(
    state: &mut StateArrays<S, N>,
    table: &SharedMemory<u32>,
    held: &Array<f32>,
    group_scale: &GroupScale,
    dithers: &Array<u32>,
    start: u32,
    len: u32,
    zero: u32,
    #[comptime] span: Span,
    #[comptime] format: Option<StateFormat>,
    #[comptime] moment: Moment,
    #[comptime] stochastic: bool,
) {
    if comptime!(format.is_none()) {
        write_held::<f32, S, N>(&mut state.values, held, start, len, span);
    } else {
        let format = comptime!(format.unwrap());
        let segment = comptime!(span.segment(format.group));
        let group = group_index(start, span, format);
        if UNIT_POS % comptime!(segment as u32) == 0 && group_exists(group, len, span, format) {
            state.scales[group as usize] = group_scale.scale;
            if comptime!(format.expand) {
                state.exponents[group as usize] =
                    u8::cast_from(u32::cast_from(group_scale.exponent));
            }
        }
        let power = power_of_exponent(group_scale.exponent);
        // Magnitudes below it become 0: all of them where the inverse is 0.
        let nonzero_from = select(group_scale.inverse == 0.0, u32::MAX, MIN_NONZERO_BITS);
        let mut codes = Array::<u32>::new(comptime!(span.held()));
        #[unroll]
        for slot in 0..comptime!(span.held()) {
            let mut dither = HALF.runtime();
            if comptime!(stochastic) {
                dither = moment_dither(dithers[slot], moment);
            }
            codes[slot] = encode(
                held[slot],
                group_scale.inverse,
                power,
                nonzero_from,
                dither,
                zero,
                table,
                format,
                moment,
                stochastic,
            );
        }
        write_held::<u32, S, N>(&mut state.values, &codes, start, len, span);
    }
}

/// The group of a unit.
#[cube]
fn group_index(start: u32, #[comptime] span: Span, #[comptime] format: StateFormat) -> u32 {
    let run = start / comptime!(span.run as u32) + UNIT_POS / comptime!(span.lanes as u32);
    run / comptime!((format.group / span.run) as u32)
}

/// Whether the tensor has this group.
#[cube]
fn group_exists(
    group: u32,
    len: u32,
    #[comptime] span: Span,
    #[comptime] format: StateFormat,
) -> bool {
    if comptime!(span.whole) {
        true.runtime()
    } else {
        group < len.div_ceil(comptime!(format.group as u32))
    }
}

/// The extremes of what a unit holds, or of its group.
#[derive(CubeType, Clone, Copy)]
struct Extremes {
    /// The bits of the largest magnitude. As integers they order NaN above infinity above the rest.
    largest: u32,
    /// By how much the bits of the smallest magnitude that is not zero lie above those of [`MIN_NONZERO`], inverted so
    /// that it is the largest here: what lies below wraps around. 0 without expansion, which does not ask for it.
    smallness: u32,
}

/// The extremes of what a unit holds.
#[cube]
fn held_extremes(
    held: &Array<f32>,
    #[comptime] span: Span,
    #[comptime] format: StateFormat,
    #[comptime] moment: Moment,
) -> Extremes {
    let mut largest = 0u32;
    let mut excess = u32::MAX.runtime();
    #[unroll]
    for slot in 0..comptime!(span.held()) {
        let bits = moment_bits(held[slot], moment);
        largest = max(largest, bits);
        if comptime!(format.expand) {
            excess = min(excess, bits - MIN_NONZERO_BITS);
        }
    }
    Extremes {
        largest,
        smallness: !excess,
    }
}

/// The bits of a value's magnitude. Second moments are their magnitudes, or NaN of either sign.
#[cube]
fn moment_bits(x: f32, #[comptime] moment: Moment) -> u32 {
    match comptime!(moment) {
        Moment::First => magnitude_bits(x),
        Moment::Second => u32::reinterpret(x),
    }
}

/// The scale of a unit's group, the same in all its units. Second moments are not negative.
#[cube]
pub(crate) fn group_scale(
    held: &Array<f32>,
    zero: u32,
    #[comptime] span: Span,
    #[comptime] format: StateFormat,
    #[comptime] moment: Moment,
) -> GroupScale {
    let segment = comptime!(span.segment(format.group));
    let mut extremes = held_extremes(held, span, format, moment);
    extremes.largest = segment_max(extremes.largest, span, segment);
    if comptime!(format.expand) {
        extremes.smallness = segment_max(extremes.smallness, span, segment);
    }
    scale_of(
        &extremes,
        comptime!(format.target(moment)).runtime(),
        comptime!(format.target(moment) / format.headroom(moment)).runtime(),
        comptime!(format.encoding.range_log2(moment)).runtime(),
        zero,
        comptime!(format.expand),
    )
}

/// The scales of both moments' groups. A scale takes as many instructions as a few elements, and all units of a group
/// the same ones: where they can exchange values and groups are of one size, even units compute that of the first
/// moment and odd ones that of the second. Second moments are not negative.
#[cube]
pub(crate) fn group_scales(
    m: &Array<f32>,
    v: &Array<f32>,
    zero: u32,
    #[comptime] span: Span,
    #[comptime] first: Option<StateFormat>,
    #[comptime] second: Option<StateFormat>,
) -> (GroupScale, GroupScale) {
    let in_turn = comptime!(match (first, second) {
        (Some(first), Some(second)) => {
            span.plane.is_some()
                && span.lanes > 1
                && first.expand == second.expand
                && first.group == second.group
        }
        _ => false,
    });
    if comptime!(in_turn) {
        let first = comptime!(first.unwrap());
        let second = comptime!(second.unwrap());
        let segment = comptime!(span.segment(first.group));
        let of_m = held_extremes(m, span, first, comptime!(Moment::First));
        let of_v = held_extremes(v, span, second, comptime!(Moment::Second));
        let odd = UNIT_POS % 2 == 1;
        let mut extremes = Extremes {
            largest: 0u32,
            smallness: 0u32,
        };
        // Where there is one extreme alone, what this saves is less than what the registers for it cost.
        if comptime!(first.expand) {
            extremes.largest = segment_max_in_turn(of_m.largest, of_v.largest, span, segment);
            extremes.smallness = segment_max_in_turn(of_m.smallness, of_v.smallness, span, segment);
        } else {
            let of_m = segment_max(of_m.largest, span, segment);
            let of_v = segment_max(of_v.largest, span, segment);
            extremes.largest = select(odd, of_v, of_m);
        }
        let mine = scale_of(
            &extremes,
            select(
                odd,
                comptime!(second.target(Moment::Second)).runtime(),
                comptime!(first.target(Moment::First)).runtime(),
            ),
            select(
                odd,
                comptime!(second.target(Moment::Second) / second.headroom(Moment::Second))
                    .runtime(),
                comptime!(first.target(Moment::First) / first.headroom(Moment::First)).runtime(),
            ),
            select(
                odd,
                comptime!(second.encoding.range_log2(Moment::Second)).runtime(),
                comptime!(first.encoding.range_log2(Moment::First)).runtime(),
            ),
            zero,
            comptime!(first.expand),
        );
        let other = GroupScale {
            scale: plane_shuffle_xor(mine.scale, 1),
            inverse: plane_shuffle_xor(mine.inverse, 1),
            exponent: plane_shuffle_xor(mine.exponent, 1),
        };
        (either(odd, &other, &mine), either(odd, &mine, &other))
    } else {
        (
            any_scale(m, zero, span, first, comptime!(Moment::First)),
            any_scale(v, zero, span, second, comptime!(Moment::Second)),
        )
    }
}

#[cube]
fn either(condition: bool, a: &GroupScale, b: &GroupScale) -> GroupScale {
    GroupScale {
        scale: select(condition, a.scale, b.scale),
        inverse: select(condition, a.inverse, b.inverse),
        exponent: select(condition, a.exponent, b.exponent),
    }
}

/// [`group_scale`], or without a format one that nobody reads.
#[cube]
fn any_scale(
    held: &Array<f32>,
    zero: u32,
    #[comptime] span: Span,
    #[comptime] format: Option<StateFormat>,
    #[comptime] moment: Moment,
) -> GroupScale {
    if comptime!(format.is_none()) {
        GroupScale {
            scale: 0.0f32,
            inverse: 0.0f32,
            exponent: 0.0f32,
        }
    } else {
        group_scale(held, zero, span, comptime!(format.unwrap()), moment)
    }
}

/// The scale of a group with these extremes, from [`StateFormat::target`], the target over the headroom, and the
/// encoding's [`range_log2`](super::Encoding::range_log2).
#[cube]
fn scale_of(
    extremes: &Extremes,
    target: f32,
    inverse_target: f32,
    range_log2: f32,
    zero: u32,
    #[comptime] expand: bool,
) -> GroupScale {
    let mut group = GroupScale {
        scale: 0.0f32,
        inverse: 0.0f32,
        exponent: comptime!(NEUTRAL_EXPONENT as f32).runtime(),
    };
    if extremes.largest >= INFINITY {
        // Or-ing keeps it an expression of a variable: the CUDA compiler cannot reinterpret a constant.
        group.scale = f32::reinterpret(extremes.largest | NAN);
    } else if extremes.largest >= MIN_ABSMAX_BITS {
        let absmax = f32::reinterpret(extremes.largest);
        if comptime!(expand) {
            let smallest = !extremes.smallness + MIN_NONZERO_BITS;
            group.scale = absmax;
            group.exponent = exponent_cube(absmax, f32::reinterpret(smallest), zero, range_log2);
            // A quarter of each, so that the divisor is one that the quotient allows.
            group.inverse = fast::quotient(inverse_target * 0.25f32, absmax * 0.25f32);
        } else {
            group.scale = absmax / target;
            group.inverse = inverse_target / absmax;
        }
    }
    group
}

/// The value of a code.
#[cube]
fn decode(
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
fn keep_small(
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
fn moment_dither(word: u32, #[comptime] moment: Moment) -> u32 {
    match comptime!(moment) {
        Moment::First => word << 16,
        Moment::Second => word & 0xffff_0000u32,
    }
}

/// The code of a value.
#[cube]
#[allow(clippy::too_many_arguments)]
fn encode(
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
