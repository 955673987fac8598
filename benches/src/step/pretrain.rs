//! The presets of `pretrain` on a GPU.

use std::path::Path;

use anyhow::{Result, anyhow};
use burn::{
    backend::{Autodiff, Cuda, cuda::CudaDevice},
    tensor::{FloatDType, IntDType, bf16, set_default_dtypes},
};
use burn_quant_train::{
    QuantTrain,
    recipe::{Chosen, Recipe},
};
use clap::Args;
use examples::args::Preset;

use super::{
    recipes::Recipes,
    training::{Trainer, Training},
};
use crate::{
    gpu::{Gpu, Report},
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
}

/// Measures training steps on every backend. Says on stderr what it does, and writes what it has to `json` after each
/// backend.
///
/// The device's default dtype becomes BF16 for all, as a program that trains in BF16 with plain Burn makes it first.
///
/// # Errors
///
/// The device failed, or has a default dtype already, or the file cannot be written.
pub fn run(
    gpu: &Gpu,
    settings: &Settings,
    recipes: &Recipes,
    json: Option<&Path>,
) -> Result<Results> {
    let device = CudaDevice::default();
    set_default_dtypes::<Cuda>(&device, FloatDType::BF16, IntDType::I32)
        .map_err(|error| anyhow!("BF16 cannot be made the default dtype: {error:?}"))?;
    let (batch, sequence) = settings.preset.batch();
    let mut random = gpu.random();
    let mut measured = Measured {
        gpu,
        random: &mut random,
        training: Training {
            name: settings.preset.to_string(),
            model: settings.preset.model(sequence),
            batch,
            sequence,
        },
    };
    let mut report = Report::new(gpu, json, Rows::Pretrain)?;
    report.add([measured.on::<Autodiff<Cuda>>(FloatDType::BF16)?])?;
    for recipe in &recipes.names {
        report.add([recipe.choose::<bf16, _>(&mut measured)?])?;
    }
    report.finish(None, [])
}

struct Measured<'a> {
    gpu: &'a Gpu,
    random: &'a mut Random,
    training: Training,
}

impl Chosen for &mut Measured<'_> {
    type Output = Result<TrainingSpeed>;

    fn with<R: Recipe>(self) -> Self::Output {
        self.on::<QuantTrain<Autodiff<Cuda>, R>>(FloatDType::F32)
    }
}

impl Measured<'_> {
    fn on<B: Trainer<Device = CudaDevice>>(
        &mut self,
        parameters: FloatDType,
    ) -> Result<TrainingSpeed> {
        let name = B::subject().name();
        let device = CudaDevice::default();
        let speed = self
            .training
            .time::<B>(Sampling::STEPS, parameters, self.random, &device)
            .map_err(|error| error.context(name.clone()))?;
        self.gpu.client.memory_cleanup();
        eprintln!(
            "{}, {name}: {:.0} tokens/s",
            speed.model, speed.tokens_per_s
        );
        Ok(speed)
    }
}
