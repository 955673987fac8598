//! `pretrain`: a small Llama-style model on bytes of real text, once with each recipe, and a table that compares them.
//!
//! - [`model`] is plain Burn and knows nothing of quantization; [`dispatch`] names the backends, [`train`] the
//!   optimizer: these two are all that it takes to train in low precision.
//! - [`data`] loads text; [`schedule`] is the learning rate; [`strategy`] counts steps inside Burn's training loop.
//! - [`args`] is the command line; [`config`] says which runs it asks for; [`folder`] holds them, [`checkpoint`] one of
//!   them, in [`sealed`] files.
//! - [`metrics`], [`progress`] and [`memory`] say what happens, [`report`] and [`table`] what came of it, with the
//!   [`statistics`] of several seeds; result files have [`rows`] and thinned loss [`curve`]s.
//!
//! `quant-train`: [`advise`] says beforehand what a training step holds, and which recipe to take.

pub mod advise;
pub mod args;
pub mod checkpoint;
pub mod config;
pub mod curve;
pub mod data;
pub mod dispatch;
pub mod folder;
pub mod memory;
pub mod metrics;
pub mod model;
mod nan;
pub mod progress;
pub mod report;
pub mod rows;
pub mod schedule;
pub mod sealed;
pub mod statistics;
pub mod strategy;
pub mod table;
pub mod train;

use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result, ensure};

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
    match Args::from_command_line().and_then(|args| pretrain(&args, live_bytes)) {
        Ok(code) => code,
        Err(error) => {
            let line = format!("{error:#}").replace('\n', " ");
            eprintln!("pretrain: {line}");
            ExitCode::from(2)
        }
    }
}

fn pretrain(args: &Args, live_bytes: fn() -> u64) -> Result<ExitCode> {
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
    let stop = Stop::default();
    let on_ctrl_c = stop.clone();
    ctrlc::set_handler(move || {
        on_ctrl_c.ctrl_c.store(true, Ordering::Relaxed);
        on_ctrl_c.interrupter.stop(Some("Ctrl-C"));
    })
    .context("cannot listen for Ctrl-C")?;

    let labels = config.runs().into_iter().map(|run| config.label(run));
    let session = Session {
        args,
        out,
        text: &text,
        stop: &stop,
        label_width: labels.map(|it| it.len()).max().unwrap_or(0),
        live_bytes,
        before: Mutex::default(),
    };
    let Done {
        reports,
        stopped,
        interrupted,
    } = train_all(&session, &config, starts)?;
    if !reports.is_empty() {
        print!("\n{}", table::runs(&reports));
        let comparison = table::comparison(&reports, config.recipes[0]);
        if !comparison.is_empty() {
            print!("\n{comparison}");
        }
    }
    if stopped {
        println!("go on with: pretrain --resume {}", out.display());
    }
    if let Some(json) = json {
        json.write(&reports)?;
    }
    Ok(match interrupted {
        true => ExitCode::from(130),
        false => ExitCode::SUCCESS,
    })
}

/// The outcome of all runs.
struct Done {
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
        reports: Vec::new(),
        stopped: false,
        interrupted: false,
    };
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
    }
    Ok(done)
}
