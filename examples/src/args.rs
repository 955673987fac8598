//! The command line.

use std::fmt::{self, Display};
use std::path::PathBuf;

use anyhow::Result;
use burn_quant_train::layer::{DelayThreshold, LayerPolicy};
use burn_quant_train::optim::{self, QuantAdamWConfig, StateFormat};
use burn_quant_train::recipe::context::{self, ContextFormat};
use burn_quant_train::recipe::{Context, NAMES, Name, SlotKind};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Parser, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::model::{AttentionWay, DecoderConfig, Family};

/// Pretrains a small Llama-style or GPT-2-style model on bytes of real text, once with each recipe, and compares them.
///
/// Without flags: two thirds of a run under mixed-precision, from where it goes on under mixed-precision and under
/// fallback-int8 with four seeds each, on the CPU, within five minutes.
#[derive(Parser, Clone, Debug, Default)]
#[command(name = "pretrain", version, after_help = EXAMPLES)]
pub struct Args {
    /// How to train from the start; repeat it, or separate by commas [default: mixed-precision, and forks of it under
    /// fallback-int8; with --seed, --seeds or --stop-after fallback-int8,mixed-precision]
    #[arg(long, value_parser = recipe_parser(), value_delimiter = ',')]
    pub recipe: Vec<Name>,
    /// Seed of the weights, the data order and the rounding [default: 1, or that of the checkpoint]
    #[arg(long)]
    pub seed: Option<u64>,
    /// Train every recipe with so many seeds, --seed and those that follow it [default: 1]
    #[arg(long, value_name = "N", value_parser = seeds)]
    pub seeds: Option<usize>,
    /// The model: about 1M, 30M, 124M or 1.3B parameters, in Llama's style or in GPT-2's [default: tiny]
    #[arg(long, value_enum)]
    pub preset: Option<Preset>,
    /// Optimizer steps in all; a resumed or forked run goes on to this number [default: the preset's]
    #[arg(long, value_parser = at_least_one)]
    pub steps: Option<usize>,
    /// Sequences in a batch [default: the preset's]
    #[arg(long, value_parser = at_least_one)]
    pub batch: Option<usize>,
    /// Bytes in a sequence [default: the preset's]
    #[arg(long, value_parser = at_least_one)]
    pub sequence: Option<usize>,
    /// The share of values that presets in GPT-2's style drop in training [default: 0.1]
    #[arg(long, value_name = "RATE", value_parser = dropout)]
    pub dropout: Option<f64>,
    /// Peak learning rate [default: the preset's]
    #[arg(long, value_parser = rate)]
    pub lr: Option<f64>,
    /// AdamW, by the format of the moments that it keeps [default: adamw]
    #[arg(long, value_enum)]
    pub optimizer: Option<Optimizer>,
    /// How the codes of 8-bit moments are rounded [default: nearest]
    #[arg(long, value_enum)]
    pub state_rounding: Option<StateRounding>,
    /// Steps at the start in which INT4 recipes set their step sizes by the data before they learn them [default: a
    /// tenth of the run]
    #[arg(long, value_name = "STEPS")]
    pub cold_start: Option<u64>,
    /// How activations wait for the backward pass, but for the inputs of quantized layers [default: exact]
    #[arg(long, value_enum)]
    pub contexts: Option<Contexts>,
    /// Which parts of the model keep their input alone and run again in the backward pass [default: none]
    #[arg(long, value_enum)]
    pub checkpointing: Option<Checkpointing>,
    /// How attention is computed [default: fused]
    #[arg(long, value_enum)]
    pub attention: Option<AttentionWay>,
    /// Which products of two activations INT4 and INT8 recipes quantize [default: none]
    #[arg(long, value_enum)]
    pub products: Option<Products>,
    /// Whether INT4 recipes quantize evaluation too [default: exact]
    #[arg(long, value_enum)]
    pub evaluation: Option<Evaluation>,
    /// How fallback thresholds follow fallback rates [default: settling]
    #[arg(long, value_enum)]
    pub threshold: Option<Threshold>,
    /// Text to train on, a file or a folder [default: the Rust sources under $CARGO_HOME/registry/src]
    #[arg(long, value_name = "PATH")]
    pub data: Option<PathBuf>,
    /// Windows of held-out text that validation reads [default: the preset's]
    #[arg(long, value_parser = at_least_one)]
    pub validation: Option<usize>,

