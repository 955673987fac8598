//! The Hadamard quantizer with a learned step size, and its backward pass, on slices: see
//! [`quantize::learned_step`](crate::quantize::learned_step).

use rayon::prelude::*;

use crate::{
    error::KernelError,
    granularity::Granularity,
    hadamard::{Axis, HadamardTransform},
    number::{Integer, Number, Storage, Symmetric, integer::ROUND_TO_EVEN, storage::nibble},
    quantize::learned_step::{
        FLAGS_OF_GROUP, LARGEST, RESIDUAL_UNITS, ResidualRows, SATURATION_GROUP, gradient_scale,
        is_step,
    },
    rounding::Rounding,
    scale::fp32::given_inverse,
};

use super::{
    HostQuantized, HostScales, HostValues, check_len,
    encode::{RowEncoder, nibble_row},
    grid::{Grid, absmax, larger},
    hadamard::transform as transform_band,
};

/// Partial sums of a dot product, as many as vector instructions have use for.
const LANES: usize = 16;

/// [`SavedRounding`](crate::quantize::learned_step::SavedRounding) in host memory.
#[derive(Debug, Clone, PartialEq)]
pub struct HostSavedRounding {
    /// `[rows, ceil(cols / 32)]`: which elements of code 7 or -7 are clamped.
    pub saturation: Vec<u8>,
    /// `[sampled rows, cols]`: `254 (code - v)`.
    pub residuals: Vec<i8>,
    /// The rows that have residuals.
    pub sample: ResidualRows,
}

/// [`Gradient`](crate::quantize::learned_step::Gradient) in host memory.
#[derive(Debug, Clone, Copy)]
pub enum HostGradient<'a> {
    /// `[rows, cols]`.
    Dense(&'a [f32]),
    /// Products of sampled rows.
    Sampled {
        /// `[capacity, cols]`.
        products: &'a [f32],
        /// `[2 rows]`: the two products that add up to a row; a position outside of them adds nothing.
        positions: &'a [i32],
    },
}

/// [`ElementSource`](crate::quantize::learned_step::ElementSource) in host memory.
#[derive(Debug, Clone, Copy)]
pub enum HostElementSource<'a> {
    /// The matrix that was quantized.
    Exact {
        /// `[rows, cols]`.
        x: &'a [f32],
        /// Rows and columns.
        shape: [usize; 2],
        /// The step size that it was quantized by.
        step: f32,
    },
    /// The values that the quantizer kept.
    Saved {
        /// The codes.
        quantized: &'a HostQuantized<'a>,
        /// The rest.
        rounding: &'a HostSavedRounding,
    },
}

/// The gradients of the quantizer's inputs.
#[derive(Debug, Clone, PartialEq)]
pub struct HostLearnedStepGradients {
    /// That of the matrix, `[rows, cols]`.
    pub x: Vec<f32>,
    /// That of the step size.
    pub step: f32,
}

