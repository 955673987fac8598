//! E4M3 scales of regions, under an FP32 scale of the matrix (NVFP4, arXiv 2509.25149).

use cubecl::prelude::*;

use crate::number::minifloat::{self, Minifloat};

use super::{INFINITY, MIN_ABSMAX, MIN_ABSMAX_BITS};

const E4M3: Minifloat = Minifloat::E4M3;
const NAN_CODE: u32 = E4M3.magnitude();

/// The scale of a matrix whose finite regions have this maximum.
pub(crate) fn tensor_scale(absmax: f32, largest: f32) -> f32 {
    if absmax < MIN_ABSMAX {
        0.0
    } else {
        absmax / (largest * E4M3.largest())
    }
}

/// The code of the scale of a region of this maximum, and the inverse of its scale times the tensor scale. Inverse 0
/// stands for "all values are 0".
pub(crate) fn scale_and_inverse(absmax: f32, largest: f32, tensor_scale: f32) -> (u8, f32) {
    if !absmax.is_finite() {
        return (NAN_CODE as u8, 0.0);
    }
    if absmax < MIN_ABSMAX {
        return (0, 0.0);
    }
    let code = E4M3.encode_magnitude(absmax / largest / tensor_scale);
    if code == 0 {
        return (0, 0.0);
    }
    (
        code as u8,
        1.0 / (E4M3.decode_magnitude(code) * tensor_scale),
    )
}

/// The factor of values under a scale of this code and a tensor scale.
pub(crate) fn decode(code: u8, tensor_scale: f32) -> f32 {
    E4M3.decode(code) * tensor_scale
}

/// [`tensor_scale`] in a kernel, from the bits of the maximum.
#[cube]
pub(crate) fn tensor_scale_cube(absmax_bits: u32, largest: f32) -> f32 {
    let mut scale = 0.0f32;
    if absmax_bits >= MIN_ABSMAX_BITS {
        scale = f32::reinterpret(absmax_bits) / (largest * comptime!(E4M3.largest()));
    }
    scale
}

/// [`scale_and_inverse`] in a kernel, from the bits of the maximum.
#[cube]
pub(crate) fn scale_and_inverse_cube(
    absmax_bits: u32,
    largest: f32,
    tensor_scale: f32,
) -> (u32, f32) {
    let mut code = 0u32;
    let mut inverse = 0.0f32;
    if absmax_bits >= INFINITY {
        code = NAN_CODE.runtime();
    } else if absmax_bits >= MIN_ABSMAX_BITS {
        let ratio = f32::reinterpret(absmax_bits) / largest / tensor_scale;
        code = minifloat::encode_magnitude(ratio, E4M3);
        if code != 0 {
            inverse = 1.0f32 / (minifloat::decode_magnitude(code, E4M3) * tensor_scale);
        }
    }
    (code, inverse)
}

/// [`decode`] in a kernel.
#[cube]
pub(crate) fn decode_cube(code: u32, tensor_scale: f32) -> f32 {
    minifloat::decode(code, E4M3) * tensor_scale
}
