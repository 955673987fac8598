//! The controllers of thresholds, by a kernel for all layers.

use burn_cubecl::{
    CubeBackend, CubeRuntime, FloatElement, IntElement, element::BoolElement,
    kernel::into_contiguous,
};
use cubecl_kernels::delay_threshold;

use super::tensors::{Cube, handle};
use crate::data::{
    kernels::checked,
    threshold::{DelayThreshold, ThresholdKernels, Thresholds},
};

impl<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement> ThresholdKernels
    for CubeBackend<R, F, I, BT>
where
    Self: Cube<R>,
{
    fn delay_threshold(state: Thresholds<Self>, config: &DelayThreshold) -> Thresholds<Self> {
        let state = Thresholds {
            counts: into_contiguous(state.counts),
            ..state
        };
        checked(delay_threshold::delay_threshold(
            &state.thresholds.client,
            &handle(&state.thresholds),
            &handle(&state.moves),
            &handle(&state.counts),
            &handle(&state.rates),
            config.kernel(),
        ));
        state
    }
}