/// Quantizes the transform of `x`, `[rows, cols]`, to INT4 by the step size `step`:
/// [`reference::learned_step::quantize`](crate::reference::learned_step::quantize), to the bit. `save` names the rows
/// of which residuals are kept for the backward pass; `None` keeps nothing for it.
///
/// # Errors
///
/// When `x` does not have as many elements as `shape`, or the blocks of the transform do not divide its axis.
pub fn quantize(
    x: &[f32],
    shape: [usize; 2],
    step: f32,
    transform: HadamardTransform,
    save: Option<ResidualRows>,
) -> Result<(HostQuantized<'static>, Option<HostSavedRounding>), KernelError> {
    let bands = Bands::new("host::learned_step::quantize", x, shape, transform)?;
    let [rows, cols] = shape;
    let inverses = [given_inverse(step)];
    let inverse = inverses[0];
    let encoder = RowEncoder {
        grid: Grid::new(shape, Granularity::Tensor),
        number: Symmetric::Integer(Integer::INT4),
        rounding: Rounding::Nearest,
    };
    let stored_cols = Storage::Nibbles.stored_cols(cols);
    let mut values = vec![0; rows * stored_cols];
    let mut saved = save.map(|sample| HostSavedRounding::zeros(shape, sample));
    let saved_bands: Vec<Option<SavedBand<'_>>> = match &mut saved {
        Some(saved) => saved.bands(shape, bands.rows).map(Some).collect(),
        None => x.chunks(bands.elements()).map(|_| None).collect(),
    };
    let largest = (
        x.par_chunks(bands.elements()),
        values.par_chunks_mut((bands.rows * stored_cols).max(1)),
        saved_bands,
    )
        .into_par_iter()
        .enumerate()
        .map(|(band, (x, values, saved))| {
            let h = bands.transformed(x);
            let first = band * bands.rows;
            let out = (values, stored_cols);
            encoder.encode(&h, first, |_| &inverses[..], nibble_row, out);
            if let Some(saved) = saved {
                saved.write(&h, cols, inverse);
            }
            absmax([&h[..]].into_iter())
        })
        .reduce(|| 0.0, larger);
    let scale = match largest.is_finite() && inverse != 0.0 {
        true => step,
        false => f32::NAN,
    };
    let quantized = HostQuantized {
        values: HostValues::U8(values.into()),
        scales: HostScales::F32(vec![scale].into()),
        number: Number::Int4,
        granularity: Granularity::Tensor,
        shape,
    };
    Ok((quantized, saved))
}

impl HostSavedRounding {
    fn zeros([rows, cols]: [usize; 2], sample: ResidualRows) -> Self {
        Self {
            saturation: vec![0; rows * cols.div_ceil(SATURATION_GROUP)],
            residuals: vec![0; sample.count(rows) * cols],
            sample,
        }
    }

    /// The parts of consecutive bands of rows.
    fn bands(
        &mut self,
        [rows, cols]: [usize; 2],
        band_rows: usize,
    ) -> impl Iterator<Item = SavedBand<'_>> {
        let sample = self.sample;
        let mut saturation = &mut self.saturation[..];
        let mut residuals = &mut self.residuals[..];
        (0..rows).step_by(band_rows).map(move |first| {
            let last = rows.min(first + band_rows);
            let sampled = sample.count(last) - sample.count(first);
            let flags = (last - first) * cols.div_ceil(SATURATION_GROUP);
            SavedBand {
                first,
                sample,
                saturation: saturation.split_off_mut(..flags).unwrap_or_default(),
                residuals: residuals
                    .split_off_mut(..sampled * cols)
                    .unwrap_or_default(),
            }
        })
    }
}

/// The values that are saved of a band of rows.
struct SavedBand<'a> {
    /// Its first row.
    first: usize,
    sample: ResidualRows,
    saturation: &'a mut [u8],
    residuals: &'a mut [i8],
}

impl SavedBand<'_> {
    /// Writes it from the transform of the band.
    fn write(self, h: &[f32], cols: usize, inverse: f32) {
        let saturation = self.saturation.chunks_mut(cols.div_ceil(SATURATION_GROUP));
        for (h, saturation) in h.chunks(cols).zip(saturation) {
            save_flags(h, inverse, saturation);
        }
        let sampled = (self.first..)
            .zip(h.chunks(cols))
            .filter(|(row, _)| self.sample.contains(*row));
        for ((_, h), residuals) in sampled.zip(self.residuals.chunks_mut(cols)) {
            save_residuals(h, inverse, residuals);
        }
    }
}

