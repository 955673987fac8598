//! The histories of largest magnitudes of layers, by which delayed scaling quantizes.

pub(super) mod kernels;
mod operation;

pub use kernels::{AmaxHistory, AmaxHistoryKernels};
pub use operation::advance_amax_history;
