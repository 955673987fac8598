//! The memory that training keeps, measured, not computed: the bytes of activations that a forward pass leaves for the
//! backward pass, and the bytes of optimizer state.

use burn::optim::{GradientsParams, Optimizer};
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, BackendTypes};

use burn_quant_train::saved::{ActivationReport, Recording, compress_pending};

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
    saved_by(|| model.loss(batch.clone()), device, live_bytes)
}

/// The same of the forward pass of any model, which ends in a loss of shape `[1]`.
pub fn saved_by<B: AutodiffBackend>(
    loss: impl Fn() -> Tensor<B, 1>,
    device: &B::Device,
    live_bytes: LiveBytes<'_, B>,
) -> u64 {
    let forward = || {
        let loss = loss();
        // As the backward pass begins.
        compress_pending();
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

/// What waits for the backward pass of this batch, the quantized copies of linear layers aside.
///
/// Nothing else may be running.
pub fn report<B: AutodiffBackend>(model: &Decoder<B>, batch: &Batch<B>) -> ActivationReport {
    let recording = Recording::start();
    let loss = model.loss(batch.clone());
    let saved = recording.report();
    drop(loss);
    saved
}

/// Bytes that an optimizer holds after its first step: those that are freed when it goes.
///
/// Nothing else may be running.
pub fn optimizer_state<B: AutodiffBackend, O: Optimizer<Decoder<B>, B>>(
    model: Decoder<B>,
    mut optim: O,
    batch: &Batch<B>,
    device: &B::Device,
    live_bytes: LiveBytes<'_, B>,
) -> u64 {
    let gradients = GradientsParams::from_grads(model.loss(batch.clone()).backward(), &model);
    let model = optim.step(0.0, model, gradients);
    let live = || {
        B::sync(device).expect("the device works");
        live_bytes(device)
    };
    let held = live();
    drop(optim);
    let freed = held.saturating_sub(live());
    drop(model);
    freed
}
