//! The errors of quantized tensors in a model that trains, on a checkpoint of `pretrain`.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result};
use benches::{
    errors::{ErrorResults, checkpoint::Checkpoint},
    results, table,
};
use clap::Parser;

/// Quantizes what the next step of a run reads and what flows back, by format, granularity, bits, groups and
/// transforms, and prints the errors beside the papers'.
#[derive(Parser, Debug)]
#[command(name = "errors", version)]
struct Args {
    /// The folder of a run of `pretrain`, with a checkpoint in it
    run: PathBuf,
    /// Write a result file for each sweep, PREFIX-<sweep>.json
    #[arg(long, value_name = "PREFIX")]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("errors: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run(args: &Args) -> Result<()> {
    for errors in Checkpoint::open(&args.run)?.errors()? {
        println!("{}", table::of(&serde_json::to_string(&errors)?)?);
        if let Some(prefix) = &args.json {
            results::write(&result_file(prefix, &errors)?, &errors)?;
        }
    }
    Ok(())
}

/// The result file of a sweep.
fn result_file(prefix: &Path, errors: &ErrorResults) -> Result<PathBuf> {
    let name = prefix.file_name().context("--json: no file name")?;
    let name = format!("{}-{}.json", name.to_string_lossy(), errors.rows.name());
    Ok(prefix.with_file_name(name))
}
