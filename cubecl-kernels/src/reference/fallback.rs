//! Block quantization with a second copy of the residual of outlier blocks.

use crate::{granularity::Granularity, number::Number, quantize::QuantizeSpec, shape::MatrixShape};

use super::{
    matrix::{ReferenceQuantized, coordinates},
    quantize::{dequantize, quantize, region_absmaxes},
};

/// A fallback-quantized matrix: `x = base + residual` where the block fell back, `base` elsewhere.
#[derive(Debug, Clone, PartialEq)]
pub struct ReferenceFallbackQuantized {
    /// The INT8 blocks.
    pub base: ReferenceQuantized,
    /// The INT8 residual blocks; all 0, with scale 0, where a block did not fall back.
    pub residual: ReferenceQuantized,
    /// For each block, whether it fell back: the indicator u(i, k).
    pub flags: Vec<bool>,
}

impl ReferenceFallbackQuantized {
    /// Number of blocks that fell back, and number of blocks.
    pub fn counts(&self) -> [i32; 2] {
        [
            self.flags.iter().filter(|&&flag| flag).count() as i32,
            self.flags.len() as i32,
        ]
    }
}

/// Quantizes `x` in square blocks, and quantizes the residual of each block whose largest magnitude is above
/// `threshold` once more (fallback-int8, section 4.3, with the AbsMax criterion of section 4.4).
///
/// A block that holds NaN or an infinity does not fall back.
///
/// # Panics
///
/// When `x` does not have as many elements as `shape`, or a block has none.
pub fn quantize_fallback(
    x: &[f32],
    shape: MatrixShape,
    block: usize,
    threshold: f32,
) -> ReferenceFallbackQuantized {
    let spec = QuantizeSpec::new(Number::Int8, Granularity::Block(block));
    let base = quantize(x, shape, &spec);
    let flags: Vec<bool> = region_absmaxes(x, &base)
        .into_iter()
        .map(|absmax| absmax.is_finite() && absmax > threshold)
        .collect();
    let residual: Vec<f32> = coordinates(shape)
        .zip(x.iter().zip(dequantize(&base)))
        .map(|((batch, row, col), (x, base_value))| {
            if flags[base.block_of(batch, row, col)] {
                x - base_value
            } else {
                0.0
            }
        })
        .collect();
    ReferenceFallbackQuantized {
        residual: quantize(&residual, shape, &spec),
        base,
        flags,
    }
}

/// The values of a fallback-quantized matrix, `base + residual`, in `f64`.
pub fn dequantize_fallback(quantized: &ReferenceFallbackQuantized) -> Vec<f64> {
    coordinates(quantized.base.shape)
        .map(|(batch, row, col)| fallback_value(&quantized.base, Some(quantized), batch, row, col))
        .collect()
}

/// The value at these coordinates, with the residual where the block fell back.
pub(super) fn fallback_value(
    base: &ReferenceQuantized,
    fallback: Option<&ReferenceFallbackQuantized>,
    batch: usize,
    row: usize,
    col: usize,
) -> f64 {
    let value =
        |q: &ReferenceQuantized| q.number(batch, row, col) * f64::from(q.scale(batch, row, col));
    match fallback {
        Some(fallback) if fallback.flags[base.block_of(batch, row, col)] => {
            value(base) + value(&fallback.residual)
        }
        _ => value(base),
    }
}
