//! The histories of layers, by a kernel for all of them.

use burn_backend::{DType, tensor::FloatTensor};
use burn_cubecl::{
    CubeBackend, CubeRuntime, FloatElement, IntElement, element::BoolElement,
    kernel::into_contiguous,
};
use cubecl_kernels::amax_history::{self, DelayedScaling};

use super::tensors::{Cube, handle, tensor};
use crate::data::{
    amax_history::{AmaxHistory, AmaxHistoryKernels},
    kernels::checked,
};

impl<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement> AmaxHistoryKernels
    for CubeBackend<R, F, I, BT>
where
    Self: Cube<R>,
{
    fn advance_amax_history(
        state: AmaxHistory<Self>,
        runs: FloatTensor<Self>,
        scaling: &DelayedScaling,
    ) -> AmaxHistory<Self> {
        // Tensors that were just uploaded may have padded rows.
        let like = into_contiguous(runs);
        let [maxima, history] =
            [state.maxima, state.history].map(|it| handle(&into_contiguous(it)));
        let next = checked(amax_history::advance_amax_history(
            &like.client,
            &amax_history::AmaxHistory { maxima, history },
            &handle(&like),
            scaling,
        ));
        AmaxHistory {
            maxima: tensor(&like, next.maxima, DType::F32),
            history: tensor(&like, next.history, DType::F32),
        }
    }
}
