//! The checkpoints of a run: whole or not there, and read only if undamaged.
//!
//! ```text
//! RUN/step-<n>/model-<n>.mpk   parameters
//!              optim-<n>.mpk   optimizer states and what the quantized layers learned
//!              scheduler-<n>.mpk
//!              run.json        step, losses so far, configuration, and the checksums of the files above
//! RUN/report.json              the results, once the run is finished
//! ```
//!
//! A checkpoint is written beside its place and renamed into it, and only then are older ones removed. Records have
//! full precision, and the data order is a function of seed and step: a resumed run goes on as if it had never stopped.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail, ensure};
use burn::lr_scheduler::LrScheduler;
use burn::module::Module;
use burn::optim::Optimizer;
use burn::record::{FileRecorder, FullPrecisionSettings, NamedMpkFileRecorder, Record, Recorder};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::train::checkpoint::{
    AsyncCheckpointer, CheckpointingAction, CheckpointingStrategy, FileCheckpointer,
};
use burn::train::metric::store::EventStoreClient;
use burn::train::{Interrupter, Learner, LearningCheckpointer, LearningComponentsMarker};
use burn_quant_train::optim::{AdamWRecord, QuantRecord};
use burn_quant_train::recipe::Name;
use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::model::Decoder;
use crate::rates::RateReadings;
use crate::report::Report;
use crate::schedule::Schedule;
use crate::{nan, sealed};

/// The learner's parts.
pub type Components<B, O> = LearningComponentsMarker<B, Schedule, Decoder<B>, O>;

type FullPrecision = NamedMpkFileRecorder<FullPrecisionSettings>;

const STATE: &str = "run.json";
const REPORT: &str = "report.json";
const RECORDS: [&str; 3] = ["model", "optim", "scheduler"];

/// All that a checkpoint holds besides Burn's records.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub struct State {
    /// Steps taken.
    pub step: usize,
    /// The recipe.
    pub recipe: Name,
    /// The run's configuration.
    pub config: Config,
    /// SHA-256 of each record, by file name; filled in when they are written. Empty in the checkpoints of versions that
    /// wrote no checksums.
    #[serde(default)]
    pub sums: BTreeMap<String, String>,
    /// The readings of fallback rates.
    #[serde(default)]
    pub rates: RateReadings,
    /// The loss of each step.
    #[serde(deserialize_with = "nan::numbers")]
    pub losses: Vec<f64>,
}

/// A finished run.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub struct Finished {
    /// Its configuration.
    pub config: Config,
    /// Its results.
    pub report: Report,
    /// The loss of each step.
    #[serde(deserialize_with = "nan::numbers")]
    pub losses: Vec<f64>,
}

/// The checkpoints of one run, the newest of which counts.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    folder: PathBuf,
}

impl Checkpoints {
    /// Those in this folder.
    pub fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// Where they are.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Removes all of them, and the report.
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