    /// Where to train [default: cpu]
    #[arg(long, value_enum, help_heading = DEVICE)]
    pub device: Option<Device>,
    /// The compute dtype [default: f32 on the CPU, bf16 with CUDA, f16 with Vulkan; a fork: its source's]
    #[arg(long, value_enum, help_heading = DEVICE)]
    pub compute: Option<Compute>,
    /// Scale losses, so that FP16 gradients do not vanish [default: on with --compute f16, else off]
    #[arg(long, value_enum, help_heading = DEVICE)]
    pub loss_scaling: Option<LossScaling>,

    /// Where checkpoints go [default: the resumed folder, target/pretrain-fork with --fork, else target/pretrain]
    #[arg(long, value_name = "DIR", help_heading = CHECKPOINTS)]
    pub out: Option<PathBuf>,
    /// Leave a checkpoint every so many steps [default: a fifth of the run, at least 100]
    #[arg(long, value_name = "STEPS", value_parser = at_least_one, help_heading = CHECKPOINTS)]
    pub checkpoint_every: Option<usize>,
    /// Stop each run after this step, leaving a checkpoint, as Ctrl-C would
    #[arg(long, value_name = "STEP", value_parser = at_least_one, help_heading = CHECKPOINTS)]
    pub stop_after: Option<usize>,
    /// Take up the runs whose checkpoints are in this folder
    ///
    /// Finished runs are not trained again. --steps may prolong the runs, and --seeds add to them.
    #[arg(long, value_name = "DIR", help_heading = CHECKPOINTS)]
    pub resume: Option<PathBuf>,
    /// Go on from the checkpoint in this folder under the recipes of --recipe
    ///
    /// Weights, moments, learning-rate schedule, step and position in the text are the checkpoint's; past the end of
    /// the schedule the learning rate stays at its lowest. With --seed or --seeds, data order and rounding differ from
    /// the checkpoint on. The folder is not written to.
    #[arg(long, value_name = "DIR", conflicts_with = "resume", help_heading = CHECKPOINTS)]
    pub fork: Option<PathBuf>,
    /// The run to fork where the folder holds several, by the name of its folder
    #[arg(long, value_name = "RUN", requires = "fork", help_heading = CHECKPOINTS)]
    pub from: Option<String>,

    /// Write the results to this file, an array with one run a line
    #[arg(long, value_name = "FILE", help_heading = OUTPUT)]
    pub json: Option<PathBuf>,
    /// Print what every linear layer got
    #[arg(long, help_heading = OUTPUT)]
    pub layers: bool,
    /// Print what waits for the backward pass of a batch after the last step, by layer and by operation, and leave it
    /// in the run's folder as memory.svg, memory.csv and memory.jsonl
    #[arg(long, help_heading = OUTPUT)]
    pub memory: bool,
    /// Measure what quantization does to every layer each so many steps, print it, and leave it in the run's folder as
    /// health.html, health.csv and health.jsonl [default: a tenth of the run, at most 100 steps]
    #[arg(long, value_name = "STEPS", value_parser = at_least_one_step, num_args = 0..=1, help_heading = OUTPUT)]
    pub health: Option<Option<u64>>,
    /// Measure layers in so many turns, each time a part of them, for as small a part of the cost [default: 1 on the
    /// CPU, 4 on GPUs]
    #[arg(long, value_name = "TURNS", value_parser = at_least_one_step, requires = "health", help_heading = OUTPUT)]
    pub health_turns: Option<u64>,
    /// Measure as well what these recipes would do to the same layers
    #[arg(long, value_parser = recipe_parser(), value_delimiter = ',', requires = "health", help_heading = OUTPUT)]
    pub what_if: Vec<Name>,
    /// Print plain lines even in a terminal
    #[arg(long, help_heading = OUTPUT)]
    pub plain: bool,
}

const DEVICE: &str = "Device";
const CHECKPOINTS: &str = "Checkpoints";
const OUTPUT: &str = "Output";

