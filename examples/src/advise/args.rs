//! The command line.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use burn_quant_train::recipe::{NAMES, Name};
use clap::{Args, Parser, Subcommand, ValueEnum};

use super::Question;
use super::device::Device;
use super::safetensors;
use super::shapes::{Family, Shapes};
use crate::args::{
    Checkpointing, Compute, Contexts, Optimizer, Preset, at_least_one, parsed, recipe_parser,
};

/// Helps with low-precision training.
#[derive(Parser, Clone, Debug)]
#[command(name = "quant-train", version)]
pub struct Cli {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Subcommand, Clone, Debug)]
pub enum Command {
    /// Print what training a model takes by each recipe and optimizer, and which to take
    #[command(after_help = EXAMPLES)]
    Advise(Box<AdviseArgs>),
}

/// A model, its batch and its device.
#[derive(Args, Clone, Debug, Default)]
pub struct AdviseArgs {
    /// The model of `pretrain` of this size
    #[arg(long, value_enum, help_heading = MODEL, conflicts_with_all = ["safetensors", "hidden"])]
    pub preset: Option<Preset>,
    /// The model whose weights are in this file; its header is read, and --heads says what it does not
    #[arg(long, value_name = "FILE", help_heading = MODEL, conflicts_with = "hidden")]
    pub safetensors: Option<PathBuf>,
    /// Width of the residual stream
    #[arg(long, value_parser = at_least_one, help_heading = MODEL, requires_all = ["layers", "heads", "vocabulary"])]
    pub hidden: Option<usize>,
    /// Decoder layers
    #[arg(long, value_parser = at_least_one, help_heading = MODEL, requires = "hidden")]
    pub layers: Option<usize>,
    /// Attention heads
    #[arg(long, value_parser = at_least_one, help_heading = MODEL, conflicts_with = "preset")]
    pub heads: Option<usize>,
    /// Heads of keys and values [default: --heads]
    #[arg(long, value_parser = at_least_one, help_heading = MODEL, requires = "hidden")]
    pub kv_heads: Option<usize>,
    /// Features of a head [default: --hidden divided by --heads]
    #[arg(long, value_parser = at_least_one, help_heading = MODEL, requires = "hidden")]
    pub head_width: Option<usize>,
    /// Width inside the feed-forward network [default: 4 times --hidden]
    #[arg(long, value_parser = at_least_one, help_heading = MODEL, requires = "hidden")]
    pub ffn: Option<usize>,
    /// Rows of the embedding
    #[arg(long, value_parser = at_least_one, help_heading = MODEL, requires = "hidden")]
    pub vocabulary: Option<usize>,
    /// The layers [default: llama]
    #[arg(long, value_enum, help_heading = MODEL, requires = "hidden")]
    pub family: Option<Family>,
    /// The embedding's table is the vocabulary head too
    #[arg(long, help_heading = MODEL, requires = "hidden")]
    pub tied: bool,

