//! Floats of 4 and 8 bits, by integer and `f32` arithmetic.
//!
//! No runtime needs a native type for them, and all of them give the same bits. Encoding rounds to nearest, ties to
//! even, in the saturating mode of the OCP specifications: what lies beyond the largest number, infinities included,
//! becomes the largest number. NaN is kept where a format has one.

use cubecl::prelude::*;

use crate::rounding::MAGNITUDE;

const F32_EXPONENT: u32 = 0x7f80_0000;
const F32_MANTISSA: u32 = 0x007f_ffff;
/// The mantissa of a number in the middle between two powers of two.
const F32_TIE: u32 = 0x0040_0000;
/// Bits of the mantissa of an `f32`, and the step of its exponent.
const F32_MANTISSA_BITS: u32 = 23;
const EXPONENT_STEP: u32 = 1 << F32_MANTISSA_BITS;
const F32_BIAS: u32 = 127;
/// The dither of [`Minifloat::cut_magnitude`] that rounds to nearest, up where two numbers are as near.
pub(crate) const HALF: u32 = 1 << 31;
/// The middle of the interval of which the top 15 bits of a dither tell.
pub(crate) const MIDDLE: u32 = 1 << 16;

/// A format of small floats: a sign, an exponent, and a mantissa.
///
/// `(-1)^sign * 2^(exponent - bias) * (1 + mantissa / 2^mantissa_bits)`, and for exponent 0
/// `(-1)^sign * 2^(1 - bias) * mantissa / 2^mantissa_bits`, where `bias = 2^(exponent_bits - 1) - 1`. Codes above that
/// of the largest number are infinity, where the mantissa is 0, or NaN.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Minifloat {
    pub(super) exponent_bits: u32,
    pub(super) mantissa_bits: u32,
    /// The code of the largest number.
    pub(super) largest_code: u32,
}

impl Minifloat {
    /// The largest finite number.
    #[inline]
    pub const fn largest(self) -> f32 {
        self.decode_magnitude(self.largest_code)
    }

    /// The smallest positive number, a subnormal one.
    #[inline]
    pub const fn smallest(self) -> f32 {
        self.decode_magnitude(1)
    }

    /// The sign of a code.
    #[inline]
    pub(crate) const fn sign(self) -> u32 {
        1 << self.sign_shift()
    }

    /// The place of the sign.
    #[inline]
    pub(crate) const fn sign_shift(self) -> u32 {
        self.exponent_bits + self.mantissa_bits
    }

    /// The magnitude of a code.
    #[inline]
    pub(crate) const fn magnitude(self) -> u32 {
        self.sign() - 1
    }

    /// True where some codes are NaN, the one of all ones among them.
    #[inline]
    pub(crate) const fn has_nan(self) -> bool {
        self.largest_code < self.magnitude()
    }

    /// The magnitude that NaN becomes: NaN, or where there is none zero.
    #[inline]
    pub(crate) const fn nan_code(self) -> u32 {
        if self.has_nan() { self.magnitude() } else { 0 }
    }

    /// How far the mantissa lies from its place in an `f32`.
    #[inline]
    const fn shift(self) -> u32 {
        F32_MANTISSA_BITS - self.mantissa_bits
    }

    /// The bits of the smallest normal number as an `f32`: the format's exponent field 1.
    #[inline]
    const fn smallest_normal_bits(self) -> u32 {
        let bias = (1 << (self.exponent_bits - 1)) - 1;
        (F32_BIAS + 1 - bias) << F32_MANTISSA_BITS
    }

    #[inline]
    const fn smallest_normal(self) -> f32 {
        f32::from_bits(self.smallest_normal_bits())
    }

    /// An `f32` exponent field plus this is that of a power so large that a sum with it ends in the format's last bit.
    #[inline]
    const fn rounding_bits(self) -> u32 {
        self.shift() << F32_MANTISSA_BITS
    }

    /// The nearest code, ties to even, saturating; NaN becomes the NaN of all ones, or where there is none zero.
    pub fn encode(self, x: f32) -> u8 {
        self.with_sign(x, |magnitude| self.encode_magnitude(magnitude)) as u8
    }

