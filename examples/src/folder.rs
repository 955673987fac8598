//! A folder of runs: what is in it, and what is left to do.
//!
//! ```text
//! DIR/pretrain.json      the configuration of all runs
//!     <recipe>/          the checkpoints of a run with the first seed
//!     <recipe>-seed-<n>/ those of a run with another seed
//!     forked-from/       the checkpoint that forked runs go on from
//! ```
//!
//! A folder needs no other: runs that are resumed to another folder take their checkpoints with them, and forked runs
//! that of their source, which may train on meanwhile.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::args::Args;
use crate::checkpoint::{Checkpoints, Finished, State};
use crate::config::{Config, Fork, Run};
use crate::sealed;

const CONFIG: &str = "pretrain.json";
const FORKED_FROM: &str = "forked-from";

/// Where runs come from.
pub enum Origin<'a> {
    /// From nowhere: they are new.
    New,
    /// From this folder, where they were stopped.
    Resumed(&'a Path),
    /// From a checkpoint of another run.
    Forked {
        /// The folder of its runs.
        folder: &'a Path,
        /// The checkpoint.
        source: Checkpoints,
    },
}

/// Where checkpoints of new runs go unless the command line says otherwise.
pub const DEFAULT: &str = "target/pretrain";

impl<'a> Origin<'a> {
    /// Reads the command line, and makes the configuration of the runs. Nothing is written.
    ///
    /// # Errors
    ///
    /// A folder without checkpoints, a damaged checkpoint, or flags that contradict it or each other.
    pub fn of(args: &'a Args) -> Result<(Self, Config)> {
        if let Some(folder) = &args.resume {
            let config = Config::resumed(load_config(folder)?, args, folder)?;
            return Ok((Self::Resumed(folder), config));
        }
        let Some(folder) = &args.fork else {
            return Ok((Self::New, Config::new(args)?));
        };
        let source = source(folder, args.from.as_deref())?;
        let state = source.state()?.context("a checkpoint that is there")?;
        let config = Config::forked(&state, args, folder)?;
        Ok((Self::Forked { folder, source }, config))
    }

    /// The folder that the runs come from.
    pub fn folder(&self) -> Option<&Path> {
        match self {
            Self::New => None,
            Self::Resumed(folder) | Self::Forked { folder, .. } => Some(folder),
        }
    }

    /// Where checkpoints go unless the command line says otherwise.
    pub fn default_out(&self) -> &Path {
        match self {
            Self::New => Path::new(DEFAULT),
            Self::Resumed(folder) => folder,
            Self::Forked { .. } => Path::new("target/pretrain-fork"),
        }
    }

    /// Makes `out` the folder of the runs, with all that they go on from, and says what each starts with. All that is
    /// read is checked before anything is written.
    ///
    /// # Errors
    ///
    /// A checkpoint is damaged or of other runs, or `out` cannot be written.
    pub fn prepare(&self, config: &Config, out: &Path) -> Result<Vec<Start>> {
        match self {
            Self::New => clear(out, config, None)?,
            Self::Resumed(folder) if resolved(folder) == resolved(out) => {
                let starts = starts(folder, config)?;
                save_config(out, config)?;
                return Ok(starts);
            }
            Self::Resumed(folder) => {
                starts(folder, config)?;
                clear(out, config, Some(folder))?;
                for name in names(config) {
                    let from = Checkpoints::new(folder.join(&name));
                    let to = Checkpoints::new(out.join(&name));
                    from.copy_to(&to)?;
                    from.finished()?.map_or(Ok(()), |it| to.finish(&it))?;
                }
            }
            Self::Forked { folder, source } => {
                ensure!(
                    !resolved(out).starts_with(resolved(folder)),
                    "--out {} is in the folder of --fork, which stays as it is: choose another",
                    out.display()
                );
                clear(out, config, Some(folder))?;
                source.copy_to(&Checkpoints::new(out.join(FORKED_FROM)))?;
            }
        }
        save_config(out, config)?;
        starts(out, config)
    }
}

/// The start of a run.
pub enum Start {
    /// Its beginning.
    Beginning,
    /// A checkpoint, its own or that of the run that it forks.
    Checkpoint(Checkpoints, Box<State>),
    /// Its end: nothing is left to do.
    Finished(Box<Finished>),
}

/// Where the checkpoints of a run are.
pub fn checkpoints(folder: &Path, config: &Config, run: Run) -> Checkpoints {
    Checkpoints::new(folder.join(config.name(run)))
}

/// The names of all folders of checkpoints that runs may have.
fn names(config: &Config) -> impl Iterator<Item = String> {
    let runs = config.runs().into_iter().map(|run| config.name(run));
    runs.chain([FORKED_FROM.into()])
}

