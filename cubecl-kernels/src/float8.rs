//! The two 8-bit float formats of the OCP 8-bit Floating Point Specification (OFP8), by integer and `f32` arithmetic.
//!
//! No runtime needs a native type for it, and all of them give the same bits. E4M3 has no infinities: 15 of its 16
//! codes with the largest exponent are numbers. Encoding rounds to nearest, ties to even, in the specification's
//! saturating mode: what lies beyond the largest number, infinities included, becomes the largest number. NaN is kept.

use cubecl::{prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{check_dtype, cube_grid, empty, is_contiguous, storage},
    error::KernelError,
};

const SIGN: u32 = 0x80;
const MAGNITUDE: u32 = 0x7f;
const F32_EXPONENT: u32 = 0x7f80_0000;
const UNITS: usize = 256;
/// The dither of [`Float8::cut_magnitude`] that rounds to nearest, up where two numbers are as near.
pub(crate) const HALF: u32 = 1 << 31;

/// An 8-bit float format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Float8 {
    /// 4 bits of exponent, 3 of mantissa: up to 448, in steps of 2^-9 near zero.
    E4M3,
    /// 5 bits of exponent, 2 of mantissa: up to 57,344, in steps of 2^-16 near zero.
    E5M2,
}

impl Float8 {
    /// The largest finite number.
    pub const fn largest(self) -> f32 {
        match self {
            Float8::E4M3 => 448.0,
            Float8::E5M2 => 57_344.0,
        }
    }

    /// The smallest positive number, a subnormal one.
    pub const fn smallest(self) -> f32 {
        match self {
            Float8::E4M3 => 1.0 / 512.0,
            Float8::E5M2 => 1.0 / 65_536.0,
        }
    }

    /// The code of the largest finite number.
    const fn largest_code(self) -> u32 {
        match self {
            Float8::E4M3 => 0x7e,
            Float8::E5M2 => 0x7b,
        }
    }

    /// How far the mantissa lies from its place in an `f32`.
    const fn shift(self) -> u32 {
        match self {
            Float8::E4M3 => 20,
            Float8::E5M2 => 21,
        }
    }

    /// The bits of the smallest normal number as an `f32`: the format's exponent field 1.
    const fn smallest_normal_bits(self) -> u32 {
        match self {
            Float8::E4M3 => (127 - 6) << 23,
            Float8::E5M2 => (127 - 14) << 23,
        }
    }

    const fn smallest_normal(self) -> f32 {
        f32::from_bits(self.smallest_normal_bits())
    }

    /// What is added to an `f32` exponent field so that the sum's last bit is the format's last bit.
    const fn rounding_bits(self) -> u32 {
        self.shift() << 23
    }

    /// The nearest code, ties to even, saturating; NaN becomes the NaN of all ones.
    pub fn encode(self, x: f32) -> u8 {
        let sign = (x.to_bits() >> 24) & SIGN;
        let magnitude = if x.is_nan() {
            MAGNITUDE
        } else {
            self.encode_magnitude(x.abs())
        };
        (sign | magnitude) as u8
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
        digits + ((exponent - self.smallest_normal_bits()) >> self.shift())
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
        let normal = normal as i32 - (self.smallest_normal_bits() - (1 << 23)) as i32;
        let subnormal = subnormal as i32 - self.smallest_normal_bits() as i32;
        normal.max(subnormal) as u32 >> self.shift()
    }

    /// The number of a code, exactly.
    pub fn decode(self, code: u8) -> f32 {
        let magnitude = u32::from(code) & MAGNITUDE;
        let value = if magnitude <= self.largest_code() {
            self.decode_magnitude(magnitude)
        } else if self == Float8::E5M2 && magnitude == self.largest_code() + 1 {
            f32::INFINITY
        } else {
            f32::NAN
        };
        if code & SIGN as u8 == 0 {
            value
        } else {
            -value
        }
    }

    /// [`Self::decode`] of a finite number's code without sign.
    #[inline]
    pub(crate) fn decode_magnitude(self, code: u32) -> f32 {
        let bits = (code << self.shift()) + self.smallest_normal_bits();
        // One exponent too high for a normal number; a subnormal one has its leading 1 too much.
        if bits < self.smallest_normal_bits() + (1 << 23) {
            f32::from_bits(bits) - self.smallest_normal()
        } else {
            f32::from_bits(bits - (1 << 23))
        }
    }
}

/// [`Float8::encode_magnitude`] in a kernel.
#[cube]
pub(crate) fn encode_magnitude(x: f32, #[comptime] format: Float8) -> u32 {
    let smallest_normal = comptime!(format.smallest_normal_bits());
    let x = min(x, comptime!(format.largest()));
    let exponent = max(u32::reinterpret(x) & F32_EXPONENT, smallest_normal);
    let power = exponent + comptime!(format.rounding_bits());
    let digits = u32::reinterpret(x + f32::reinterpret(power)) - power;
    digits + ((exponent - smallest_normal) >> comptime!(format.shift()))
}

