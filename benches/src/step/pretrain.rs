//! The presets of `pretrain` on a GPU.

use std::path::Path;

use anyhow::{Result, anyhow, ensure};
use burn::{
    backend::{Autodiff, Cuda, cuda::CudaDevice},
    tensor::{FloatDType, IntDType, set_default_dtypes},
};
use burn_quant_train::{QuantTrain, recipe::Named, saved::choose_context};
use clap::Args;
use examples::args::{Checkpointing, Contexts, Optimizer, Preset};

use super::{
    recipes::Recipes,
    training::{Gauges, Trainer, Training},
};
use crate::{
    gpu::{Gpu, Report},
    peers::Peers,
    random::Random,
    results::{Results, Rows, TrainingSpeed},
    timing::Sampling,
};

/// The model to measure.
#[derive(Args, Debug, Clone)]
#[group(skip)]
pub struct Settings {
    /// The model, and its batch
    #[arg(long, value_enum, default_value = "medium")]
    pub preset: Preset,
    /// Lengths of sequences, in batches of as many tokens as the preset's [default: the preset's]
    #[arg(long, value_delimiter = ',', value_name = "N,..")]
    pub sequences: Vec<usize>,
    /// Sequences in a batch [default: as many tokens as the preset has]
    #[arg(long, value_name = "N")]
    pub batch: Option<usize>,
    /// How activations of the recipes wait for the backward pass
    #[arg(long, value_enum, default_value = "exact")]
    pub contexts: Contexts,
    /// Which parts of the recipes' models keep their input alone and run again in the backward pass
    #[arg(long, value_enum, default_value = "none")]
    pub checkpointing: Checkpointing,
    /// AdamW of the recipes, by the format of its moments
    #[arg(long, value_enum, default_value = "adamw")]
    pub optimizer: Optimizer,
    /// Leave out what waits between the passes, for whose measurement the values of two passes wait at once
    #[arg(long)]
    pub without_held: bool,
}

impl Settings {
    /// Trainings of the preset, one for each length.
    fn trainings(&self) -> Result<Vec<Training>> {
        let (batch, sequence) = self.preset.batch();
        let sequences = match self.sequences.as_slice() {
            [] => vec![sequence],
            given => given.to_vec(),
        };
        let tokens = batch * sequence;
        let of = |length: usize| {
            ensure!(
                length > 0 && (self.batch.is_some() || tokens.is_multiple_of(length)),
                "each of --sequences must divide {tokens}, the tokens of a batch of `{}`",
                self.preset
            );
            ensure!(self.batch != Some(0), "--batch must be 1 or more");
            Ok(Training {
                name: self.preset.to_string(),
                model: self.preset.model(length),
                batch: self.batch.unwrap_or(tokens / length),
                sequence: length,
                checkpointing: self.checkpointing,
                moments: self.optimizer,
                with_held: !self.without_held,
            })
        };
        sequences.into_iter().map(of).collect()
    }
}

/// Measures training steps on every backend, by the length of sequences. Says on stderr what it does, and writes what
/// it has to `json` after each backend.
///
/// The device's default dtype becomes BF16 for all, as a program that trains in BF16 with plain Burn makes it first.
///
/// # Errors
///
/// A length that does not divide the preset's tokens, a device that failed or has a default dtype already, a file of
/// peers that is none of this GPU, or a file that cannot be written.
pub fn run(
    gpu: &Gpu,
    settings: &Settings,
    recipes: &Recipes,
    peers: Option<&Path>,
    json: Option<&Path>,
) -> Result<Results> {
    let trainings = settings.trainings()?;
    let peers = peers.map(|path| Peers::read(path, &gpu.name)).transpose()?;
    let before = gpu.used_bytes()?;
    let device = CudaDevice::default();
    set_default_dtypes::<Cuda>(&device, FloatDType::BF16, IntDType::I32)
        .map_err(|error| anyhow!("BF16 cannot be made the default dtype: {error:?}"))?;
    let mut random = gpu.random();
    let mut first = true;
    let mut report = Report::new(gpu, json, Rows::Pretrain)?;
    choose_context(Some(settings.contexts.context()));
    for training in trainings {
        let mut measured = Measured {
            gpu,
            random: &mut random,
            training,
            contexts: settings.contexts,
            before,
            first: &mut first,
        };
        if !recipes.without_burn {
            report.add([measured.on::<Autodiff<Cuda>>(FloatDType::BF16)?])?;
        }
        for recipe in &recipes.names {
            let _entered = recipe.enter()?;
            report.add([measured.on::<QuantTrain<Autodiff<Cuda>, Named>>(FloatDType::F32)?])?;
        }
    }
    let rows = peers.iter().flat_map(Peers::pretrain);
    report.finish(peers.as_ref().map(Peers::run), rows)
}

struct Measured<'a> {
    gpu: &'a Gpu,
    random: &'a mut Random,
    training: Training,
    contexts: Contexts,
    /// Bytes of the device that were in use before the first tensor.
    before: u64,
    /// True until something was measured.
    first: &'a mut bool,
}

impl Measured<'_> {
    fn on<B: Trainer<Device = CudaDevice>>(
        &mut self,
        parameters: FloatDType,
    ) -> Result<TrainingSpeed> {
        let name = B::subject().name();
        let device = CudaDevice::default();
        let (gpu, before) = (self.gpu, self.before);
        let memory = Gauges {
            live: &|_| gpu.live_bytes().unwrap_or_default(),
            // Less than what lives: another program gave memory back since this one began, and the difference is not
            // this one's.
            taken: &|| {
                let taken = gpu.used_bytes()?.checked_sub(before);
                Ok(taken.filter(|&taken| gpu.live_bytes().is_some_and(|live| taken >= live)))
            },
        };
        let speed = self
            .training
            .time::<B>(Sampling::STEPS, parameters, self.random, &device, &memory)
            .map_err(|error| error.context(name.clone()))?;
        self.gpu.client.memory_cleanup();
        let contexts = B::row().map(|_| self.contexts);
        let is_first = std::mem::take(self.first);
        let speed = TrainingSpeed {
            contexts,
            peak_bytes: speed.peak_bytes.filter(|_| is_first),
            ..speed
        };
        eprintln!(
            "{}, {} x {}, {name}: {:.0} tokens/s, {:?} bytes held, {:?} taken",
            speed.model,
            speed.batch,
            speed.sequence,
            speed.tokens_per_s,
            speed.activation_bytes,
            speed.peak_bytes
        );
        Ok(speed)
    }
}
