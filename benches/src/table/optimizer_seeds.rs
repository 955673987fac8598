//! Runs of `pretrain` with several seeds: how much of the differences between optimizers is chance.

use std::fmt::Write;

use anyhow::{Result, ensure};
use examples::statistics::{Mean, paired_differences, percent};
use serde_json::Value;

use super::{
    optimizers::{BASELINE, label},
    runs::{check_conditions_but, conditions_but_seed, forked_from, losses_by_seed, text},
};

/// `11, 12`.
fn named(runs: &[&Value]) -> String {
    let seeds: Vec<String> = runs.iter().map(|run| run["seed"].to_string()).collect();
    seeds.join(", ")
}

/// One line for each recipe and optimizer, in the order of their first runs, and one on what all runs have in common.
///
/// Differences are those to the baseline's run of the same recipe and seed; where there are several, their mean and its
/// standard error.
pub(super) fn table(runs: &[Value]) -> Result<String> {
    check_conditions_but(runs, &["seed"])?;
    let mut out = String::from(
        "| recipe | optimizer | seeds | validation loss, mean | lowest to highest | against adamw, by seed | mean |\n\
         | --- | --- | --- | ---: | ---: | ---: | ---: |\n",
    );
    let mut kinds: Vec<(&Value, String)> = Vec::new();
    for run in runs {
        let kind = (&run["recipe"], label(run));
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    for (recipe, label_of_kind) in kinds {
        let of = |label_of_kind: &str| -> Vec<&Value> {
            let of_recipe = runs.iter().filter(|run| run["recipe"] == *recipe);
            let mut of_kind: Vec<_> = of_recipe
                .filter(|run| label(run) == label_of_kind)
                .collect();
            of_kind.sort_by_key(|run| run["seed"].as_u64());
            of_kind
        };
        let of_kind = of(&label_of_kind);
        let twice = of_kind
            .windows(2)
            .any(|pair| pair[0]["seed"] == pair[1]["seed"]);
        ensure!(!twice, "two runs of {label_of_kind} have the same seed");
        let by_seed = losses_by_seed(&of_kind)?;
        let losses: Vec<f64> = by_seed.iter().map(|(_, loss)| *loss).collect();
        let baseline = format!("`{BASELINE}`");
        let differences = match label_of_kind == baseline {
            true => Vec::new(),
            false => paired_differences(&by_seed, &losses_by_seed(&of(&baseline))?),
        };
        let fold = |of: fn(f64, f64) -> f64| losses.iter().copied().reduce(of).unwrap_or(f64::NAN);
        let by_seed: Vec<String> = differences
            .iter()
            .map(|it| format!("{:+.2}", 100.0 * it))
            .collect();
        writeln!(
            out,
            "| `{}` | {label_of_kind} | {} | {:.4} | {:.4} to {:.4} | {} | {} |",
            text(of_kind[0], "recipe")?,
            named(&of_kind),
            Mean::of(&losses).map_or(f64::NAN, |it| it.value),
            fold(f64::min),
            fold(f64::max),
            if by_seed.is_empty() {
                String::from("-")
            } else {
                format!("{}%", by_seed.join(", "))
            },
            Mean::of(&differences).map_or(String::from("-"), mean_and_error),
        )?;
    }
    let (conditions, forked) = (conditions_but_seed(&runs[0])?, forked_from(&runs[0])?);
    writeln!(out, "{conditions}{forked}.")?;
    Ok(out)
}

/// `+0.31% ± 0.45`: the mean, and its standard error from the scatter of the values.
fn mean_and_error(mean: Mean) -> String {
    match mean.standard_error {
        None => percent(mean.value),
        Some(error) => format!("{} ± {:.2}", percent(mean.value), 100.0 * error),
    }
}

#[cfg(test)]
mod tests {
    use crate::table::of;

    fn run(optimizer: &str, seed: u64, val_loss: f64) -> String {
        format!(
            r#"{{"recipe": "mixed-precision", "optimizer": "{optimizer}", "preset": "small", "device": "cuda",
            "compute": "bf16", "steps": 1250, "batch": 32, "sequence": 512, "seed": {seed}, "parameters": 30942720,
            "tokens": 20480000, "train_loss": 0.7, "val_loss": {val_loss}, "tokens_per_s": 245000.0}}"#
        )
    }

    #[test]
    fn differences_are_of_one_seed_and_have_an_error() {
        let json = format!(
            "[{}, {}, {}, {}, {}]",
            run("fp8-adamw", 12, 0.99),
            run("adamw", 11, 1.0),
            run("fp8-adamw", 11, 1.03),
            run("adamw", 12, 1.0),
            run("int8-adamw", 11, 0.98),
        );
        let table = of(&json).unwrap();
        let lines: Vec<&str> = table.lines().collect();
        // Deviations of 2 from the mean of 1: sqrt(8 / 1 / 2).
        assert_eq!(
            lines[2..5],
            [
                "| `mixed-precision` | `fp8-adamw` | 11, 12 | 1.0100 | 0.9900 to 1.0300 | +3.00, -1.00% | +1.00% ± 2.00 |",
                "| `mixed-precision` | `adamw` | 11, 12 | 1.0000 | 1.0000 to 1.0000 | - | - |",
                "| `mixed-precision` | `int8-adamw` | 11 | 0.9800 | 0.9800 to 0.9800 | -2.00% | -2.00% |",
            ]
        );
        assert!(lines[6].ends_with("20,480,000 tokens."));
    }

    #[test]
    fn a_seed_that_was_run_twice_is_refused() {
        let json = format!(
            "[{}, {}, {}]",
            run("adamw", 1, 1.0),
            run("adamw", 2, 1.0),
            run("adamw", 2, 1.1)
        );
        assert!(of(&json).unwrap_err().to_string().contains("same seed"));
    }
}
