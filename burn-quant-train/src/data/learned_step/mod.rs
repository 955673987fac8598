//! Quantization by learned step sizes, of Hadamard-transformed matrices (HQ and LSQ: int4-hq-lss, sections 3.1 and
//! 3.3).

pub(super) mod kernels;
mod matrix;

pub use cubecl_kernels::{
    hadamard::{HadamardSize, HadamardTransform},
    quantize::learned_step::ResidualRows,
};
pub use kernels::{ElementSource, Gradient, LearnedStep, LearnedStepKernels};
pub use matrix::{LearnedMatrix, SavedRounding};
pub(crate) use matrix::{saturation_shape, spec};
