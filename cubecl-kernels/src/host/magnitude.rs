//! The magnitudes of a matrix, on all cores.

use rayon::prelude::*;

use crate::{
    magnitude::{BINS, TINY, ZEROS},
    reference,
};

/// Elements that a thread takes at a time.
const CHUNK: usize = 1 << 14;

/// The largest magnitude, and the elements in each bin: [`reference::magnitudes`].
pub fn magnitudes(x: &[f32]) -> (f32, [u32; BINS]) {
    let parts: Vec<_> = x.par_chunks(CHUNK).map(reference::magnitudes).collect();
    let absmax = reference::absmax(parts.iter().map(|(absmax, _)| *absmax));
    let octave = |value: f32| (value.to_bits() >> 23) as usize;
    let mut histogram = [0; BINS];
    for (of_part, counts) in parts {
        // Bins of a part are relative to its own maximum.
        let below = octave(absmax) - octave(of_part);
        for (bin, count) in counts.into_iter().enumerate() {
            let bin = match bin {
                ZEROS => ZEROS,
                _ => TINY.min(bin + below),
            };
            histogram[bin] += count;
        }
    }
    (absmax, histogram)
}
