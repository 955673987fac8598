//! The magnitudes of a matrix.

use crate::magnitude::{BINS, TINY, ZEROS, octave};

/// The largest magnitude, and the elements in each bin of [`magnitude`](crate::magnitude).
pub fn magnitudes(x: &[f32]) -> (f32, [u32; BINS]) {
    let absmax = super::absmax(x.iter().copied());
    let mut histogram = [0; BINS];
    for &value in x {
        let bin = match value == 0.0 {
            true => ZEROS,
            false => TINY.min(octave(absmax).saturating_sub(octave(value))),
        };
        histogram[bin] += 1;
    }
    (absmax, histogram)
}
