//! Runs of `pretrain` with several seeds: what of the differences between optimizers is chance.

use std::fmt::Write;

use anyhow::{Result, ensure};
use serde_json::Value;

use super::{
    optimizers::{BASELINE, label, of},
    runs::{check_conditions_but, conditions_but_seed, number, text},
};

/// Whether a recipe and optimizer has runs with several seeds.
pub(super) fn several(runs: &[Value]) -> bool {
    let like =
        |run: &Value, other: &Value| run["recipe"] == other["recipe"] && label(run) == label(other);
    let repeats = |run: &Value| {
        runs.iter()
            .any(|other| like(run, other) && run["seed"] != other["seed"])
    };
    runs.iter().any(repeats)
}

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
    check_conditions_but(runs, "seed")?;
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
        let mut of_kind: Vec<&Value> = runs
            .iter()
            .filter(|run| run["recipe"] == *recipe && label(run) == label_of_kind)
            .collect();
        of_kind.sort_by_key(|run| run["seed"].as_u64());
        let losses: Vec<f64> = of_kind
            .iter()
            .map(|run| number(run, "val_loss"))
            .collect::<Result<_>>()?;
        let mut differences = Vec::new();
        for (run, loss) in of_kind.iter().zip(&losses) {
            let baseline = runs.iter().find(|other| {
                of(other) == BASELINE
                    && other["recipe"] == *recipe
                    && other["seed"] == run["seed"]
                    && !std::ptr::eq(*other, *run)
            });
            if let Some(baseline) = baseline {
                differences.push(100.0 * (loss / number(baseline, "val_loss")? - 1.0));
            }
        }
        let twice = of_kind
            .windows(2)
            .any(|pair| pair[0]["seed"] == pair[1]["seed"]);
        ensure!(!twice, "two runs of {label_of_kind} have the same seed");
        let fold = |of: fn(f64, f64) -> f64| losses.iter().copied().reduce(of).unwrap_or(f64::NAN);
        let by_seed: Vec<String> = differences.iter().map(|it| format!("{it:+.2}")).collect();
        writeln!(
            out,
            "| `{}` | {label_of_kind} | {} | {:.4} | {:.4} to {:.4} | {} | {} |",
            text(of_kind[0], "recipe")?,
            named(&of_kind),
            mean(&losses),
            fold(f64::min),
            fold(f64::max),
            if by_seed.is_empty() {
                String::from("-")
            } else {
                format!("{}%", by_seed.join(", "))
            },
            mean_and_error(&differences),
        )?;
    }
    writeln!(out, "{}.", conditions_but_seed(&runs[0])?)?;
    Ok(out)
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// `+0.31% ± 0.45`: the mean, and its standard error from the scatter of the values.
fn mean_and_error(values: &[f64]) -> String {
    let count = values.len() as f64;
    match values {
        [] => String::from("-"),
        [value] => format!("{value:+.2}%"),
        _ => {
            let center = mean(values);
            let squares: f64 = values.iter().map(|value| (value - center).powi(2)).sum();
            let error = (squares / (count - 1.0) / count).sqrt();
            format!("{center:+.2}% ± {error:.2}")
        }
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
