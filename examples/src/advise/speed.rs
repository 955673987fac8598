//! Speeds that were measured, from the book's result files. What is not in them is not known.

use std::sync::LazyLock;

use burn_quant_train::recipe::{MixedPrecision, Name, Recipe};
use serde::Deserialize;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Question;
use super::device::Device;
use super::memory::Case;
use crate::args::{Checkpointing, Compute, Contexts, Optimizer};

/// A measurement.
#[derive(Serialize, Clone, Copy, Debug, PartialEq)]
#[serde(rename_all = "kebab-case")]
pub enum Speed {
    /// Training of this model with this batch on this device.
    Training {
        /// Tokens a second.
        tokens_per_s: f64,
        /// The result file.
        source: &'static str,
    },
    /// Both passes of a decoder layer of nearly this width on this device, without an optimizer: of the batch that is
    /// nearest.
    Layer {
        /// Times as fast as mixed precision in the same run.
        of_mixed_precision: f64,
        /// The layer's width.
        hidden: usize,
        /// Tokens in its batch.
        tokens: usize,
        /// The result file.
        source: &'static str,
    },
}

/// A result file of `qt-bench`, or of `report recipes`.
#[derive(Deserialize)]
struct Bench<T> {
    #[serde(alias = "recipes")]
    rows: Vec<T>,
}

/// A training run: of `qt-bench pretrain`, or of `pretrain`.
#[derive(Deserialize)]
struct Training {
    #[serde(alias = "recipe")]
    subject: String,
    parameters: usize,
    batch: usize,
    sequence: usize,
    tokens_per_s: f64,
}

/// A layer of `qt-bench layer`.
#[derive(Deserialize)]
struct Layer {
    subject: String,
    tokens: usize,
    hidden: usize,
    both: Spread,
}

#[derive(Deserialize)]
struct Spread {
    median_ms: f64,
}

/// The result files that say how fast training is, with the device that each is of.
struct Results {
    training: [(Device, Compute, &'static str, Vec<Training>); 3],
    layers: [(Device, &'static str, Vec<Layer>); 2],
}

macro_rules! result {
    ($name:literal) => {
        (
            concat!("book/results/", $name),
            include_str!(concat!(
                env!("CARGO_MANIFEST_DIR"),
                "/../book/results/",
                $name
            )),
        )
    };
}

fn parsed<T: DeserializeOwned>((source, text): (&'static str, &str)) -> (&'static str, T) {
    let parsed = serde_json::from_str(text);
    (
        source,
        parsed.unwrap_or_else(|error| panic!("{source}: {error}")),
    )
}

static RESULTS: LazyLock<Results> = LazyLock::new(|| {
    let (h200, of_h200) = parsed::<Bench<Training>>(result!("h200-recipes.json"));
    let (h100, of_h100) = parsed::<Bench<Training>>(result!("h100-recipes.json"));
    let (cpu, of_cpu) = parsed(result!("cpu-tiny.json"));
    let (on_h200, of_h200_layers) = parsed::<Bench<Layer>>(result!("h200-layer.json"));
    let (on_h100, of_h100_layers) = parsed::<Bench<Layer>>(result!("h100-layer-batches.json"));
    Results {
        training: [
            (Device::H200, Compute::Bf16, h200, of_h200.rows),
            (Device::H100, Compute::Bf16, h100, of_h100.rows),
            (Device::Cpu, Compute::F32, cpu, of_cpu),
        ],
        layers: [
            (Device::H200, on_h200, of_h200_layers.rows),
            (Device::H100, on_h100, of_h100_layers.rows),
        ],
    }
});

/// Widths of a layer and of the model that is asked for may differ by this factor.
const NEARLY: f64 = 2.0;

/// The measured speed of this way to train; `None`: not measured.
pub fn of(question: &Question, case: &Case) -> Option<Speed> {
    if case.contexts != Contexts::Exact || question.checkpointing != Checkpointing::None {
        return None;
    }
    training(question, case).or_else(|| layer(question, case.recipe))
}

fn training(question: &Question, case: &Case) -> Option<Speed> {
    let Question {
        model,
        batch,
        sequence,
        device,
        compute,
        ..
    } = question;
    if case.optimizer != Optimizer::Adamw {
        return None;
    }
    let parameters = model.parameters();
    let of_device = |(on, of, _, _): &&(Device, Compute, _, _)| on == device && of == compute;
    let (_, _, source, runs) = RESULTS.training.iter().find(of_device)?;
    let run = runs.iter().find(|run| {
        run.subject == case.recipe.as_str()
            && run.parameters == parameters
            && [run.batch, run.sequence] == [*batch, *sequence]
    })?;
    Some(Speed::Training {
        tokens_per_s: run.tokens_per_s,
        source,
    })
}

fn layer(question: &Question, recipe: Name) -> Option<Speed> {
    if question.compute != Compute::Bf16 {
        return None;
    }
    let of_device = |(on, _, _): &&(Device, _, _)| *on == question.device;
    let (_, source, layers) = RESULTS.layers.iter().find(of_device)?;
    let distance = |measured: usize, asked: usize| (measured as f64 / asked as f64).ln().abs();
    let of_width = |layer: &Layer| distance(layer.hidden, question.model.hidden);
    let of_batch = |layer: &Layer| distance(layer.tokens, question.batch * question.sequence);
    let own = layers
        .iter()
        .filter(|layer| layer.subject == recipe.as_str() && of_width(layer) <= NEARLY.ln());
    let own = own.min_by(|a, b| {
        let by_width = of_width(a).total_cmp(&of_width(b));
        by_width.then(of_batch(a).total_cmp(&of_batch(b)))
    })?;
    let baseline = layers.iter().find(|layer| {
        layer.subject == <MixedPrecision<f32> as Recipe>::ROW.name
            && [layer.hidden, layer.tokens] == [own.hidden, own.tokens]
    })?;
    Some(Speed::Layer {
        of_mixed_precision: baseline.both.median_ms / own.both.median_ms,
        hidden: own.hidden,
        tokens: own.tokens,
        source,
    })
}
