//! Quantized matrices as floats.

use std::borrow::Cow;

use rayon::prelude::*;

use crate::{
    error::KernelError,
    number::{Number, Storage, storage},
    scale::{e8m0, two_level},
};

use super::{HostQuantized, HostScales, HostValues, check, grid::Grid};

/// The values of a quantized matrix: the number of each code times its scale, rounded to `f32`.
///
/// # Errors
///
/// When values and scales are not those of the matrix' shape, number and granularity, or the number is not symmetric.
pub fn dequantize(matrix: &HostQuantized<'_>) -> Result<Vec<f32>, KernelError> {
    let parts = Parts::new("host::dequantize", matrix)?;
    let mut out = vec![0.0; matrix.shape[0] * matrix.shape[1]];
    parts.each_row(&mut out, |row, out| parts.write(row, out));
    Ok(out)
}

/// The values of a matrix quantized with fallback: base plus residual, each product and the sum rounded to `f32`.
///
/// # Errors
///
/// As [`dequantize`], and when the two differ in shape or granularity, or are not INT8.
pub fn dequantize_fallback(
    base: &HostQuantized<'_>,
    residual: &HostQuantized<'_>,
) -> Result<Vec<f32>, KernelError> {
    const OPERATION: &str = "host::dequantize_fallback";
    if (base.shape, base.granularity) != (residual.shape, residual.granularity) {
        return Err(KernelError::Shape {
            operation: OPERATION,
            got: format!(
                "a base {:?} by {:?} with a residual {:?} by {:?}",
                base.shape, base.granularity, residual.shape, residual.granularity
            ),
            remedy: "pass what `quantize_fallback` made",
        });
    }
    let (HostValues::I8(_), HostValues::I8(rest)) = (&base.values, &residual.values) else {
        return Err(KernelError::Unsupported {
            operation: OPERATION,
            reason: format!(
                "a base of {:?} with a residual of {:?}",
                base.number, residual.number
            ),
            remedy: "pass INT8 matrices",
        });
    };
    let of_base = Parts::new(OPERATION, base)?;
    let of_residual = Parts::new(OPERATION, residual)?;
    let mut out = vec![0.0; base.shape[0] * base.shape[1]];
    of_base.each_row(&mut out, |row, out| {
        of_base.write(row, out);
        let rest = &rest[row * out.len()..][..out.len()];
        of_residual.each_region(row, |(start, end), scale| {
            if scale != 0.0 {
                for (out, &q) in out[start..end].iter_mut().zip(&rest[start..end]) {
                    *out += f32::from(q) * scale;
                }
            }
        });
    });
    Ok(out)
}

/// A checked matrix.
struct Parts<'a> {
    grid: Grid,
    /// Stored elements of a row.
    stored_cols: usize,
    values: &'a HostValues<'a>,
    storage: Storage,
    /// The factors of values.
    scales: Cow<'a, [f32]>,
    /// The numbers of all codes, where they have at most 8 bits.
    numbers: Vec<f32>,
}

impl<'a> Parts<'a> {
    fn new(operation: &'static str, matrix: &'a HostQuantized<'_>) -> Result<Self, KernelError> {
        let HostQuantized {
            values,
            scales,
            number,
            granularity,
            shape,
        } = matrix;
        check(operation, *number, *granularity)?;
        let (grid, storage) = (Grid::new(*shape, *granularity), number.storage());
        let stored_cols = storage.stored_cols(grid.cols);
        if !values.fits(storage)
            || values.len() != grid.rows * stored_cols
            || scales.len() != grid.regions()
        {
            return Err(KernelError::Shape {
                operation,
                got: format!(
                    "{shape:?} of {number:?} by {granularity:?} with {} stored values and {} scales",
                    values.len(),
                    scales.len()
                ),
                remedy: "pass what `host::quantize` made",
            });
        }
        Ok(Self {
            grid,
            stored_cols,
            values,
            storage,
            scales: match scales {
                HostScales::F32(scales) => scales[..].into(),
                HostScales::E8M0(bytes) => bytes.iter().map(|&byte| e8m0::decode(byte)).collect(),
                HostScales::E4M3 {
                    scales,
                    tensor_scale,
                } => scales
                    .iter()
                    .map(|&code| two_level::decode(code, *tensor_scale))
                    .collect(),
            },
            numbers: numbers(*number),
        })
    }

    fn each_row(&self, out: &mut [f32], write: impl Fn(usize, &mut [f32]) + Sync) {
        let (band, cols) = (self.grid.band_rows(), self.grid.cols.max(1));
        out.par_chunks_mut(band * cols)
            .enumerate()
            .for_each(|(index, out)| {
                for (row, out) in out.chunks_mut(cols).enumerate() {
                    write(index * band + row, out);
                }
            });
    }

    /// The scales of the regions of a row.
    fn row_scales(&self, row: usize) -> &[f32] {
        let across = self.grid.across();
        &self.scales[row / self.grid.block.0 * across..][..across]
    }

    /// Writes the values of a row.
    fn write(&self, row: usize, out: &mut [f32]) {
        let start = row * self.stored_cols;
        let stored = start..start + self.stored_cols;
        match self.values {
            HostValues::I8(values) => {
                let values = &values[stored];
                self.each_region(row, |(start, end), scale| {
                    for (out, &q) in out[start..end].iter_mut().zip(&values[start..end]) {
                        *out = f32::from(q) * scale;
                    }
                });
                return;
            }
            HostValues::U8(values) => {
                let values = &values[stored];
                match self.storage {
                    Storage::Nibbles => {
                        for (col, out) in out.iter_mut().enumerate() {
                            *out = self.numbers[storage::nibble(values, col) as usize];
                        }
                    }
                    Storage::SignedBytes | Storage::Bytes | Storage::TenBits => {
                        for (&code, out) in values.iter().zip(out.iter_mut()) {
                            *out = self.numbers[usize::from(code)];
                        }
                    }
                }
            }
            HostValues::U32(words) => {
                let words = &words[stored];
                for (col, out) in out.iter_mut().enumerate() {
                    *out = Number::Int10.decode(storage::ten_bits(words, col));
                }
            }
        }
        self.each_region(row, |(start, end), scale| {
            for out in &mut out[start..end] {
                *out *= scale;
            }
        });
    }

    /// The columns and the scale of each region of a row.
    fn each_region(&self, row: usize, mut of_region: impl FnMut((usize, usize), f32)) {
        for (index, &scale) in self.row_scales(row).iter().enumerate() {
            of_region(self.grid.columns(index), scale);
        }
    }
}

/// The numbers of all codes of at most 8 bits; none for more bits.
fn numbers(number: Number) -> Vec<f32> {
    match number.storage() {
        Storage::SignedBytes | Storage::TenBits => Vec::new(),
        Storage::Bytes | Storage::Nibbles => (0..1 << number.bits())
            .map(|code| number.decode(code))
            .collect(),
    }
}
