//! One linear layer on a GPU.

use std::path::Path;

use anyhow::Result;
use burn::{
    backend::{Autodiff, Cuda, cuda::CudaDevice},
    tensor::DType,
};
use burn_quant_train::{QuantTrain, recipe::Named};
use clap::Args;

use super::{
    architecture::Weight, check::Reference, contender::Contender, input::Input, measure::Measure,
    recipes::Recipes,
};
use crate::{
    gpu::{Gpu, Report},
    peers::Peers,
    results::{Results, Rows, StepSpeed},
    timing::Sampling,
};

/// The linear layers to measure.
#[derive(Args, Debug, Clone)]
#[group(skip)]
pub struct Settings {
    /// Features of input and output of the linear layer
    #[arg(long, default_value_t = 4096, value_name = "N")]
    pub features: usize,
    /// Features of its output, if these are others
    #[arg(long, value_name = "N")]
    pub outputs: Option<usize>,
    /// Rows of its input
    #[arg(
        long,
        value_delimiter = ',',
        default_values = ["2048", "8192"],
        value_name = "N,.."
    )]
    pub tokens: Vec<usize>,
}

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
    let peers = peers.map(|path| Peers::read(path, &gpu.name)).transpose()?;
    let mut random = gpu.random();
    let features = [
        settings.features,
        settings.outputs.unwrap_or(settings.features),
    ];
    let mut report = Report::new(gpu, json, Rows::Linear)?;
    for &tokens in &settings.tokens {
        let weight = Weight::random(&mut random, features);
        let input = Input::random(&mut random, [1, tokens], features);
        let reference = Reference::of_linear(&mut random, &weight, &input);
        let measure = Measured {
            gpu,
            weight: &weight,
            input: &input,
            reference: &reference,
        };
        if !recipes.without_burn {
            report.add([measure.on::<Autodiff<Cuda>>(DType::BF16)?])?;
        }
        for recipe in &recipes.names {
            let _entered = recipe.enter()?;
            report.add([measure.on::<QuantTrain<Autodiff<Cuda>, Named>>(DType::F32)?])?;
        }
    }
    let rows = peers.iter().flat_map(Peers::linear);
    report.finish(peers.as_ref().map(Peers::run), rows)
}

struct Measured<'a> {
    gpu: &'a Gpu,
    weight: &'a Weight,
    input: &'a Input,
    reference: &'a Reference,
}

impl Measured<'_> {
    fn on<B: Contender<Device = CudaDevice>>(&self, parameters: DType) -> Result<StepSpeed> {
        let name = B::subject().name();
        let measure = Measure::<B> {
            sampling: Sampling::LAYERS,
            device: &CudaDevice::default(),
            parameters,
            activations: DType::BF16,
            live_bytes: &|| self.gpu.live_bytes(),
        };
        let (speed, _) = measure
            .run(self.weight, self.input, Some(self.reference))
            .map_err(|error| error.context(name.clone()))?;
        self.gpu.client.memory_cleanup();
        let (tokens, ms) = (speed.tokens, speed.both.median_ms);
        eprintln!("linear layer, {tokens} tokens, {name}: {ms:.3} ms");
        Ok(speed)
    }
}
