//! Runs of `pretrain` with one optimizer, by recipe.

use std::fmt::Write;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{change, grouped, mebibytes};

/// The recipe that the others are compared with.
const BASELINE: &str = "mixed-precision";

/// The fields that all runs of a file have in common, named in the line under the table.
const CONDITIONS: [&str; 11] = [
    "forked_from",
    "preset",
    "dropout",
    "device",
    "compute",
    "parameters",
    "steps",
    "batch",
    "sequence",
    "seed",
    "tokens",
];

/// One line for each recipe, and one on what the runs have in common.
pub(super) fn table(runs: &[Value]) -> Result<String> {
    check_conditions(runs)?;
    let mut out = String::from(
        "| recipe | training loss | validation loss | against mixed-precision | bits per byte | tokens/s \
         | saved activations | fallback rate: lowest / mean / highest |",
    );
    // On a CPU a run has no memory of its own, and compiles nothing.
    let on_gpu = runs.iter().any(|run| run["taken_bytes"].is_number());
    out.push_str(if on_gpu {
        " device memory | first step after |\n"
    } else {
        "\n"
    });
    out.push_str("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |");
    out.push_str(if on_gpu { " ---: | ---: |\n" } else { "\n" });
    let baseline = runs.iter().find(|run| run["recipe"] == BASELINE);
    let baseline = baseline.map(|run| number(run, "val_loss")).transpose()?;
    for run in runs {
        let recipe = text(run, "recipe")?;
        let loss = number(run, "val_loss")?;
        let against = match baseline {
            Some(baseline) if recipe != BASELINE => change(loss, baseline),
            _ => String::from("-"),
        };
        write!(
            out,
            "| `{recipe}` | {:.4} | {loss:.4} | {against} | {:.4} | {} | {} | {} |",
            number(run, "train_loss")?,
            number(run, "bits_per_byte")?,
            grouped(number(run, "tokens_per_s")?),
            mebibytes(number(run, "activation_bytes")?),
            fallback_rates(run)?,
        )?;
        if on_gpu {
            let taken = mebibytes(number(run, "taken_bytes")?);
            write!(out, " {taken} | {:.1} s |", number(run, "first_step_s")?)?;
        }
        out.push('\n');
    }
    out.push_str(&conditions(&runs[0])?);
    Ok(out)
}

/// The runs of a table differ in nothing but what the table is about.
pub(super) fn check_conditions(runs: &[Value]) -> Result<()> {
    check_conditions_but(runs, &[])
}

/// The same, with exceptions. A field that a run does not have is as one that is null.
pub(super) fn check_conditions_but(runs: &[Value], exceptions: &[&str]) -> Result<()> {
    for run in &runs[1..] {
        for field in CONDITIONS
            .into_iter()
            .filter(|field| !exceptions.contains(field))
        {
            ensure!(
                run[field] == runs[0][field],
                "the runs differ in `{field}`: they belong in files of their own"
            );
        }
    }
    Ok(())
}

/// Seed and validation loss of each run.
pub(super) fn losses_by_seed<'a>(runs: &[&'a Value]) -> Result<Vec<(&'a Value, f64)>> {
    let by_seed = |run: &&'a Value| Ok((&run["seed"], number(run, "val_loss")?));
    runs.iter().map(by_seed).collect()
}

/// The checkpoint that a run was forked from: `` `mixed-precision`, seed 1, step 500 ``.
pub(super) fn checkpoint(run: &Value) -> Result<Option<String>> {
    let Some(fork) = run.get("forked_from").filter(|it| !it.is_null()) else {
        return Ok(None);
    };
    let (recipe, seed) = (text(fork, "recipe")?, number(fork, "seed")?);
    let step = grouped(number(fork, "step")?);
    Ok(Some(format!("`{recipe}`, seed {seed}, step {step}")))
}

/// The line under a table of runs.
pub(super) fn conditions(run: &Value) -> Result<String> {
    let seed = number(run, "seed")?;
    let (conditions, forked) = (conditions_but_seed(run)?, forked_from(run)?);
    Ok(format!("{conditions}, seed {seed}{forked}.\n"))
}

/// Where all runs of a table were forked from, for the line under it.
pub(super) fn forked_from(run: &Value) -> Result<String> {
    let named = |checkpoint| format!(", forked from {checkpoint}");
    Ok(checkpoint(run)?.map_or_else(String::new, named))
}

/// The same without the seed, open at its end.
pub(super) fn conditions_but_seed(run: &Value) -> Result<String> {
    conditions_computing(run, &format!("in `{}`", text(run, "compute")?))
}

