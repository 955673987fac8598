//! All that runs depend on: the command line and a checkpoint make it together.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use burn_quant_train::recipe::{FallbackInt8, MixedPrecision, Name, Recipe};
use serde::{Deserialize, Serialize};

use crate::args::{
    Args, Checkpointing, Compute, Contexts, Device, Evaluation, LossScaling, Optimizer, Preset,
    Products, StateRounding, Threshold,
};
use crate::checkpoint::State;
use crate::model::{AttentionWay, DecoderConfig, Family};

/// One of the runs of a configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// How it trains.
    pub recipe: Name,
    /// Seed of the weights, the data order and the rounding.
    pub seed: u64,
}

/// The checkpoint that runs go on from under recipes of their own.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fork {
    /// The recipe of the run that left it.
    pub recipe: Name,
    /// That run's seed.
    pub seed: u64,
    /// Steps it had taken.
    pub step: usize,
    /// Steps that its learning-rate schedule was made for.
    pub planned_steps: usize,
}

/// All that runs depend on; a folder of checkpoints carries it, and each checkpoint that of its own run.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct Config {
    /// Recipes, in the order of their runs.
    pub recipes: Vec<Name>,
    /// The format of the optimizer's moments.
    #[serde(default)]
    pub optimizer: Optimizer,
    /// How the codes of 8-bit moments are rounded.
    #[serde(default)]
    pub state_rounding: StateRounding,
    /// Steps before step sizes are learned; 0 in older checkpoints, which have no step sizes.
    #[serde(default)]
    pub cold_start: u64,
    /// How activations wait for the backward pass.
    #[serde(default)]
    pub contexts: Contexts,
    /// Which parts of the model run again in the backward pass.
    #[serde(default)]
    pub checkpointing: Checkpointing,
    /// How attention is computed.
    #[serde(default)]
    pub attention: AttentionWay,
    /// Which products of activations are quantized, by recipes that can.
    #[serde(default)]
    pub products: Products,
    /// How models are evaluated, of recipes with learned step sizes.
    #[serde(default)]
    pub evaluation: Evaluation,
    /// How fallback thresholds follow fallback rates.
    #[serde(default = "Threshold::unnamed")]
    pub threshold: Threshold,
    /// Where to train.
    pub device: Device,
    /// The compute dtype.
    pub compute: Compute,
    /// The scaling of losses.
    #[serde(default)]
    pub loss_scaling: LossScaling,
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
    /// The first seed of the weights, the data order and the rounding.
    pub seed: u64,
    /// How many seeds each recipe has.
    #[serde(default = "one")]
    pub seeds: usize,
    /// Windows that validation reads.
    pub validation: usize,
    /// The text; `None` is Cargo's registry.
    pub data: Option<PathBuf>,
    /// Hash of the loaded text, filled in once it is loaded.
    pub fingerprint: String,
    /// Where the runs went on from; `None`: they began at the beginning.
    #[serde(default)]
    pub fork: Option<Fork>,
}

fn one() -> usize {
    1
}

impl Config {
    /// The configuration of new runs.
    ///
    /// # Errors
    ///
    /// A recipe named twice, or more seeds than there are.
    pub fn new(args: &Args) -> Result<Self> {
        let preset = args.preset.unwrap_or(Preset::Tiny);
        let defaults = preset.defaults();
        let device = args.device.unwrap_or(Device::Cpu);
        let sequence = args.sequence.unwrap_or(defaults.sequence);
        let steps = args.steps.unwrap_or(defaults.steps);
        let model = preset.model(sequence);
        ensure!(
            args.dropout.is_none() || model.family == Family::Gpt2,
            "--dropout is for presets in GPT-2's style: the model of --preset {preset} has none"
        );
        let compute = args.compute.unwrap_or(match device {
            Device::Cpu => Compute::F32,
            Device::Cuda => Compute::Bf16,
            Device::Vulkan => Compute::F16,
        });
        Self {
            recipes: recipes(args)?,
            optimizer: args.optimizer.unwrap_or_default(),
            state_rounding: args.state_rounding.unwrap_or_default(),
            cold_start: args.cold_start.unwrap_or(steps as u64 / 10),
            contexts: args.contexts.unwrap_or_default(),
            checkpointing: args.checkpointing.unwrap_or_default(),
            attention: args.attention.unwrap_or_default(),
            products: args.products.unwrap_or_default(),
            evaluation: args.evaluation.unwrap_or_default(),
            threshold: args.threshold.unwrap_or_default(),
            device,
            compute,
            loss_scaling: args.loss_scaling.unwrap_or(LossScaling::of(compute)),
            preset,
            model: DecoderConfig {
                dropout: args.dropout.unwrap_or(model.dropout),
                ..model
            },
            steps,
            batch: args.batch.unwrap_or(defaults.batch),
            sequence,
            lr: args.lr.unwrap_or(defaults.lr),
            seed: args.seed.unwrap_or(1),
            seeds: args.seeds.unwrap_or(1),
            validation: args.validation.unwrap_or(defaults.validation),
            data: args.data.as_deref().map(absolute),
            fingerprint: String::new(),
            fork: None,
        }
        .checked()
    }

