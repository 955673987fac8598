//! The reading and writing of a state, group by group.

use cubecl::prelude::*;

use crate::{
    dynamic_range_expansion::{inverse_power, power_of_exponent},
    number::minifloat::HALF,
};

use super::{
    Moment, StateFormat,
    arrays::StateArrays,
    code::{decode, encode, keep_small, moment_dither},
    group_scale::{GroupScale, MIN_NONZERO_BITS},
    span::{Span, read_held, write_held},
};

/// The part of a state that a unit has read.
#[derive(CubeType)]
pub(crate) struct Loaded {
    /// The codes, or where there is no format the bits of the values.
    pub words: Array<u32>,
    pub scale: f32,
    /// `1 / k`
    pub power: f32,
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

/// True where the tensor has this group.
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
