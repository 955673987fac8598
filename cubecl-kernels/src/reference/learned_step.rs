//! The Hadamard quantizer with a learned step size, and its backward pass (int4-hq-lss, sections 3.1 and 3.3, equation
//! 4, Appendices A.3 to A.5).
//!
//! With `h = x H` and the step size `s`: `v = h / s`, an element's code is `v` clamped to `[-7, 7]` and rounded, and
//! `Z = s * code` stands for `h`. An element is *clamped* where `|v| > 7`.
//!
//! All but the sums over a matrix is specified to the bit. A sum is evaluated in `f64`; a kernel may differ from it by
//! its FP32 accumulation.

use crate::{
    granularity::Granularity,
    hadamard::HadamardTransform,
    number::Number,
    quantize::{
        QuantizeSpec,
        learned_step::{
            FLAGS_OF_GROUP, LARGEST, RESIDUAL_UNITS, ResidualRows, SATURATION_GROUP,
            gradient_scale, is_step,
        },
    },
    shape::MatrixShape,
};

use super::{
    hadamard::hadamard, matrix::ReferenceQuantized, quantize::quantize_by, scale::given_inverse,
};

/// A matrix in units of its step size, before and after it was rounded.
#[derive(Debug, Clone, PartialEq)]
pub struct LearnedStepQuantized {
    /// INT4 with one FP32 scale, the step size, or NaN where `h` holds NaN or an infinity, or where the step size has
    /// no inverse.
    pub quantized: ReferenceQuantized,
    /// `v` of each element, row-major: the product of `h` with the inverse of the step size. 0 where `h` is NaN or the
    /// step size has no inverse.
    pub quotients: Vec<f32>,
}

/// The straight-through estimate of an element.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StraightThrough {
    /// `I`: true where the element is not clamped, so that the gradient passes.
    pub passes: bool,
    /// `delta = code - I v`: the derivative of `Z` by the step size.
    pub delta: f64,
}

/// Quantizes the transform of `x`, `[rows, cols]`: [`quantize_by`] of [`hadamard`].
///
/// # Panics
///
/// As [`hadamard`].
pub fn quantize(
    x: &[f32],
    shape: [usize; 2],
    transform: HadamardTransform,
    step: f32,
) -> LearnedStepQuantized {
    let transformed = hadamard(x, shape, transform);
    let spec = QuantizeSpec::new(Number::Int4, Granularity::Tensor);
    let matrix = MatrixShape::new(shape[0], shape[1]);
    let (quantized, _) = quantize_by(&transformed, matrix, &spec, step);
    let inverse = given_inverse(step);
    let quotient = |h: f32| match inverse == 0.0 || h.is_nan() {
        true => 0.0,
        false => h * inverse,
    };
    LearnedStepQuantized {
        quantized,
        quotients: transformed.into_iter().map(quotient).collect(),
    }
}

impl LearnedStepQuantized {
    /// `I` and `delta` of each element, row-major.
    pub fn exact(&self) -> Vec<StraightThrough> {
        self.elements()
            .map(|(code, v)| match is_clamped(v) {
                true => clamped(code),
                false => passing(f64::from(code as f32 - v)),
            })
            .collect()
    }

    /// u8 `[rows, ceil(cols / 32)]`: bit `j` of a byte says that the `j`-th element of code 7 or -7, of the 32
    /// neighbours of a row that the byte is for, is clamped. Nothing is said of the ninth and those behind it.
    pub fn saturation(&self) -> Vec<u8> {
        let elements: Vec<(i32, f32)> = self.elements().collect();
        elements
            .chunks(self.quantized.shape.cols.max(1))
            .flat_map(|row| row.chunks(SATURATION_GROUP))
            .map(|group| {
                group
                    .iter()
                    .filter(|(code, _)| is_extreme(*code))
                    .take(FLAGS_OF_GROUP)
                    .enumerate()
                    .fold(0, |flags, (j, (_, v))| {
                        flags | u8::from(is_clamped(*v)) << j
                    })
            })
            .collect()
    }

    /// i8 `[sampled rows, cols]`: `254 (code - v)` rounded to the nearest integer, ties to even; 0 for a clamped
    /// element.
    pub fn residuals(&self, sample: ResidualRows) -> Vec<i8> {
        let elements: Vec<(i32, f32)> = self.elements().collect();
        elements
            .chunks(self.quantized.shape.cols.max(1))
            .enumerate()
            .filter(|(row, _)| sample.contains(*row))
            .flat_map(|(_, row)| row)
            .map(|&(code, v)| match is_clamped(v) {
                true => 0,
                false => ((code as f32 - v) * RESIDUAL_UNITS).round_ties_even() as i8,
            })
            .collect()
    }

    /// Code and `v` of each element.
    fn elements(&self) -> impl Iterator<Item = (i32, f32)> {
        self.quantized
            .values
            .iter()
            .copied()
            .zip(self.quotients.iter().copied())
    }
}

