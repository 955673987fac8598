//! Quantization in square blocks: one read of the input, every output written once.
//!
//! The nearest copy, the stochastic copy and the residual come from the same elements, so a linear layer's input is
//! read once for its forward product, its fallback and its backward pass.

use cubecl::{prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{MatrixView, or_unused, storage},
    rounding::StochasticKey,
};

mod portable;
pub(crate) mod whole_tiles;

/// How a copy is rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Round {
    Nearest,
    Stochastic,
}

/// The tensors of a fallback: the state of the layer, and what is written beside the base.
pub(crate) struct BlockFallback<'a, R: Runtime> {
    pub thresholds: &'a TensorHandle<R>,
    pub layer: u32,
    pub counts: &'a TensorHandle<R>,
    pub values: &'a TensorHandle<R>,
    pub scales: &'a TensorHandle<R>,
    pub flags: &'a TensorHandle<R>,
}

/// Where a launch writes, in the shapes of [`Quantized`](super::Quantized).
pub(crate) struct BlockOutput<'a, R: Runtime> {
    pub row_major: Option<(&'a TensorHandle<R>, Round)>,
    pub transposed: Option<(&'a TensorHandle<R>, Round)>,
    pub scales: &'a TensorHandle<R>,
    pub fallback: Option<BlockFallback<'a, R>>,
}

/// The residual's values and scales, flags, thresholds and counts; something that is not touched where there is no
/// fallback.
fn fallback_buffers<R: Runtime>(
    fallback: Option<&BlockFallback<R>>,
    unused: &TensorHandle<R>,
) -> [TensorHandle<R>; 5] {
    let buffer = |tensor, dtype| or_unused(tensor, unused, dtype);
    [
        buffer(fallback.map(|f| f.values), storage::<i8>()),
        buffer(fallback.map(|f| f.scales), storage::<f32>()),
        buffer(fallback.map(|f| f.flags), storage::<u32>()),
        buffer(fallback.map(|f| f.thresholds), storage::<f32>()),
        buffer(fallback.map(|f| f.counts), storage::<i32>()),
    ]
}

/// Quantizes `x` in blocks of `block`, a divisor of 128 of at least 16. Stochastic copies need a key. Whole tiles go
/// through a kernel of CUDA source where the device has it.
///
/// # Safety
///
/// `view` is that of `x`, which is not empty. The outputs have the types and shapes of [`Quantized`](super::Quantized)
/// for it, and are contiguous. The layer of a fallback has a threshold, f32, and two counts, i32.
#[allow(unsafe_code)]
pub(crate) unsafe fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    view: &MatrixView,
    block: usize,
    key: Option<StochasticKey>,
    output: &BlockOutput<R>,
) {
    // SAFETY: the caller's promise is that of both functions.
    unsafe {
        if !whole_tiles::launch(client, x, view, block, key, output) {
            portable::launch(client, x, view, block, key, output);
        }
    }
}
