//! The scale of a group: from its extremes to the numbers that its values are encoded with.

use cubecl::prelude::*;

use crate::{
    dynamic_range_expansion::exponent_cube, fast, rounding::magnitude_bits, scale::MIN_ABSMAX_BITS,
};

use super::{
    MIN_NONZERO, Moment, NEUTRAL_EXPONENT, StateFormat,
    span::{Span, segment_max, segment_max_in_turn},
};

const INFINITY: u32 = f32::INFINITY.to_bits();
const NAN: u32 = f32::NAN.to_bits();
pub(super) const MIN_NONZERO_BITS: u32 = MIN_NONZERO.to_bits();

/// The numbers that a group's values are encoded with.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct GroupScale {
    /// As it is stored.
    pub scale: f32,
    /// The factor of values; 0 for "all values are 0".
    pub inverse: f32,
    /// `k` in eighths.
    pub exponent: f32,
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
pub(super) fn moment_bits(x: f32, #[comptime] moment: Moment) -> u32 {
    match comptime!(moment) {
        Moment::First => magnitude_bits(x),
        Moment::Second => u32::reinterpret(x),
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
