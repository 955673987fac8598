//! Tables in shared memory, in which a cube looks up numbers instead of computing them for each element.
//!
//! | entries | of | hold |
//! | --- | --- | --- |
//! | 256, by code | an expanded format | the bits of `log2(magnitude / largest number)`, the last one the sign |
//! | 256, by code | the dynamic exponent | the bits of the number |
//! | 283, behind them | the dynamic exponent | what finds the segment of a number: see [`dynamic_exponent::level`] |
//! | 257 or 513, instead | the same, expanded | what finds its place: see [`dynamic_exponent::level_of_root`] |
//!
//! The lanes of a plane meet in a bank three or four times, which still is far cheaper than the arithmetic.

use cubecl::prelude::*;

use crate::{
    fast,
    number::{
        Arithmetic,
        dynamic_exponent::{self, SEGMENT_TABLE},
    },
};

use super::{
    Encoding, Moment, StateFormat,
    code::{magnitude, sign_bit},
    span::UNITS,
};

const CODES: usize = 256;
/// The logarithm of zero: any multiple of it by a power has the exponential 0. Its last bit is 0, and with the sign it
/// is a little less.
pub(super) const LOG2_ZERO: f32 = -1e30;

/// True where a format has a table, the same for both moments.
pub(super) fn is_needed(format: Option<StateFormat>) -> bool {
    format.is_some_and(|format| format.expand || format.encoding == Encoding::DynamicExponent)
}

fn len(format: Option<StateFormat>, moment: Moment) -> usize {
    match format {
        Some(format) if is_needed(Some(format)) => {
            let places = match format.encoding.arithmetic(moment) {
                Arithmetic::DynamicExponent(signedness) if format.expand => signedness.root_table(),
                Arithmetic::DynamicExponent(_) => SEGMENT_TABLE,
                Arithmetic::Integer(_) | Arithmetic::Float(_) | Arithmetic::Square => 0,
            };
            CODES + places
        }
        _ => 1,
    }
}

/// The table of a moment's format. All units of the cube call it and then synchronize.
#[cube]
#[allow(clippy::single_match, reason = "kernels have no if let")]
pub(crate) fn fill_table(
    #[comptime] format: Option<StateFormat>,
    #[comptime] moment: Moment,
) -> SharedMemory<u32> {
    let mut table = SharedMemory::<u32>::new(comptime!(len(format, moment)));
    if comptime!(is_needed(format)) {
        comptime!(assert!(
            UNITS == CODES,
            "a unit fills the entry of one code"
        ));
        let format = comptime!(format.unwrap());
        let arithmetic = comptime!(format.encoding.arithmetic(moment));
        let code = UNIT_POS;
        let magnitude = magnitude(code, comptime!(moment == Moment::First), arithmetic);
        if comptime!(format.expand) {
            let largest = comptime!(format.encoding.largest(moment));
            let log2 = fast::log2(magnitude * comptime!(1.0 / largest));
            let below_largest = select(magnitude == 0.0, LOG2_ZERO, log2);
            let log2 = select(magnitude < largest, below_largest, 0.0f32);
            let sign = sign_bit(code, arithmetic) >> 31;
            table[code as usize] = u32::reinterpret(log2) & !1u32 | sign;
        } else {
            table[code as usize] = u32::reinterpret(magnitude) | sign_bit(code, arithmetic);
        }
        match comptime!(arithmetic) {
            Arithmetic::DynamicExponent(signedness) => {
                if comptime!(format.expand) {
                    dynamic_exponent::fill_roots(&mut table, PLACES_AT, signedness);
                } else {
                    dynamic_exponent::fill_segments(&mut table, PLACES_AT, signedness);
                }
            }
            Arithmetic::Integer(_) | Arithmetic::Float(_) | Arithmetic::Square => {}
        }
    }
    table
}

/// The first entry that finds the place of a number.
pub(crate) const PLACES_AT: u32 = CODES as u32;
