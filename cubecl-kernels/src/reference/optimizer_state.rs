//! The specification of [`optimizer_state`](crate::optimizer_state): what a device does to a group, and what a backend
//! without kernels runs. Groups are independent, and nothing here allocates but [`quantize_state`] and
//! [`dequantize_state`].
//!
//! Without expansion the codes are specified to the bit. With it they are as good as the powers: where a value lies
//! half way between two codes, another implementation of the logarithm and the exponential may take the other one.
//! Scales and exponents are specified to the bit in either case.

use crate::{
    dynamic_range_expansion::{contract, expand, exponent},
    number::{Integer, Minifloat, Signedness, square},
    optimizer_state::{Encoding, MIN_NONZERO, Moment, NEUTRAL_EXPONENT, StateFormat},
    philox::uniform16,
    scale::MIN_ABSMAX,
};

/// The scale and the power of a group's codes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupScale {
    /// `largest magnitude / largest number`; with expansion the largest magnitude. 0 for a group of zeros, NaN for one
    /// that is not finite.
    pub scale: f32,
    /// `k` in eighths. Without expansion it has no meaning and is 8.
    pub exponent: u8,
}

/// A state in memory of the host.
#[derive(Debug, Clone, PartialEq)]
pub struct HostState {
    /// One code for each element.
    pub codes: Vec<u8>,
    /// One scale for each group.
    pub scales: Vec<f32>,
    /// One exponent for each group, in eighths; empty without expansion.
    pub exponents: Vec<u8>,
}

/// Compresses one moment of a flattened tensor.
///
/// # Panics
///
/// When a group has no elements.
pub fn quantize_state(x: &[f32], format: StateFormat, moment: Moment) -> HostState {
    assert!(
        format.group > 0,
        "quantize_state: {format:?}; use a group of at least one element"
    );
    let mut codes = vec![0; x.len()];
    let (scales, exponents): (Vec<f32>, Vec<u8>) = x
        .chunks(format.group)
        .zip(codes.chunks_mut(format.group))
        .map(|(x, codes)| {
            let group = quantize_group(x, format, moment, codes);
            (group.scale, group.exponent)
        })
        .unzip();
    HostState {
        codes,
        scales,
        exponents: if format.expand { exponents } else { Vec::new() },
    }
}

/// The values of a state.
///
/// # Panics
///
/// When there are fewer scales, or with expansion exponents, than groups.
pub fn dequantize_state(state: &HostState, format: StateFormat, moment: Moment) -> Vec<f32> {
    let mut x = vec![0.0; state.codes.len()];
    dequantize_groups(
        &state.codes,
        &state.scales,
        &state.exponents,
        format,
        moment,
        &mut x,
    );
    x
}

/// The values of consecutive groups, with the scales and, under expansion, the exponents of the first one and those
/// behind it.
pub(super) fn dequantize_groups(
    codes: &[u8],
    scales: &[f32],
    exponents: &[u8],
    format: StateFormat,
    moment: Moment,
    x: &mut [f32],
) {
    let groups = codes.chunks(format.group).zip(x.chunks_mut(format.group));
    for (index, (codes, x)) in groups.enumerate() {
        let group = GroupScale {
            scale: scales[index],
            exponent: if format.expand {
                exponents[index]
            } else {
                NEUTRAL_EXPONENT
            },
        };
        dequantize_group(codes, group, format, moment, x);
    }
}

/// Compresses one group, to nearest: as many codes as values.
pub fn quantize_group(
    x: &[f32],
    format: StateFormat,
    moment: Moment,
    codes: &mut [u8],
) -> GroupScale {
    encode_group(x, None, format, moment, codes)
}

/// Compresses one group, each value to one of the two numbers around it: to the upper one where the value's dither, of
/// 32 bits, is below the part of the way to it that the value has gone. With random dithers the mean of what a value
/// becomes is the value; with expansion that holds of its power.
///
/// # Panics
///
/// When there are fewer dithers than values.
pub fn quantize_group_dithered(
    x: &[f32],
    dithers: &[u32],
    format: StateFormat,
    moment: Moment,
    codes: &mut [u8],
) -> GroupScale {
    encode_group(x, Some(dithers), format, moment, codes)
}

