//! `quant-train advise`: what a training step holds, by recipe and optimizer, what of it fits, how fast it was
//! measured, and which recipe to take.
//!
//! - [`shapes`] are a model's sizes, of a preset, of the command line or of a [`safetensors`] header.
//! - [`activations`] are what waits for the backward pass, [`memory`] all that a step holds; both follow the recipes'
//!   rows.
//! - [`speed`] is what the committed results say, [`device`] what a device multiplies in.
//! - [`recommendation`] chooses; [`table`] and JSON say what was found. [`args`] is the command line.

pub mod activations;
pub mod args;
pub mod device;
pub mod memory;
pub mod recommendation;
pub mod safetensors;
pub mod shapes;
pub mod speed;
pub mod table;

use std::process::ExitCode;

use anyhow::Result;
use burn_quant_train::recipe::Name;
use serde::Serialize;

use crate::args::{Checkpointing, Compute, Contexts, Optimizer};
use crate::{ended, rows};
use activations::AttentionForm;
use args::{AdviseArgs, Cli, Command};
use device::Device;
use memory::{Case, Memory};
use recommendation::Recommendation;
use shapes::Shapes;
use speed::Speed;

/// Runs the program: 0, or 2 after one line on the standard error.
pub fn main() -> ExitCode {
    ended("quant-train", Cli::from_command_line().and_then(run))
}

fn run(cli: Cli) -> Result<ExitCode> {
    let Command::Advise(args) = cli.command;
    let advice = Advice::of(&args)?;
    match args.json {
        true => print!("{}", rows::to_string(&advice)?),
        false => print!("{}", table::text(&advice)),
    }
    Ok(ExitCode::SUCCESS)
}

/// The memory and time that training a model takes.
#[derive(Serialize, Clone, Debug)]
pub struct Advice {
    /// The model.
    pub model: Shapes,
    /// Its parameters.
    pub parameters: usize,
    /// Sequences in a batch.
    pub batch: usize,
    /// Tokens in a sequence.
    pub sequence: usize,
    /// Where it is to train.
    pub device: Device,
    /// The dtype of what is not quantized.
    pub compute: Compute,
    /// How attention is computed there.
    pub attention: AttentionForm,
    /// Bytes that training may hold; none: not asked.
    pub memory: Option<u64>,
    /// Which parts of the model run again in the backward pass.
    pub checkpointing: Checkpointing,
    /// A row for each recipe, context and optimizer.
    pub rows: Vec<Row>,
    /// Which to take.
    pub recommendation: Recommendation,
}

/// A way to train.
#[derive(Serialize, Clone, Debug)]
pub struct Row {
    /// The recipe.
    pub recipe: Name,
    /// How activations wait for the backward pass.
    pub contexts: Contexts,
    /// The format of the optimizer's moments.
    pub optimizer: Optimizer,
    /// The bytes that a step holds.
    pub bytes: Memory,
    /// True if the peak fits; none: no memory was given.
    pub fits: Option<bool>,
    /// Sequences in the largest batch that fits, 0 where none does; none: no memory was given.
    pub largest_batch: Option<usize>,
    /// The measured speed; `None`: not measured.
    pub speed: Option<Speed>,
}

impl Row {
    fn case(&self) -> Case {
        Case {
            recipe: self.recipe,
            contexts: self.contexts,
            optimizer: self.optimizer,
        }
    }
}

impl Advice {
    /// The advice that the command line asks for.
    ///
    /// # Errors
    ///
    /// A model that is not described, or is none; a file that cannot be read.
    pub fn of(args: &AdviseArgs) -> Result<Self> {
        let question = args.question()?;
        let cases = question.cases();
        let rows: Vec<Row> = cases.iter().map(|case| question.row(case)).collect();
        Ok(Self {
            recommendation: recommendation::recommend(&question, &rows),
            parameters: question.model.parameters(),
            attention: question.attention(),
            model: question.model,
            batch: question.batch,
            sequence: question.sequence,
            device: question.device,
            compute: question.compute,
            memory: question.memory,
            checkpointing: question.checkpointing,
            rows,
        })
    }
}

/// The question: a model, its batch and its device.
#[derive(Clone, Debug)]
pub struct Question {
    /// The model.
    pub model: Shapes,
    /// Sequences in a batch.
    pub batch: usize,
    /// Tokens in a sequence.
    pub sequence: usize,
    /// Where it is to train.
    pub device: Device,
    /// The dtype of what is not quantized.
    pub compute: Compute,
    /// Bytes that training may hold.
    pub memory: Option<u64>,
    /// The recipes to look at.
    pub recipes: Vec<Name>,
    /// The contexts to look at.
    pub contexts: Vec<Contexts>,
    /// The optimizers to look at.
    pub optimizers: Vec<Optimizer>,
    /// Which parts of the model run again in the backward pass.
    pub checkpointing: Checkpointing,
}

impl Question {
    /// How attention is computed on the device.
    pub fn attention(&self) -> AttentionForm {
        AttentionForm::on(self.device, self.compute, self.model.head_width)
    }

    fn cases(&self) -> Vec<Case> {
        let mut cases = Vec::new();
        for &recipe in &self.recipes {
            for &contexts in &self.contexts {
                for &optimizer in &self.optimizers {
                    cases.push(Case {
                        recipe,
                        contexts,
                        optimizer,
                    });
                }
            }
        }
        cases
    }

    fn row(&self, case: &Case) -> Row {
        let bytes = Memory::of(self, case, self.batch);
        let fits = |batch: usize, limit: u64| Memory::of(self, case, batch).peak <= limit;
        Row {
            recipe: case.recipe,
            contexts: case.contexts,
            optimizer: case.optimizer,
            bytes,
            fits: self.memory.map(|limit| bytes.peak <= limit),
            largest_batch: self
                .memory
                .map(|limit| memory::largest(|batch| fits(batch, limit))),
            speed: speed::of(self, case),
        }
    }
}
