//! Training losses of forks of one checkpoint, step by step.
//!
//! Forks with one seed read the same batches from the same weights on. Most of what a loss owes to its batch is in
//! both, so a mean over some hundred steps shows a difference of a few hundredths of a percent, where validation losses
//! of one checkpoint and another differ by a tenth.

use std::{fs, path::Path};

use anyhow::{Context, Result, ensure};
use examples::{
    checkpoint::{Checkpoints, State},
    config::{Config, Fork},
    nan,
    report::Report,
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
    /// The last step that all of them took.
    pub step: usize,
    /// Steps whose mean is one value of a difference.
    #[serde(default = "window")]
    pub window: usize,
    /// Each fork, the baseline first.
    pub paired: Vec<PairedRun>,
}

/// A fork beside the baseline.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PairedRun {
    /// Its recipe.
    pub recipe: String,
    /// The last step that it and the baseline took.
    pub step: usize,
    /// The difference over the steps that all runs took; none of the baseline itself.
    pub common: Option<Difference>,
    /// Over the last 200 steps that it and the baseline took.
    pub last: Option<Difference>,
    /// The validation loss of a run that ended, if it is a number.
    pub validation: Option<f64>,
}

/// By how much a loss is above another, as a part of it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    /// The mean; NaN of a run that diverged.
    #[serde(deserialize_with = "nan::number")]
    pub mean: f64,
    /// The bounds of its 95% interval, over means of so many steps as if they were independent.
    pub interval: Option<[f64; 2]>,
}

impl PairedLosses {
    /// Compares the runs in these folders with that in the first one, each a folder of checkpoints.
    ///
    /// # Errors
    ///
    /// A folder without a checkpoint, a damaged one, a run that is no fork, or one of another checkpoint, seed, text or
    /// setting than the first.
    pub fn of(folders: &[&Path]) -> Result<Self> {
        let checkpoints = folders.iter().map(|it| Checkpoints::new(it.to_path_buf()));
        let checkpoints: Vec<Checkpoints> = checkpoints.collect();
        let states = checkpoints.iter().map(|it| {
            let at = it.folder().display();
            it.state_alone()?
                .with_context(|| format!("{at} has no checkpoint"))
        });
        let runs: Vec<State> = states.collect::<Result<_>>()?;
        let baseline = runs.first().context("no run")?;
        let config = &baseline.config;
        let fork = config.fork.context("the first run is no fork")?;
        for (run, checkpoints) in runs.iter().zip(&checkpoints) {
            ensure!(
                but_recipe(&run.config) == but_recipe(config),
                "{} is of another checkpoint, seed, text or setting than the first run",
                checkpoints.folder().display()
            );
        }
        let common = runs.iter().map(|run| run.losses.len()).min().unwrap_or(0);
        let mut paired = Vec::new();
        for (index, (run, checkpoints)) in runs.iter().zip(&checkpoints).enumerate() {
            let end = run.losses.len().min(baseline.losses.len());
            let difference = |from: usize, to: usize| {
                let from = from.max(fork.step);
                let is_enough = index > 0 && from + WINDOW <= to;
                is_enough.then(|| Difference::of(&run.losses[from..to], &baseline.losses[from..to]))
            };
            paired.push(PairedRun {
                recipe: run.recipe.to_string(),
                step: end,
                common: difference(0, common),
                last: difference(end.saturating_sub(LAST), end),
                validation: checkpoints
                    .finished()?
                    .map(|it| it.report.val_loss)
                    .filter(|it| it.is_finite()),
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
            step: common,
            window: WINDOW,
            paired,
        })
    }

    /// The same of runs that ended, in these result files of `pretrain`: over the points of their curves, means of as many
    /// steps each, that lie behind the fork.
    ///
    /// # Errors
    ///
    /// A file that is none of results, a run that is no fork, or one of another checkpoint, seed or setting than the
    /// first.
    pub fn of_results(files: &[&Path]) -> Result<Self> {
        let mut runs: Vec<Report> = Vec::new();
        for file in files {
            let shown = file.display();
            let text = fs::read_to_string(file).with_context(|| format!("cannot read {shown}"))?;
            let of_file: Vec<Report> = serde_json::from_str(&text)
                .with_context(|| format!("{shown} has no results of pretrain"))?;
            runs.extend(of_file);
        }
        let baseline = runs.first().context("no run")?;
        let fork = baseline.forked_from.context("the first run is no fork")?;
        let (window, _) = *baseline.loss_curve.first().context("a run without steps")?;
        let of_windows = |run: &Report| -> Vec<f64> {
            let whole = |(step, _): &&(usize, f64)| step % window == 0;
            let behind = |(step, _): &&(usize, f64)| *step >= fork.step + window;
            let points = run.loss_curve.iter().filter(whole).filter(behind);
            points.map(|(_, loss)| *loss).collect()
        };
        let of_baseline = of_windows(baseline);
        let mut paired = Vec::new();
        for (index, run) in runs.iter().enumerate() {
            let setting = |run: &Report| {
                let shape = (run.steps, run.batch, run.sequence, run.seed);
                (run.forked_from, run.preset, run.device, run.compute, shape)
            };
            ensure!(
                setting(run) == setting(baseline),
                "{} is of another checkpoint, seed or setting than the first run",
                run.recipe
            );
            let losses = of_windows(run);
            let difference = |windows: usize| {
                let from = losses.len().saturating_sub(windows);
                let is_enough = index > 0 && from < losses.len();
                is_enough.then(|| Difference::of_means(&losses[from..], &of_baseline[from..]))
            };
            paired.push(PairedRun {
                recipe: run.recipe.to_string(),
                step: run.steps,
                common: difference(losses.len()),
                last: difference(LAST / window),
                validation: Some(run.val_loss).filter(|it| it.is_finite()),
            });
        }
        Ok(Self {
            baseline: baseline.recipe.to_string(),
            fork,
            tokens: baseline.batch * baseline.sequence,
            of: [
                baseline.preset.to_string(),
                baseline.device.to_string(),
                baseline.compute.to_string(),
            ],
            seed: baseline.seed,
            step: baseline.steps / window * window,
            window,
            paired,
        })
    }
}

fn window() -> usize {
    WINDOW
}

impl Difference {
    /// Of two runs over the same steps, at least [`WINDOW`] of them; what is left over at the start is not counted.
    fn of(losses: &[f64], baselines: &[f64]) -> Self {
        let sums = |losses: &[f64]| -> Vec<f64> {
            let windows = losses.rchunks_exact(WINDOW);
            windows.map(|window| window.iter().sum()).collect()
        };
        Self::of_means(&sums(losses), &sums(baselines))
    }