/// The gradients of the matrix and of its step size from that of `Z`:
/// [`reference::learned_step::backward`](crate::reference::learned_step::backward), the former to the bit.
///
/// # Errors
///
/// When slices are of other lengths than their places say, or the blocks of the transform do not divide its axis.
pub fn backward(
    gradient: HostGradient<'_>,
    source: HostElementSource<'_>,
    transform: HadamardTransform,
) -> Result<HostLearnedStepGradients, KernelError> {
    const OPERATION: &str = "host::learned_step::backward";
    let shape = match source {
        HostElementSource::Exact { shape, .. } => shape,
        HostElementSource::Saved { quantized, .. } => quantized.shape,
    };
    let mut out = vec![0.0; shape[0] * shape[1]];
    let bands = Bands::new(OPERATION, &out, shape, transform)?;
    check_gradient(OPERATION, &gradient, shape)?;
    let elements = Elements::new(OPERATION, &source)?;
    let cols = shape[1];
    let sums: Vec<f64> = out
        .par_chunks_mut(bands.elements())
        .enumerate()
        .map(|(band, out)| {
            let first = band * bands.rows;
            let mut sum = 0.0;
            let mut deltas = match &elements {
                Elements::Exact { x, .. } => bands.transformed(&x[first * cols..][..out.len()]),
                Elements::Saved { .. } => vec![0.0; out.len()],
            };
            let mut passes = vec![0.0; cols];
            let rows = out.chunks_mut(cols).zip(deltas.chunks_mut(cols));
            for (row, (out, deltas)) in rows.enumerate() {
                gradient.write_row(first + row, out);
                elements.write_row(first + row, deltas, &mut passes);
                sum += f64::from(dot(out, deltas));
                for (out, passes) in out.iter_mut().zip(&passes) {
                    *out *= passes;
                }
            }
            transform_band(out, cols, transform);
            sum
        })
        .collect();
    let sum: f64 = sums.into_iter().sum();
    Ok(HostLearnedStepGradients {
        step: (sum * f64::from(gradient_scale(out.len()))) as f32,
        x: out,
    })
}

/// The step size `2 mean|h| / sqrt(7)`, or `step` where that is none: see
/// [`cold_step`](crate::quantize::learned_step::cold_step).
///
/// # Errors
///
/// As [`quantize`].
pub fn cold_step(
    x: &[f32],
    shape: [usize; 2],
    step: f32,
    transform: HadamardTransform,
) -> Result<f32, KernelError> {
    let bands = Bands::new("host::learned_step::cold_step", x, shape, transform)?;
    let mean = bands.mean(x, f32::abs);
    let cold = (2.0 * mean / f64::from(LARGEST).sqrt()) as f32;
    Ok(if is_step(cold) { cold } else { step })
}

/// The mean of `(Z - h)^2`: see [`squared_error`](crate::quantize::learned_step::squared_error).
///
/// # Errors
///
/// As [`quantize`].
pub fn squared_error(
    x: &[f32],
    shape: [usize; 2],
    step: f32,
    transform: HadamardTransform,
) -> Result<f32, KernelError> {
    let bands = Bands::new("host::learned_step::squared_error", x, shape, transform)?;
    let inverse = given_inverse(step);
    if inverse == 0.0 {
        return Ok(f32::NAN);
    }
    let mean = bands.mean(x, |h| {
        let rest = rounded(h * inverse) - h * inverse;
        if h.is_finite() { rest * rest } else { f32::NAN }
    });
    Ok((mean * f64::from(step) * f64::from(step)) as f32)
}

/// A matrix in bands of rows, each for a thread, of whole blocks of the transform.
struct Bands {
    rows: usize,
    cols: usize,
    count: usize,
    transform: HadamardTransform,
}

impl Bands {
    fn new(
        operation: &'static str,
        x: &[f32],
        shape: [usize; 2],
        transform: HadamardTransform,
    ) -> Result<Self, KernelError> {
        check_len(operation, x, shape)?;
        transform.check(operation, shape)?;
        let rows = Grid::new(shape, Granularity::Tensor).band_rows();
        Ok(Self {
            rows: match transform.axis {
                Axis::Rows => rows.next_multiple_of(transform.size.block()),
                Axis::Columns => rows,
            },
            cols: shape[1],
            count: x.len(),
            transform,
        })
    }

    /// Elements of a band.
    fn elements(&self) -> usize {
        (self.rows * self.cols).max(1)
    }

    /// The transform of the rows of a band.
    fn transformed(&self, x: &[f32]) -> Vec<f32> {
        let mut h = x.to_vec();
        transform_band(&mut h, self.cols, self.transform);
        h
    }

