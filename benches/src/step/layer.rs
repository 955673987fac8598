//! A decoder layer on a GPU.

use std::{path::Path, str::FromStr};

use anyhow::{Result, ensure};
use burn::{
    backend::{Autodiff, Cuda, Flex, cuda::CudaDevice},
    tensor::DType,
};
use burn_quant_train::{
    QuantTrain,
    recipe::{MixedPrecision, Named, Recipe},
    saved::scope::choose_context,
};
use clap::Args;
use examples::args::Contexts;

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
    /// Sequences and their length
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "2x1024",
        value_name = "BxN,.."
    )]
    pub rows: Vec<RowsOfInput>,
    /// How activations of the recipes wait for the backward pass
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_values = ["exact"],
        value_name = "FORMAT,.."
    )]
    pub contexts: Vec<Contexts>,
    /// Also measure each part of the layer by itself
    #[arg(long)]
    pub breakdown: bool,
}

/// A batch of sequences, `2x1024` on the command line.
#[derive(Debug, Clone, Copy)]
pub struct RowsOfInput([usize; 2]);

impl FromStr for RowsOfInput {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = text
            .split_once('x')
            .and_then(|(batch, sequence)| Some([batch.parse().ok()?, sequence.parse().ok()?]));
        match numbers {
            Some([batch, sequence]) if batch > 0 && sequence > 0 => Ok(Self([batch, sequence])),
            _ => Err(String::from(
                "sequences and their length are written as 2x1024",
            )),
        }
    }
}

/// The widest layer whose reference comes from the CPU, in FP32. That of a wider one comes from Burn in BF16, or from
/// `mixed-precision`, which a narrower one has been checked with.
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
        for rows in &settings.rows {
            let input = Input::random(&mut random, rows.0, [hidden, hidden]);
            let mut measured = Measured {
                gpu,
                weights: &weights,
                input: &input,
                breakdown: settings.breakdown,
                reference: None,
                random: &mut random,
            };
            if hidden <= FLEX {
                let outputs = on_the_cpu(&weights, &input)?;
                measured.refer_to(&outputs);
            }
            if !recipes.without_burn {
                let (plain, outputs) = measured.on::<Autodiff<Cuda>>(DType::BF16, None)?;
                measured.refer_to(&outputs);
                report.add([plain])?;
            } else if measured.reference.is_none() {
                let _entered = <MixedPrecision as Recipe>::ROW.name().enter()?;
                let outputs = measured.outputs::<QuantTrain<Autodiff<Cuda>, Named>>(DType::F32)?;
                measured.refer_to(&outputs);
            }
            for recipe in &recipes.names {
                let _entered = recipe.enter()?;
                for &contexts in &settings.contexts {
                    choose_context(Some(contexts.context()));
                    let (speed, _) = measured
                        .on::<QuantTrain<Autodiff<Cuda>, Named>>(DType::F32, Some(contexts))?;
                    report.add([speed])?;
                }
                choose_context(None);
            }
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
    /// Compares results with these, if there are none to compare with yet.
    fn refer_to(&mut self, outputs: &Outputs) {
        if self.reference.is_none() {
            self.reference = Some(outputs.reference(self.random));
        }
    }

    fn outputs<B: Contender<Device = CudaDevice>>(&self, parameters: DType) -> Result<Outputs> {
        let device = CudaDevice::default();
        let model = self.weights.init::<B>(parameters, &device);
        let outputs = Outputs::of(&model, &self.input.on(DType::BF16, &device), self.input);
        self.gpu.client.memory_cleanup();
        outputs
    }

    /// `contexts`: how activations wait for the backward pass, where that was chosen.
    fn on<B: Contender<Device = CudaDevice>>(
        &mut self,
        parameters: DType,
        contexts: Option<Contexts>,
    ) -> Result<(StepSpeed, Outputs)> {
        let name = B::subject().name_with(contexts);
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
        let [batch, sequence] = self.input.rows;
        (speed.sequence, speed.contexts) = (Some(sequence), contexts);
        self.gpu.client.memory_cleanup();
        let (hidden, ms) = (speed.hidden, speed.both.median_ms);
        eprintln!(
            "decoder layer, hidden {hidden}, {batch} x {sequence} tokens, {name}: {ms:.3} ms"
        );
        if self.breakdown {
            let breakdown = Breakdown::<B> {
                sampling: Sampling::LAYERS,
                device: &device,
                parameters,
                activations: DType::BF16,
                rows: self.input.rows,
            };
            speed.parts = breakdown.parts(self.weights, self.random)?;
            self.gpu.client.memory_cleanup();
        }
        Ok((speed, outputs))
    }
}