    /// The configuration of resumed runs: that of their folder.
    ///
    /// Only the total of steps, the device, the place of the text, the format and the rounding of the optimizer's
    /// moments, the cold start, the contexts, checkpointing, how attention is computed, which products of activations are
    /// quantized, how models are evaluated, how thresholds follow rates, and loss scaling may change.
    /// Several recipes may be narrowed down to some of them, and seeds may be added.
    ///
    /// # Errors
    ///
    /// A flag that contradicts the folder.
    pub fn resumed(saved: Self, args: &Args, folder: &Path) -> Result<Self> {
        let at = folder.display();
        let mut config = saved.amended(args, folder)?;
        if let Some(compute) = args.compute {
            ensure!(
                compute == config.compute,
                "the checkpoint in {at} was made with --compute {}, not {compute}; --fork goes on in another one",
                config.compute
            );
        }
        if let Some(seed) = args.seed {
            ensure!(
                seed == config.seed,
                "the checkpoint in {at} was made with --seed {}, not {seed}",
                config.seed
            );
        }
        if !args.recipe.is_empty() {
            let recipes = recipes(args)?;
            for recipe in &recipes {
                ensure!(
                    config.recipes.contains(recipe),
                    "the checkpoint in {at} is of {}, not of {recipe}; --fork goes on under another recipe",
                    list(&config.recipes)
                );
            }
            config.recipes = recipes;
        }
        if let Some(seeds) = args.seeds {
            ensure!(
                seeds >= config.seeds,
                "the runs in {at} have {} seeds, and --seeds {seeds} would leave some out: it can only add seeds",
                config.seeds
            );
            config.seeds = seeds;
        }
        config.checked()
    }

    /// The configuration of runs that go on from a checkpoint of another run: as for a resumed run, but for recipes and
    /// seeds, which are the command line's, and for the compute dtype, which may be another one: weights and moments
    /// are not kept in it.
    ///
    /// # Errors
    ///
    /// A flag that contradicts the checkpoint, or no step left to take.
    pub fn forked(source: &State, args: &Args, folder: &Path) -> Result<Self> {
        let at = folder.display();
        let saved = source.config.clone();
        let fork = Fork {
            recipe: source.recipe,
            seed: saved.seed,
            step: source.step,
            planned_steps: saved.planned_steps(),
        };
        let mut config = Self {
            recipes: recipes(args)?,
            seed: args.seed.unwrap_or(saved.seed),
            seeds: args.seeds.unwrap_or(1),
            fork: Some(fork),
            ..saved.amended(args, folder)?
        };
        if let Some(compute) = args.compute.filter(|asked| *asked != config.compute) {
            config.compute = compute;
            config.loss_scaling = args.loss_scaling.unwrap_or(LossScaling::of(compute));
        }
        ensure!(
            config.steps > fork.step,
            "the checkpoint of {} in {at} is at step {} of {}: --fork needs --steps beyond that",
            fork.recipe,
            fork.step,
            config.steps
        );
        config.checked()
    }

    /// The configuration of a checkpoint with the changes that the command line may make to it, but to recipes, seeds and
    /// the compute dtype.
    fn amended(mut self, args: &Args, folder: &Path) -> Result<Self> {
        let at = folder.display();
        macro_rules! unchanged {
            ($($field:ident),*) => {$(
                if let Some(asked) = args.$field {
                    ensure!(
                        asked == self.$field,
                        "the checkpoint in {at} was made with --{} {}, not {asked}",
                        stringify!($field),
                        self.$field
                    );
                }
            )*};
        }
        unchanged!(preset, batch, sequence, lr, validation);
        let dropout = self.model.dropout;
        ensure!(
            args.dropout.is_none_or(|asked| asked == dropout),
            "the checkpoint in {at} was made with --dropout {dropout}, not {}",
            args.dropout.unwrap_or_default()
        );
        let of_preset = DecoderConfig {
            dropout,
            ..self.preset.model(self.sequence)
        };
        ensure!(
            self.model == of_preset,
            "the checkpoint in {at} is of another shape than today's preset {}",
            self.preset
        );
        self.steps = args.steps.unwrap_or(self.steps);
        self.device = args.device.unwrap_or(self.device);
        self.optimizer = args.optimizer.unwrap_or(self.optimizer);
        self.state_rounding = args.state_rounding.unwrap_or(self.state_rounding);
        self.cold_start = args.cold_start.unwrap_or(self.cold_start);
        self.contexts = args.contexts.unwrap_or(self.contexts);
        self.checkpointing = args.checkpointing.unwrap_or(self.checkpointing);
        self.attention = args.attention.unwrap_or(self.attention);
        self.products = args.products.unwrap_or(self.products);
        self.evaluation = args.evaluation.unwrap_or(self.evaluation);
        self.threshold = args.threshold.unwrap_or(self.threshold);
        self.loss_scaling = args.loss_scaling.unwrap_or(self.loss_scaling);
        if args.data.is_some() {
            self.data = args.data.as_deref().map(absolute);
        }
        Ok(self)
    }