    /// Sequences in a batch [default: the preset's, else 1]
    #[arg(long, value_parser = at_least_one)]
    pub batch: Option<usize>,
    /// Tokens in a sequence [default: the preset's, else 2048]
    #[arg(long, value_parser = at_least_one)]
    pub sequence: Option<usize>,
    /// Memory that training may take, in GiB
    #[arg(long, value_name = "GIB", value_parser = gib)]
    pub memory: Option<f64>,
    /// Where to train
    #[arg(long, value_enum, default_value_t = Device::default())]
    pub device: Device,
    /// The dtype of what is not quantized [default: the device's]
    #[arg(long, value_enum)]
    pub compute: Option<Compute>,
    /// Recipes to look at [default: all]
    #[arg(long, value_parser = recipe_parser(), value_delimiter = ',')]
    pub recipe: Vec<Name>,
    /// Contexts to look at [default: exact, int10 and int8]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub contexts: Vec<Contexts>,
    /// Which parts of the model keep their input alone and run again in the backward pass
    #[arg(long, value_enum, default_value_t = Checkpointing::None)]
    pub checkpointing: Checkpointing,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

const MODEL: &str = "Model";

const EXAMPLES: &str = "\
Examples:
  quant-train advise --preset medium --device h200 --memory 40
  quant-train advise --safetensors model.safetensors --heads 32 --batch 4 --device a100 --memory 80
  quant-train advise --hidden 4096 --layers 32 --heads 32 --kv-heads 8 --ffn 14336 --vocabulary 128256";

/// Tokens in a sequence where nothing says how many.
const SEQUENCE: usize = 2048;

impl Cli {
    /// The process's command line. An error is one line; help and version are printed and end the process.
    ///
    /// # Errors
    ///
    /// Whatever clap finds wrong.
    pub fn from_command_line() -> Result<Self> {
        parsed()
    }
}

impl AdviseArgs {
    /// The question that the arguments ask.
    ///
    /// # Errors
    ///
    /// A model that is not described, or is none; a file that cannot be read.
    pub fn question(&self) -> Result<Question> {
        let (batch, sequence) = self.preset.map_or((1, SEQUENCE), Preset::batch);
        let sequence = self.sequence.unwrap_or(sequence);
        let model = self.model(sequence)?.checked()?;
        ensure!(
            model.positions == 0 || sequence <= model.positions,
            "the model has {} positions, fewer than the {sequence} tokens of --sequence",
            model.positions
        );
        Ok(Question {
            model,
            batch: self.batch.unwrap_or(batch),
            sequence,
            device: self.device,
            compute: self.compute.unwrap_or(self.device.compute()),
            memory: self.memory.map(|gib| (gib * GIB) as u64),
            recipes: or_all(&self.recipe, NAMES),
            contexts: or_all(
                &self.contexts,
                &[Contexts::Exact, Contexts::Int10, Contexts::Int8],
            ),
            optimizers: Optimizer::value_variants().to_vec(),
            checkpointing: self.checkpointing,
        })
    }

    fn model(&self, sequence: usize) -> Result<Shapes> {
        if let Some(preset) = self.preset {
            return Ok(Shapes::from(&preset.model(sequence)));
        }
        if let Some(file) = &self.safetensors {
            return safetensors::shapes(file, self.heads);
        }
        self.numbers(sequence)
    }

    fn numbers(&self, sequence: usize) -> Result<Shapes> {
        let hidden = self.hidden.context(
            "which model? Add --preset, --safetensors, or --hidden with the other sizes",
        )?;
        let size = |size: Option<usize>, flag| size.with_context(|| format!("add --{flag}"));
        let heads = size(self.heads, "heads")?;
        let family = self.family.unwrap_or_default();
        if self.head_width.is_none() {
            ensure!(
                hidden.is_multiple_of(heads),
                "{heads} heads do not divide a width of {hidden}: add --head-width"
            );
        }
        Ok(Shapes {
            family,
            hidden,
            layers: size(self.layers, "layers")?,
            heads,
            kv_heads: self.kv_heads.unwrap_or(heads),
            head_width: self.head_width.unwrap_or(hidden / heads),
            ffn: self.ffn.unwrap_or(4 * hidden),
            vocabulary: size(self.vocabulary, "vocabulary")?,
            positions: match family {
                Family::Llama => 0,
                Family::Gpt2 => sequence,
            },
            is_tied: self.tied,
            has_dropout: false,
        })
    }
}

/// The names that were asked for, else all.
fn or_all<T: Copy>(asked: &[T], all: &[T]) -> Vec<T> {
    match asked.is_empty() {
        true => all.to_vec(),
        false => asked.to_vec(),
    }
}

/// Bytes of a GiB.
const GIB: f64 = (1u64 << 30) as f64;

fn gib(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(gib) if gib > 0.0 && gib < 1e9 => Ok(gib),
        _ => Err("must be a number of GiB above 0".into()),
    }
}
