//! Numbers by their definitions, in exact arithmetic: what [`Number`] computes from bits.

use crate::{number::Number, rounding::STOCHASTIC_OFFSET};

/// The definition of a number format.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Definition {
    /// The integers up to this magnitude. A code is the integer itself.
    Integer {
        /// The largest of them.
        largest: i32,
    },
    /// Floats: `(-1)^sign * 2^(exponent - bias) * (1 + mantissa / 2^M)`, and for exponent 0 the subnormal numbers
    /// `(-1)^sign * 2^(1 - bias) * mantissa / 2^M`. A code has the sign above the exponent above the mantissa.
    Float {
        /// Bits of the exponent, `E`.
        exponent_bits: u32,
        /// Bits of the mantissa, `M`.
        mantissa_bits: u32,
        /// The largest number. Codes above its own are infinity, where the mantissa is 0, or NaN.
        largest: f64,
    },
}

impl Definition {
    /// The definition of a number that matrices hold (OCP OFP8, section 5; OCP Microscaling Formats, section 5.3).
    ///
    /// # Panics
    ///
    /// When the number is not symmetric.
    pub fn of(number: Number) -> Self {
        let float = |exponent_bits, mantissa_bits, largest| Self::Float {
            exponent_bits,
            mantissa_bits,
            largest,
        };
        match number {
            Number::Int4 => Self::Integer { largest: 7 },
            Number::Int8 => Self::Integer { largest: 127 },
            Number::Int10 => Self::Integer { largest: 511 },
            Number::E2M1 => float(2, 1, 6.0),
            Number::E3M0 => float(3, 0, 16.0),
            Number::E4M3 => float(4, 3, 448.0),
            Number::E5M2 => float(5, 2, 57_344.0),
            Number::DynamicExponent(_) | Number::Square => {
                panic!("{number:?} is not symmetric; matrices hold integers and floats")
            }
        }
    }

    /// The largest number.
    pub fn largest(&self) -> f32 {
        match *self {
            Self::Integer { largest } => largest as f32,
            Self::Float { largest, .. } => largest as f32,
        }
    }

    /// The number of a code.
    pub fn value(&self, code: i32) -> f64 {
        let Self::Float {
            exponent_bits,
            mantissa_bits,
            largest,
        } = *self
        else {
            return f64::from(code);
        };
        let bias = (1 << (exponent_bits - 1)) - 1;
        let exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1);
        let mantissa = code & ((1 << mantissa_bits) - 1);
        let sign = if code >> (exponent_bits + mantissa_bits) & 1 == 1 {
            -1.0
        } else {
            1.0
        };
        let fraction = f64::from(mantissa) / f64::from(1 << mantissa_bits);
        let magnitude = match exponent {
            0 => 2f64.powi(1 - bias) * fraction,
            _ => 2f64.powi(exponent - bias) * (1.0 + fraction),
        };
        match (magnitude > largest, mantissa) {
            (false, _) => sign * magnitude,
            (true, 0) => sign * f64::INFINITY,
            (true, _) => f64::NAN,
        }
    }

    /// The code of a value in units of the scale.
    ///
    /// Values beyond the largest number become the largest number. NaN becomes the NaN of all ones, or 0 where there is
    /// none. `u` is the random number in `[0, 1)` of stochastic rounding, a multiple of 2^-15; without it the value is
    /// rounded to the nearest number, of two equally near ones to that with an even code.
    ///
    /// Stochastically, an *integer* is the floor of the value plus `u`, by way of [`STOCHASTIC_OFFSET`], in `f32`. A
    /// *float* has the magnitude of the number below the value, or of the one above it where the part of the way to it
    /// that the value has gone, plus `u + 2^-16`, is at least 1: with the middle of the interval that `u` stands for.
    /// Below the smallest normal number the value is first rounded to a multiple of 2^-23 of that number.
    pub fn code(&self, v: f32, u: Option<f32>) -> i32 {
        match *self {
            Self::Integer { largest } => integer_code(v, largest, u),
            Self::Float {
                exponent_bits,
                mantissa_bits,
                largest,
            } => {
                let sign = i32::from(v.is_sign_negative()) << (exponent_bits + mantissa_bits);
                let all_ones = (1 << (exponent_bits + mantissa_bits)) - 1;
                sign | match v.is_nan() {
                    true if self.value(all_ones).is_nan() => all_ones,
                    true => 0,
                    false => {
                        let v = f64::from(v.abs()).min(largest);
                        magnitude_code(v, exponent_bits, mantissa_bits, u)
                    }
                }
            }
        }
    }
}

fn integer_code(v: f32, largest: i32, u: Option<f32>) -> i32 {
    let v = if v.is_nan() { 0.0 } else { v };
    let v = v.clamp(-largest as f32, largest as f32);
    let rounded = match u {
        None => v.round_ties_even(),
        Some(u) => (v + (STOCHASTIC_OFFSET + u)).floor() - STOCHASTIC_OFFSET,
    };
    (rounded as i32).min(largest)
}

/// The code without sign of a magnitude in `[0, largest]`.
fn magnitude_code(v: f64, exponent_bits: u32, mantissa_bits: u32, u: Option<f32>) -> i32 {
    let bias = (1 << (exponent_bits - 1)) - 1;
    let smallest_normal = 2f64.powi(1 - bias);
    let (exponent, v) = match (v < smallest_normal, u) {
        (false, _) => (v.log2().floor() as i32, v),
        (true, None) => (1 - bias, v),
        (true, Some(_)) => {
            let unit = smallest_normal * 2f64.powi(-23);
            (1 - bias, (v / unit).round_ties_even() * unit)
        }
    };
    // The numbers from 2^exponent on are multiples of this step, up to the next power of two.
    let steps = v / 2f64.powi(exponent - mantissa_bits as i32);
    let gone = steps - steps.floor();
    // A step is a code: from 0 below the smallest normal number, and 2^mantissa_bits of them for each exponent above.
    let below = steps.floor() as i32 + ((exponent + bias - 1) << mantissa_bits);
    let up = match u {
        None => gone > 0.5 || (gone == 0.5 && below % 2 == 1),
        Some(u) => gone + f64::from(u) + 2f64.powi(-16) >= 1.0,
    };
    below + i32::from(up)
}