fn encode_group(
    x: &[f32],
    dithers: Option<&[u32]>,
    format: StateFormat,
    moment: Moment,
    codes: &mut [u8],
) -> GroupScale {
    let (group, inverse) = group_scale(x, format, moment);
    let largest = format.encoding.largest(moment);
    let headroom = format.headroom(moment);
    let number = |magnitude: f32| {
        let scaled = magnitude * headroom * inverse;
        if format.expand {
            // A ratio below the range of `f32` is not zero all the same.
            expand(scaled.max(f32::MIN_POSITIVE), group.exponent) * largest
        } else {
            scaled
        }
    };
    let values = Values {
        x,
        dithers,
        inverse,
        moment,
    };
    // Each number gets a loop of its own, compiled for its constants.
    match (format.encoding, moment) {
        (Encoding::E4M3, Moment::First | Moment::Second) => {
            values.encode_floats(codes, number, Minifloat::E4M3)
        }
        (Encoding::E5M2, Moment::First | Moment::Second) => {
            values.encode_floats(codes, number, Minifloat::E5M2)
        }
        (Encoding::DynamicExponent, Moment::First) => {
            values.encode_dynamic_exponents(codes, number, Signedness::Signed);
        }
        (Encoding::DynamicExponent, Moment::Second) => {
            values.encode_dynamic_exponents(codes, number, Signedness::Unsigned);
        }
        (Encoding::Int8, Moment::First) => values.encode_integers(codes, number, Integer::INT8),
        (Encoding::Int8, Moment::Second) => values.encode_squares(codes, number),
    }
    group
}

/// The values of one group: as many as codes.
pub fn dequantize_group(
    codes: &[u8],
    group: GroupScale,
    format: StateFormat,
    moment: Moment,
    x: &mut [f32],
) {
    match (format.encoding, moment) {
        (Encoding::E4M3, Moment::First | Moment::Second) => {
            decode_floats(codes, group, format, moment, x, Minifloat::E4M3)
        }
        (Encoding::E5M2, Moment::First | Moment::Second) => {
            decode_floats(codes, group, format, moment, x, Minifloat::E5M2)
        }
        (Encoding::DynamicExponent, Moment::First) => {
            each_value(codes, group, format, moment, x, |code| {
                Signedness::Signed.decode(code)
            });
        }
        (Encoding::DynamicExponent, Moment::Second) => {
            each_value(codes, group, format, moment, x, |code| {
                Signedness::Unsigned.decode(code)
            });
        }
        (Encoding::Int8, Moment::First) => {
            each_value(codes, group, format, moment, x, |code| {
                Integer::INT8.decode(u32::from(code))
            });
        }
        (Encoding::Int8, Moment::Second) => {
            each_value(codes, group, format, moment, x, |code| {
                square::decode(u32::from(code))
            });
        }
    }
}

/// States hold no codes that are not finite, so that there is none to look for.
#[inline(always)]
fn decode_floats(
    codes: &[u8],
    group: GroupScale,
    format: StateFormat,
    moment: Moment,
    x: &mut [f32],
    float: Minifloat,
) {
    each_value(codes, group, format, moment, x, |code| {
        let magnitude = float.decode_magnitude(u32::from(code) & float.magnitude());
        if u32::from(code) & float.sign() == 0 {
            magnitude
        } else {
            -magnitude
        }
    });
}

/// The scale of a group, and what its values are multiplied by; 0 for "all values are 0".
fn group_scale(x: &[f32], format: StateFormat, moment: Moment) -> (GroupScale, f32) {
    let magnitudes = || x.iter().map(|x| x.to_bits() & 0x7fff_ffff);
    // By the order of the bits NaN lies above infinity above the rest.
    let largest = f32::from_bits(magnitudes().max().unwrap_or_default());
    let mut group = GroupScale {
        scale: 0.0,
        exponent: NEUTRAL_EXPONENT,
    };
    if !largest.is_finite() {
        group.scale = f32::NAN;
        return (group, 0.0);
    }
    if largest < MIN_ABSMAX {
        return (group, 0.0);
    }
    let target = format.target(moment);
    if format.expand {
        let nonzero = magnitudes().filter(|&bits| bits >= MIN_NONZERO.to_bits());
        let smallest = f32::from_bits(nonzero.min().unwrap_or(largest.to_bits()));
        group.scale = largest;
        group.exponent = exponent(largest, smallest, format.encoding.range_log2(moment));
    } else {
        group.scale = largest / target;
    }
    (group, target / format.headroom(moment) / largest)
}

