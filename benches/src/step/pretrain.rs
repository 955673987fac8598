//! The presets of `pretrain` on a GPU.

use std::path::Path;

use anyhow::{Result, anyhow};
use burn::{
    backend::{Autodiff, Cuda, cuda::CudaDevice},
    tensor::{FloatDType, IntDType, bf16, set_default_dtypes},
};
use burn_quant_train::{
    QuantTrain,
    recipe::{FallbackInt8, MixedPrecision},
};
use clap::Args;
use examples::args::Preset;

use super::training::{Trainer, Training};
use crate::{
    gpu::{Gpu, Report},
    random::Random,
    results::{Results, Rows, TrainingSpeed},
    timing::Sampling,
};

/// What is measured.
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
/// What a program that trains in BF16 with plain Burn does first is done here for all: the device's default dtype
/// becomes BF16.
///
/// # Errors
///
/// The device failed, or has a default dtype already, or the file cannot be written.
pub fn run(gpu: &Gpu, settings: &Settings, json: Option<&Path>) -> Result<Results> {
    let device = CudaDevice::default();
    set_default_dtypes::<Cuda>(&device, FloatDType::BF16, IntDType::I32)
        .map_err(|error| anyhow!("BF16 cannot be made the default dtype: {error:?}"))?;
    let (batch, sequence) = settings.preset.batch();
    let measured = Measured {
        gpu,
        training: Training {
            name: settings.preset.to_string(),
            model: settings.preset.model(sequence),
            batch,
            sequence,
        },
    };
    let mut random = gpu.random();
    type Quant<R> = QuantTrain<Autodiff<Cuda>, R>;
    let mut report = Report::new(gpu, json, Rows::Pretrain)?;
    report.add([measured.on::<Autodiff<Cuda>>(FloatDType::BF16, &mut random)?])?;
    report.add([measured.on::<Quant<MixedPrecision<bf16>>>(FloatDType::F32, &mut random)?])?;
    report.add([measured.on::<Quant<FallbackInt8<bf16>>>(FloatDType::F32, &mut random)?])?;
    report.finish(None, [])
}

struct Measured<'a> {
    gpu: &'a Gpu,
    training: Training,
}

impl Measured<'_> {
    fn on<B: Trainer<Device = CudaDevice>>(
        &self,
        parameters: FloatDType,
        random: &mut Random,
    ) -> Result<TrainingSpeed> {
        let name = B::SUBJECT.name();
        let device = CudaDevice::default();
        let speed = self
            .training
            .time::<B>(Sampling::STEPS, parameters, random, &device)
            .map_err(|error| error.context(name))?;
        self.gpu.client.memory_cleanup();
        eprintln!(
            "{}, {name}: {:.0} tokens/s",
            speed.model, speed.tokens_per_s
        );
        Ok(speed)
    }
}
