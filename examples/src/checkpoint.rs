//! Checkpoints: whole or not there.
//!
//! ```text
//! DIR/pretrain.json                     the configuration
//! DIR/<recipe>/step-<n>/model-<n>.mpk   parameters
//!                       optim-<n>.mpk   optimizer states and what the quantized layers learned
//!                       scheduler-<n>.mpk
//!                       run.json        step, losses so far, configuration
//! ```
//!
//! A checkpoint is written beside its place and renamed into it, and only then are older ones removed. Records have
//! full precision, and the data order is a function of seed and step: a resumed run goes on as if it had never stopped.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail, ensure};
use burn::lr_scheduler::LrScheduler;
use burn::lr_scheduler::composed::ComposedLrScheduler;
use burn::module::Module;
use burn::optim::Optimizer;
use burn::record::{FileRecorder, FullPrecisionSettings, NamedMpkFileRecorder, Record, Recorder};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::train::checkpoint::{
    AsyncCheckpointer, CheckpointingAction, CheckpointingStrategy, FileCheckpointer,
};
use burn::train::metric::store::EventStoreClient;
use burn::train::{Interrupter, Learner, LearningCheckpointer, LearningComponentsMarker};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::args::{Config, Recipe};
use crate::model::Decoder;

/// What the learner is made of.
pub type Components<B, O> = LearningComponentsMarker<B, ComposedLrScheduler, Decoder<B>, O>;

type FullPrecision = NamedMpkFileRecorder<FullPrecisionSettings>;

const CONFIG: &str = "pretrain.json";
const STATE: &str = "run.json";

/// What a checkpoint holds besides Burn's records.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub struct State {
    /// Steps taken.
    pub step: usize,
    /// The loss of each.
    pub losses: Vec<f64>,
    /// The recipe.
    pub recipe: Recipe,
    /// The run's configuration.
    pub config: Config,
}

/// Writes the configuration of the runs whose checkpoints will be in this folder.
///
/// # Errors
///
/// The folder cannot be written.
pub fn save_config(folder: &Path, config: &Config) -> Result<()> {
    fs::create_dir_all(folder)
        .with_context(|| format!("cannot create the output folder {}", folder.display()))?;
    let partial = folder.join(format!("{CONFIG}.partial"));
    write_json(&partial, config)?;
    fs::rename(&partial, folder.join(CONFIG))
        .with_context(|| format!("cannot write to {}", folder.display()))
}

/// Reads that configuration back.
///
/// # Errors
///
/// No such file, or not ours.
pub fn load_config(folder: &Path) -> Result<Config> {
    ensure!(
        folder.join(CONFIG).is_file(),
        "no checkpoint in {}",
        folder.display()
    );
    read_json(&folder.join(CONFIG))
}

fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value)?;
    fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let text =
        fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_str(&text)
        .with_context(|| format!("{} is not of this version of pretrain", path.display()))
}

/// The checkpoints of one recipe.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    folder: PathBuf,
}

impl Checkpoints {
    /// Those of `recipe` in the output folder `out`.
    pub fn new(out: &Path, recipe: Recipe) -> Self {
        Self {
            folder: out.join(recipe.to_string()),
        }
    }

    /// Removes all of them.
    ///
    /// # Errors
    ///
    /// They cannot be removed.
    pub fn clear(&self) -> Result<()> {
        if self.folder.exists() {
            fs::remove_dir_all(&self.folder).with_context(|| {
                format!(
                    "cannot remove the old checkpoints in {}",
                    self.folder.display()
                )
            })?;
        }
        Ok(())
    }

    fn step_folder(&self, step: usize) -> PathBuf {
        self.folder.join(format!("step-{step}"))
    }

    /// The step of the newest checkpoint.
    pub fn newest(&self) -> Option<usize> {
        self.steps().into_iter().max()
    }

