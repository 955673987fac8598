//! The fallback thresholds of layers and their controller (fallback-int8, appendix D, algorithm 2).

pub(super) mod kernels;
mod operation;

pub use kernels::{DelayThreshold, ThresholdFactor, ThresholdKernels, Thresholds};
pub use operation::delay_threshold;