    /// Of the means, or the sums, of two runs over the same windows, of which there is one.
    fn of_means(losses: &[f64], baselines: &[f64]) -> Self {
        let windows = losses.iter().zip(baselines);
        let differences: Vec<f64> = windows.map(|(a, b)| a / b - 1.0).collect();
        let mean = Mean::of(&differences).expect("a window");
        Self {
            mean: mean.value,
            interval: mean
                .interval()
                .filter(|it| it.iter().all(|bound| bound.is_finite())),
        }
    }
}

/// A run but for its recipe, and for where its text lay, which has a fingerprint.
fn but_recipe(config: &Config) -> Config {
    Config {
        recipes: Vec::new(),
        data: None,
        ..config.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use examples::sealed;

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

    /// Writes the newest state of a fork with this recipe, which changes what `change` changes.
    fn write(folder: &Path, recipe: &str, losses: &[f64], change: impl Fn(&mut serde_json::Value)) {
        let mut state = serde_json::json!({
            "step": losses.len(), "recipe": recipe, "losses": losses,
            "config": {
                "recipes": [recipe], "optimizer": "adamw", "state_rounding": "nearest", "cold_start": 1,
                "contexts": "exact", "checkpointing": "none", "threshold": "settling", "device": "cpu",
                "compute": "f32", "loss_scaling": "off", "preset": "tiny", "steps": 200, "batch": 8,
                "sequence": 128, "lr": 1e-3, "seed": 2, "seeds": 1, "validation": 4, "data": folder,
                "model": {"family": "llama", "hidden": 128, "mlp_hidden": 384, "heads": 4, "layers": 4,
                          "max_sequence": 128, "dropout": 0.0},
                "fingerprint": "00", "fork": {"recipe": "mixed-precision", "seed": 1, "step": 50, "planned_steps": 200},
            },
        });
        change(&mut state);
        let step = folder.join(format!("step-{}", losses.len()));
        fs::create_dir_all(&step).expect("a folder");
        sealed::write_json(&step.join("run.json"), &state).expect("a file");
    }

    #[test]
    fn runs_are_compared_over_the_steps_that_all_took() {
        let root = tempfile::tempdir().expect("a folder");
        let [a, b, c] = ["a", "b", "c"].map(|name| root.path().join(name));
        let losses = |count: usize, factor: f64| -> Vec<f64> {
            let behind = |step| if step < 50 { 1.0 } else { factor };
            (0..count)
                .map(|step| behind(step) * (3.0 - step as f64 / 100.0))
                .collect()
        };
        write(&a, "mixed-precision", &losses(180, 1.0), |_| ());
        write(&b, "fallback-int8", &losses(200, 1.01), |_| ());
        write(&c, "block-int8", &losses(110, f64::NAN), |_| ());
        let paired = PairedLosses::of(&[&a, &b, &c]).expect("forks of one checkpoint");
        assert_eq!((paired.step, paired.paired[1].step), (110, 180));
        assert_eq!(paired.paired[0].common, None);
        let of_b = paired.paired[1].common.expect("steps");
        assert!((of_b.mean - 0.01).abs() < 1e-9);
        // A run that diverged is shown, and the file is read back.
        let text = serde_json::to_string(&paired).expect("JSON");
        let table = crate::table::of(&text).expect("a table");
        assert!(table.contains("| `block-int8` | 110 | NaN% |"), "{table}");

        for (change, value) in [("seed", 3), ("batch", 4), ("cold_start", 2)] {
            write(&b, "fallback-int8", &losses(200, 1.01), |state| {
                state["config"][change] = value.into();
            });
            let error = PairedLosses::of(&[&a, &b]).expect_err(change);
            assert!(error.to_string().contains("than the first run"), "{error}");
        }
        write(&a, "mixed-precision", &losses(180, 1.0), |state| {
            state["config"]["fork"] = serde_json::Value::Null;
        });
        let error = PairedLosses::of(&[&a]).expect_err("no fork");
        assert!(error.to_string().contains("is no fork"), "{error}");
    }

    /// Of the results of real forks, whose curves become one that is known.
    #[test]
    fn result_files_are_compared_by_the_points_of_their_curves() {
        let results =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../book/results/cpu-gpt2-forks.json");
        let text = fs::read_to_string(results).expect("a result file");
        let mut runs: Vec<serde_json::Value> = serde_json::from_str(&text).expect("runs");
        runs.retain(|run| run["seed"] == 1);
        let fork = runs[0]["forked_from"]["step"].as_u64().expect("a fork");
        for (run, factor) in runs.iter_mut().zip([1.0, 1.01, 0.98]) {
            // Up to the fork they are one; the last point has fewer steps.
            let points = (1..=20).map(|point| {
                let step = if point < 20 { point * 20 } else { 393 };
                let factor = if step <= fork { 1.0 } else { factor };
                serde_json::json!([step, factor * (4.0 - 0.1 * point as f64)])
            });
            run["loss_curve"] = points.collect();
        }
        runs.truncate(3);
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, runs: &[serde_json::Value]| {
            let file = folder.path().join(name);
            fs::write(&file, serde_json::to_string(runs).expect("JSON")).expect("a file");
            file
        };
        let [first, others] = [write("first", &runs[..1]), write("others", &runs[1..])];
        let paired = PairedLosses::of_results(&[&first, &others]).expect("forks of one checkpoint");
        assert_eq!((paired.window, paired.paired.len()), (20, 3));
        for (run, expected) in paired.paired[1..].iter().zip([0.01, -0.02]) {
            for difference in [run.common, run.last] {
                let mean = difference.expect("points behind the fork").mean;
                assert!((mean - expected).abs() < 1e-12, "{mean}");
            }
        }
        runs[1]["seed"] = 2.into();
        let other = write("other", &runs[1..2]);
        let error = PairedLosses::of_results(&[&first, &other]).expect_err("another seed");
        assert!(error.to_string().contains("than the first run"), "{error}");
    }

    #[test]
    fn a_folder_without_a_checkpoint_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let error = PairedLosses::of(&[folder.path()]).expect_err("nothing there");
        assert!(error.to_string().contains("has no checkpoint"), "{error}");
    }
}