    fn steps(&self) -> Vec<usize> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        entries
            .filter_map(|it| it.file_name().to_str()?.strip_prefix("step-")?.parse().ok())
            .collect()
    }

    /// Writes the learner's model, optimizer and scheduler and the state, with Burn's own checkpointer.
    ///
    /// # Errors
    ///
    /// The folder cannot be written.
    pub fn save<B, O>(
        &self,
        learner: &Learner<Components<B, O>>,
        state: &State,
        events: &Arc<EventStoreClient>,
    ) -> Result<()>
    where
        B: AutodiffBackend,
        O: Optimizer<Decoder<B>, B> + 'static,
    {
        let step = state.step;
        let partial = self.folder.join("partial");
        let _ = fs::remove_dir_all(&partial);
        fs::create_dir_all(&partial)
            .with_context(|| format!("cannot create {}", partial.display()))?;

        // Its threads report errors through an interrupter; it writes everything before it is dropped.
        let failure = Interrupter::new();
        let mut writer = LearningCheckpointer::<Components<B, O>>::new(
            writer::<_, B>(&partial, "model", &failure),
            writer::<_, B>(&partial, "optim", &failure),
            writer::<_, B>(&partial, "scheduler", &failure),
            Box::new(Always),
        );
        writer.checkpoint(learner, step, events);
        drop(writer);
        if failure.should_stop() {
            bail!(
                "cannot write a checkpoint to {}: {}",
                self.folder.display(),
                failure.get_message().unwrap_or_default()
            );
        }
        write_json(&partial.join(STATE), state)?;

        let place = self.step_folder(step);
        if place.exists() {
            // The same step of the same run: the same bytes.
            return fs::remove_dir_all(&partial).context("cannot remove a partial checkpoint");
        }
        fs::rename(&partial, &place)
            .with_context(|| format!("cannot write the checkpoint {}", place.display()))?;
        for older in self.steps().into_iter().filter(|it| *it != step) {
            let _ = fs::remove_dir_all(self.step_folder(older));
        }
        Ok(())
    }

    /// The state of the checkpoint of a step.
    ///
    /// # Errors
    ///
    /// It cannot be read, or is of another recipe or shape.
    pub fn load_state(&self, step: usize, recipe: Recipe, config: &Config) -> Result<State> {
        let folder = self.step_folder(step);
        let state: State = read_json(&folder.join(STATE))?;
        ensure!(
            state.recipe == recipe,
            "the checkpoint in {} is of {}, not of {recipe}",
            folder.display(),
            state.recipe
        );
        ensure!(
            state.config.model == config.model && state.config.batch == config.batch,
            "the checkpoint in {} is of another shape than {}",
            folder.display(),
            config.preset
        );
        ensure!(
            state.config.fingerprint == config.fingerprint,
            "the text has changed since the checkpoint in {} was made",
            folder.display()
        );
        ensure!(
            state.step == step && state.losses.len() == step,
            "the checkpoint in {} is damaged",
            folder.display()
        );
        Ok(state)
    }

    /// Burn's records of the checkpoint of a step.
    ///
    /// # Errors
    ///
    /// They cannot be read, or hold other things.
    pub fn load<B, O>(
        &self,
        step: usize,
        model: Decoder<B>,
        optim: O,
        scheduler: ComposedLrScheduler,
        device: &B::Device,
    ) -> Result<(Decoder<B>, O, ComposedLrScheduler)>
    where
        B: AutodiffBackend,
        O: Optimizer<Decoder<B>, B>,
    {
        let folder = self.step_folder(step);
        let model = model.load_record(read::<_, B>(&folder, "model", step, device)?);
        let optim = optim.load_record(read::<_, B>(&folder, "optim", step, device)?);
        let scheduler =
            scheduler.load_record::<B>(read::<_, B>(&folder, "scheduler", step, device)?);
        Ok((model, optim, scheduler))
    }
}

struct Always;

impl CheckpointingStrategy for Always {
    fn checkpointing(
        &mut self,
        _epoch: usize,
        _events: &EventStoreClient,
    ) -> Vec<CheckpointingAction> {
        vec![CheckpointingAction::Save]
    }
}

fn writer<R: Record<B> + 'static, B: Backend>(
    folder: &Path,
    name: &str,
    failure: &Interrupter,
) -> AsyncCheckpointer<R, B> {
    let files = FileCheckpointer::new(FullPrecision::new(), folder, name);
    AsyncCheckpointer::new(files).with_interrupter(failure.clone())
}

fn read<R: Record<B>, B: Backend>(
    folder: &Path,
    name: &str,
    step: usize,
    device: &B::Device,
) -> Result<R> {
    let path = folder.join(format!("{name}-{step}"));
    FullPrecision::new()
        .load(path.clone(), device)
        .map_err(|error| {
            let extension = <FullPrecision as FileRecorder<B>>::file_extension();
            anyhow!("cannot read {}.{extension}: {error}", path.display())
        })
}
