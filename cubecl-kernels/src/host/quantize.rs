//! Quantization of a matrix.

use rayon::prelude::*;

use crate::{
    error::KernelError,
    layout::Layout,
    number::Storage,
    quantize::{QuantizeSpec, check_given},
    scale::{MIN_ABSMAX, ScaleNumber, e8m0, fp32, two_level},
};

use super::{
    HostQuantized, HostScales, HostValues, check, check_len,
    encode::{EncodeRow, RowEncoder, byte_row, int8_row, nibble_row, signed_byte_row, ten_bit_row},
    grid::{Grid, absmax, larger},
};

/// Quantizes `x`, `[rows, cols]`: [`reference::quantize`](crate::reference::quantize()), to the bit.
///
/// # Errors
///
/// When `x` does not have as many elements as `shape`, the number is not symmetric, a block or a group has no elements,
/// or the layout is not row-major.
pub fn quantize(
    x: &[f32],
    shape: [usize; 2],
    spec: &QuantizeSpec,
) -> Result<HostQuantized<'static>, KernelError> {
    let encoder = encoder("host::quantize", x, shape, spec)?;
    let (values, scales) = match spec.number.storage() {
        Storage::SignedBytes => {
            // Scales of E4M3 may be too small for their values by a rounding, which the fast way does not cut off.
            let encode_row = match spec.scale {
                ScaleNumber::F32 | ScaleNumber::E8M0 if encoder.grid.block.1 > 1 => int8_row,
                ScaleNumber::F32 | ScaleNumber::E8M0 | ScaleNumber::E4M3 => signed_byte_row,
            };
            let (values, scales) = by_maxima(x, &encoder, spec, encode_row);
            (HostValues::I8(values.into()), scales)
        }
        Storage::Bytes => {
            let (values, scales) = by_maxima(x, &encoder, spec, byte_row);
            (HostValues::U8(values.into()), scales)
        }
        Storage::Nibbles => {
            let (values, scales) = by_maxima(x, &encoder, spec, nibble_row);
            (HostValues::U8(values.into()), scales)
        }
        Storage::TenBits => {
            let (values, scales) = by_maxima(x, &encoder, spec, ten_bit_row);
            (HostValues::U32(values.into()), scales)
        }
    };
    Ok(HostQuantized {
        values,
        scales,
        number: spec.number,
        granularity: spec.granularity,
        shape,
    })
}

/// Quantizes `x`, `[rows, cols]`, by a scale that was given, and finds its largest magnitude:
/// [`reference::quantize_by`](crate::reference::quantize_by), to the bit.
///
/// # Errors
///
/// As [`quantize`], and when `spec` does not ask for one FP32 scale for the matrix.
pub fn quantize_by(
    x: &[f32],
    shape: [usize; 2],
    spec: &QuantizeSpec,
    scale: f32,
) -> Result<(HostQuantized<'static>, f32), KernelError> {
    check_given(spec)?;
    let encoder = encoder("host::quantize_by", x, shape, spec)?;
    let inverse = fp32::given_inverse(scale);
    let values = match spec.number.storage() {
        Storage::SignedBytes => {
            HostValues::I8(by_inverses(x, &encoder, spec, &[inverse], signed_byte_row).into())
        }
        Storage::Bytes => {
            HostValues::U8(by_inverses(x, &encoder, spec, &[inverse], byte_row).into())
        }
        Storage::Nibbles => {
            HostValues::U8(by_inverses(x, &encoder, spec, &[inverse], nibble_row).into())
        }
        Storage::TenBits => {
            HostValues::U32(by_inverses(x, &encoder, spec, &[inverse], ten_bit_row).into())
        }
    };
    let largest = largest_magnitude(x, &encoder.grid);
    let absmax = if largest.is_finite() {
        largest
    } else {
        f32::NAN
    };
    let kept = if absmax.is_nan() || inverse == 0.0 {
        f32::NAN
    } else {
        scale
    };
    let quantized = HostQuantized {
        values,
        scales: HostScales::F32(vec![kept; encoder.grid.regions()].into()),
        number: spec.number,
        granularity: spec.granularity,
        shape,
    };
    Ok((quantized, absmax))
}

/// Quantizes by the scale of a maximum that earlier data had, or where there is none by that of the data:
/// [`reference::quantize_delayed`](crate::reference::quantize_delayed), to the bit.
///
/// # Errors
///
/// As [`quantize_by`].
pub fn quantize_delayed(
    x: &[f32],
    shape: [usize; 2],
    spec: &QuantizeSpec,
    delayed: f32,
) -> Result<(HostQuantized<'static>, f32), KernelError> {
    let absmax = match has_scale(delayed) {
        true => delayed,
        false => largest_magnitude(x, &Grid::new(shape, spec.granularity)),
    };
    let scale = match has_scale(absmax) {
        true => absmax / spec.number.largest(),
        false => 1.0,
    };
    quantize_by(x, shape, spec, scale)
}

/// True for a maximum that gets a scale, unless it is that of zeros or of what is not finite.
fn has_scale(absmax: f32) -> bool {
    (MIN_ABSMAX..=f32::MAX).contains(&absmax)
}

/// The largest magnitude of all elements, by the order of the bits.
fn largest_magnitude(x: &[f32], grid: &Grid) -> f32 {
    x.par_chunks(grid.band_rows() * grid.cols.max(1))
        .map(|x| absmax([x].into_iter()))
        .reduce(|| 0.0, larger)
}

