//! The controller as an operation.

use crate::data::{
    kernels::Kernels,
    operation::{DataBackend, Operation},
    tensors::{FloatMeta, IntMeta, Outline, Tensors},
};

use super::kernels::{DelayThreshold, Thresholds};

/// Moves every layer's threshold: see [`ThresholdKernels::delay_threshold`](super::ThresholdKernels::delay_threshold).
///
/// # Panics
///
/// On devices, if the tensors are not of the dtypes and shapes that [`Thresholds`] has, or the settings are out of
/// range: see [`DelayThreshold::validate`].
pub fn delay_threshold<B: DataBackend>(
    state: Thresholds<B>,
    config: &DelayThreshold,
) -> Thresholds<B> {
    B::run(DelayThresholdStep { config: *config }, state)
}

#[derive(Debug, Clone)]
struct DelayThresholdStep {
    config: DelayThreshold,
}

impl Operation for DelayThresholdStep {
    const NAME: &'static str = "delay_threshold";
    type Inputs = Thresholds<Outline>;
    type Outputs = Thresholds<Outline>;

    fn outline<T: Tensors>(&self, state: &Thresholds<T>) -> Thresholds<Outline> {
        Thresholds {
            thresholds: FloatMeta::of(&state.thresholds),
            moves: FloatMeta::of(&state.moves),
            counts: IntMeta::of(&state.counts),
            rates: FloatMeta::of(&state.rates),
        }
    }

    fn run<K: Kernels>(self, state: Thresholds<K>) -> Thresholds<K> {
        K::delay_threshold(state, &self.config)
    }
}