/// [`Float8::cut_magnitude`] in a kernel.
#[cube]
pub(crate) fn cut_magnitude(x: f32, dither: u32, #[comptime] format: Float8) -> u32 {
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

/// [`Float8::decode_magnitude`] in a kernel.
#[cube]
pub(crate) fn decode_magnitude(code: u32, #[comptime] format: Float8) -> f32 {
    let smallest_normal = comptime!(format.smallest_normal_bits());
    let bits = (code << comptime!(format.shift())) + smallest_normal;
    select(
        bits < comptime!(format.smallest_normal_bits() + (1 << 23)),
        f32::reinterpret(bits) - comptime!(format.smallest_normal()),
        f32::reinterpret(bits - comptime!(1u32 << 23)),
    )
}

/// The codes of `x`, as [`Float8::encode`] gives them: u8, of the shape of `x`.
///
/// - `x`: f32, contiguous.
///
/// # Errors
///
/// When `x` is of another element type or not contiguous.
pub fn encode<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    format: Float8,
) -> Result<TensorHandle<R>, KernelError> {
    const OPERATION: &str = "float8::encode";
    check_dtype(OPERATION, "x", x, storage::<f32>(), "cast it to f32")?;
    let len = check_contiguous(OPERATION, x)?;
    let out = empty(client, x.shape().to_vec(), storage::<u8>());
    if len > 0 {
        // SAFETY: the kernel guards its index with the number of elements of both tensors.
        #[allow(unsafe_code)]
        unsafe {
            encode_kernel::launch_unchecked::<R>(
                client,
                cube_grid(len.div_ceil(UNITS)),
                CubeDim::new_1d(UNITS as u32),
                x.clone().into_arg(),
                out.clone().into_arg(),
                len as u32,
                format,
            );
        }
    }
    Ok(out)
}

/// The numbers of `codes`, as [`Float8::decode`] gives them: f32, of the shape of `codes`.
///
/// - `codes`: u8, contiguous.
///
/// # Errors
///
/// When `codes` is of another element type or not contiguous.
pub fn decode<R: Runtime>(
    client: &ComputeClient<R>,
    codes: &TensorHandle<R>,
    format: Float8,
) -> Result<TensorHandle<R>, KernelError> {
    const OPERATION: &str = "float8::decode";
    check_dtype(OPERATION, "codes", codes, storage::<u8>(), "pass u8 codes")?;
    let len = check_contiguous(OPERATION, codes)?;
    let out = empty(client, codes.shape().to_vec(), storage::<f32>());
    if len > 0 {
        // SAFETY: the kernel guards its index with the number of elements of both tensors.
        #[allow(unsafe_code)]
        unsafe {
            decode_kernel::launch_unchecked::<R>(
                client,
                cube_grid(len.div_ceil(UNITS)),
                CubeDim::new_1d(UNITS as u32),
                codes.clone().into_arg(),
                out.clone().into_arg(),
                len as u32,
                format,
            );
        }
    }
    Ok(out)
}

/// The number of elements of a contiguous tensor, few enough that 32 bits index all of a launch's last cubes too.
pub(crate) fn check_contiguous<R: Runtime>(
    operation: &'static str,
    tensor: &TensorHandle<R>,
) -> Result<usize, KernelError> {
    let len = tensor.shape().iter().product::<usize>();
    if is_contiguous(tensor) && len <= 1 << 31 {
        return Ok(len);
    }
    Err(KernelError::Shape {
        operation,
        got: format!(
            "a tensor of shape {:?} and strides {:?}",
            tensor.shape(),
            tensor.strides()
        ),
        remedy: "pass a contiguous tensor of at most 2^31 elements",
    })
}

#[cube(launch_unchecked)]
fn encode_kernel(x: &Tensor<f32>, out: &mut Tensor<u8>, len: u32, #[comptime] format: Float8) {
    if (ABSOLUTE_POS as u32) < len {
        let bits = u32::reinterpret(x[ABSOLUTE_POS]);
        let magnitude = bits & 0x7fff_ffffu32;
        // NaN is taken out before it enters arithmetic: as integers its bits lie above those of infinity.
        let number = f32::reinterpret(min(magnitude, F32_EXPONENT));
        let code = select(
            magnitude > F32_EXPONENT,
            MAGNITUDE,
            encode_magnitude(number, format),
        );
        out[ABSOLUTE_POS] = u8::cast_from(((bits >> 24) & SIGN) | code);
    }
}

#[cube(launch_unchecked)]
fn decode_kernel(codes: &Tensor<u8>, out: &mut Tensor<f32>, len: u32, #[comptime] format: Float8) {
    if (ABSOLUTE_POS as u32) < len {
        let code = u32::cast_from(codes[ABSOLUTE_POS]);
        let magnitude = code & MAGNITUDE;
        let mut bits = u32::reinterpret(decode_magnitude(magnitude, format));
        if magnitude > comptime!(format.largest_code()) {
            // The mantissa's place in an f32 keeps infinity and NaN apart in E5M2; E4M3 has NaN alone.
            bits = (magnitude << comptime!(format.shift())) | F32_EXPONENT;
        }
        out[ABSOLUTE_POS] = f32::reinterpret(bits | ((code & SIGN) << 24));
    }
}
