//! The results of a run.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use burn_quant_train::recipe::Name;
use serde::{Deserialize, Serialize};

use crate::args::{
    Checkpointing, Compute, Contexts, Device, Evaluation, LossScaling, Optimizer, Preset, Products,
    StateRounding, Threshold, of_learned, products_of,
};
use crate::config::{Config, Fork};
use crate::curve;
use crate::model::AttentionWay;
use crate::rates::RateReadings;
use crate::{nan, rows};

/// The result of a run.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub struct Report {
    /// The recipe.
    pub recipe: Name,
    /// The format of the optimizer's moments.
    pub optimizer: Optimizer,
    /// How the codes of 8-bit moments are rounded.
    pub state_rounding: StateRounding,
    /// How activations waited for the backward pass.
    #[serde(default)]
    pub contexts: Contexts,
    /// Which parts of the model ran again in the backward pass.
    #[serde(default)]
    pub checkpointing: Checkpointing,
    /// How attention was computed.
    #[serde(default)]
    pub attention: AttentionWay,
    /// Which products of activations were quantized.
    #[serde(default)]
    pub products: Products,
    /// How the model was evaluated.
    #[serde(default)]
    pub evaluation: Evaluation,
    /// How fallback thresholds followed fallback rates.
    #[serde(default = "Threshold::unnamed")]
    pub threshold: Threshold,
    /// The model's size.
    pub preset: Preset,
    /// The share of values that the model dropped in training.
    #[serde(default)]
    pub dropout: f64,
    /// Where it trained.
    pub device: Device,
    /// The compute dtype.
    pub compute: Compute,
    /// The scaling of losses.
    #[serde(default)]
    pub loss_scaling: LossScaling,
    /// Optimizer steps.
    pub steps: usize,
    /// Sequences in a batch.
    pub batch: usize,
    /// Bytes in a sequence.
    pub sequence: usize,
    /// Seed of the weights, the data order and the rounding; of a forked run, of the last two since it was forked.
    pub seed: u64,
    /// The checkpoint that the run went on from; none if it began at the beginning.
    pub forked_from: Option<Fork>,
    /// Peak learning rate.
    pub lr: f64,
    /// Parameters of the model.
    pub parameters: usize,
    /// Tokens trained on, by a forked run those before it was forked included.
    pub tokens: usize,
    /// Mean training loss of the last tenth of the steps, at most 50, and of a forked run none from before the fork.
    #[serde(deserialize_with = "nan::number")]
    pub train_loss: f64,
    /// Validation loss in nats per byte.
    #[serde(deserialize_with = "nan::number")]
    pub val_loss: f64,
    /// The same in bits.
    #[serde(deserialize_with = "nan::number")]
    pub bits_per_byte: f64,
    /// Training speed, without the first steps, checkpoints and validation.
    pub tokens_per_s: f64,
    /// Seconds from the run's beginning, or that of its resumption, to the end of its first step, the device's start
    /// and the compilation of kernels included; the first run of a program also reads the text in them.
    #[serde(default)]
    pub first_step_s: Option<f64>,
    /// Bytes that one forward pass leaves for the backward pass.
    pub activation_bytes: u64,
    /// Bytes of optimizer state.
    pub optimizer_bytes: u64,
    /// Bytes that the device's memory pools took for training and validation since the run began or was resumed, which
    /// is the most that was in use, with their slack. None on a CPU.
    #[serde(default)]
    pub taken_bytes: Option<u64>,
    /// Steps that the optimizer skipped, since a gradient held NaN or Inf.
    pub skipped_steps: u64,
    /// Mean fallback rate over the layers in the last step; none for recipes without fallback.
    pub fallback_rate: Option<f64>,
    /// Fallback rate of each layer in the last step.
    pub fallback_rates: BTreeMap<String, f32>,
    /// How often the rates were read: after every step on a CPU, less often on GPUs, which are waited for; and of a
    /// forked run none from before the fork.
    #[serde(default)]
    pub rate_readings: usize,
    /// By layer, the share of these readings that lay in the range which the threshold follows.
    #[serde(default)]
    pub rates_in_range: BTreeMap<String, f64>,
    /// Step and training loss, [thinned](curve::thinned).
    #[serde(deserialize_with = "nan::curve")]
    pub loss_curve: Vec<(usize, f64)>,
}