    fn checked(self) -> Result<Self> {
        self.seed
            .checked_add(self.seeds as u64 - 1)
            .with_context(|| {
                format!(
                    "--seeds {} from --seed {} on: there are no such seeds",
                    self.seeds, self.seed
                )
            })?;
        Ok(self)
    }

    /// All runs, seed by seed, so that a set that is stopped early has compared as many recipes as it could.
    pub fn runs(&self) -> Vec<Run> {
        let seeds = (0..self.seeds as u64).map(|it| self.seed + it);
        seeds
            .flat_map(|seed| self.recipes.iter().map(move |&recipe| Run { recipe, seed }))
            .collect()
    }

    /// The configuration of one run.
    pub fn of(&self, run: Run) -> Self {
        Self {
            recipes: vec![run.recipe],
            seed: run.seed,
            seeds: 1,
            ..self.clone()
        }
    }

    /// The name of a run in its folder: that of its recipe, and of its seed if it is not the first.
    pub fn name(&self, run: Run) -> String {
        match run.seed == self.seed {
            true => run.recipe.to_string(),
            false => format!("{}-seed-{}", run.recipe, run.seed),
        }
    }

    /// The name of a run for people: that of its recipe, and of its seed if there are several.
    pub fn label(&self, run: Run) -> String {
        match self.seeds {
            1 => run.recipe.to_string(),
            _ => format!("{} seed {}", run.recipe, run.seed),
        }
    }

    /// Steps that the learning-rate schedule is made for: a fork keeps that of its checkpoint, so that all its recipes
    /// have one schedule, and the one that the checkpoint's run would have had.
    pub fn planned_steps(&self) -> usize {
        self.fork.map_or(self.steps, |fork| fork.planned_steps)
    }

    /// Tells whether a checkpoint that was saved with another configuration belongs to this run.
    ///
    /// # Errors
    ///
    /// It does not; the message says in what it differs.
    pub fn check_same_run(&self, saved: &Self, folder: &Path) -> Result<()> {
        let at = folder.display();
        macro_rules! same {
            ($($field:ident),*) => {$(
                ensure!(
                    saved.$field == self.$field,
                    "the checkpoint in {at} is of another run, with {} {} instead of {}; remove it to train anew",
                    stringify!($field),
                    saved.$field,
                    self.$field
                );
            )*};
        }
        ensure!(
            saved.fingerprint == self.fingerprint,
            "the text has changed since the checkpoint in {at} was made"
        );
        same!(preset, compute, batch, sequence, lr, seed, validation);
        ensure!(
            saved.model == self.model && saved.fork == self.fork,
            "the checkpoint in {at} is of another run; remove it to train anew"
        );
        Ok(())
    }
}

/// The recipe and the baseline that are compared where none is named.
pub const DEFAULT: [Name; 2] = [
    <FallbackInt8<f32> as Recipe>::ROW.name(),
    <MixedPrecision<f32> as Recipe>::ROW.name(),
];

/// The recipes that the command line names, or the two that are compared by default.
fn recipes(args: &Args) -> Result<Vec<Name>> {
    if args.recipe.is_empty() {
        return Ok(DEFAULT.to_vec());
    }
    for (i, recipe) in args.recipe.iter().enumerate() {
        ensure!(
            !args.recipe[..i].contains(recipe),
            "--recipe names {recipe} twice"
        );
    }
    Ok(args.recipe.clone())
}

/// A run may be resumed from another folder.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Names separated by commas.
fn list(recipes: &[Name]) -> String {
    let names: Vec<_> = recipes.iter().map(Name::to_string).collect();
    names.join(", ")
}