    fn steps(&self) -> Vec<usize> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        entries
            .filter_map(|it| it.file_name().to_str()?.strip_prefix("step-")?.parse().ok())
            .collect()
    }

    /// The step of the newest checkpoint.
    pub fn newest(&self) -> Option<usize> {
        self.steps().into_iter().max()
    }

    /// The state of the newest checkpoint, none if there is no checkpoint.
    ///
    /// # Errors
    ///
    /// The state or a record is damaged or cannot be read.
    pub fn state(&self) -> Result<Option<State>> {
        let state = self.state_alone()?;
        if let Some(state) = &state {
            self.check(state)?;
        }
        Ok(state)
    }

    /// The same without a look at the records, which need not be there.
    ///
    /// # Errors
    ///
    /// The state is damaged or cannot be read.
    pub fn state_alone(&self) -> Result<Option<State>> {
        let Some(step) = self.newest() else {
            return Ok(None);
        };
        let state: State = sealed::read_json(&self.step_folder(step).join(STATE))?;
        ensure!(
            state.step == step && state.losses.len() == step,
            "the checkpoint in {} is damaged",
            self.step_folder(step).display()
        );
        Ok(Some(state))
    }

    /// Compares the records with their checksums.
    fn check(&self, state: &State) -> Result<()> {
        let folder = self.step_folder(state.step);
        state
            .sums
            .iter()
            .try_for_each(|(file, sum)| sealed::check(&folder.join(file), sum))
    }

    /// Writes the learner's model, optimizer and scheduler and the state, with Burn's own checkpointer.
    ///
    /// # Errors
    ///
    /// The folder cannot be written.
    pub fn save<B, O>(
        &self,
        learner: &Learner<Components<B, O>>,
        mut state: State,
        events: &Arc<EventStoreClient>,
    ) -> Result<()>
    where
        B: AutodiffBackend,
        O: Optimizer<Decoder<B>, B> + 'static,
    {
        let step = state.step;
        let partial = self.partial()?;

        // Its threads report errors through an interrupter; it writes everything before it is dropped.
        let failure = Interrupter::new();
        let [model, optim, scheduler] = RECORDS;
        let mut writer = LearningCheckpointer::<Components<B, O>>::new(
            writer::<_, B>(&partial, model, &failure),
            writer::<_, B>(&partial, optim, &failure),
            writer::<_, B>(&partial, scheduler, &failure),
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
        state.sums = sums(&partial)?;
        sealed::write_json(&partial.join(STATE), &state)?;

        if self.step_folder(step).exists() {
            // The same step of the same run: the same bytes.
            return fs::remove_dir_all(&partial).context("cannot remove a partial checkpoint");
        }
        self.put_in_place(&partial, step)?;
        for older in self.steps().into_iter().filter(|it| *it != step) {
            let _ = fs::remove_dir_all(self.step_folder(older));
        }
        Ok(())
    }

    /// An empty folder to write a checkpoint to.
    fn partial(&self) -> Result<PathBuf> {
        let partial = self.folder.join("partial");
        let _ = fs::remove_dir_all(&partial);
        create(&partial)?;
        Ok(partial)
    }

    fn put_in_place(&self, partial: &Path, step: usize) -> Result<()> {
        let place = self.step_folder(step);
        fs::rename(partial, &place)
            .with_context(|| format!("cannot write the checkpoint {}", place.display()))
    }

    /// Copies the newest checkpoint, if there is one, to an empty folder.
    ///
    /// # Errors
    ///
    /// It cannot be read, or not be written there.
    pub fn copy_to(&self, other: &Self) -> Result<()> {
        let Some(step) = self.newest() else {
            return Ok(());
        };
        let partial = other.partial()?;
        for file in files(&self.step_folder(step))? {
            let copy = partial.join(file.file_name().unwrap_or_default());
            fs::copy(&file, &copy)
                .with_context(|| format!("cannot copy {} to {}", file.display(), copy.display()))?;
        }
        other.put_in_place(&partial, step)
    }

    /// Burn's records of a checkpoint, for a run with this seed. With another seed than the checkpoint's, rounding
    /// draws other numbers from here on.
    ///
    /// # Errors
    ///
    /// They are damaged, cannot be read, or hold other things.
    pub fn load<B, O>(
        &self,
        state: &State,
        seed: u64,
        (model, optim, scheduler): (Decoder<B>, O, Schedule),
        device: &B::Device,
    ) -> Result<(Decoder<B>, O, Schedule)>
    where
        B: AutodiffBackend,
        O: Optimizer<Decoder<B>, B, Record = QuantRecord<AdamWRecord>>,
    {
        self.check(state)?;
        let path = |name| {
            self.step_folder(state.step)
                .join(format!("{name}-{}", state.step))
        };
        let [model_file, optim_file, scheduler_file] = RECORDS.map(path);
        let model = model.load_record(read::<_, B>(model_file, device)?);
        let mut record: O::Record = read::<_, B>(optim_file, device)?;
        if seed != state.config.seed {
            record.layers.seed = seed;
            record.optimizer.seed = Some(seed);
        }
        let optim = optim.load_record(record);
        let scheduler = scheduler.load_record::<B>(read::<_, B>(scheduler_file, device)?);
        Ok((model, optim, scheduler))
    }

    /// Writes the results of the run.
    ///
    /// # Errors
    ///
    /// The folder cannot be written.
    pub fn finish(&self, finished: &Finished) -> Result<()> {
        create(&self.folder)?;
        sealed::write_json(&self.folder.join(REPORT), finished)
    }

    /// The results of the run, none if it has not finished.
    ///
    /// # Errors
    ///
    /// They are damaged or cannot be read.
    pub fn finished(&self) -> Result<Option<Finished>> {
        let report = self.folder.join(REPORT);
        match report.exists() {
            true => sealed::read_json(&report).map(Some),
            false => Ok(None),
        }
    }
}

fn create(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))
}

/// The files of a folder.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).and_then(|entries| {
        let paths = entries.map(|entry| entry.map(|it| it.path()));
        paths.collect()
    });
    entries.with_context(|| format!("cannot read {}", folder.display()))
}

/// The checksums of the files of a folder, by name.
fn sums(folder: &Path) -> Result<BTreeMap<String, String>> {
    let named = |file: PathBuf| {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        Ok((name.into_owned(), sealed::sum(&file)?))
    };
    files(folder)?.into_iter().map(named).collect()
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

/// `path` has no extension: the recorder adds its own.
fn read<R: Record<B>, B: Backend>(path: PathBuf, device: &B::Device) -> Result<R> {
    FullPrecision::new()
        .load(path.clone(), device)
        .map_err(|error| {
            let extension = <FullPrecision as FileRecorder<B>>::file_extension();
            anyhow!("cannot read {}.{extension}: {error}", path.display())
        })
}
