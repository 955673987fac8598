//! How far quantized values are from those that they stand for. Unlike a kernel's, its sums are of f64.

use crate::quantization_error::{BEYOND, COUNTS, SUMS, unit};

/// Sums and counts of [`quantization_error`](mod@crate::quantization_error): of a matrix `x`, of largest magnitude
/// `absmax`, and of `y`, what it became.
///
/// # Panics
///
/// When the slices differ in length.
pub fn quantization_error(
    x: &[f32],
    y: &[f32],
    absmax: f32,
    limit: Option<f32>,
) -> ([f64; SUMS], [u32; COUNTS]) {
    assert_eq!(x.len(), y.len(), "quantization_error: elements of x and y");
    let unit = f64::from(unit(absmax));
    let limit = limit.map_or(f32::INFINITY, |limit| limit * BEYOND);
    let (mut sums, mut counts) = ([0.0; SUMS], [0; COUNTS]);
    for (&x, &y) in x.iter().zip(y) {
        counts[0] += u32::from(x != 0.0 && y == 0.0);
        counts[1] += u32::from(x.is_finite() && x.abs() > limit);
        let (x, y) = (f64::from(x) * unit, f64::from(y) * unit);
        let terms = [x * x, (x - y) * (x - y), x * y, y * y];
        sums.iter_mut()
            .zip(terms)
            .for_each(|(sum, term)| *sum += term);
    }
    (sums, counts)
}
