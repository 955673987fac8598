//! `pretrain`: a small Llama-style model on bytes of real text, once with each recipe, and a table that compares them.
//!
//! - [`model`] is plain Burn and knows nothing of quantization; [`dispatch`] names the backends, [`train`] the
//!   optimizer: these two are all that it takes to train in low precision.
//! - [`data`] loads text; [`strategy`] counts steps inside Burn's supervised training; [`checkpoint`] makes runs
//!   resumable.
//! - [`metrics`], [`progress`], [`memory`] and [`report`] say what happened; [`args`] is the command line.

pub mod args;
pub mod checkpoint;
pub mod data;
pub mod dispatch;
pub mod memory;
pub mod metrics;
pub mod model;
pub mod progress;
pub mod report;
pub mod strategy;
pub mod train;

use std::path::Path;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result, ensure};

use args::{Args, Config};
use data::Text;
use strategy::Stop;
use train::{Ended, Session};

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
    let mut config = match &args.resume {
        Some(folder) => Config::resumed(checkpoint::load_config(folder)?, args, folder)?,
        None => Config::new(args)?,
    };
    dispatch::check_built(config.device, config.compute)?;
    if let Some(json) = &args.json {
        let folder = json.parent().filter(|it| !it.as_os_str().is_empty());
        ensure!(
            folder.is_none_or(Path::is_dir) && !json.is_dir(),
            "cannot write {}: no such folder, or a folder itself",
            json.display()
        );
    }
    let text = Text::load(config.data.as_deref(), config.sequence)?;
    let fingerprint = text.fingerprint();
    if let Some(folder) = &args.resume {
        ensure!(
            fingerprint == config.fingerprint,
            "the text has changed since the checkpoint in {} was made",
            folder.display()
        );
    }
    config.fingerprint = fingerprint;
    println!("data: {}", text.description);

    let out = args
        .out
        .as_deref()
        .or(args.resume.as_deref())
        .unwrap_or(Path::new("target/pretrain"));
    checkpoint::save_config(out, &config)?;

    let stop = Stop::default();
    let on_ctrl_c = stop.clone();
    ctrlc::set_handler(move || {
        on_ctrl_c.ctrl_c.store(true, Ordering::Relaxed);
        on_ctrl_c.interrupter.stop(Some("Ctrl-C"));
    })
    .context("cannot listen for Ctrl-C")?;

    let session = Session {
        args,
        config: &config,
        out,
        resume: args.resume.as_deref(),
        text: &text,
        stop: &stop,
        live_bytes,
        before: Mutex::default(),
    };
    let mut reports = Vec::new();
    for recipe in &config.recipes {
        match dispatch::run(&session, *recipe)? {
            Ended::Complete(report) => reports.push(*report),
            Ended::Early { step, interrupted } => {
                println!(
                    "{recipe}: stopped after step {step} of {}; go on with: pretrain --resume {}",
                    config.steps,
                    out.display()
                );
                if interrupted {
                    return Ok(ExitCode::from(130));
                }
            }
        }
    }
    if !reports.is_empty() {
        print!("\n{}", report::table(&reports));
    }
    if let Some(json) = &args.json {
        report::write_json(json, &reports)?;
    }
    Ok(ExitCode::SUCCESS)
}
