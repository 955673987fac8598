//! Results: a table for people, JSON for programs.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

use crate::args::{Compute, Config, Device, Optimizer, Preset, Recipe, StateRounding};
use crate::data;

/// At most this many points of the loss curve go into the JSON.
const CURVE_POINTS: usize = 500;

/// The result of a run.
#[derive(Serialize, Clone, Debug)]
pub struct Report {
    /// The recipe.
    pub recipe: Recipe,
    /// The format of the optimizer's moments.
    pub optimizer: Optimizer,
    /// How the codes of 8-bit moments are rounded.
    pub state_rounding: StateRounding,
    /// The model's size.
    pub preset: Preset,
    /// Where it trained.
    pub device: Device,
    /// The compute dtype.
    pub compute: Compute,
    /// Optimizer steps.
    pub steps: usize,
    /// Sequences in a batch.
    pub batch: usize,
    /// Bytes in a sequence.
    pub sequence: usize,
    /// Seed of the weights, the data order and the rounding.
    pub seed: u64,
    /// Peak learning rate.
    pub lr: f64,
    /// Parameters of the model.
    pub parameters: usize,
    /// Tokens trained on.
    pub tokens: usize,
    /// Mean training loss of the last tenth of the steps, at most 50.
    pub train_loss: f64,
    /// Validation loss in nats per byte.
    pub val_loss: f64,
    /// The same in bits.
    pub bits_per_byte: f64,
    /// Training speed, without the first steps, checkpoints and validation.
    pub tokens_per_s: f64,
    /// Bytes that one forward pass leaves for the backward pass.
    pub activation_bytes: u64,
    /// Bytes of optimizer state.
    pub optimizer_bytes: u64,
    /// Steps that the optimizer skipped, since a gradient held NaN or Inf.
    pub skipped_steps: u64,
    /// Mean fallback rate over the layers in the last step; none for recipes without fallback.
    pub fallback_rate: Option<f64>,
    /// Fallback rate of each layer in the last step.
    pub fallback_rates: BTreeMap<String, f32>,
    /// Step and training loss.
    pub loss_curve: Vec<(usize, f64)>,
}

/// What a run measured beside its loss curve; the fields are those of [`Report`].
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct Measured {
    pub parameters: usize,
    pub val_loss: f64,
    pub tokens_per_s: f64,
    pub activation_bytes: u64,
    pub optimizer_bytes: u64,
    pub skipped_steps: u64,
    pub fallback_rates: Vec<(String, f32)>,
}

impl Report {
    /// Puts the results of a run together.
    pub fn new(recipe: Recipe, config: &Config, losses: &[f64], measured: Measured) -> Self {
        let last = &losses[losses.len() - (losses.len() / 10).clamp(1, 50).min(losses.len())..];
        let every = losses.len().div_ceil(CURVE_POINTS).max(1);
        let loss_curve = (1..=losses.len())
            .filter(|step| *step == 1 || step.is_multiple_of(every) || *step == losses.len())
            .map(|step| (step, losses[step - 1]))
            .collect();
        let rates: Vec<f64> = measured
            .fallback_rates
            .iter()
            .map(|(_, it)| f64::from(*it))
            .collect();
        Self {
            recipe,
            optimizer: config.optimizer,
            state_rounding: config.state_rounding,
            preset: config.preset,
            device: config.device,
            compute: config.compute,
            steps: losses.len(),
            batch: config.batch,
            sequence: config.sequence,
            seed: config.seed,
            lr: config.lr,
            parameters: measured.parameters,
            tokens: losses.len() * config.batch * config.sequence,
            train_loss: mean(last),
            val_loss: measured.val_loss,
            bits_per_byte: measured.val_loss / std::f64::consts::LN_2,
            tokens_per_s: measured.tokens_per_s,
            activation_bytes: measured.activation_bytes,
            optimizer_bytes: measured.optimizer_bytes,
            skipped_steps: measured.skipped_steps,
            fallback_rate: (!rates.is_empty()).then(|| mean(&rates)),
            fallback_rates: measured.fallback_rates.into_iter().collect(),
            loss_curve,
        }
    }

    fn fallback_range(&self) -> String {
        let rates = || self.fallback_rates.values().copied();
        match self.fallback_rate {
            Some(mean) => format!(
                "{:.1} / {:.1} / {:.1} %",
                100.0 * rates().fold(f32::INFINITY, f32::min),
                100.0 * mean,
                100.0 * rates().fold(f32::NEG_INFINITY, f32::max)
            ),
            None => "-".into(),
        }
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// The table at the end.
pub fn table(reports: &[Report]) -> String {
    let header = [
        "recipe",
        "train loss",
        "val loss",
        "bits/byte",
        "tokens/s",
        "saved activations",
        "optimizer state",
        "fallback rate (min / mean / max of layers)",
    ];
    let rows = reports.iter().map(|it| {
        [
            it.recipe.to_string(),
            format!("{:.4}", it.train_loss),
            format!("{:.4}", it.val_loss),
            format!("{:.4}", it.bits_per_byte),
            format!("{:.0}", it.tokens_per_s),
            data::bytes(it.activation_bytes as usize),
            data::bytes(it.optimizer_bytes as usize),
            it.fallback_range(),
        ]
    });
    let rows: Vec<_> = std::iter::once(header.map(String::from))
        .chain(rows)
        .collect();
    let widths: Vec<_> = (0..header.len())
        .map(|column| {
            rows.iter()
                .map(|row| row[column].chars().count())
                .max()
                .unwrap_or(0)
        })
        .collect();
    let mut text = String::new();
    for (i, row) in rows.iter().enumerate() {
        let cells: Vec<_> = row
            .iter()
            .zip(&widths)
            .enumerate()
            .map(|(column, (cell, width))| match column {
                0 => format!("{cell:<width$}"),
                _ => format!("{cell:>width$}"),
            })
            .collect();
        let _ = writeln!(text, "{}", cells.join("  ").trim_end());
        if i == 0 {
            let _ = writeln!(
                text,
                "{}",
                "-".repeat(widths.iter().sum::<usize>() + 2 * (widths.len() - 1))
            );
        }
    }
    text
}

/// Writes the reports as a JSON array.
///
/// # Errors
///
/// The file cannot be written.
pub fn write_json(path: &Path, reports: &[Report]) -> Result<()> {
    let text = serde_json::to_string_pretty(reports)? + "\n";
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