    /// One of the two codes around `x`: the upper magnitude with the probability that makes the expectation `x`, if
    /// `dither` is a random multiple of 2^-15 in `[0, 1)`. Saturating; NaN as in [`Self::encode`].
    pub fn encode_stochastic(self, x: f32, dither: f32) -> u8 {
        self.with_sign(x, |magnitude| {
            self.cut_magnitude(magnitude.min(self.largest()), stochastic_dither(dither))
        }) as u8
    }

    /// The code of `x` from that of its magnitude.
    #[inline]
    pub(crate) fn with_sign(self, x: f32, encode: impl Fn(f32) -> u32) -> u32 {
        let sign = (x.to_bits() >> 31) << self.sign_shift();
        let magnitude = if x.is_nan() {
            self.nan_code()
        } else {
            encode(x.abs())
        };
        sign | magnitude
    }

    /// [`Self::encode`] of a number that is neither negative nor NaN: a code without sign.
    #[inline]
    pub(crate) fn encode_magnitude(self, x: f32) -> u32 {
        let x = x.min(self.largest());
        // A power of two so far above x that the sum has as many digits as the format: rounding is left to the
        // adder. Below the format's normal numbers the power stands still, which gives the subnormal ones.
        let exponent = (x.to_bits() & F32_EXPONENT).max(self.smallest_normal_bits());
        let power = exponent + self.rounding_bits();
        let digits = (x + f32::from_bits(power)).to_bits() - power;
        let code = digits + ((exponent - self.smallest_normal_bits()) >> self.shift());
        // Without a mantissa the adder's even digit is the upper power, whichever code that has.
        let is_odd_tie = self.mantissa_bits == 0
            && x.to_bits() >= self.smallest_normal_bits()
            && x.to_bits() & F32_MANTISSA == F32_TIE;
        code - (code & u32::from(is_odd_tie))
    }

    /// The code, without sign, of `x` in `[0, largest]` moved up by `dither / 2^32` of the distance to the next number,
    /// and cut off to a number: stochastic rounding where `dither` is random, to nearest where it is [`HALF`].
    ///
    /// The bits of a normal number are in the code's order already. Below the normal numbers it is the sum with the
    /// smallest of them that has the digits to be cut. Each of the two is the larger one where it holds.
    #[inline]
    pub(crate) fn cut_magnitude(self, x: f32, dither: u32) -> u32 {
        let dither = dither >> (32 - self.shift());
        let normal = x.to_bits() + dither;
        let subnormal = (x + self.smallest_normal()).to_bits() + dither;
        let normal = normal as i32 - (self.smallest_normal_bits() - EXPONENT_STEP) as i32;
        let subnormal = subnormal as i32 - self.smallest_normal_bits() as i32;
        normal.max(subnormal) as u32 >> self.shift()
    }

    /// The number of a code, exactly.
    pub fn decode(self, code: u8) -> f32 {
        let magnitude = u32::from(code) & self.magnitude();
        let value = if magnitude <= self.largest_code {
            self.decode_magnitude(magnitude)
        } else {
            // The mantissa's place in an `f32` keeps infinity and NaN apart.
            f32::from_bits((magnitude << self.shift()) | F32_EXPONENT)
        };
        if u32::from(code) & self.sign() == 0 {
            value
        } else {
            -value
        }
    }

    /// [`Self::decode`] of a finite number's code without sign.
    #[inline]
    pub(crate) const fn decode_magnitude(self, code: u32) -> f32 {
        let bits = (code << self.shift()) + self.smallest_normal_bits();
        // One exponent too high for a normal number; a subnormal one has its leading 1 too much.
        if bits < self.smallest_normal_bits() + EXPONENT_STEP {
            f32::from_bits(bits) - self.smallest_normal()
        } else {
            f32::from_bits(bits - EXPONENT_STEP)
        }
    }
}