fn encoder(
    operation: &'static str,
    x: &[f32],
    shape: [usize; 2],
    spec: &QuantizeSpec,
) -> Result<RowEncoder, KernelError> {
    let number = check(operation, spec.number, spec.granularity)?;
    if spec.layout != Layout::RowMajor {
        return Err(KernelError::Unsupported {
            operation,
            reason: format!("{:?}", spec.layout),
            remedy: "use Layout::RowMajor",
        });
    }
    check_len(operation, x, shape)?;
    Ok(RowEncoder {
        grid: Grid::new(shape, spec.granularity),
        number,
        rounding: spec.rounding,
    })
}

/// The stored values and the scales of `x`, by the maxima of its regions.
fn by_maxima<E: Clone + Default + Send>(
    x: &[f32],
    encoder: &RowEncoder,
    spec: &QuantizeSpec,
    encode_row: EncodeRow<E>,
) -> (Vec<E>, HostScales<'static>) {
    let largest = spec.number.largest();
    match spec.scale {
        ScaleNumber::F32 => {
            let scale = |absmax| fp32::scale_and_inverse(absmax, largest);
            let (values, scales) = by_own_maxima(x, encoder, spec, scale, encode_row);
            (values, HostScales::F32(scales.into()))
        }
        ScaleNumber::E8M0 => {
            let scale = |absmax| e8m0::scale_and_inverse(absmax, largest);
            let (values, scales) = by_own_maxima(x, encoder, spec, scale, encode_row);
            (values, HostScales::E8M0(scales.into()))
        }
        ScaleNumber::E4M3 => {
            let maxima = region_maxima(x, &encoder.grid);
            let finite = maxima.iter().copied().filter(|absmax| absmax.is_finite());
            let tensor_scale = two_level::tensor_scale(finite.fold(0.0, f32::max), largest);
            let (scales, inverses): (Vec<u8>, Vec<f32>) = maxima
                .into_iter()
                .map(|absmax| two_level::scale_and_inverse(absmax, largest, tensor_scale))
                .unzip();
            let values = by_inverses(x, encoder, spec, &inverses, encode_row);
            let scales = HostScales::E4M3 {
                scales: scales.into(),
                tensor_scale,
            };
            (values, scales)
        }
    }
}

/// Where the scale of a region follows from its own maximum: each row of regions in one go, while it is in the cache,
/// unless there is one row of regions alone.
fn by_own_maxima<E: Clone + Default + Send, S: Clone + Default + Send>(
    x: &[f32],
    encoder: &RowEncoder,
    spec: &QuantizeSpec,
    scale: impl Fn(f32) -> (S, f32) + Sync,
    encode_row: EncodeRow<E>,
) -> (Vec<E>, Vec<S>) {
    let grid = encoder.grid;
    if grid.block.0 >= grid.rows {
        let maxima = region_maxima(x, &grid).into_iter();
        let (scales, inverses): (Vec<S>, Vec<f32>) = maxima.map(&scale).unzip();
        return (by_inverses(x, encoder, spec, &inverses, encode_row), scales);
    }
    let stored_cols = spec.number.storage().stored_cols(grid.cols);
    let mut values = vec![E::default(); grid.rows * stored_cols];
    let mut scales = vec![S::default(); grid.regions()];
    (
        x.par_chunks(grid.stripe()),
        values.par_chunks_mut((grid.block.0 * stored_cols).max(1)),
        scales.par_chunks_mut(grid.across().max(1)),
    )
        .into_par_iter()
        .enumerate()
        .for_each(|(stripe, (x, values, scales))| {
            let maxima = grid.maxima(x).into_iter();
            let inverses: Vec<f32> = maxima
                .zip(scales)
                .map(|(absmax, out)| {
                    let (scale, inverse) = scale(absmax);
                    *out = scale;
                    inverse
                })
                .collect();
            let out = (values, stored_cols);
            encoder.encode(x, stripe * grid.block.0, |_| &inverses[..], encode_row, out);
        });
    (values, scales)
}

/// The stored values of `x`, by the inverse scales of its regions.
fn by_inverses<E: Clone + Default + Send>(
    x: &[f32],
    encoder: &RowEncoder,
    spec: &QuantizeSpec,
    inverses: &[f32],
    encode_row: EncodeRow<E>,
) -> Vec<E> {
    let grid = encoder.grid;
    let stored_cols = spec.number.storage().stored_cols(grid.cols);
    let mut values = vec![E::default(); grid.rows * stored_cols];
    if x.is_empty() {
        return values;
    }
    let band = grid.band_rows();
    let of_row = |row: usize| &inverses[row / grid.block.0 * grid.across()..][..grid.across()];
    (
        x.par_chunks(band * grid.cols),
        values.par_chunks_mut(band * stored_cols),
    )
        .into_par_iter()
        .enumerate()
        .for_each(|(index, (x, values))| {
            encoder.encode(x, index * band, of_row, encode_row, (values, stored_cols));
        });
    values
}

/// The largest magnitude of each region, by the order of the bits.
fn region_maxima(x: &[f32], grid: &Grid) -> Vec<f32> {
    if x.is_empty() {
        return vec![0.0; grid.regions()];
    }
    let none = || vec![0.0; grid.across()];
    x.par_chunks(grid.stripe())
        .flat_map_iter(|stripe| {
            stripe
                .par_chunks(grid.band_rows() * grid.cols)
                .map(|rows| grid.maxima(rows))
                .reduce(none, |mut a, b| {
                    a.iter_mut().zip(b).for_each(|(a, b)| *a = larger(*a, b));
                    a
                })
        })
        .collect()
}