/// `I` and `delta` of each element from what was saved of it. The ninth element of code 7 or -7 of a group, and those
/// behind it, count as clamped. The residuals of sampled rows stand for those of all rows: each counts `interval`
/// times, and those of the other rows are 0. Of a clamped element `delta` is known in every row.
pub fn saved(
    codes: &[i32],
    cols: usize,
    saturation: &[u8],
    residuals: &[i8],
    sample: ResidualRows,
) -> Vec<StraightThrough> {
    let groups_of_row = cols.div_ceil(SATURATION_GROUP);
    let weight = f64::from(sample.residual_weight());
    let mut out = Vec::with_capacity(codes.len());
    for (row, codes) in codes.chunks(cols.max(1)).enumerate() {
        let mut extremes = 0;
        for (col, &code) in codes.iter().enumerate() {
            if col % SATURATION_GROUP == 0 {
                extremes = 0;
            }
            let flags = saturation[row * groups_of_row + col / SATURATION_GROUP];
            let is_clamped =
                is_extreme(code) && (extremes >= FLAGS_OF_GROUP || flags >> extremes & 1 == 1);
            extremes += usize::from(is_extreme(code));
            out.push(match (is_clamped, sample.contains(row)) {
                (true, _) => clamped(code),
                (false, true) => {
                    let residual = residuals[row / sample.interval() * cols + col];
                    passing(f64::from(residual) * weight)
                }
                (false, false) => passing(0.0),
            });
        }
    }
    out
}

/// The gradients of `x` and of the step size from that of `Z` (equation 4 and Appendix A.3): `(I g) H`, and the sum of
/// `g delta` by `1 / sqrt(7 N)` for a matrix of `N` elements.
///
/// Where `I` is 0 the gradient is multiplied by it, so that NaN stays NaN.
///
/// # Panics
///
/// As [`hadamard`].
pub fn backward(
    gradient: &[f32],
    elements: &[StraightThrough],
    shape: [usize; 2],
    transform: HadamardTransform,
) -> (Vec<f32>, f64) {
    let pairs = || gradient.iter().zip(elements);
    let passed: Vec<f32> = pairs()
        .map(|(g, element)| g * f32::from(u8::from(element.passes)))
        .collect();
    let sum: f64 = pairs()
        .map(|(g, element)| f64::from(*g) * element.delta)
        .sum();
    (
        hadamard(&passed, shape, transform),
        sum * f64::from(gradient_scale(gradient.len())),
    )
}

/// The gradient of `Z` from products of sampled rows, `[capacity, cols]`: row `i` is the sum of the rows
/// `positions[i]` and `positions[rows + i]`, where a position outside of them, as -1, adds nothing.
pub fn sampled_gradient(products: &[f32], cols: usize, positions: &[i32]) -> Vec<f32> {
    let rows = positions.len() / 2;
    let at = |position: i32, col: usize| {
        let row = usize::try_from(position).ok()?;
        products.get(row * cols + col).copied()
    };
    (0..rows * cols)
        .map(|index| {
            let (row, col) = (index / cols, index % cols);
            let of = |position| at(position, col).unwrap_or_default();
            of(positions[row]) + of(positions[rows + row])
        })
        .collect()
}

/// The step size `2 mean|h| / sqrt(7)` (Appendix A.4). The one that there is stays where that is none: see [`is_step`].
///
/// # Panics
///
/// As [`hadamard`].
pub fn cold_step(x: &[f32], shape: [usize; 2], transform: HadamardTransform, step: f32) -> f32 {
    let transformed = hadamard(x, shape, transform);
    let sum: f64 = transformed.iter().map(|h| f64::from(h.abs())).sum();
    let cold = (2.0 * sum / x.len() as f64 / f64::from(LARGEST).sqrt()) as f32;
    if is_step(cold) { cold } else { step }
}

/// The mean of `(Z - h)^2` (Appendix A.5), which is that of the matrix itself too, since `H` is orthogonal. NaN where
/// the matrix or the step size gives no values; 0 for an empty matrix.
///
/// # Panics
///
/// As [`hadamard`].
pub fn squared_error(x: &[f32], shape: [usize; 2], transform: HadamardTransform, step: f32) -> f64 {
    let quantized = quantize(x, shape, transform, step);
    let square = |(code, v): (i32, f32)| (f64::from(code) - f64::from(v)).powi(2);
    let sum: f64 = quantized.elements().map(square).sum();
    let scale = f64::from(quantized.quantized.scales[0]);
    sum / x.len().max(1) as f64 * scale * scale
}

fn is_clamped(v: f32) -> bool {
    v.abs() > LARGEST
}

fn is_extreme(code: i32) -> bool {
    code.abs() == LARGEST as i32
}

fn clamped(code: i32) -> StraightThrough {
    StraightThrough {
        passes: false,
        delta: f64::from(code),
    }
}

fn passing(delta: f64) -> StraightThrough {
    StraightThrough {
        passes: true,
        delta,
    }
}
