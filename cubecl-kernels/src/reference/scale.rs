//! From the largest magnitude of a region to its scale.

use crate::scale::{MIN_ABSMAX, ScaleNumber};

use super::number::Definition;

/// The largest magnitude of a region, by the order of the bits without the sign: NaN above infinity above the rest.
pub fn absmax(region: impl Iterator<Item = f32>) -> f32 {
    f32::from_bits(
        region
            .map(|x| x.to_bits() & 0x7fff_ffff)
            .max()
            .unwrap_or_default(),
    )
}

/// The scale of a region.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RegionScale {
    /// The factor that gives values back.
    pub scale: f32,
    /// The factor of values that are to be encoded; 0 stands for "all values are 0".
    pub inverse: f32,
    /// The byte that is stored, where a scale is one; else 0.
    pub byte: u8,
}

/// The scale of a region from its largest magnitude.
///
/// - `largest`: the largest number of the values.
/// - `tensor_scale`: that of the matrix, which [`tensor_scale`] gives; read for [`ScaleNumber::E4M3`].
///
/// A region that holds NaN or an infinity has scale NaN, one whose maximum is below [`MIN_ABSMAX`] has scale 0; both
/// have inverse 0.
pub fn region_scale(
    absmax: f32,
    largest: f32,
    tensor_scale: f32,
    number: ScaleNumber,
) -> RegionScale {
    match number {
        ScaleNumber::F32 => {
            let (scale, inverse) = scale_and_inverse(absmax, largest);
            RegionScale {
                scale,
                inverse,
                byte: 0,
            }
        }
        ScaleNumber::E8M0 => e8m0(absmax, largest),
        ScaleNumber::E4M3 => e4m3(absmax, largest, tensor_scale),
    }
}

/// FP32: `scale = absmax / largest`, `inverse = largest / absmax` (fallback-int8, section 3.1).
pub fn scale_and_inverse(absmax: f32, largest: f32) -> (f32, f32) {
    if !absmax.is_finite() {
        (f32::NAN, 0.0)
    } else if absmax < MIN_ABSMAX {
        (0.0, 0.0)
    } else {
        (absmax / largest, largest / absmax)
    }
}

/// E8M0: the smallest `2^(e - 127)` that is at least `absmax / largest`, the quotient not being rounded (OCP
/// Microscaling Formats, section 5.4.1, with the exponent rounded up).
fn e8m0(absmax: f32, largest: f32) -> RegionScale {
    if !absmax.is_finite() {
        return RegionScale {
            scale: f32::NAN,
            inverse: 0.0,
            byte: 255,
        };
    }
    if absmax < MIN_ABSMAX {
        return RegionScale {
            scale: 0.0,
            inverse: 0.0,
            byte: 0,
        };
    }
    let power = |byte: i32| 2f64.powi(byte - 127);
    let byte = (0..=254)
        .find(|&byte| f64::from(largest) * power(byte) >= f64::from(absmax))
        .expect("numbers go up to more than 1");
    RegionScale {
        scale: power(byte) as f32,
        inverse: (1.0 / power(byte)) as f32,
        byte: byte as u8,
    }
}

/// E4M3 under the scale of the matrix: `S = E4M3(absmax / largest / tensor_scale)`, to nearest even, each quotient
/// rounded; `scale = S * tensor_scale`; `inverse = 1 / scale` (arXiv 2509.25149, where the tensor scale is inverted
/// first).
///
/// Where `S` is 0, so are the values.
fn e4m3(absmax: f32, largest: f32, tensor_scale: f32) -> RegionScale {
    let e4m3 = Definition::of(crate::number::Number::E4M3);
    let byte = if !absmax.is_finite() {
        0x7f
    } else if absmax < MIN_ABSMAX {
        0
    } else {
        e4m3.code(absmax / largest / tensor_scale, None)
    };
    let scale = e4m3.value(byte) as f32 * tensor_scale;
    RegionScale {
        scale,
        inverse: if scale > 0.0 { 1.0 / scale } else { 0.0 },
        byte: byte as u8,
    }
}

/// The FP32 scale of a matrix whose regions have these maxima: `absmax / (largest * 448)`, where `absmax` is the
/// largest of the finite ones, or 0 if that is below [`MIN_ABSMAX`].
///
/// A region with NaN or an infinity has scale NaN already; left out, it leaves the other regions theirs.
pub fn tensor_scale(absmaxes: impl Iterator<Item = f32>, largest: f32) -> f32 {
    let absmax = absmaxes
        .filter(|absmax| absmax.is_finite())
        .fold(0.0, f32::max);
    if absmax < MIN_ABSMAX {
        0.0
    } else {
        absmax / (largest * 448.0)
    }
}

/// The inverse of a scale that was given: `1 / scale`, or 0, for "all values are 0", unless the scale is positive,
/// normal, and at most 2^126, so that its inverse is normal too.
pub fn given_inverse(scale: f32) -> f32 {
    if (f32::MIN_POSITIVE..=2f32.powi(126)).contains(&scale) {
        1.0 / scale
    } else {
        0.0
    }
}
