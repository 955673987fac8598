//! The number formats of quantized values, a file each: largest value, storage, encoding and decoding, on the host and
//! in kernels.
//!
//! A *code* is the bits that stand for a number, in the low bits of a word. Quantizers, optimizer states, the host
//! path and the reference share this vocabulary; every match over it is exhaustive, so that a new number does not
//! compile until each place has said what it does with it.
//!
//! | number | a code | largest | smallest | source |
//! | --- | --- | --- | --- | --- |
//! | [`Number::Int4`] | two's complement | 7 | 1 | int4-hq-lss, section 3.1 |
//! | [`Number::Int8`] | two's complement | 127 | 1 | fallback-int8, section 3.1 |
//! | [`Number::Int10`] | two's complement | 511 | 1 | fallback-int8, section 5.2 |
//! | [`Number::E2M1`] | sign, 2 bits of exponent, 1 of mantissa | 6 | 2^-1 | OCP MX, section 5.3.3 |
//! | [`Number::E3M0`] | sign, 3 bits of exponent | 16 | 2^-2 | LUQ, arXiv 2112.10769 |
//! | [`Number::E4M3`] | sign, 4 bits of exponent, 3 of mantissa | 448 | 2^-9 | OCP OFP8, section 5 |
//! | [`Number::E5M2`] | sign, 5 bits of exponent, 2 of mantissa | 57,344 | 2^-16 | OCP OFP8, section 5 |
//! | [`Number::DynamicExponent`] | a place in a table | 1 | 5.5e-7, unsigned 3.25e-7 | [`dynamic_exponent`] |
//! | [`Number::Square`] | the root of a square | 65,025 | 1 | [`optimizer_state`](crate::optimizer_state) |
//!
//! The first seven are *symmetric*: their negatives are numbers too, and matrices are quantized to them. The last two
//! hold the moments of optimizers.

pub mod codes;
pub mod dynamic_exponent;
mod e2m1;
mod e3m0;
mod e4m3;
mod e5m2;
pub(crate) mod fp8;
mod int10;
pub(crate) mod int4;
pub(crate) mod int8;
pub(crate) mod integer;
pub(crate) mod minifloat;
pub(crate) mod square;
pub(crate) mod storage;

pub use dynamic_exponent::Signedness;
pub use integer::Integer;
pub use minifloat::Minifloat;
pub use storage::Storage;

/// A number format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Number {
    /// 4-bit integers from -7 to 7, two in a byte.
    Int4,
    /// 8-bit integers from -127 to 127.
    Int8,
    /// 10-bit integers from -511 to 511, 16 of them in five `u32`: a near-lossless context of non-linear layers.
    Int10,
    /// 4-bit floats, two in a byte: the elements of MXFP4 and NVFP4.
    E2M1,
    /// Powers of two in 4 bits, two in a byte: the numbers of LUQ.
    E3M0,
    /// 8-bit floats of more precision.
    E4M3,
    /// 8-bit floats of more range.
    E5M2,
    /// 8-bit numbers over seven decades.
    DynamicExponent(Signedness),
    /// The squares of the integers from 0 to 255.
    Square,
}

/// How codes and numbers belong together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Arithmetic {
    Integer(Integer),
    Float(Minifloat),
    DynamicExponent(Signedness),
    Square,
}

/// [`Arithmetic`] of a number that matrices hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Symmetric {
    Integer(Integer),
    Float(Minifloat),
}

impl Number {
    /// The numbers that matrices are quantized to.
    pub const SYMMETRIC: [Number; 7] = [
        Number::Int4,
        Number::Int8,
        Number::Int10,
        Number::E2M1,
        Number::E3M0,
        Number::E4M3,
        Number::E5M2,
    ];

    pub(crate) const fn arithmetic(self) -> Arithmetic {
        match self {
            Number::Int4 => Arithmetic::Integer(Integer::INT4),
            Number::Int8 => Arithmetic::Integer(Integer::INT8),
            Number::Int10 => Arithmetic::Integer(Integer::INT10),
            Number::E2M1 => Arithmetic::Float(Minifloat::E2M1),
            Number::E3M0 => Arithmetic::Float(Minifloat::E3M0),
            Number::E4M3 => Arithmetic::Float(Minifloat::E4M3),
            Number::E5M2 => Arithmetic::Float(Minifloat::E5M2),
            Number::DynamicExponent(signedness) => Arithmetic::DynamicExponent(signedness),
            Number::Square => Arithmetic::Square,
        }
    }

