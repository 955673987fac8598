//! The kernel that moves histories, and the state that it moves.

use burn_backend::{Backend, tensor::FloatTensor};
use cubecl_kernels::amax_history::DelayedScaling;

use crate::data::tensors::{Bundle, Change, Outline, Tensors};

/// The histories of all layers of a model, on one device.
#[derive(Debug, Clone)]
pub struct AmaxHistory<T: Tensors> {
    /// FP32 `[layers]`: the magnitude that becomes the largest number; 0 for a layer that has none yet.
    pub maxima: T::Float,
    /// FP32 `[layers, length]`: the last step first; 0 where there was none.
    pub history: T::Float,
}

impl Bundle for AmaxHistory<Outline> {
    type On<T: Tensors> = AmaxHistory<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        state: AmaxHistory<S>,
        change: &mut impl Change<S, T>,
    ) -> AmaxHistory<T> {
        AmaxHistory {
            maxima: change.float(state.maxima),
            history: change.float(state.history),
        }
    }
}

/// Histories on a backend that holds data.
pub trait AmaxHistoryKernels: Backend {
    /// Ends a step of all layers, without a host read, by the largest magnitudes of their runs, FP32 `[layers, runs]`, 0
    /// for a run that was not: see [`cubecl_kernels::amax_history::advance_amax_history`].
    ///
    /// # Panics
    ///
    /// If a shape is not as [`AmaxHistory`] says, on devices also if a dtype is not, or the margin is above 64.
    fn advance_amax_history(
        state: AmaxHistory<Self>,
        runs: FloatTensor<Self>,
        scaling: &DelayedScaling,
    ) -> AmaxHistory<Self>;
}
