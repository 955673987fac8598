//! Bit splitting of a gradient into two INT4 matrices (int4-hq-lss, section 4.2, equation 5).

use rayon::prelude::*;

use crate::{
    bit_splitting::LOW_STEPS,
    error::KernelError,
    granularity::Granularity,
    number::{Number, integer::ROUND_TO_EVEN},
    philox,
    rounding::{FRACTION_BITS, Rounding, STOCHASTIC_OFFSET},
    scale::fp32::scale_and_inverse,
};

use super::{
    HostQuantized, HostScales, HostValues, check_len,
    grid::{Grid, absmax, larger},
};

const LARGEST: f32 = Number::Int4.largest();

/// A matrix `[N, C]` as the sum of two INT4 matrices, in the very storage of the device: what
/// [`BitSplit`](crate::bit_splitting::BitSplit) says of each field.
#[derive(Debug, Clone, PartialEq)]
pub struct HostBitSplit {
    /// `[N, C]`: the high part in the low nibble, the low part in the high nibble.
    pub parts: Vec<u8>,
    /// The scale of the high part, and that of the low part.
    pub scales: [f32; 2],
    /// `[2 N]`: the squared norms of the rows of the stacked parts, in integers.
    pub squared_norms: Vec<u32>,
    /// `[N, C]`.
    pub shape: [usize; 2],
}

impl HostBitSplit {
    /// Accepts slices of these lengths.
    pub(super) fn check(&self, operation: &'static str) -> Result<(), KernelError> {
        let [rows, cols] = self.shape;
        if self.parts.len() == rows * cols && self.squared_norms.len() == 2 * rows {
            return Ok(());
        }
        Err(KernelError::Shape {
            operation,
            got: format!(
                "a split of {:?} with {} parts and {} squared norms",
                self.shape,
                self.parts.len(),
                self.squared_norms.len()
            ),
            remedy: "pass what `host::bit_split` made",
        })
    }
}

/// The integer in the low nibble of a byte: the high part of an element.
#[inline]
pub(super) fn low_nibble(byte: u8) -> i8 {
    (byte << 4) as i8 >> 4
}

/// The integer in the high nibble of a byte: the low part of an element.
#[inline]
pub(super) fn high_nibble(byte: u8) -> i8 {
    byte as i8 >> 4
}

/// Splits `x`, `[N, C]`, into two INT4 matrices:
/// [`reference::bit_split`](crate::reference::bit_split), to the bit.
///
/// # Errors
///
/// When `x` does not have as many elements as `shape`.
pub fn bit_split(
    x: &[f32],
    shape: [usize; 2],
    rounding: Rounding,
) -> Result<HostBitSplit, KernelError> {
    check_len("host::bit_split", x, shape)?;
    let [rows, cols] = shape;
    let grid = Grid::new(shape, Granularity::Tensor);
    let band = grid.band_rows();
    let maximum = x
        .par_chunks(band * cols.max(1))
        .map(|x| absmax([x].into_iter()))
        .reduce(|| 0.0, larger);
    let (scale, inverse) = scale_and_inverse(maximum, LARGEST);
    let mut parts = vec![0; x.len()];
    let mut squared_norms = vec![0; 2 * rows];
    if inverse != 0.0 {
        let (high_norms, low_norms) = squared_norms.split_at_mut(rows);
        (
            x.par_chunks(band * cols),
            parts.par_chunks_mut(band * cols),
            high_norms.par_chunks_mut(band),
            low_norms.par_chunks_mut(band),
        )
            .into_par_iter()
            .enumerate()
            .for_each(|(index, (x, parts, high_norms, low_norms))| {
                let mut dithers = vec![0.0; cols];
                let rows = x.chunks(cols).zip(parts.chunks_mut(cols));
                let norms = high_norms.iter_mut().zip(low_norms);
                for (row, ((x, parts), (high_norm, low_norm))) in rows.zip(norms).enumerate() {
                    match rounding {
                        Rounding::Nearest => split_nearest(x, inverse, parts),
                        Rounding::Stochastic(key) => {
                            philox::dither_row(key, index * band + row, &mut dithers);
                            split_stochastic(x, inverse, &dithers, parts);
                        }
                    }
                    let square = |q: i8| (i32::from(q) * i32::from(q)) as u32;
                    *high_norm = parts.iter().map(|&byte| square(low_nibble(byte))).sum();
                    *low_norm = parts.iter().map(|&byte| square(high_nibble(byte))).sum();
                }
            });
    }
    Ok(HostBitSplit {
        parts,
        scales: [scale, scale / LOW_STEPS],
        squared_norms,
        shape,
    })
}

fn split_nearest(x: &[f32], inverse: f32, parts: &mut [u8]) {
    for (x, part) in x.iter().zip(parts) {
        let (high, rest) = high_and_rest(*x, inverse);
        let low = (rest + ROUND_TO_EVEN).to_bits() as u8;
        *part = high | low << 4;
    }
}

fn split_stochastic(x: &[f32], inverse: f32, dithers: &[f32], parts: &mut [u8]) {
    for ((x, dither), part) in x.iter().zip(dithers).zip(parts) {
        let (high, rest) = high_and_rest(*x, inverse);
        let sum = rest + (STOCHASTIC_OFFSET + dither);
        // The floor, whose offset is a multiple of 16.
        let low = (sum.to_bits() >> FRACTION_BITS) as u8;
        *part = high | low << 4;
    }
}

/// The nibble of the high part, and what it misses in steps of the low part.
#[inline]
fn high_and_rest(x: f32, inverse: f32) -> (u8, f32) {
    let v = (x * inverse).clamp(-LARGEST, LARGEST);
    let sum = v + ROUND_TO_EVEN;
    (
        sum.to_bits() as u8 & 0xf,
        (v - (sum - ROUND_TO_EVEN)) * LOW_STEPS,
    )
}

/// Both parts as one INT8 matrix:
/// [`reference::merge_parts`](crate::reference::merge_parts).
///
/// # Errors
///
/// When `split` does not have as many elements as its shape.
pub fn merge_parts(split: &HostBitSplit) -> Result<HostQuantized<'static>, KernelError> {
    split.check("host::merge_parts")?;
    let merged: Vec<i8> = split
        .parts
        .par_iter()
        .with_min_len(1 << 14)
        .map(|&byte| low_nibble(byte) * LOW_STEPS as i8 + high_nibble(byte))
        .collect();
    Ok(HostQuantized {
        values: HostValues::I8(merged.into()),
        scales: HostScales::F32(vec![split.scales[1]].into()),
        number: Number::Int8,
        granularity: Granularity::Tensor,
        shape: split.shape,
    })
}
