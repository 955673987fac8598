//! The figures of a layer's health: magnitudes of matrices, and errors of what they are quantized to.

mod findings;
pub(super) mod kernels;

pub use cubecl_kernels::{
    magnitude::{BINS, TINY, ZEROS, add_histogram, octave},
    quantization_error::{COUNTS, SUMS, unit},
};
pub use findings::Findings;
pub use kernels::{HealthKernels, Magnitudes, QuantizationError};