/// The same, of runs that compute as is said.
pub(super) fn conditions_computing(run: &Value, compute: &str) -> Result<String> {
    let dropout = run.get("dropout").and_then(Value::as_f64);
    let dropout = dropout.filter(|rate| *rate > 0.0);
    Ok(format!(
        "\n`{}` preset, {} parameters{}, on `{}`, computing {compute}: {} steps of {} sequences of {} bytes, {} tokens",
        text(run, "preset")?,
        grouped(number(run, "parameters")?),
        dropout.map_or_else(String::new, |rate| format!(", dropout {rate}")),
        text(run, "device")?,
        grouped(number(run, "steps")?),
        grouped(number(run, "batch")?),
        grouped(number(run, "sequence")?),
        grouped(number(run, "tokens")?),
    ))
}

/// Lowest, mean and highest rate of the layers, in percent.
fn fallback_rates(run: &Value) -> Result<String> {
    let Some(mean) = run
        .get("fallback_rate")
        .context("no `fallback_rate`")?
        .as_f64()
    else {
        return Ok(String::from("-"));
    };
    let layers = run.get("fallback_rates").and_then(Value::as_object);
    let layers = layers.context("no `fallback_rates`")?;
    let rates: Vec<f64> = layers.values().filter_map(Value::as_f64).collect();
    ensure!(
        rates.len() == layers.len() && !rates.is_empty(),
        "`fallback_rates` are not numbers"
    );
    let lowest = rates.iter().copied().fold(f64::INFINITY, f64::min);
    let highest = rates.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    Ok(format!(
        "{:.1} / {:.1} / {:.1}%",
        100.0 * lowest,
        100.0 * mean,
        100.0 * highest
    ))
}

pub(super) fn number(run: &Value, field: &str) -> Result<f64> {
    let value = run.get(field).and_then(Value::as_f64);
    value.with_context(|| format!("`{field}` is missing, or not a number"))
}

pub(super) fn text<'a>(run: &'a Value, field: &str) -> Result<&'a str> {
    let value = run.get(field).and_then(Value::as_str);
    value.with_context(|| format!("`{field}` is missing, or not a text"))
}

#[cfg(test)]
mod tests {
    use crate::table::of;

    fn run(recipe: &str, val_loss: f64, rates: &str) -> String {
        let mean = if rates == "{}" { "null" } else { "0.2" };
        format!(
            r#"{{"recipe": "{recipe}", "preset": "tiny", "device": "cpu", "compute": "f32", "steps": 240, "batch": 8,
            "sequence": 128, "seed": 1, "parameters": 1049728, "tokens": 245760, "train_loss": 2.5,
            "val_loss": {val_loss}, "bits_per_byte": 3.0, "tokens_per_s": 1234.6, "activation_bytes": 1572864,
            "fallback_rate": {mean}, "fallback_rates": {rates}}}"#
        )
    }

    #[test]
    fn a_line_for_each_run_and_one_for_what_they_share() {
        let json = format!(
            "[{}, {}]",
            run("fallback-int8", 2.02, r#"{"a": 0.1, "b": 0.3}"#),
            run("mixed-precision", 2.0, "{}")
        );
        let table = of(&json).unwrap();
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(
            lines[2],
            "| `fallback-int8` | 2.5000 | 2.0200 | +1.00% | 3.0000 | 1,235 | 1.5 MiB | 10.0 / 20.0 / 30.0% |"
        );
        assert_eq!(
            lines[3],
            "| `mixed-precision` | 2.5000 | 2.0000 | - | 3.0000 | 1,235 | 1.5 MiB | - |"
        );
        assert_eq!(
            lines[5],
            "`tiny` preset, 1,049,728 parameters, on `cpu`, computing in `f32`: 240 steps of 8 sequences of 128 bytes, \
             245,760 tokens, seed 1."
        );
        let dropping = of(&json.replace("\"tiny\",", "\"gpt2-tiny\", \"dropout\": 0.1,")).unwrap();
        assert!(
            dropping.contains("`gpt2-tiny` preset, 1,049,728 parameters, dropout 0.1, on `cpu`")
        );
    }

    #[test]
    fn runs_that_cannot_be_compared_are_errors() {
        let other = run("mixed-precision", 2.0, "{}").replace("\"seed\": 1", "\"seed\": 2");
        let json = format!("[{}, {other}]", run("block-int8", 2.0, "{}"));
        assert!(of(&json).unwrap_err().to_string().contains("`seed`"));
        assert!(of("[{\"recipe\": \"block-int8\"}]").is_err());
    }
}
