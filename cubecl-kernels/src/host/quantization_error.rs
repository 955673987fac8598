//! How far quantized values are from those that they stand for, on all cores.

use rayon::prelude::*;

use crate::{
    quantization_error::{COUNTS, SUMS},
    reference,
};

/// Elements that a thread takes at a time: the order of the sums.
const CHUNK: usize = 1 << 14;

/// Sums and counts of a matrix `x`, of largest magnitude `absmax`, and of `y`, what it became:
/// [`reference::quantization_error()`].
///
/// # Panics
///
/// When the slices differ in length.
pub fn quantization_error(
    x: &[f32],
    y: &[f32],
    absmax: f32,
    limit: Option<f32>,
) -> ([f32; SUMS], [u32; COUNTS]) {
    assert_eq!(x.len(), y.len(), "quantization_error: elements of x and y");
    let parts: Vec<_> = (x.par_chunks(CHUNK), y.par_chunks(CHUNK))
        .into_par_iter()
        .map(|(x, y)| reference::quantization_error(x, y, absmax, limit))
        .collect();
    let sum = |index: usize| parts.iter().map(|(sums, _)| sums[index]).sum::<f64>() as f32;
    let count = |index: usize| parts.iter().map(|(_, counts)| counts[index]).sum();
    (std::array::from_fn(sum), std::array::from_fn(count))
}