/// The dither of [`Minifloat::cut_magnitude`] for a random multiple of 2^-15 in `[0, 1)`: the number's bits, and the
/// middle of what lies below them, so that their coarseness does not lower the expectation.
#[inline]
pub(crate) fn stochastic_dither(dither: f32) -> u32 {
    ((dither * 32_768.0) as u32) << 17 | MIDDLE
}

/// [`Minifloat::encode`] in a kernel.
#[cube]
pub(crate) fn encode(x: f32, #[comptime] format: Minifloat) -> u32 {
    let magnitude = u32::reinterpret(x) & MAGNITUDE;
    // NaN is taken out before it enters arithmetic: as integers its bits lie above those of infinity.
    let number = f32::reinterpret(min(magnitude, F32_EXPONENT));
    let code = encode_magnitude(number, format);
    signed(
        x,
        select(magnitude > F32_EXPONENT, comptime!(format.nan_code()), code),
        format,
    )
}

/// A code's magnitude with the sign of `x`.
#[cube]
pub(crate) fn signed(x: f32, magnitude: u32, #[comptime] format: Minifloat) -> u32 {
    magnitude | ((u32::reinterpret(x) >> 31) << comptime!(format.sign_shift()))
}

/// [`Minifloat::encode_magnitude`] in a kernel.
#[cube]
pub(crate) fn encode_magnitude(x: f32, #[comptime] format: Minifloat) -> u32 {
    let smallest_normal = comptime!(format.smallest_normal_bits());
    let x = min(x, comptime!(format.largest()));
    let exponent = max(u32::reinterpret(x) & F32_EXPONENT, smallest_normal);
    let power = exponent + comptime!(format.rounding_bits());
    let digits = u32::reinterpret(x + f32::reinterpret(power)) - power;
    let code = digits + ((exponent - smallest_normal) >> comptime!(format.shift()));
    if comptime!(format.mantissa_bits == 0) {
        let is_tie = u32::reinterpret(x) & F32_MANTISSA == F32_TIE;
        let is_normal = u32::reinterpret(x) >= smallest_normal;
        select(is_tie && is_normal, code - (code & 1), code)
    } else {
        code
    }
}

/// [`Minifloat::cut_magnitude`] in a kernel.
#[cube]
pub(crate) fn cut_magnitude(x: f32, dither: u32, #[comptime] format: Minifloat) -> u32 {
    let dither = dither >> comptime!(32 - format.shift());
    let smallest_normal = comptime!(format.smallest_normal_bits());
    let normal = u32::reinterpret(x) + dither - comptime!(smallest_normal - (1 << 23));
    let subnormal = u32::reinterpret(x + comptime!(format.smallest_normal())) + dither;
    let larger = max(
        i32::reinterpret(normal),
        i32::reinterpret(subnormal - smallest_normal),
    );
    u32::reinterpret(larger) >> comptime!(format.shift())
}

/// [`Minifloat::decode_magnitude`] in a kernel.
#[cube]
pub(crate) fn decode_magnitude(code: u32, #[comptime] format: Minifloat) -> f32 {
    let smallest_normal = comptime!(format.smallest_normal_bits());
    let bits = (code << comptime!(format.shift())) + smallest_normal;
    select(
        bits < comptime!(format.smallest_normal_bits() + (1 << 23)),
        f32::reinterpret(bits) - comptime!(format.smallest_normal()),
        f32::reinterpret(bits - comptime!(1u32 << 23)),
    )
}

/// [`Minifloat::decode`] in a kernel.
#[cube]
pub(crate) fn decode(code: u32, #[comptime] format: Minifloat) -> f32 {
    let magnitude = code & comptime!(format.magnitude());
    let mut bits = u32::reinterpret(decode_magnitude(magnitude, format));
    if comptime!(format.has_nan()) {
        let special = (magnitude << comptime!(format.shift())) | F32_EXPONENT;
        bits = select(magnitude > comptime!(format.largest_code), special, bits);
    }
    let sign = (code << comptime!(31 - format.sign_shift())) & !MAGNITUDE;
    f32::reinterpret(bits | sign)
}
