//! The end of a step as an operation.

use burn_backend::tensor::FloatTensor;
use cubecl_kernels::amax_history::DelayedScaling;

use crate::data::{
    kernels::Kernels,
    operation::{DataBackend, Operation},
    tensors::{FloatMeta, On, Outline, Tensors},
};

use super::kernels::AmaxHistory;

/// Ends a step of all layers: see
/// [`AmaxHistoryKernels::advance_amax_history`](super::AmaxHistoryKernels::advance_amax_history).
///
/// # Panics
///
/// If a shape is not as [`AmaxHistory`] says, on devices also if a dtype is not, or the margin is above 64.
pub fn advance_amax_history<B: DataBackend>(
    state: AmaxHistory<B>,
    runs: FloatTensor<B>,
    scaling: DelayedScaling,
) -> AmaxHistory<B> {
    B::run(AdvanceAmaxHistory { scaling }, (state, runs))
}

#[derive(Debug, Clone)]
struct AdvanceAmaxHistory {
    scaling: DelayedScaling,
}

impl Operation for AdvanceAmaxHistory {
    const NAME: &'static str = "advance_amax_history";
    type Inputs = (AmaxHistory<Outline>, FloatMeta);
    type Outputs = AmaxHistory<Outline>;

    fn outline<T: Tensors>(&self, (state, _): &On<Self::Inputs, T>) -> AmaxHistory<Outline> {
        AmaxHistory {
            maxima: FloatMeta::of(&state.maxima),
            history: FloatMeta::of(&state.history),
        }
    }

    fn run<K: Kernels>(self, (state, runs): On<Self::Inputs, K>) -> AmaxHistory<K> {
        K::advance_amax_history(state, runs, &self.scaling)
    }
}