const EXAMPLES: &str = "\
Examples:
  pretrain --seeds 4 --json runs.json
      both recipes with seeds 1 to 4, and how far apart they are, with a 95% interval
  pretrain --resume target/pretrain
      go on with runs that were stopped
  pretrain --recipe mixed-precision --stop-after 60 --out base
  pretrain --fork base --recipe mixed-precision,fallback-int8,block-int8 --seeds 4
      the last 60 of 120 steps under three recipes, from one checkpoint";

impl Args {
    /// Parses the process's arguments. An error is one line; help and version are printed and end the process.
    ///
    /// # Errors
    ///
    /// Whatever clap finds wrong.
    pub fn from_command_line() -> Result<Self> {
        parsed()
    }
}

fn at_least_one_step(text: &str) -> Result<u64, String> {
    Ok(at_least_one(text)? as u64)
}

/// The process's arguments, with errors of one line; help and version end the process.
pub(crate) fn parsed<A: Parser>() -> Result<A> {
    A::try_parse().map_err(|error| {
        if !error.use_stderr() {
            error.exit();
        }
        // Clap explains over many lines; what comes before the first hint says what is wrong.
        let text = error.to_string();
        let lines = text.lines().map(str::trim);
        let about = lines.take_while(|it| {
            !it.starts_with("Usage:")
                && !it.starts_with("tip:")
                && !it.starts_with("For more information")
        });
        let line = about
            .filter(|it| !it.is_empty())
            .collect::<Vec<_>>()
            .join(" ");
        anyhow::anyhow!(line.trim_start_matches("error: ").to_owned())
    })
}

pub(crate) fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".into()),
        Ok(number) => Ok(number),
        Err(_) => Err("must be a whole number".into()),
    }
}

/// Takes the name of a recipe.
pub fn recipe_parser() -> impl TypedValueParser<Value = Name> {
    let choice = |name: &Name| PossibleValue::new(name.as_str()).help(name.about());
    let choices = PossibleValuesParser::new(NAMES.iter().map(choice));
    choices.try_map(|name| name.parse::<Name>())
}

fn seeds(text: &str) -> Result<usize, String> {
    match at_least_one(text)? {
        number @ ..=1000 => Ok(number),
        _ => Err("must be at most 1000".into()),
    }
}

fn dropout(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(rate) if (0.0..1.0).contains(&rate) => Ok(rate),
        _ => Err("must be at least 0 and below 1".into()),
    }
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(rate) if rate > 0.0 && rate <= 1.0 => Ok(rate),
        _ => Err("must be above 0 and at most 1".into()),
    }
}

/// AdamW, by the format of its moments.
#[derive(ValueEnum, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Optimizer {
    /// FP32: 8 bytes a parameter.
    #[default]
    Adamw,
    /// E4M3 with dynamic range expansion, as COAT.
    Fp8Adamw,
    /// The dynamic exponent format with expansion for the mean, E4M3 with expansion for the variance: COAT's best pair.
    DynamicFp8Adamw,
    /// The dynamic exponent format.
    #[value(name = "dynamic-adamw-8bit")]
    #[serde(rename = "dynamic-adamw-8bit")]
    DynamicAdamw8bit,
    /// INT8 in blocks of 2048.
    Int8Adamw,
}

impl Optimizer {
    /// The library's configuration.
    pub fn config(self) -> QuantAdamWConfig {
        match self {
            Self::Adamw => QuantAdamWConfig::new(),
            Self::Fp8Adamw => QuantAdamWConfig::fp8(),
            Self::DynamicFp8Adamw => {
                QuantAdamWConfig::fp8().with_first(Some(StateFormat::DYNAMIC_EXPONENT.expanded()))
            }
            Self::DynamicAdamw8bit => QuantAdamWConfig::dynamic_8bit(),
            Self::Int8Adamw => QuantAdamWConfig::int8(),
        }
    }
}

/// How the codes of 8-bit moments are rounded.
#[derive(ValueEnum, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum StateRounding {
    /// To the nearest code.
    #[default]
    Nearest,
    /// Up or down at random, so that small changes add up.
    Stochastic,
}