    /// The mean of a term of each element of the transform, in one order whatever the number of threads; 0 of nothing.
    fn mean(&self, x: &[f32], term: impl Fn(f32) -> f32 + Sync) -> f64 {
        let sums: Vec<f64> = x
            .par_chunks(self.elements())
            .map(|x| {
                let mut h = self.transformed(x);
                h.iter_mut().for_each(|h| *h = term(*h));
                h.chunks(self.cols).map(|row| f64::from(sum(row))).sum()
            })
            .collect();
        sums.into_iter().sum::<f64>() / self.count.max(1) as f64
    }
}

impl HostGradient<'_> {
    /// Writes a row.
    fn write_row(&self, row: usize, out: &mut [f32]) {
        let cols = out.len();
        match self {
            Self::Dense(gradient) => out.copy_from_slice(&gradient[row * cols..][..cols]),
            Self::Sampled {
                products,
                positions,
            } => {
                let rows = positions.len() / 2;
                let product = |position: i32| {
                    let start = usize::try_from(position).ok()?.checked_mul(cols)?;
                    products.get(start..start + cols)
                };
                match product(positions[row]) {
                    Some(product) => out.copy_from_slice(product),
                    None => out.fill(0.0),
                }
                match product(positions[rows + row]) {
                    Some(product) => {
                        for (out, product) in out.iter_mut().zip(product) {
                            *out += product;
                        }
                    }
                    // The sum of -0 and nothing is 0.
                    None => out.iter_mut().for_each(|out| *out += 0.0),
                }
            }
        }
    }
}

fn check_gradient(
    operation: &'static str,
    gradient: &HostGradient<'_>,
    [rows, cols]: [usize; 2],
) -> Result<(), KernelError> {
    match gradient {
        HostGradient::Dense(gradient) => check_len(operation, gradient, [rows, cols]),
        HostGradient::Sampled {
            products,
            positions,
        } => {
            if positions.len() == 2 * rows && products.len() % cols.max(1) == 0 {
                return Ok(());
            }
            Err(KernelError::Shape {
                operation,
                got: format!(
                    "{} elements of products and {} positions of a matrix [{rows}, {cols}]",
                    products.len(),
                    positions.len()
                ),
                remedy: "pass products [capacity, cols] and positions [2 rows]",
            })
        }
    }
}

/// A checked [`HostElementSource`].
enum Elements<'a> {
    Exact {
        x: &'a [f32],
        inverse: f32,
    },
    Saved {
        codes: &'a [u8],
        rounding: &'a HostSavedRounding,
    },
}

impl<'a> Elements<'a> {
    fn new(operation: &'static str, source: &HostElementSource<'a>) -> Result<Self, KernelError> {
        let (quantized, rounding) = match *source {
            HostElementSource::Exact { x, shape, step } => {
                check_len(operation, x, shape)?;
                let inverse = given_inverse(step);
                return Ok(Self::Exact { x, inverse });
            }
            HostElementSource::Saved {
                quantized,
                rounding,
            } => (quantized, rounding),
        };
        let [rows, cols] = quantized.shape;
        let HostSavedRounding {
            saturation,
            residuals,
            sample,
        } = rounding;
        match &quantized.values {
            HostValues::U8(codes)
                if quantized.number == Number::Int4
                    && codes.len() == rows * Storage::Nibbles.stored_cols(cols)
                    && saturation.len() == rows * cols.div_ceil(SATURATION_GROUP)
                    && residuals.len() == sample.count(rows) * cols =>
            {
                Ok(Self::Saved { codes, rounding })
            }
            HostValues::I8(_) | HostValues::U8(_) | HostValues::U32(_) => Err(KernelError::Shape {
                operation,
                got: format!(
                    "[{rows}, {cols}] of {:?} with {} stored values, {} bytes of saturation and {} residuals of {sample:?}",
                    quantized.number,
                    quantized.values.len(),
                    saturation.len(),
                    residuals.len()
                ),
                remedy: "pass what `host::learned_step::quantize` made",
            }),
        }
    }

