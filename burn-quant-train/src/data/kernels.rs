//! The kernels of a backend: one trait for each concern.

use cubecl_kernels::KernelError;

use super::{
    amax_history::kernels::AmaxHistoryKernels, attention::kernels::AttentionKernels,
    composition::kernels::CompositionKernels, concat::kernels::ConcatKernels,
    health::kernels::HealthKernels, learned_step::kernels::LearnedStepKernels,
    optimizer::kernels::OptimizerKernels, product::kernels::ProductKernels,
    quantize::kernels::QuantizeKernels, sampling::kernels::SamplingKernels,
    threshold::kernels::ThresholdKernels,
};

/// The kernels of a backend.
///
/// Their methods work on tensors in memory, in the order of the calls. No method has a default: each backend says what
/// it does.
pub trait Kernels:
    QuantizeKernels
    + LearnedStepKernels
    + SamplingKernels
    + ProductKernels
    + AttentionKernels
    + CompositionKernels
    + OptimizerKernels
    + ThresholdKernels
    + AmaxHistoryKernels
    + ConcatKernels
    + HealthKernels
{
}

impl<B> Kernels for B where
    B: QuantizeKernels
        + LearnedStepKernels
        + SamplingKernels
        + ProductKernels
        + AttentionKernels
        + CompositionKernels
        + OptimizerKernels
        + ThresholdKernels
        + AmaxHistoryKernels
        + AmaxHistoryKernels
        + ConcatKernels
        + HealthKernels
{
}

/// The result of a kernel. Burn's backend traits return no errors: the kernels' message names operation, shapes and
/// remedy.
pub(super) fn checked<T>(result: Result<T, KernelError>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}
