//! How the scales of quantized values are stored, and how they follow from the largest magnitude of a region.
//!
//! Rules that hold for all of them:
//!
//! - A region that holds NaN or an infinity has scale NaN, and values 0: it dequantizes to NaN.
//! - A region whose largest magnitude is below [`MIN_ABSMAX`] has scale 0, and values 0.
//! - Nothing that a device computes on the way is a subnormal number.
//!
//! Each rule is given in [`reference::scale`](crate::reference::scale) to the bit. Here it stands for the host and
//! beside it for kernels, from the bits of a maximum, which order NaN above infinity above the rest.

use cubecl::{ir::StorageType, prelude::*};

use crate::device::storage;

pub(crate) mod e8m0;
pub(crate) mod fp32;
pub(crate) mod two_level;

/// Smallest maximum that gets a scale, 2^-100.
///
/// Below it `absmax / largest number` could leave the range of normal `f32` numbers, which some devices flush to zero,
/// so a region of a smaller maximum is all zeros with scale 0 everywhere.
pub const MIN_ABSMAX: f32 = f32::from_bits((127 - 100) << 23);

pub(crate) const MIN_ABSMAX_BITS: u32 = MIN_ABSMAX.to_bits();
const INFINITY: u32 = f32::INFINITY.to_bits();
const NAN: u32 = f32::NAN.to_bits();

/// The number format of the scales of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScaleNumber {
    /// FP32: `absmax / largest number`.
    F32,
    /// A power of two in one byte (OCP Microscaling Formats, section 5.4.1): byte `e` is `2^(e - 127)`, 255 is NaN.
    ///
    /// The smallest power that is at least `absmax / largest number`, so that nothing saturates. The largest magnitudes
    /// that get a scale need bytes from 12 to 253 alone. Byte 0, in OCP's specification a subnormal number, stands for
    /// a region of zeros and is read as 0.
    E8M0,
    /// Two levels (NVFP4, arXiv 2509.25149): an E4M3 scale for each region, without sign, in one byte, times an FP32
    /// scale for the matrix.
    ///
    /// The tensor scale is `absmax of the matrix / (largest number * 448)`, where regions that are not finite do not
    /// count; 0 for a matrix of zeros.
    E4M3,
}

impl ScaleNumber {
    /// The type of a stored scale.
    pub fn dtype(self) -> StorageType {
        match self {
            ScaleNumber::F32 => storage::<f32>(),
            ScaleNumber::E8M0 | ScaleNumber::E4M3 => storage::<u8>(),
        }
    }

    /// The scale that a stored number stands for, that of a byte being its value; `tensor_scale` counts for E4M3 only.
    pub fn decode(self, stored: f32, tensor_scale: f32) -> f32 {
        match self {
            ScaleNumber::F32 => stored,
            ScaleNumber::E8M0 => e8m0::decode(stored as u8),
            ScaleNumber::E4M3 => two_level::decode(stored as u8, tensor_scale),
        }
    }

    /// True where each matrix has a tensor scale too.
    pub const fn has_tensor_scale(self) -> bool {
        match self {
            ScaleNumber::F32 | ScaleNumber::E8M0 => false,
            ScaleNumber::E4M3 => true,
        }
    }
}

/// True for a maximum that is neither NaN nor infinite.
#[cube]
pub(crate) fn is_finite(absmax_bits: u32) -> bool {
    absmax_bits < INFINITY
}

/// True for a maximum that gets a scale: a positive number from [`MIN_ABSMAX`] on.
#[cube]
pub(crate) fn has_scale(absmax_bits: u32) -> bool {
    // Bits of negative numbers and of NaN lie above infinity's.
    is_finite(absmax_bits) && absmax_bits >= MIN_ABSMAX_BITS
}

/// The scale of a region of this maximum, and what its values are multiplied by: 0 for "all values are 0". The scale
/// comes as it is stored, a byte, or the bits of an `f32`. `largest` is that of the number.
#[cube]
pub(crate) fn region_scale(
    absmax_bits: u32,
    largest: f32,
    tensor_scale: f32,
    #[comptime] number: ScaleNumber,
) -> (u32, f32) {
    match comptime!(number) {
        ScaleNumber::F32 => {
            let (scale, inverse) = fp32::scale_and_inverse_cube(absmax_bits, largest);
            (u32::reinterpret(scale), inverse)
        }
        ScaleNumber::E8M0 => e8m0::scale_and_inverse_cube(absmax_bits, largest),
        ScaleNumber::E4M3 => two_level::scale_and_inverse_cube(absmax_bits, largest, tensor_scale),
    }
}

/// Writes a scale that [`region_scale`] gave.
#[cube]
pub(crate) fn store_scale<S: Numeric>(
    scales: &mut Array<S>,
    slot: u32,
    stored: u32,
    #[comptime] number: ScaleNumber,
) {
    scales[slot as usize] = match comptime!(number) {
        ScaleNumber::F32 => S::cast_from(f32::reinterpret(stored)),
        ScaleNumber::E8M0 | ScaleNumber::E4M3 => S::cast_from(stored),
    };
}

/// The factor that gives back the values of a region. `tensor_scale` is read where the number has one.
#[cube]
pub(crate) fn load_scale<S: Numeric>(
    scales: &Array<S>,
    slot: u32,
    tensor_scale: f32,
    #[comptime] number: ScaleNumber,
) -> f32 {
    let stored = scales[slot as usize];
    match comptime!(number) {
        ScaleNumber::F32 => f32::cast_from(stored),
        ScaleNumber::E8M0 => e8m0::decode_cube(u32::cast_from(stored)),
        ScaleNumber::E4M3 => two_level::decode_cube(u32::cast_from(stored), tensor_scale),
    }
}
