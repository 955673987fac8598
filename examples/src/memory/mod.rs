//! The memory that training keeps, measured, not computed: the bytes of activations that a forward pass leaves for the
//! backward pass, and the bytes of optimizer state.
//!
//! `--memory` says what the activations are: `table` on the terminal, by layer and by operation; `rows` for other
//! tools; `plot` as a picture.

mod plot;
mod rows;
mod table;

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use burn::optim::{GradientsParams, Optimizer};
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, BackendTypes};

use burn_quant_train::recipe::Flow;
use burn_quant_train::saved::{ActivationReport, Recording, compress_pending};

use crate::data::Batch;
use crate::model::Decoder;

/// Asks for the bytes that are live now: of the process's allocator, or of the device's memory pools.
pub type LiveBytes<'a, B> = &'a dyn Fn(&<B as BackendTypes>::Device) -> u64;

/// The gauges of the memory that a run takes.
pub struct Gauges<'a, D> {
    /// Bytes that are live now, as for [`LiveBytes`].
    pub live: &'a dyn Fn(&D) -> u64,
    /// Bytes that memory pools have taken from the device, in use or not; `None` on a CPU, which has no pools.
    pub taken: fn(&D) -> Option<u64>,
    /// Has the pools give back what is not in use.
    pub give_back: fn(&D),
}

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

/// The values that wait for the backward pass of this batch.
pub fn report<B: AutodiffBackend>(model: &Decoder<B>, batch: &Batch<B>) -> ActivationReport {
    let recording = Recording::start();
    let loss = model.loss(batch.clone());
    let saved = recording.report();
    drop(loss);
    saved
}

/// Writes a report into the folder of its run as `memory.svg`, `memory.csv` and `memory.jsonl`. Gives what is to be
/// printed; `title` names the run.
///
/// # Errors
///
/// A file that cannot be written.
pub fn show(
    title: &str,
    report: &ActivationReport,
    flow: Option<&Flow>,
    folder: &Path,
) -> Result<String> {
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let rows = rows::of(report);
    let files = [
        ("memory.svg", plot::layers(title, report)?),
        ("memory.csv", rows::csv(&rows)?),
        ("memory.jsonl", rows::json_lines(&rows)?),
    ];
    for (name, content) in files {
        let path = folder.join(name);
        fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let tables = table::all(report, flow);
    let folder = folder.display();
    Ok(format!(
        "\n{title}: what waits for the backward pass\n{tables}\nmore in {folder}/memory.svg, memory.csv and memory.jsonl\n"
    ))
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
