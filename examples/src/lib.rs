//! `pretrain`: a small Llama-style or GPT-2-style model on bytes of real text, once with each recipe, and a table that
//! compares them.
//!
//! - [`model`] is plain Burn and knows nothing of quantization; [`dispatch`] names the backends, [`train`] the
//!   optimizer: these two are all that it takes to train in low precision.
//! - [`data`] loads text; [`schedule`] is the learning rate; [`strategy`] counts steps inside Burn's training loop.
//! - `first_run` is what happens without flags; [`args`] is the command line; [`config`] says which runs it asks for;
//!   [`folder`] holds them, [`checkpoint`] one of them, in [`sealed`] files.
//! - [`metrics`], [`progress`] and [`memory`] say what happens, [`report`] and [`table`] what came of it, with the
//!   [`statistics`] of several seeds, [`health`] what became of each layer; result files have [`rows`] and thinned loss
//!   [`curve`]s.
//!
//! `quant-train`: [`advise`] says beforehand what a training step holds, and which recipe to take.

pub mod advise;
pub mod args;
pub mod checkpoint;
pub mod config;
pub mod curve;
pub mod data;
pub mod dispatch;
mod first_run;
pub mod folder;
pub mod health;
pub mod memory;
pub mod metrics;
pub mod model;
pub mod nan;
pub mod picture;
pub mod progress;
pub mod rates;
pub mod report;
pub mod rows;
#[cfg(any(test, feature = "cuda", feature = "vulkan"))]
mod runtime;
pub mod schedule;
pub mod sealed;
pub mod statistics;
pub mod strategy;
pub mod table;
pub mod train;

use std::cell::Cell;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use burn_quant_train::CompileAhead;

use args::Args;
use config::Config;
use data::Text;
use folder::{Origin, Start};
use metrics::History;
use report::{Report, ResultFile};
use strategy::Stop;
use train::{Ended, Job, Session};

/// Runs the program. `live_bytes` asks the process's allocator how many bytes are live.
///
/// Ends with 0, with 2 after one line on the standard error, or with 130 after Ctrl-C.
pub fn main(live_bytes: fn() -> u64) -> ExitCode {
    ended(
        "pretrain",
        Args::from_command_line().and_then(|args| pretrain(&args, live_bytes)),
    )
}

/// The exit code of a program; an error becomes one line on the standard error, and 2.
fn ended(program: &str, result: Result<ExitCode>) -> ExitCode {
    result.unwrap_or_else(|error| {
        let line = format!("{error:#}").replace('\n', " ");
        eprintln!("{program}: {line}");
        ExitCode::from(2)
    })
}

fn pretrain(args: &Args, live_bytes: fn() -> u64) -> Result<ExitCode> {
    let began = Instant::now();
    #[cfg(any(feature = "cuda", feature = "vulkan"))]
    runtime::set_up();
    let _compiling = CompileAhead::start();
    let stop = Stop::default();
    let on_ctrl_c = stop.clone();
    ctrlc::set_handler(move || {
        on_ctrl_c.ctrl_c.store(true, Ordering::Relaxed);
        on_ctrl_c.interrupter.stop(Some("Ctrl-C"));
    })
    .context("cannot listen for Ctrl-C")?;
    let program = Program {
        stop: &stop,
        live_bytes,
        began: Cell::new(Some(began)),
    };
    if first_run::is_asked_for(args) {
        return first_run::run(&program, args);
    }
    let done = program.train(args)?;
    if done.stopped {
        println!("go on with: pretrain --resume {}", done.out.display());
    }
    Ok(match done.interrupted {
        true => ExitCode::from(130),
        false => ExitCode::SUCCESS,
    })
}

/// The state that all sets of runs of a process share.
struct Program<'a> {
    stop: &'a Stop,
    /// Bytes live in the process's allocator.
    live_bytes: fn() -> u64,
    /// When the program began, until a set of runs has begun.
    began: Cell<Option<Instant>>,
}

impl Program<'_> {
    /// Trains the runs that a command line asks for, and prints and writes their tables.
    fn train(&self, args: &Args) -> Result<Done> {
        let (origin, mut config) = Origin::of(args)?;
        dispatch::check_built(&config)?;
        let json = args.json.as_deref().map(ResultFile::new).transpose()?;
        let text = Text::load(config.data.as_deref(), config.sequence)?;
        let fingerprint = text.fingerprint();
        if let Some(folder) = origin.folder() {
            ensure!(
                fingerprint == config.fingerprint,
                "the text has changed since the checkpoint in {} was made",
                folder.display()
            );
        }
        config.fingerprint = fingerprint;
        println!("data: {}", text.description);

        let out = args.out.as_deref().unwrap_or(origin.default_out());
        let starts = origin.prepare(&config, out)?;
        let labels = config.runs().into_iter().map(|run| config.label(run));
        let session = Session {
            args,
            out,
            text: &text,
            stop: self.stop,
            label_width: labels.map(|it| it.len()).max().unwrap_or(0),
            live_bytes: self.live_bytes,
            began: self.began.take().unwrap_or_else(Instant::now),
            before: Mutex::default(),
        };
        let done = train_all(&session, &config, starts)?;
        if !done.reports.is_empty() {
            print!("\n{}", table::runs(&done.reports));
            let comparison = table::comparison(&done.reports, config.recipes[0]);
            if !comparison.is_empty() {
                print!("\n{comparison}");
            }
        }
        if let Some(json) = json {
            json.write(&done.reports)?;
        }
        Ok(done)
    }
}

/// The outcome of all runs.
struct Done {
    /// The folder of the runs.
    out: PathBuf,
    /// The results of those that are complete, in their order.
    reports: Vec<Report>,
    /// True if any was stopped before its end.
    stopped: bool,
    /// True if somebody asked to stop, so that runs may not have begun.
    interrupted: bool,
}

fn train_all(session: &Session<'_>, config: &Config, starts: Vec<Start>) -> Result<Done> {
    let runs = config.runs();
    let mut done = Done {
        out: session.out.to_owned(),
        reports: Vec::new(),
        stopped: false,
        interrupted: false,
    };
    let mut began = session.began;
    for (number, (&run, start)) in (1..).zip(runs.iter().zip(starts)) {
        let label = config.label(run);
        let position = match runs.len() {
            1 | 2 => String::new(),
            count => format!("run {number} of {count}, "),
        };
        let from = match start {
            Start::Finished(finished) => {
                let loss = finished.report.val_loss;
                println!("{position}{label}: finished before, with validation loss {loss:.4}");
                session.remember(run, History::new(finished.losses));
                done.reports.push(finished.report);
                continue;
            }
            Start::Checkpoint(checkpoints, state) => Some((checkpoints, *state)),
            Start::Beginning => None,
        };
        let job = Job {
            run,
            config: config.of(run),
            checkpoints: folder::checkpoints(session.out, config, run),
            label,
            position,
            began,
            from,
        };
        match dispatch::run(session, &job)? {
            Ended::Complete(report) => done.reports.push(*report),
            Ended::Early { step, interrupted } => {
                let Job { label, config, .. } = job;
                println!("{label}: stopped after step {step} of {}", config.steps);
                done.stopped = true;
                done.interrupted = interrupted;
                if interrupted {
                    break;
                }
            }
        }
        began = Instant::now();
    }
    Ok(done)
}