impl From<StateRounding> for optim::StateRounding {
    fn from(rounding: StateRounding) -> Self {
        match rounding {
            StateRounding::Nearest => Self::Nearest,
            StateRounding::Stochastic => Self::Stochastic,
        }
    }
}

/// How activations wait for the backward pass.
#[derive(ValueEnum, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Contexts {
    /// As they are.
    #[default]
    Exact,
    /// INT10 in groups of 128.
    Int10,
    /// INT8 in groups of 128.
    Int8,
    /// The same, but for attention, whose forward pass is then not computed again.
    Int8ExactAttention,
    /// INT8 in groups of 128, beside attention's output as it is: its forward pass is not computed again either.
    Int8KeptOutput,
    /// E4M3 in groups of 16.
    E4m3,
    /// INT4 in groups of 32, for measurements.
    Int4,
}

impl Contexts {
    /// The library's context.
    pub fn context(self) -> Option<Context> {
        match self {
            Self::Exact => context::Exact::CONTEXT,
            Self::Int10 => <context::Int10>::CONTEXT,
            Self::Int8 => <context::Int8>::CONTEXT,
            Self::Int8ExactAttention => context::ExactAttention::<context::Int8>::CONTEXT,
            Self::Int8KeptOutput => context::KeptOutput::<context::Int8>::CONTEXT,
            Self::E4m3 => context::E4M3::<16>::CONTEXT,
            Self::Int4 => context::Int4::<32>::CONTEXT,
        }
    }
}

/// How fallback thresholds follow fallback rates.
#[derive(ValueEnum, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Threshold {
    /// By a factor for each layer, which becomes smaller when the threshold turns around.
    #[default]
    Settling,
    /// By one factor, as in the paper.
    Paper,
}

impl Threshold {
    /// The library's settings.
    pub fn config(self) -> DelayThreshold {
        match self {
            Self::Settling => DelayThreshold::default(),
            Self::Paper => DelayThreshold::paper(),
        }
    }

    /// That of runs which do not name it: they are from before there was another.
    pub(crate) fn unnamed() -> Self {
        Self::Paper
    }
}

/// Where to train.
#[derive(ValueEnum, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Device {
    /// Burn's Flex backend.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
    /// Any GPU with a Vulkan driver.
    Vulkan,
}

/// The dtype of everything that is neither quantized nor kept in FP32.
#[derive(ValueEnum, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Compute {
    /// 32-bit floats.
    F32,
    /// Brain floats.
    Bf16,
    /// Half floats.
    F16,
}

impl Compute {
    /// Bytes of a number.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }
}

/// Which parts of the model run again in the backward pass, so that only what they read waits for it.
#[derive(ValueEnum, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Checkpointing {
    /// None.
    #[default]
    None,
    /// Each layer of the decoder.
    Layers,
}

/// Which products of two activations are quantized, by recipes with learned step sizes and by INT8 recipes.
#[derive(ValueEnum, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Products {
    /// None.
    #[default]
    None,
    /// The two of attention. With learned step sizes it is composed of them then; by INT8 recipes those of its forward
    /// pass, where a kernel multiplies INT8 codes.
    Attention,
}

impl Products {
    /// The layers and products that are quantized.
    pub fn policy(self) -> LayerPolicy {
        match self {
            Self::None => LayerPolicy::default(),
            // The projections behind which they come.
            Self::Attention => LayerPolicy::default()
                .products("attention.v")
                .products("attention.qkv"),
        }
    }
}

/// How models are evaluated, of recipes with learned step sizes.
#[derive(ValueEnum, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Evaluation {
    /// Without quantization.
    #[default]
    Exact,
    /// By the step sizes that were learned.
    Quantized,
}

/// Which products of activations this recipe quantizes.
pub fn products_of(recipe: Name, products: Products) -> Products {
    match recipe.row().linear {
        Some(row) if row.has_int8_attention() => products,
        _ => of_learned(recipe, products),
    }
}

/// A setting that recipes with learned step sizes alone have, as it holds for this one.
pub fn of_learned<T: Default>(recipe: Name, setting: T) -> T {
    let slots = recipe.row().linear.map_or(&[][..], |row| row.slots);
    match slots.iter().any(|slot| slot.kind == SlotKind::StepSize) {
        true => setting,
        false => T::default(),
    }
}

