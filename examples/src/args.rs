//! The command line, and the configuration that it and a checkpoint make together.

use std::fmt::{self, Display};
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use burn_quant_train::optim::{self, QuantAdamWConfig, StateFormat};
use clap::{Parser, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::model::DecoderConfig;

/// Pretrains a small Llama-style model on bytes of real text, once with each recipe, and compares them.
///
/// Without flags: fallback-int8 and mixed-precision from the same seed, on the CPU, within five minutes.
#[derive(Parser, Clone, Debug, Default)]
#[command(name = "pretrain", version)]
pub struct Args {
    /// How to train; repeat it, or separate by commas [default: fallback-int8,mixed-precision]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub recipe: Vec<Recipe>,
    /// What the optimizer keeps of each parameter [default: adamw]
    #[arg(long, value_enum)]
    pub optimizer: Option<Optimizer>,
    /// How the codes of 8-bit moments are rounded [default: nearest]
    #[arg(long, value_enum)]
    pub state_rounding: Option<StateRounding>,
    /// Where to train [default: cpu]
    #[arg(long, value_enum)]
    pub device: Option<Device>,
    /// The compute dtype [default: f32 on the CPU, bf16 with CUDA, f16 with Vulkan]
    #[arg(long, value_enum)]
    pub compute: Option<Compute>,
    /// The model's size: about 1M, 30M or 124M parameters [default: tiny]
    #[arg(long, value_enum)]
    pub preset: Option<Preset>,
    /// Optimizer steps in all; a resumed run goes on to this number [default: the preset's]
    #[arg(long, value_parser = at_least_one)]
    pub steps: Option<usize>,
    /// Sequences in a batch [default: the preset's]
    #[arg(long, value_parser = at_least_one)]
    pub batch: Option<usize>,
    /// Bytes in a sequence [default: the preset's]
    #[arg(long, value_parser = at_least_one)]
    pub sequence: Option<usize>,
    /// Peak learning rate [default: the preset's]
    #[arg(long, value_parser = rate)]
    pub lr: Option<f64>,
    /// Seed of the weights, the data order and the rounding [default: 1]
    #[arg(long)]
    pub seed: Option<u64>,
    /// Windows of held-out text that validation reads [default: the preset's]
    #[arg(long, value_parser = at_least_one)]
    pub validation: Option<usize>,
    /// Text to train on, a file or a folder [default: the Rust sources under $CARGO_HOME/registry/src]
    #[arg(long, value_name = "PATH")]
    pub data: Option<PathBuf>,
    /// Take up the run whose checkpoint is in this folder
    #[arg(long, value_name = "DIR")]
    pub resume: Option<PathBuf>,
    /// Where checkpoints go [default: target/pretrain, or the resumed run's folder]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Write the results to this file, an array with one object per run
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Leave a checkpoint every so many steps [default: a fifth of the run, at least 100]
    #[arg(long, value_name = "STEPS", value_parser = at_least_one)]
    pub checkpoint_every: Option<usize>,
    /// Stop after this step, leaving a checkpoint, as Ctrl-C would
    #[arg(long, value_name = "STEP", value_parser = at_least_one)]
    pub stop_after: Option<usize>,
    /// Print what every linear layer got
    #[arg(long)]
    pub layers: bool,
    /// Print plain lines even in a terminal
    #[arg(long)]
    pub plain: bool,
}

impl Args {
    /// Parses the process's arguments. An error is one line; help and version are printed and end the process.
    ///
    /// # Errors
    ///
    /// Whatever clap finds wrong.
    pub fn from_command_line() -> Result<Self> {
        Self::try_parse().map_err(|error| {
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
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".into()),
        Ok(number) => Ok(number),
        Err(_) => Err("must be a whole number".into()),
    }
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(rate) if rate > 0.0 && rate <= 1.0 => Ok(rate),
        _ => Err("must be above 0 and at most 1".into()),
    }
}

/// A recipe of `burn-quant-train`.
#[derive(ValueEnum, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Recipe {
    /// FP32 parameters, everything else in the compute dtype.
    MixedPrecision,
    /// INT8 matrix products of 128 x 128 blocks.
    BlockInt8,
    /// The same, with a second INT8 term for blocks that hold outliers.
    FallbackInt8,
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
display_as_flag!(Recipe, Optimizer, StateRounding, Device, Compute, Preset);

struct Defaults {
    steps: usize,
    batch: usize,
    sequence: usize,
    lr: f64,
    validation: usize,
}

impl Preset {
    /// The model of this preset.
    pub fn model(self, sequence: usize) -> DecoderConfig {
        let (hidden, layers, heads) = match self {
            Self::Tiny => (128, 4, 4),
            Self::Small => (512, 9, 8),
            Self::Medium => (768, 16, 12),
        };
        DecoderConfig::new(hidden, 3 * hidden, heads, layers, sequence)
    }

    /// Sequences in a batch, and bytes in a sequence, unless the command line says otherwise.
    pub fn batch(self) -> (usize, usize) {
        let Defaults {
            batch, sequence, ..
        } = self.defaults();
        (batch, sequence)
    }

    fn defaults(self) -> Defaults {
        let (steps, batch, sequence, lr, validation) = match self {
            Self::Tiny => (120, 8, 128, 3e-3, 64),
            Self::Small => (1250, 32, 512, 1e-3, 1024),
            Self::Medium => (2000, 16, 1024, 6e-4, 512),
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

/// All that a run depends on; a checkpoint carries it.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct Config {
    /// Recipes, in the order of their runs.
    pub recipes: Vec<Recipe>,
    /// The format of the optimizer's moments.
    #[serde(default)]
    pub optimizer: Optimizer,
    /// How the codes of 8-bit moments are rounded.
    #[serde(default)]
    pub state_rounding: StateRounding,
    /// Where to train.
    pub device: Device,
    /// The compute dtype.
    pub compute: Compute,
    /// The model's size.
    pub preset: Preset,
    /// The shape of the model.
    pub model: DecoderConfig,
    /// Optimizer steps in all.
    pub steps: usize,
    /// Sequences in a batch.
    pub batch: usize,
    /// Bytes in a sequence.
    pub sequence: usize,
    /// Peak learning rate.
    pub lr: f64,
    /// Seed of the weights, the data order and the rounding.
    pub seed: u64,
    /// Windows that validation reads.
    pub validation: usize,
    /// The text; `None` is Cargo's registry.
    pub data: Option<PathBuf>,
    /// Hash of the loaded text, filled in once it is loaded.
    pub fingerprint: String,
}

impl Config {
    /// The configuration of a new run.
    ///
    /// # Errors
    ///
    /// A recipe named twice.
    pub fn new(args: &Args) -> Result<Self> {
        let preset = args.preset.unwrap_or(Preset::Tiny);
        let defaults = preset.defaults();
        let device = args.device.unwrap_or(Device::Cpu);
        let sequence = args.sequence.unwrap_or(defaults.sequence);
        let recipes = if args.recipe.is_empty() {
            vec![Recipe::FallbackInt8, Recipe::MixedPrecision]
        } else {
            args.recipe.clone()
        };
        for (i, recipe) in recipes.iter().enumerate() {
            ensure!(
                !recipes[..i].contains(recipe),
                "--recipe names {recipe} twice"
            );
        }
        Ok(Self {
            recipes,
            optimizer: args.optimizer.unwrap_or_default(),
            state_rounding: args.state_rounding.unwrap_or_default(),
            device,
            compute: args.compute.unwrap_or(match device {
                Device::Cpu => Compute::F32,
                Device::Cuda => Compute::Bf16,
                Device::Vulkan => Compute::F16,
            }),
            preset,
            model: preset.model(sequence),
            steps: args.steps.unwrap_or(defaults.steps),
            batch: args.batch.unwrap_or(defaults.batch),
            sequence,
            lr: args.lr.unwrap_or(defaults.lr),
            seed: args.seed.unwrap_or(1),
            validation: args.validation.unwrap_or(defaults.validation),
            data: args.data.as_deref().map(absolute),
            fingerprint: String::new(),
        })
    }

    /// The configuration of a resumed run: the checkpoint's, where only the total of steps, the device, the format and
    /// the rounding of the optimizer's moments and where the text lies may change. Several recipes may be narrowed down
    /// to some of them.
    ///
    /// # Errors
    ///
    /// A flag that contradicts the checkpoint.
    pub fn resumed(saved: Self, args: &Args, folder: &Path) -> Result<Self> {
        let at = folder.display();
        macro_rules! unchanged {
            ($($field:ident),*) => {$(
                if let Some(asked) = args.$field {
                    ensure!(
                        asked == saved.$field,
                        "the checkpoint in {at} was made with --{} {}, not {asked}",
                        stringify!($field),
                        saved.$field
                    );
                }
            )*};
        }
        unchanged!(preset, compute, batch, sequence, seed, lr, validation);
        let mut config = saved;
        for recipe in &args.recipe {
            ensure!(
                config.recipes.contains(recipe),
                "the checkpoint in {at} is of {}, not of {recipe}",
                list(&config.recipes)
            );
        }
        if !args.recipe.is_empty() {
            config.recipes = args.recipe.clone();
        }
        ensure!(
            config.model == config.preset.model(config.sequence),
            "the checkpoint in {at} is of another shape than today's preset {}",
            config.preset
        );
        config.steps = args.steps.unwrap_or(config.steps);
        config.device = args.device.unwrap_or(config.device);
        config.optimizer = args.optimizer.unwrap_or(config.optimizer);
        config.state_rounding = args.state_rounding.unwrap_or(config.state_rounding);
        if args.data.is_some() {
            config.data = args.data.as_deref().map(absolute);
        }
        Ok(config)
    }
}

/// A run may be resumed from another folder.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Names separated by commas.
pub fn list(recipes: &[Recipe]) -> String {
    let names: Vec<_> = recipes.iter().map(Recipe::to_string).collect();
    names.join(", ")
}