    /// Writes `delta` and `I` of a row. For [`Self::Exact`] the deltas are the row's transform before.
    fn write_row(&self, row: usize, deltas: &mut [f32], passes: &mut [f32]) {
        match self {
            Self::Exact { inverse, .. } => {
                for (delta, passes) in deltas.iter_mut().zip(passes) {
                    let v = quotient(*delta, *inverse);
                    let number = rounded(v);
                    let clamped = v.abs() > LARGEST;
                    *passes = if clamped { 0.0 } else { 1.0 };
                    *delta = if clamped { number } else { number - v };
                }
            }
            Self::Saved { codes, rounding } => {
                let cols = deltas.len();
                let stored_cols = Storage::Nibbles.stored_cols(cols);
                let groups = cols.div_ceil(SATURATION_GROUP);
                let sample = rounding.sample;
                if sample.contains(row) {
                    let weight = sample.residual_weight();
                    let residuals = &rounding.residuals[row / sample.interval() * cols..][..cols];
                    for (delta, residual) in deltas.iter_mut().zip(residuals) {
                        *delta = f32::from(*residual) * weight;
                    }
                } else {
                    deltas.fill(0.0);
                }
                passes.fill(1.0);
                clamp_saved(
                    &codes[row * stored_cols..][..stored_cols],
                    &rounding.saturation[row * groups..][..groups],
                    deltas,
                    passes,
                );
            }
        }
    }
}

/// Gives the clamped elements of a saved row their code for `delta`, and 0 for `I`.
fn clamp_saved(codes: &[u8], saturation: &[u8], deltas: &mut [f32], passes: &mut [f32]) {
    let cols = deltas.len();
    for (group, flags) in saturation.iter().enumerate() {
        let first = group * SATURATION_GROUP;
        let mut extremes = 0;
        for col in first..cols.min(first + SATURATION_GROUP) {
            let number = Integer::INT4.decode(nibble(codes, col));
            if number.abs() == LARGEST {
                if extremes >= FLAGS_OF_GROUP || flags >> extremes & 1 == 1 {
                    deltas[col] = number;
                    passes[col] = 0.0;
                }
                extremes += 1;
            }
        }
    }
}

/// The bytes of a row that say which elements are clamped.
fn save_flags(h: &[f32], inverse: f32, saturation: &mut [u8]) {
    for (group, out) in h.chunks(SATURATION_GROUP).zip(saturation) {
        let mut extremes = 0;
        *out = 0;
        for &h in group {
            let v = quotient(h, inverse);
            if rounded(v).abs() == LARGEST && extremes < FLAGS_OF_GROUP {
                *out |= u8::from(v.abs() > LARGEST) << extremes;
                extremes += 1;
            }
        }
    }
}

/// The residuals of a row.
fn save_residuals(h: &[f32], inverse: f32, residuals: &mut [i8]) {
    for (&h, out) in h.iter().zip(residuals) {
        let v = quotient(h, inverse);
        let rest = match v.abs() > LARGEST {
            true => 0.0,
            false => (rounded(v) - v) * RESIDUAL_UNITS,
        };
        *out = (rest + ROUND_TO_EVEN).to_bits() as i8;
    }
}

/// `v`: 0 where `h` is NaN, or where the step size has no inverse.
#[inline]
fn quotient(h: f32, inverse: f32) -> f32 {
    if inverse == 0.0 || h.is_nan() {
        0.0
    } else {
        h * inverse
    }
}

/// The number of the code of `v`, which is not NaN.
#[inline]
fn rounded(v: f32) -> f32 {
    (v.clamp(-LARGEST, LARGEST) + ROUND_TO_EVEN) - ROUND_TO_EVEN
}

/// The sum of a row by lanes.
fn sum(row: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    for chunk in row.chunks(LANES) {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += x;
        }
    }
    lanes.into_iter().sum()
}

/// The dot product of two rows by lanes.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    for (a, b) in a.chunks(LANES).zip(b.chunks(LANES)) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += a * b;
        }
    }
    lanes.into_iter().sum()
}