/// The scaling of losses.
#[derive(ValueEnum, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum LossScaling {
    /// They are as they are.
    #[default]
    Off,
    /// By a scale that follows the gradients, as in AMP.
    On,
}

impl LossScaling {
    /// What a compute dtype needs unless something else is asked for.
    pub fn of(compute: Compute) -> Self {
        match compute {
            Compute::F16 => Self::On,
            Compute::F32 | Compute::Bf16 => Self::Off,
        }
    }

    /// The library's settings.
    pub fn config(self) -> Option<optim::LossScaling> {
        match self {
            Self::Off => None,
            Self::On => Some(optim::LossScaling::default()),
        }
    }
}

/// The model's size, with defaults to match.
#[derive(ValueEnum, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Preset {
    /// About 1M parameters, for two CPU cores.
    Tiny,
    /// About 30M parameters, 20M tokens.
    Small,
    /// About 124M parameters.
    Medium,
    /// About 1.3B parameters, for a GPU of 80 GB.
    Large,
    /// As `tiny`, in GPT-2's style.
    Gpt2Tiny,
    /// As `small`, in GPT-2's style.
    Gpt2Small,
    /// As `medium`, in GPT-2's style.
    Gpt2Medium,
}

macro_rules! display_as_flag {
    ($($name:ty),*) => {$(
        impl Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let value = self.to_possible_value().expect("no variant is hidden");
                f.pad(value.get_name())
            }
        }
    )*};
}
display_as_flag!(
    Optimizer,
    StateRounding,
    Contexts,
    Threshold,
    Device,
    Compute,
    Checkpointing,
    LossScaling,
    Preset
);

/// The sizes of a run that a preset proposes.
#[derive(Clone, Copy, Debug)]
pub struct Defaults {
    /// Optimizer steps in all.
    pub steps: usize,
    /// Sequences in a batch.
    pub batch: usize,
    /// Bytes in a sequence.
    pub sequence: usize,
    /// Peak learning rate.
    pub lr: f64,
    /// Windows that validation reads.
    pub validation: usize,
}

impl Preset {
    /// The model of this preset.
    pub fn model(self, sequence: usize) -> DecoderConfig {
        let (hidden, layers, heads) = match self {
            Self::Tiny | Self::Gpt2Tiny => (128, 4, 4),
            Self::Small | Self::Gpt2Small => (512, 9, 8),
            Self::Medium | Self::Gpt2Medium => (768, 16, 12),
            Self::Large => (2048, 24, 16),
        };
        let family = self.family();
        // Llama's network has three matrices, GPT-2's two.
        let (ratio, dropout) = match family {
            Family::Llama => (3, 0.0),
            Family::Gpt2 => (4, 0.1),
        };
        DecoderConfig {
            family,
            dropout,
            ..DecoderConfig::new(hidden, ratio * hidden, heads, layers, sequence)
        }
    }

    /// The style of its layers.
    pub fn family(self) -> Family {
        match self {
            Self::Tiny | Self::Small | Self::Medium | Self::Large => Family::Llama,
            Self::Gpt2Tiny | Self::Gpt2Small | Self::Gpt2Medium => Family::Gpt2,
        }
    }

    /// Sequences in a batch, and bytes in a sequence, unless the command line says otherwise.
    pub fn batch(self) -> (usize, usize) {
        let Defaults {
            batch, sequence, ..
        } = self.defaults();
        (batch, sequence)
    }

    /// The sizes that the command line may leave out.
    pub fn defaults(self) -> Defaults {
        let (steps, batch, sequence, lr, validation) = match self {
            Self::Tiny | Self::Gpt2Tiny => (120, 8, 128, 3e-3, 64),
            Self::Small | Self::Gpt2Small => (1250, 32, 512, 1e-3, 1024),
            Self::Medium | Self::Gpt2Medium => (2000, 16, 1024, 6e-4, 512),
            Self::Large => (2000, 8, 2048, 2e-4, 256),
        };
        Defaults {
            steps,
            batch,
            sequence,
            lr,
            validation,
        }
    }
}