    /// `None` where not every number has its negative.
    pub(crate) const fn symmetric(self) -> Option<Symmetric> {
        match self.arithmetic() {
            Arithmetic::Integer(integer) => Some(Symmetric::Integer(integer)),
            Arithmetic::Float(float) => Some(Symmetric::Float(float)),
            Arithmetic::DynamicExponent(_) | Arithmetic::Square => None,
        }
    }

    /// True where every number has its negative, so that matrices can be quantized to it.
    pub const fn is_symmetric(self) -> bool {
        self.symmetric().is_some()
    }

    /// The largest number.
    pub const fn largest(self) -> f32 {
        match self.arithmetic() {
            Arithmetic::Integer(integer) => integer.largest() as f32,
            Arithmetic::Float(float) => float.largest(),
            Arithmetic::DynamicExponent(_) => 1.0,
            Arithmetic::Square => square::LARGEST,
        }
    }

    /// The smallest positive number.
    pub const fn smallest(self) -> f32 {
        match self.arithmetic() {
            Arithmetic::Integer(_) | Arithmetic::Square => 1.0,
            Arithmetic::Float(float) => float.smallest(),
            Arithmetic::DynamicExponent(signedness) => signedness.smallest(),
        }
    }

    /// Bits that a significand needs, the leading one among them: a float format of this precision, and of enough
    /// range, holds every number exactly.
    pub const fn precision(self) -> u32 {
        match self.arithmetic() {
            Arithmetic::Integer(integer) => u32::BITS - (integer.largest() as u32).leading_zeros(),
            Arithmetic::Float(float) => float.mantissa_bits + 1,
            Arithmetic::DynamicExponent(_) => f32::MANTISSA_DIGITS,
            Arithmetic::Square => u32::BITS - (square::LARGEST as u32).leading_zeros(),
        }
    }

    /// The code of zero.
    pub const fn zero(self) -> u32 {
        match self.arithmetic() {
            Arithmetic::Integer(_) | Arithmetic::Float(_) | Arithmetic::Square => 0,
            Arithmetic::DynamicExponent(signedness) => signedness.zero(),
        }
    }

    /// Bits of a code.
    pub const fn bits(self) -> u32 {
        self.storage().bits()
    }

    /// True for the floats of 8 bits that tensor cores multiply: E4M3 and E5M2.
    pub const fn is_fp8(self) -> bool {
        fp8::Fp8::of(self).is_some()
    }

    /// How codes lie in memory.
    pub const fn storage(self) -> Storage {
        match self {
            Number::Int4 | Number::E2M1 | Number::E3M0 => Storage::Nibbles,
            Number::Int8 => Storage::SignedBytes,
            Number::Int10 => Storage::TenBits,
            Number::E4M3 | Number::E5M2 | Number::DynamicExponent(_) | Number::Square => {
                Storage::Bytes
            }
        }
    }

    /// The code of `value`, a number in units of the scale.
    ///
    /// - `dither`: `None` rounds to nearest. A random multiple of 2^-15 in `[0, 1)`, as
    ///   [`philox::dither`](crate::philox::dither) gives it, rounds up or down so that the expectation is the value;
    ///   for symmetric numbers by the rules of [`reference::number`](crate::reference::number).
    ///
    /// Values beyond the largest number become the largest number. NaN becomes the NaN of E4M3 and E5M2, and a zero
    /// of the other numbers. [`Number::Square`] takes the magnitude, and so does the unsigned dynamic exponent.
    pub fn encode(self, value: f32, dither: Option<f32>) -> u32 {
        match self.arithmetic() {
            Arithmetic::Integer(integer) => integer.encode(value, dither),
            Arithmetic::Float(float) => match dither {
                None => u32::from(float.encode(value)),
                Some(dither) => u32::from(float.encode_stochastic(value, dither)),
            },
            Arithmetic::DynamicExponent(_) | Arithmetic::Square if value.is_nan() => self.zero(),
            Arithmetic::DynamicExponent(signedness) => match dither {
                None => u32::from(signedness.encode(value)),
                Some(dither) => u32::from(signedness.encode_stochastic(value, dither_word(dither))),
            },
            Arithmetic::Square => square::encode(value, dither.map(dither_word)),
        }
    }

    /// The number of a code, exactly.
    pub fn decode(self, code: u32) -> f32 {
        match self.arithmetic() {
            Arithmetic::Integer(integer) => integer.decode(code),
            Arithmetic::Float(float) => float.decode(code as u8),
            Arithmetic::DynamicExponent(signedness) => signedness.decode(code as u8),
            Arithmetic::Square => square::decode(code),
        }
    }
}

/// A random number in `[0, 1)` as the random bits, from the top of a word down.
fn dither_word(dither: f32) -> u32 {
    (f64::from(dither) * 2f64.powi(32)) as u32
}
