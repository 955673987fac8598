//! Runs of `pretrain`, by recipe and optimizer.

use std::fmt::Write;

use anyhow::Result;
use serde_json::Value;

use super::{
    change, grouped, mebibytes,
    runs::{check_conditions, conditions, number, text},
};

/// The optimizer that the others are compared with, and the only one of files that name none.
pub(super) const BASELINE: &str = "adamw";

/// The optimizer of a run.
pub(super) fn of(run: &Value) -> &str {
    run.get("optimizer")
        .and_then(Value::as_str)
        .unwrap_or(BASELINE)
}

/// The optimizer of a run, and how it rounds its moments where that is not to nearest.
pub(super) fn label(run: &Value) -> String {
    match run.get("state_rounding").and_then(Value::as_str) {
        None | Some("nearest") => format!("`{}`", of(run)),
        Some(rounding) => format!("`{}`, {rounding}", of(run)),
    }
}

/// True if a recipe and optimizer has runs with several seeds.
pub(super) fn several_seeds(runs: &[Value]) -> bool {
    let like =
        |run: &Value, other: &Value| run["recipe"] == other["recipe"] && label(run) == label(other);
    let repeats = |run: &Value| {
        runs.iter()
            .any(|other| like(run, other) && run["seed"] != other["seed"])
    };
    runs.iter().any(repeats)
}

/// One line for each run, and one on what they have in common.
pub(super) fn table(runs: &[Value]) -> Result<String> {
    check_conditions(runs)?;
    // Steps are skipped in few runs: the column is there only where it says something.
    let skipped = |run: &Value| run.get("skipped_steps").and_then(Value::as_u64);
    let any_skipped = runs.iter().any(|run| skipped(run).unwrap_or_default() > 0);
    let mut out = String::from(
        "| recipe | optimizer | training loss | validation loss | against adamw | optimizer state | tokens/s |",
    );
    out.push_str(if any_skipped {
        " skipped steps |\n"
    } else {
        "\n"
    });
    out.push_str("| --- | --- | ---: | ---: | ---: | ---: | ---: |");
    out.push_str(if any_skipped { " ---: |\n" } else { "\n" });
    for run in runs {
        let (recipe, optimizer) = (text(run, "recipe")?, of(run));
        let loss = number(run, "val_loss")?;
        let baseline = runs
            .iter()
            .find(|other| other["recipe"] == recipe && of(other) == BASELINE)
            .filter(|_| optimizer != BASELINE);
        let against = match baseline {
            Some(baseline) => change(loss, number(baseline, "val_loss")?),
            None => String::from("-"),
        };
        let state = match run.get("optimizer_bytes") {
            Some(_) => mebibytes(number(run, "optimizer_bytes")?),
            None => String::from("-"),
        };
        write!(
            out,
            "| `{recipe}` | {} | {:.4} | {loss:.4} | {against} | {state} | {} |",
            label(run),
            number(run, "train_loss")?,
            grouped(number(run, "tokens_per_s")?),
        )?;
        match skipped(run).filter(|_| any_skipped) {
            Some(steps) => writeln!(out, " {steps} |")?,
            None if any_skipped => writeln!(out, " - |")?,
            None => writeln!(out)?,
        }
    }
    out.push_str(&conditions(&runs[0])?);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use crate::table::of;

    fn run(recipe: &str, optimizer: &str, val_loss: f64, skipped: u64) -> String {
        format!(
            r#"{{"recipe": "{recipe}", {optimizer} "preset": "tiny", "device": "cpu", "compute": "f32", "steps": 240,
            "batch": 8, "sequence": 128, "seed": 1, "parameters": 1049728, "tokens": 245760, "train_loss": 2.5,
            "val_loss": {val_loss}, "tokens_per_s": 1234.6, "skipped_steps": {skipped}}}"#
        )
    }

    const STOCHASTIC: &str = r#""state_rounding": "stochastic","#;
    const FP8: &str = r#""optimizer": "fp8-adamw", "optimizer_bytes": 2097152,"#;

    #[test]
    fn optimizers_are_compared_with_adamw_of_their_recipe() {
        let json = format!(
            "[{}, {}, {}]",
            run("mixed-precision", "", 2.0, 0),
            run("mixed-precision", FP8, 2.02, 0),
            run("fallback-int8", &format!("{FP8} {STOCHASTIC}"), 2.01, 0),
        );
        let table = of(&json).unwrap();
        let lines: Vec<&str> = table.lines().collect();
        assert!(lines[0].ends_with("| tokens/s |"));
        assert_eq!(
            lines[2..5],
            [
                "| `mixed-precision` | `adamw` | 2.5000 | 2.0000 | - | - | 1,235 |",
                "| `mixed-precision` | `fp8-adamw` | 2.5000 | 2.0200 | +1.00% | 2.0 MiB | 1,235 |",
                "| `fallback-int8` | `fp8-adamw`, stochastic | 2.5000 | 2.0100 | - | 2.0 MiB | 1,235 |",
            ]
        );
        assert!(lines[6].starts_with("`tiny` preset"));
    }

    #[test]
    fn skipped_steps_show() {
        let json = format!(
            "[{}, {}]",
            run("mixed-precision", "", 2.0, 0),
            run("mixed-precision", FP8, 2.0, 3)
        );
        let table = of(&json).unwrap();
        let lines: Vec<&str> = table.lines().collect();
        assert!(lines[0].ends_with("| skipped steps |") && lines[1].ends_with("| ---: | ---: |"));
        assert!(lines[2].ends_with("| 0 |") && lines[3].ends_with("| 3 |"));
    }
}
