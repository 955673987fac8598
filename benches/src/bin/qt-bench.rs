//! The speed of burn-quant-train on an NVIDIA GPU, beside the device's limits and other libraries.

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result};
use benches::{optimizer, table};
use clap::{Parser, Subcommand};

/// Measures the speed of burn-quant-train on the first NVIDIA GPU. Each result is checked against its reference first.
#[derive(Parser, Debug)]
#[command(name = "qt-bench", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// One step of AdamW on one tensor, in each format of its states
    Optimizer {
        #[command(flatten)]
        settings: optimizer::Settings,
        /// Write the results to this file
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
    },
    /// Every benchmark
    All {
        #[command(flatten)]
        optimizer: optimizer::Settings,
        /// Write the results to files in this folder, each named after its benchmark
        #[arg(long, value_name = "FOLDER")]
        results: Option<PathBuf>,
    },
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("qt-bench: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Optimizer { settings, json } => show(&optimizer::run(&settings)?, json.as_deref()),
        Command::All { optimizer, results } => {
            if let Some(folder) = &results {
                fs::create_dir_all(folder)
                    .with_context(|| format!("cannot create {}", folder.display()))?;
            }
            let file = |name: &str| results.as_ref().map(|folder| folder.join(name));
            show(
                &optimizer::run(&optimizer)?,
                file("optimizer.json").as_deref(),
            )
        }
    }
}

/// Prints the table and writes the file.
fn show(results: &impl serde::Serialize, json: Option<&Path>) -> Result<()> {
    let text = serde_json::to_string_pretty(results)? + "\n";
    println!("\n{}", table::of(&text)?);
    match json {
        None => Ok(()),
        Some(path) => {
            fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
        }
    }
}
