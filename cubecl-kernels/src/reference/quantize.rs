//! Quantization, and back.

use crate::{
    granularity::Granularity, philox, quantize::QuantizeSpec, rounding::Rounding,
    scale::ScaleNumber, shape::MatrixShape,
};

use super::{
    matrix::{ReferenceQuantized, coordinates},
    number::Definition,
    scale::{RegionScale, absmax, given_inverse, region_scale, scale_and_inverse, tensor_scale},
};

/// Quantizes `x`: each value is encoded from its product with the inverse scale of its region (fallback-int8, section
/// 4.2; OCP Microscaling Formats, section 6.3). The layout of `spec` has no meaning here.
///
/// # Panics
///
/// When `x` does not have as many elements as `shape`, a region has none, or the number is not symmetric.
pub fn quantize(x: &[f32], shape: MatrixShape, spec: &QuantizeSpec) -> ReferenceQuantized {
    quantize_as(x, shape, Definition::of(spec.number), spec)
}

/// [`quantize`] to integers of any range, with FP32 scales, so that a test can compare with a number that has no
/// kernel.
///
/// # Panics
///
/// When `x` does not have as many elements as `shape`, or a region has none.
pub fn quantize_to(
    x: &[f32],
    shape: MatrixShape,
    largest: i32,
    granularity: Granularity,
    rounding: Rounding,
) -> ReferenceQuantized {
    let spec = QuantizeSpec::int8(granularity).with_rounding(rounding);
    quantize_as(x, shape, Definition::Integer { largest }, &spec)
}

fn quantize_as(
    x: &[f32],
    shape: MatrixShape,
    number: Definition,
    spec: &QuantizeSpec,
) -> ReferenceQuantized {
    let mut quantized = unscaled(x, shape, number, spec);
    let absmaxes = region_absmaxes(x, &quantized);
    let of_matrix = absmaxes.len() / shape.batch.max(1);
    if spec.scale.has_tensor_scale() {
        quantized.tensor_scales = (0..shape.batch)
            .map(|batch| {
                let absmaxes = &absmaxes[batch * of_matrix..][..of_matrix];
                tensor_scale(absmaxes.iter().copied(), number.largest())
            })
            .collect();
    }
    let scales: Vec<RegionScale> = absmaxes
        .iter()
        .enumerate()
        .map(|(region, &absmax)| {
            let tensor_scale = quantized.tensor_scales.get(region / of_matrix.max(1));
            let tensor_scale = tensor_scale.copied().unwrap_or_default();
            region_scale(absmax, number.largest(), tensor_scale, spec.scale)
        })
        .collect();
    quantized.scales = scales.iter().map(|scale| scale.scale).collect();
    quantized.scale_bytes = match spec.scale {
        ScaleNumber::F32 => Vec::new(),
        ScaleNumber::E8M0 | ScaleNumber::E4M3 => scales.iter().map(|scale| scale.byte).collect(),
    };
    let inverses: Vec<f32> = scales.iter().map(|scale| scale.inverse).collect();
    encode(x, &inverses, spec.rounding, &mut quantized);
    quantized
}

/// Quantizes `x` by a scale that was given, with one scale for each matrix, all of them the same: values are encoded
/// from their products with [`given_inverse`], and what is too large becomes the largest number. Beside it the largest
/// magnitude of all matrices, NaN if they hold NaN or an infinity.
///
/// The scale that goes with the values is NaN where that maximum is, or where the given scale has no inverse.
///
/// # Panics
///
/// When `x` does not have as many elements as `shape`, the number is not symmetric, or `spec` does not ask for one FP32
/// scale a matrix.
pub fn quantize_by(
    x: &[f32],
    shape: MatrixShape,
    spec: &QuantizeSpec,
    scale: f32,
) -> (ReferenceQuantized, f32) {
    assert_eq!(
        (spec.granularity, spec.scale),
        (Granularity::Tensor, ScaleNumber::F32),
        "quantize_by: granularity and scales"
    );
    let mut quantized = unscaled(x, shape, Definition::of(spec.number), spec);
    let absmax = match absmax(x.iter().copied()) {
        finite if finite.is_finite() => finite,
        _ => f32::NAN,
    };
    let inverse = given_inverse(scale);
    let inverses = vec![inverse; quantized.scales.len()];
    let kept = if absmax.is_nan() || inverse == 0.0 {
        f32::NAN
    } else {
        scale
    };
    quantized.scales.fill(kept);
    encode(x, &inverses, spec.rounding, &mut quantized);
    (quantized, absmax)
}

