//! A decoder layer on a GPU.

use std::path::Path;

use anyhow::{Result, ensure};
use burn::{
    backend::{Autodiff, Cuda, Flex, cuda::CudaDevice},
    tensor::DType,
};
use burn_quant_train::{QuantTrain, recipe::Named};
use clap::Args;

use super::{
    architecture::{Architecture, DecoderWeights},
    breakdown::Breakdown,
    check::{Outputs, Reference},
    contender::Contender,
    input::Input,
    measure::Measure,
    recipes::Recipes,
};
use crate::{
    gpu::{Gpu, Report},
    peers::Peers,
    random::Random,
    results::{Results, Rows, StepSpeed},
    timing::Sampling,
};

/// The decoder layers to measure.
#[derive(Args, Debug, Clone)]
#[group(skip)]
pub struct Settings {
    /// Features of the residual stream, multiples of 128
    #[arg(
        long,
        value_delimiter = ',',
        default_values = ["1024", "2048", "4096"],
        value_name = "N,.."
    )]
    pub hidden: Vec<usize>,
    /// Also measure each part of the layer by itself
    #[arg(long)]
    pub breakdown: bool,
}

/// Batch and sequence.
const ROWS: [usize; 2] = [2, 1024];
/// The widest layer whose reference comes from the CPU, in FP32. That of a wider one comes from Burn in BF16, which a
/// narrower one has been checked with.
const FLEX: usize = 1024;

/// Checks the layer on every backend, then measures it. Says on stderr what it does, and writes what it has to `json`
/// after each backend.
///
/// # Errors
///
/// A result that differs from the reference, a file of peers that is none of this GPU, or a file that cannot be
/// written.
pub fn run(
    gpu: &Gpu,
    settings: &Settings,
    recipes: &Recipes,
    peers: Option<&Path>,
    json: Option<&Path>,
) -> Result<Results> {
    ensure!(
        settings
            .hidden
            .iter()
            .all(|it| *it > 0 && it.is_multiple_of(128)),
        "--hidden must be multiples of 128"
    );
    let peers = peers.map(|path| Peers::read(path, &gpu.name)).transpose()?;
    let mut random = gpu.random();
    let mut report = Report::new(gpu, json, Rows::Layer)?;
    for &hidden in &settings.hidden {
        let weights = DecoderWeights::random(&mut random, hidden);
        let input = Input::random(&mut random, ROWS, [hidden, hidden]);
        let reference = if hidden <= FLEX {
            Some(on_the_cpu(&weights, &input)?.reference(&mut random))
        } else {
            None
        };
        let mut measured = Measured {
            gpu,
            weights: &weights,
            input: &input,
            breakdown: settings.breakdown,
            reference,
            random: &mut random,
        };
        let (plain, outputs) = measured.on::<Autodiff<Cuda>>(DType::BF16)?;
        let of_burn = outputs.reference(measured.random);
        measured.reference.get_or_insert(of_burn);
        report.add([plain])?;
        for recipe in &recipes.names {
            let _entered = recipe.enter()?;
            let (speed, _) = measured.on::<QuantTrain<Autodiff<Cuda>, Named>>(DType::F32)?;
            report.add([speed])?;
        }
    }
    let rows = peers.iter().flat_map(Peers::layer);
    report.finish(peers.as_ref().map(Peers::run), rows)
}

/// The layer in FP32.
fn on_the_cpu(weights: &DecoderWeights, input: &Input) -> Result<Outputs> {
    let device = Default::default();
    let model = weights.init::<Autodiff<Flex>>(DType::F32, &device);
    Outputs::of(&model, &input.on(DType::F32, &device), input)
}

struct Measured<'a> {
    gpu: &'a Gpu,
    weights: &'a DecoderWeights,
    input: &'a Input,
    breakdown: bool,
    reference: Option<Reference>,
    random: &'a mut Random,
}

impl Measured<'_> {
    fn on<B: Contender<Device = CudaDevice>>(
        &mut self,
        parameters: DType,
    ) -> Result<(StepSpeed, Outputs)> {
        let name = B::subject().name();
        let device = CudaDevice::default();
        let measure = Measure::<B> {
            sampling: Sampling::LAYERS,
            device: &device,
            parameters,
            activations: DType::BF16,
            live_bytes: &|| self.gpu.live_bytes(),
        };
        let (mut speed, outputs) = measure
            .run(self.weights, self.input, self.reference.as_ref())
            .map_err(|error| error.context(name.clone()))?;
        self.gpu.client.memory_cleanup();
        let (hidden, ms) = (speed.hidden, speed.both.median_ms);
        eprintln!("decoder layer, hidden {hidden}, {name}: {ms:.3} ms");
        if self.breakdown {
            let breakdown = Breakdown::<B> {
                sampling: Sampling::LAYERS,
                device: &device,
                parameters,
                activations: DType::BF16,
                rows: ROWS,
            };
            speed.parts = breakdown.parts(self.weights, self.random)?;
            self.gpu.client.memory_cleanup();
        }
        Ok((speed, outputs))
    }
}
