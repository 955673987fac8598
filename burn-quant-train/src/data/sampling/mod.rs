//! Bit splitting and leverage score sampling of output gradients (int4-hq-lss, section 4.2).

pub(super) mod kernels;

pub use kernels::{BitSplit, RowSample, SamplingKernels};
