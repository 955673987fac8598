//! The magnitudes of a matrix, on all cores.

use rayon::prelude::*;

use crate::{
    magnitude::{BINS, add_histogram, octave},
    reference,
};

/// Elements that a thread takes at a time.
const CHUNK: usize = 1 << 14;

/// The largest magnitude, and the elements in each bin: [`reference::magnitudes`].
pub fn magnitudes(x: &[f32]) -> (f32, [u32; BINS]) {
    let parts: Vec<_> = x.par_chunks(CHUNK).map(reference::magnitudes).collect();
    let absmax = reference::absmax(parts.iter().map(|(absmax, _)| *absmax));
    let mut histogram = [0; BINS];
    for (of_part, counts) in &parts {
        // Bins of a part are relative to its own maximum.
        add_histogram(&mut histogram, counts, octave(absmax) - octave(*of_part));
    }
    (absmax, histogram)
}
