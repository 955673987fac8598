//! How many bytes of activations a forward pass leaves behind for the backward pass: measured, not computed.

use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, BackendTypes};

use crate::data::Batch;
use crate::model::Decoder;

/// Asks for the bytes that are live now: of the process's allocator, or of the device's memory pools.
pub type LiveBytes<'a, B> = &'a dyn Fn(&<B as BackendTypes>::Device) -> u64;

/// Bytes that are live after a forward pass and were not before it, the loss included.
///
/// Nothing else may be running. A first pass, whose result is kept, makes what weights keep for themselves (their
/// quantized copies) and whatever kernels and pools allocate once; a second one is measured.
pub fn saved_activations<B: AutodiffBackend>(
    model: &Decoder<B>,
    batch: &Batch<B>,
    device: &B::Device,
    live_bytes: LiveBytes<'_, B>,
) -> u64 {
    let forward = || -> Tensor<B, 1> {
        let loss = model.loss(batch.clone());
        B::sync(device).expect("the device works");
        loss
    };
    let first = forward();
    let before = live_bytes(device);
    let second = forward();
    let after = live_bytes(device);
    drop((first, second));
    after.saturating_sub(before)
}