/// The values of a group on the way to their codes.
struct Values<'a> {
    x: &'a [f32],
    /// One for each value; `None`: to nearest.
    dithers: Option<&'a [u32]>,
    inverse: f32,
    moment: Moment,
}

impl Values<'_> {
    #[inline(always)]
    fn encode_floats(&self, codes: &mut [u8], number: impl Fn(f32) -> f32, float: Minifloat) {
        self.encode(
            codes,
            |magnitude| float.encode_magnitude(number(magnitude)),
            |magnitude, dither| float.cut_magnitude(number(magnitude).min(float.largest()), dither),
            |level, negative| level as u8 | u8::from(negative) << float.sign_shift(),
        );
    }

    #[inline(always)]
    fn encode_dynamic_exponents(
        &self,
        codes: &mut [u8],
        number: impl Fn(f32) -> f32,
        signedness: Signedness,
    ) {
        self.encode(
            codes,
            |magnitude| signedness.level(number(magnitude)),
            |magnitude, dither| signedness.dithered_level(number(magnitude).min(1.0), dither),
            |level, negative| signedness.code(level, negative),
        );
    }

    #[inline(always)]
    fn encode_integers(&self, codes: &mut [u8], number: impl Fn(f32) -> f32, integer: Integer) {
        let largest = integer.largest() as f32;
        self.encode(
            codes,
            |magnitude| number(magnitude).min(largest).round_ties_even() as u32,
            |magnitude, dither| (number(magnitude).min(largest) + uniform16(dither)).floor() as u32,
            |level, negative| integer.code(level, negative) as u8,
        );
    }

    #[inline(always)]
    fn encode_squares(&self, codes: &mut [u8], number: impl Fn(f32) -> f32) {
        self.encode(
            codes,
            |magnitude| square::level(number(magnitude).min(square::LARGEST)),
            |magnitude, dither| {
                square::dithered_level(number(magnitude).min(square::LARGEST), dither)
            },
            |level, _| level as u8,
        );
    }

    /// `nearest` and `dithered` give the place of a magnitude among the encoding's, `code` the code of a place with a
    /// sign.
    #[inline(always)]
    fn encode(
        &self,
        codes: &mut [u8],
        nearest: impl Fn(f32) -> u32,
        dithered: impl Fn(f32, u32) -> u32,
        code: impl Fn(u32, bool) -> u8,
    ) {
        match self.dithers {
            None => self.each(codes, |magnitude, _| nearest(magnitude), code),
            Some(dithers) => {
                assert!(dithers.len() >= self.x.len(), "a dither for each value");
                self.each(
                    codes,
                    |magnitude, index| dithered(magnitude, dithers[index]),
                    code,
                );
            }
        }
    }

    #[inline(always)]
    fn each(
        &self,
        codes: &mut [u8],
        level: impl Fn(f32, usize) -> u32,
        code: impl Fn(u32, bool) -> u8,
    ) {
        for (index, (x, out)) in self.x.iter().zip(codes).enumerate() {
            let magnitude = x.abs();
            let nonzero = magnitude >= MIN_NONZERO && self.inverse != 0.0;
            let level = if nonzero { level(magnitude, index) } else { 0 };
            *out = match self.moment {
                Moment::First => code(level, x.is_sign_negative()),
                Moment::Second => code(level.max(u32::from(nonzero)), false),
            };
        }
    }
}

#[inline]
fn each_value(
    codes: &[u8],
    group: GroupScale,
    format: StateFormat,
    moment: Moment,
    x: &mut [f32],
    number: impl Fn(u8) -> f32,
) {
    let largest = format.encoding.largest(moment);
    for (&code, x) in codes.iter().zip(x) {
        let number = number(code);
        *x = if !format.expand {
            number * group.scale
        } else if number.abs() >= largest {
            group.scale.copysign(number)
        } else {
            let base = number.abs() * (1.0 / largest);
            (contract(base, group.exponent) * group.scale).copysign(number)
        };
    }
}
