//! The error of compressed optimizer states, on those of a checkpoint of `pretrain`.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Result, anyhow, ensure};
use benches::{
    results,
    state_error::{StateErrors, Sums},
    table,
};
use burn::{
    backend::Flex,
    record::{FullPrecisionSettings, NamedMpkFileRecorder, Recorder},
};
use burn_quant_train::optim::{AdamWRecord, QuantRecord};
use clap::Parser;

/// Compresses the moments of a checkpoint in the formats of COAT's tables 1 and 9, and prints the errors beside COAT's.
#[derive(Parser, Debug)]
#[command(name = "states", version)]
struct Args {
    /// The optimizer's record, `optim-<step>.mpk` in a checkpoint of `pretrain --optimizer adamw`
    record: PathBuf,
    /// Added to the root of the second moment
    #[arg(long, default_value_t = 1e-8)]
    epsilon: f64,
    /// Tensors with fewer elements do not count: they keep FP32 moments
    #[arg(long, default_value_t = 4096, value_name = "N")]
    min_elements: usize,
    /// Write the errors to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("states: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run(args: &Args) -> Result<()> {
    ensure!(
        args.epsilon >= 0.0 && args.epsilon.is_finite(),
        "--epsilon must be a number that is not negative"
    );
    let errors = errors(&read(&args.record)?, args)?;
    print!("{}", table::of(&serde_json::to_string(&errors)?)?);
    match &args.json {
        None => Ok(()),
        Some(path) => results::write(path, &errors),
    }
}

fn read(path: &Path) -> Result<AdamWRecord> {
    ensure!(path.is_file(), "there is no file {}", path.display());
    let record: QuantRecord<AdamWRecord> = Recorder::<Flex>::load(
        &NamedMpkFileRecorder::<FullPrecisionSettings>::new(),
        path.to_owned(),
        &Default::default(),
    )
    .map_err(|error| {
        anyhow!(
            "{} is not an optimizer record of pretrain: {error}",
            path.display()
        )
    })?;
    Ok(record.optimizer)
}

fn errors(record: &AdamWRecord, args: &Args) -> Result<StateErrors> {
    let mut sums = Sums::new(args.epsilon);
    // In the order of the ids, so that sums round alike in every run.
    let mut parameters: Vec<_> = record.parameters.iter().collect();
    parameters.sort_by_key(|(id, _)| id.val());
    for (_, parameter) in parameters {
        if parameter.shape().iter().product::<usize>() >= args.min_elements {
            let [first, second] = parameter.values();
            sums.add(&first, &second);
        }
    }
    let errors = sums.finish(record.steps);
    ensure!(
        errors.elements > 0,
        "no parameter has {} elements or more",
        args.min_elements
    );
    Ok(errors)
}