/// [`quantize_by`] the scale `delayed / largest number` of a maximum that earlier data had; where that is none that
/// gets a scale, by that of the data's own maximum, and where that is none either, by 1.
///
/// # Panics
///
/// As [`quantize_by`].
pub fn quantize_delayed(
    x: &[f32],
    shape: MatrixShape,
    spec: &QuantizeSpec,
    delayed: f32,
) -> (ReferenceQuantized, f32) {
    let largest = spec.number.largest();
    let of_maximum = |absmax: f32| match scale_and_inverse(absmax.max(0.0), largest) {
        (_, 0.0) => None,
        (scale, _) => Some(scale),
    };
    let scale = of_maximum(delayed).or_else(|| of_maximum(absmax(x.iter().copied())));
    let scale = scale.unwrap_or(1.0);
    quantize_by(x, shape, spec, scale)
}

/// All values and scales 0.
fn unscaled(
    x: &[f32],
    shape: MatrixShape,
    number: Definition,
    spec: &QuantizeSpec,
) -> ReferenceQuantized {
    assert_eq!(x.len(), shape.num_elements(), "elements of x");
    let scale_block = spec.granularity.scale_block(shape);
    assert!(
        scale_block.0 > 0 && scale_block.1 > 0,
        "quantize: {:?}; use a block or a group of at least one element",
        spec.granularity
    );
    ReferenceQuantized {
        shape,
        number,
        values: vec![0; x.len()],
        scales: vec![0.0; spec.granularity.scales_shape(shape).num_elements()],
        scale_bytes: Vec::new(),
        tensor_scales: Vec::new(),
        scale_number: spec.scale,
        scale_block,
    }
}

/// Encodes each value by the inverse scale of its region; 0 stands for "all values are 0".
fn encode(x: &[f32], inverses: &[f32], rounding: Rounding, quantized: &mut ReferenceQuantized) {
    let shape = quantized.shape;
    for (index, (batch, row, col)) in coordinates(shape).enumerate() {
        let u = match rounding {
            Rounding::Nearest => None,
            Rounding::Stochastic(key) => Some(philox::dither(key, batch * shape.rows + row, col)),
        };
        let inverse = inverses[quantized.block_of(batch, row, col)];
        if inverse != 0.0 {
            quantized.values[index] = quantized.number.code(signed_product(x[index], inverse), u);
        }
    }
}

/// `x * inverse`, which keeps the sign of `x`.
fn signed_product(x: f32, inverse: f32) -> f32 {
    (x * inverse).copysign(x)
}

/// The values of a quantized matrix: number times scale, rounded to `f32`.
pub fn dequantize(quantized: &ReferenceQuantized) -> Vec<f32> {
    coordinates(quantized.shape)
        .map(|(batch, row, col)| {
            quantized.number(batch, row, col) as f32 * quantized.scale(batch, row, col)
        })
        .collect()
}

/// The largest magnitude of each region.
pub(super) fn region_absmaxes(x: &[f32], regions: &ReferenceQuantized) -> Vec<f32> {
    let mut bits = vec![0u32; regions.scales.len()];
    for (x, (batch, row, col)) in x.iter().zip(coordinates(regions.shape)) {
        let max = &mut bits[regions.block_of(batch, row, col)];
        *max = (*max).max(absmax(std::iter::once(*x)).to_bits());
    }
    bits.into_iter().map(f32::from_bits).collect()
}
