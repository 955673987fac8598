//! Training losses of forks of one checkpoint, step by step.
//!
//! Forks with one seed read the same batches from the same weights on. Most of what a loss owes to its batch is in both,
//! so the difference of their training losses is known to a hundredth of a percent, where validation losses of one
//! checkpoint and another differ by a tenth.

use std::{fs, path::Path};

use anyhow::{Context, Result, ensure};
use examples::{
    checkpoint::{Finished, State},
    config::{Config, Fork},
    sealed,
    statistics::Mean,
};
use serde::{Deserialize, Serialize};

/// Steps whose mean is one value of a difference: neighbours are alike, since one leaves its weights to the next.
const WINDOW: usize = 20;
/// The last steps of which a difference is told by itself.
const LAST: usize = 200;

/// The result file of `report pair`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PairedLosses {
    /// The recipe that others are compared with.
    pub baseline: String,
    /// The checkpoint.
    pub fork: Fork,
    /// Tokens of a step.
    pub tokens: usize,
    /// The preset, the device, the compute dtype.
    pub of: [String; 3],
    /// The seed of the forks.
    pub seed: u64,
    /// Each fork, the baseline first.
    pub paired: Vec<PairedRun>,
}

/// A fork beside the baseline.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PairedRun {
    /// Its recipe.
    pub recipe: String,
    /// The last step that both took.
    pub step: usize,
    /// The difference over all steps behind the checkpoint; none of the baseline itself.
    pub all: Option<Difference>,
    /// Over the last 200 of them.
    pub last: Option<Difference>,
    /// The validation loss of a run that ended.
    pub validation: Option<f64>,
}

/// By how much a loss is above another, as a part of it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    /// The mean.
    pub mean: f64,
    /// The bounds of its 95% interval, over means of 20 steps.
    pub interval: Option<[f64; 2]>,
}

impl PairedLosses {
    /// Compares the runs in these folders with that in the first one, each a folder of checkpoints.
    ///
    /// # Errors
    ///
    /// A folder without a checkpoint, a damaged one, a run that is no fork, or one of another checkpoint, seed, text or
    /// batch than the first.
    pub fn of(folders: &[&Path]) -> Result<Self> {
        let runs: Vec<State> = folders.iter().map(|it| newest(it)).collect::<Result<_>>()?;
        let baseline = runs.first().context("no run")?;
        let config = &baseline.config;
        let fork = config.fork.context("the first run is no fork")?;
        let mut paired = Vec::new();
        for (run, folder) in runs.iter().zip(folders) {
            let at = folder.display();
            ensure!(
                data(&run.config) == data(config),
                "{at} is of another checkpoint, seed, text or batch than the first run"
            );
            let end = run.losses.len().min(baseline.losses.len());
            let difference = |from: usize| {
                let from = from.max(fork.step);
                let compared = from + WINDOW <= end && run.recipe != baseline.recipe;
                compared
                    .then(|| Difference::of(&run.losses[from..end], &baseline.losses[from..end]))
            };
            paired.push(PairedRun {
                recipe: run.recipe.to_string(),
                step: end,
                all: difference(0),
                last: difference(end.saturating_sub(LAST)),
                validation: validation(folder)?,
            });
        }
        Ok(Self {
            baseline: baseline.recipe.to_string(),
            fork,
            tokens: config.batch * config.sequence,
            of: [
                config.preset.to_string(),
                config.device.to_string(),
                config.compute.to_string(),
            ],
            seed: config.seed,
            paired,
        })
    }
}

impl Difference {
    /// Of two runs over the same steps, at least [`WINDOW`] of them; what is left over at the start is not counted.
    fn of(losses: &[f64], baselines: &[f64]) -> Self {
        let windows = losses
            .rchunks_exact(WINDOW)
            .zip(baselines.rchunks_exact(WINDOW));
        let sum = |window: &[f64]| window.iter().sum::<f64>();
        let differences = windows
            .map(|(a, b)| sum(a) / sum(b) - 1.0)
            .collect::<Vec<_>>();
        let mean = Mean::of(&differences).expect("a window");
        Self {
            mean: mean.value,
            interval: mean.interval(),
        }
    }
}

/// What decides which batches a fork reads, and from which weights on.
fn data(config: &Config) -> impl PartialEq {
    let Config {
        preset,
        batch,
        sequence,
        seed,
        fork,
        ..
    } = config;
    (
        *preset,
        *batch,
        *sequence,
        *seed,
        config.fingerprint.clone(),
        *fork,
    )
}

/// The newest checkpoint of a run, without its records.
fn newest(folder: &Path) -> Result<State> {
    let at = folder.display();
    let mut steps = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {at}"))? {
        let name = entry?.file_name();
        let step = name
            .to_str()
            .and_then(|it| it.strip_prefix("step-")?.parse::<usize>().ok());
        steps.extend(step);
    }
    let newest = steps.into_iter().max();
    let newest = newest.with_context(|| format!("{at} has no checkpoint"))?;
    sealed::read_json(&folder.join(format!("step-{newest}/run.json")))
}

/// The validation loss of a run that ended.
fn validation(folder: &Path) -> Result<Option<f64>> {
    let report = folder.join("report.json");
    match report.exists() {
        true => Ok(Some(
            sealed::read_json::<Finished>(&report)?.report.val_loss,
        )),
        false => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_common_part_of_both_losses_cancels() {
        let baselines: Vec<f64> = (0..205).map(|step| 2.0 + f64::from(step % 7)).collect();
        let losses: Vec<f64> = baselines.iter().map(|loss| 1.01 * loss).collect();
        let difference = Difference::of(&losses, &baselines);
        assert!((difference.mean - 0.01).abs() < 1e-12);
        let [low, high] = difference.interval.expect("ten windows");
        assert!(low <= 0.01 + 1e-12 && high - low < 1e-9);
    }

    #[test]
    fn what_is_left_over_is_at_the_start() {
        let baselines = vec![1.0; 2 * WINDOW + 1];
        let mut losses = vec![1.5; 2 * WINDOW + 1];
        losses[0] = f64::NAN;
        assert_eq!(Difference::of(&losses, &baselines).mean, 0.5);
    }

    #[test]
    fn a_folder_without_a_checkpoint_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let error = PairedLosses::of(&[folder.path()]).expect_err("nothing there");
        assert!(error.to_string().contains("has no checkpoint"), "{error}");
    }
}