/// The start of each run of a folder, in their order.
fn starts(folder: &Path, config: &Config) -> Result<Vec<Start>> {
    let mut source = None;
    let mut starts = Vec::new();
    for run in config.runs() {
        let start = match (own_start(folder, config, run)?, config.fork) {
            (Some(start), _) => start,
            (None, None) => Start::Beginning,
            (None, Some(fork)) => {
                if source.is_none() {
                    source = Some(forked_from(folder, fork)?);
                }
                let (checkpoints, state) = source.clone().context("the checkpoint of the fork")?;
                Start::Checkpoint(checkpoints, Box::new(state))
            }
        };
        starts.push(start);
    }
    Ok(starts)
}

/// The start of a run that has been here before.
fn own_start(folder: &Path, config: &Config, run: Run) -> Result<Option<Start>> {
    let own = checkpoints(folder, config, run);
    let run_config = config.of(run);
    if let Some(finished) = own.finished()? {
        run_config.check_same_run(&finished.config, own.folder())?;
        if finished.report.answers(&run_config) {
            return Ok(Some(Start::Finished(Box::new(finished))));
        }
    }
    let Some(state) = own.state()? else {
        return Ok(None);
    };
    ensure!(
        state.recipe == run.recipe,
        "the checkpoint in {} is of {}, not of {}",
        own.folder().display(),
        state.recipe,
        run.recipe
    );
    run_config.check_same_run(&state.config, own.folder())?;
    ensure!(
        state.step <= config.steps,
        "the checkpoint of {} is at step {}, past --steps {}",
        config.label(run),
        state.step,
        config.steps
    );
    Ok(Some(Start::Checkpoint(own, Box::new(state))))
}

/// The folder's copy of the checkpoint that its runs go on from.
fn forked_from(folder: &Path, fork: Fork) -> Result<(Checkpoints, State)> {
    let source = Checkpoints::new(folder.join(FORKED_FROM));
    let at = source.folder().display().to_string();
    let state = source.state()?;
    let state = state.with_context(|| format!("there is no checkpoint in {at} to go on from"))?;
    ensure!(
        (state.recipe, state.config.seed, state.step) == (fork.recipe, fork.seed, fork.step),
        "the checkpoint in {at} is not the one that the runs were forked from"
    );
    Ok((source, state))
}

/// The run of a folder that `from` names, or its only one.
fn source(folder: &Path, from: Option<&str>) -> Result<Checkpoints> {
    let at = folder.display();
    let config = load_config(folder)?;
    let runs = config.runs().into_iter().map(|run| config.name(run));
    let runs: Vec<_> = runs
        .map(|name| (Checkpoints::new(folder.join(&name)), name))
        .filter(|(checkpoints, _)| checkpoints.newest().is_some())
        .collect();
    ensure!(!runs.is_empty(), "no checkpoint in {at}");
    let names: Vec<_> = runs.iter().map(|(_, name)| name.as_str()).collect();
    let names = names.join(", ");
    let chosen = match from {
        Some(from) => {
            let mut runs = runs.into_iter();
            let run = runs.find(|(_, name)| name == from);
            run.with_context(|| format!("no run {from} in {at}: --from can be {names}"))?
        }
        None => {
            ensure!(
                runs.len() == 1,
                "several runs in {at}: say with --from which to fork, of {names}"
            );
            runs.into_iter().next().context("one run")?
        }
    };
    Ok(chosen.0)
}

fn load_config(folder: &Path) -> Result<Config> {
    ensure!(
        folder.join(CONFIG).is_file(),
        "no checkpoint in {}: there is no {CONFIG}",
        folder.display()
    );
    sealed::read_json(&folder.join(CONFIG))
}

fn create(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder)
        .with_context(|| format!("cannot create the output folder {}", folder.display()))
}

fn save_config(folder: &Path, config: &Config) -> Result<()> {
    create(folder)?;
    sealed::write_json(&folder.join(CONFIG), config)
}

/// Makes the folder, and removes what other runs left in it where these go, unless `source` lies there.
fn clear(out: &Path, config: &Config, source: Option<&Path>) -> Result<()> {
    let folders: Vec<_> = names(config).map(|name| out.join(name)).collect();
    for folder in &folders {
        ensure!(
            source.is_none_or(|it| !resolved(it).starts_with(resolved(folder))),
            "--out {} would replace {}: choose another",
            out.display(),
            folder.display()
        );
    }
    create(out)?;
    // First: a folder without it has no runs, however much of them is left.
    let config = out.join(CONFIG);
    if config.exists() {
        fs::remove_file(&config).with_context(|| format!("cannot remove {}", config.display()))?;
    }
    folders
        .into_iter()
        .try_for_each(|folder| Checkpoints::new(folder).clear())
}

/// The path without links, as far as it exists.
fn resolved(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    path.canonicalize().unwrap_or_else(|_| {
        let parts = (path.parent(), path.file_name());
        match parts {
            (Some(parent), Some(name)) => resolved(parent).join(name),
            _ => path.clone(),
        }
    })
}