/// The measurements of a run beside its loss curve; the fields are those of [`Report`].
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct Measured {
    pub parameters: usize,
    pub val_loss: f64,
    pub tokens_per_s: f64,
    pub first_step_s: Option<f64>,
    pub activation_bytes: u64,
    pub optimizer_bytes: u64,
    pub taken_bytes: Option<u64>,
    pub skipped_steps: u64,
    pub fallback_rates: Vec<(String, f32)>,
    pub rates: RateReadings,
}

impl Report {
    /// Puts the results of a run together.
    pub fn new(recipe: Name, config: &Config, losses: &[f64], measured: Measured) -> Self {
        let own = losses.len() - config.fork.map_or(0, |fork| fork.step).min(losses.len());
        let last = &losses[losses.len() - (losses.len() / 10).clamp(1, 50).min(own)..];
        let curve: Vec<_> = (1..).zip(losses.iter().copied()).collect();
        let rates: Vec<f64> = measured
            .fallback_rates
            .iter()
            .map(|(_, it)| f64::from(*it))
            .collect();
        Self {
            recipe,
            optimizer: config.optimizer,
            state_rounding: config.state_rounding,
            contexts: config.contexts,
            checkpointing: config.checkpointing,
            attention: config.attention,
            products: products_of(recipe, config.products),
            evaluation: of_learned(recipe, config.evaluation),
            threshold: config.threshold,
            preset: config.preset,
            dropout: config.model.dropout,
            device: config.device,
            compute: config.compute,
            loss_scaling: config.loss_scaling,
            steps: losses.len(),
            batch: config.batch,
            sequence: config.sequence,
            seed: config.seed,
            forked_from: config.fork,
            lr: config.lr,
            parameters: measured.parameters,
            tokens: losses.len() * config.batch * config.sequence,
            train_loss: mean(last),
            val_loss: measured.val_loss,
            bits_per_byte: measured.val_loss / std::f64::consts::LN_2,
            tokens_per_s: measured.tokens_per_s,
            first_step_s: measured.first_step_s,
            activation_bytes: measured.activation_bytes,
            optimizer_bytes: measured.optimizer_bytes,
            taken_bytes: measured.taken_bytes,
            skipped_steps: measured.skipped_steps,
            fallback_rate: (!rates.is_empty()).then(|| mean(&rates)),
            fallback_rates: measured.fallback_rates.into_iter().collect(),
            rate_readings: measured.rates.readings,
            rates_in_range: measured.rates.shares(),
            loss_curve: curve::thinned(&curve),
        }
    }

    /// True if these are the results that a run with this configuration would end with, the run being the same.
    pub fn answers(&self, config: &Config) -> bool {
        let of_run = (
            self.steps,
            self.optimizer,
            self.state_rounding,
            self.contexts,
            self.checkpointing,
            self.attention,
            self.products,
            self.evaluation,
            self.threshold,
            self.loss_scaling,
        );
        let of_config = (
            config.steps,
            config.optimizer,
            config.state_rounding,
            config.contexts,
            config.checkpointing,
            config.attention,
            products_of(self.recipe, config.products),
            of_learned(self.recipe, config.evaluation),
            config.threshold,
            config.loss_scaling,
        );
        of_run == of_config
    }

    /// Lowest, mean and highest fallback rate of the layers, for people.
    pub fn fallback_range(&self) -> String {
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

/// A file that results will be written to.
pub struct ResultFile {
    path: PathBuf,
    partial: PathBuf,
}

impl ResultFile {
    /// Tries whether it can be written, so that it is not found out after hours of training. A file that is there stays
    /// until it is replaced.
    ///
    /// # Errors
    ///
    /// It cannot be written.
    pub fn new(path: &Path) -> Result<Self> {
        let at = path.display();
        ensure!(!path.is_dir(), "cannot write {at}: it is a folder");
        let partial = path.with_added_extension("partial");
        std::fs::write(&partial, "")
            .and_then(|()| std::fs::remove_file(&partial))
            .with_context(|| format!("cannot write {at}"))?;
        Ok(Self {
            path: path.to_owned(),
            partial,
        })
    }

    /// Writes the results as a JSON array, a run a line.
    ///
    /// # Errors
    ///
    /// The file cannot be written.
    pub fn write(&self, reports: &[Report]) -> Result<()> {
        std::fs::write(&self.partial, rows::to_string(&reports)?)
            .and_then(|()| std::fs::rename(&self.partial, &self.path))
            .with_context(|| format!("cannot write {}", self.path.display()))
    }
}
