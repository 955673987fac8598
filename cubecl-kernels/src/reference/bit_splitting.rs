//! Bit splitting of a gradient into two INT4 matrices (int4-hq-lss, section 4.2, equation 5).

use crate::{
    bit_splitting::LOW_STEPS, granularity::Granularity, number::Number, philox,
    quantize::QuantizeSpec, rounding::Rounding, scale::ScaleNumber, shape::MatrixShape,
};

use super::{
    matrix::{ReferenceQuantized, coordinates},
    number::Definition,
    scale::{absmax, scale_and_inverse},
};

/// A matrix as the sum of two INT4 matrices: `high * scales[0] + low * scales[1]`.
#[derive(Debug, Clone, PartialEq)]
pub struct ReferenceBitSplit {
    /// Rows and columns of the matrix.
    pub shape: MatrixShape,
    /// The integers of the high part, row-major.
    pub high: Vec<i32>,
    /// The integers of the low part, row-major.
    pub low: Vec<i32>,
    /// The scale of the high part, and that of the low part.
    pub scales: [f32; 2],
}

impl ReferenceBitSplit {
    /// Both parts of each element in a byte: the high part in the low nibble, the low part in the high nibble.
    pub fn bytes(&self) -> Vec<u8> {
        let bytes = self.high.iter().zip(&self.low);
        bytes
            .map(|(high, low)| (high & 0xf | (low & 0xf) << 4) as u8)
            .collect()
    }

    /// The integers of a row of the stacked parts, and their scale: rows `0..N` are those of the high part, rows
    /// `N..2 N` those of the low part.
    pub fn part_row(&self, row: usize) -> (&[i32], f32) {
        let MatrixShape { rows, cols, .. } = self.shape;
        let (part, scale) = match row < rows {
            true => (&self.high, self.scales[0]),
            false => (&self.low, self.scales[1]),
        };
        (&part[row % rows * cols..][..cols], scale)
    }

    /// The squared Euclidean norms of the rows of the stacked parts, in integers.
    pub fn squared_norms(&self) -> Vec<u32> {
        (0..2 * self.shape.rows)
            .map(|row| squared_norm(self.part_row(row).0))
            .collect()
    }
}

/// The sum of the squares of integers.
pub(super) fn squared_norm(integers: &[i32]) -> u32 {
    integers.iter().map(|q| (q * q) as u32).sum()
}

/// Splits `x`, `[rows, cols]`, into two INT4 matrices.
///
/// With `v = x * inverse` under the scale of the largest magnitude, cut off at 7: `high` is the integer nearest to `v`,
/// a half rounded to even, and `low` is `14 (v - high)` rounded as asked for. The difference is exact in `f32`, and the
/// product lies in `[-7, 7]`, so that its rounding never saturates. The scale of the low part is that of the high part
/// divided by 14.
///
/// If `x` holds NaN or an infinity, both scales are NaN and all integers 0.
///
/// # Panics
///
/// When `x` does not have as many elements as `shape`, or that is a batch.
pub fn bit_split(x: &[f32], shape: MatrixShape, rounding: Rounding) -> ReferenceBitSplit {
    assert_eq!(x.len(), shape.num_elements(), "elements of x");
    assert_eq!(shape.batch, 1, "bit_split: one matrix");
    let int4 = Definition::of(Number::Int4);
    let largest = int4.largest();
    let (scale, inverse) = scale_and_inverse(absmax(x.iter().copied()), largest);
    let (mut high, mut low) = (vec![0; x.len()], vec![0; x.len()]);
    if inverse != 0.0 {
        for (index, (_, row, col)) in coordinates(shape).enumerate() {
            let u = match rounding {
                Rounding::Nearest => None,
                Rounding::Stochastic(key) => Some(philox::dither(key, row, col)),
            };
            let v = (x[index] * inverse).clamp(-largest, largest);
            high[index] = int4.code(v, None);
            low[index] = int4.code((v - high[index] as f32) * LOW_STEPS, u);
        }
    }
    ReferenceBitSplit {
        shape,
        high,
        low,
        scales: [scale, scale / LOW_STEPS],
    }
}

/// Both parts as one INT8 matrix: the integers `14 high + low` under the scale of the low part.
pub fn merge_parts(split: &ReferenceBitSplit) -> ReferenceQuantized {
    let parts = split.high.iter().zip(&split.low);
    ReferenceQuantized {
        values: parts
            .map(|(high, low)| high * LOW_STEPS as i32 + low)
            .collect(),
        scales: vec![split.scales[1]],
        ..int8_zeros(split.shape, Granularity::Tensor)
    }
}

/// INT8 zeros with scales 0.
pub(super) fn int8_zeros(shape: MatrixShape, granularity: Granularity) -> ReferenceQuantized {
    let spec = QuantizeSpec::int8(granularity);
    ReferenceQuantized {
        shape,
        number: Definition::of(spec.number),
        values: vec![0; shape.num_elements()],
        scales: vec![0.0; granularity.scales_shape(shape).num_elements()],
        scale_bytes: Vec::new(),
        tensor_scales: Vec::new(),
        scale_number: ScaleNumber::F32,
        scale_block: granularity.scale_block(shape),
    }
}
