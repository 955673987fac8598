//! Runs of `pretrain` with one optimizer, by recipe, over several seeds or from common checkpoints: which of the
//! differences between recipes, or compute dtypes, are chance. Where fallback rates were read, how many of them lie in
//! their range.

use std::fmt::Write;

use anyhow::{Result, ensure};
use examples::statistics::{Mean, paired_differences, percent};
use serde_json::Value;

use super::{
    grouped, mebibytes,
    optimizers::{BASELINE, label},
    rates,
    runs::{
        check_conditions_but, checkpoint, conditions_but_seed, conditions_computing,
        losses_by_seed, number, text,
    },
};

/// One line for each checkpoint and recipe, in the order of their first runs, and one on what all runs have in common.
///
/// Differences are those to the first recipe's run of the same checkpoint and seed; their interval is
/// [`Mean::interval`]'s.
pub(super) fn table(runs: &[Value]) -> Result<String> {
    check_conditions_but(runs, &["seed", "forked_from", "compute"])?;
    let computes_alike = runs.iter().all(|run| run["compute"] == runs[0]["compute"]);
    let name = |run: &Value| match computes_alike {
        true => name(run),
        false => Ok(format!("{}, {}", name(run)?, compute(run)?)),
    };
    let first = name(&runs[0])?;
    let forked = runs.iter().any(|run| !run["forked_from"].is_null());
    let rated = runs.iter().any(rates::were_read);
    let mut out = format!(
        "{}recipe | seeds | validation loss, mean | against {first} | 95% interval | tokens/s | saved activations |{}\n\
         {} --- | ---: | ---: | ---: | ---: | ---: | ---: |{}\n",
        if forked { "| checkpoint | " } else { "| " },
        if rated { rates::HEADER } else { "" },
        if forked { "| --- |" } else { "|" },
        if rated { rates::RULE } else { "" },
    );
    let mut kinds: Vec<(&Value, String)> = Vec::new();
    for run in runs {
        let kind = (&run["forked_from"], name(run)?);
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    for (fork, kind) in kinds {
        let of = |kind: &str| -> Vec<&Value> {
            let of_checkpoint = runs.iter().filter(|run| run["forked_from"] == *fork);
            of_checkpoint
                .filter(|run| name(run).is_ok_and(|name| name == kind))
                .collect()
        };
        let of_kind = of(&kind);
        let by_seed = losses_by_seed(&of_kind)?;
        for (index, (seed, _)) in by_seed.iter().enumerate() {
            ensure!(
                by_seed[..index].iter().all(|(other, _)| other != seed),
                "two runs of {kind} have the same seed, {seed}"
            );
        }
        let differences = match kind == first {
            true => Vec::new(),
            false => paired_differences(&by_seed, &losses_by_seed(&of(&first))?),
        };
        if forked {
            let name = checkpoint(of_kind[0])?;
            write!(out, "| {} ", name.unwrap_or(String::from("none")))?;
        }
        let difference = Mean::of(&differences);
        let none = || String::from("-");
        let losses: Vec<f64> = by_seed.iter().map(|(_, loss)| *loss).collect();
        let rates = match rated {
            true => rates::cells(&of_kind)?,
            false => String::new(),
        };
        writeln!(
            out,
            "| `{kind}` | {} | {:.4} | {} | {} | {} | {} |{rates}",
            of_kind.len(),
            Mean::of(&losses).map_or(f64::NAN, |it| it.value),
            difference.map_or_else(none, |it| percent(it.value)),
            difference
                .and_then(|it| it.interval_in_percent())
                .unwrap_or_else(none),
            grouped(mean(&of_kind, "tokens_per_s")?),
            mebibytes(mean(&of_kind, "activation_bytes")?),
        )?;
    }
    let optimizer = match label(&runs[0]) {
        label if label == format!("`{BASELINE}`") => String::new(),
        label => format!(", optimizer {label}"),
    };
    let conditions = match computes_alike {
        true => conditions_but_seed(&runs[0])?,
        false => conditions_computing(&runs[0], "as is said")?,
    };
    writeln!(out, "{conditions}{optimizer}, {}.", seeds(runs))?;
    Ok(out)
}

/// Names the recipe of a run, its contexts where they are not exact, what of the model ran again, whether attention
/// was composed, which products of activations were quantized, whether evaluation was, and how its thresholds followed the
/// rates where these were read.
fn name(run: &Value) -> Result<String> {
    let contexts = run["contexts"].as_str().filter(|it| *it != "exact");
    let threshold = run["threshold"].as_str().filter(|_| rates::were_read(run));
    let again = run["checkpointing"].as_str() == Some("layers");
    let again = again.then_some("layers run again");
    let composed = run["attention"].as_str() == Some("composed");
    let composed = composed.then_some("composed attention");
    let products = run["products"].as_str() == Some("attention");
    let products = products.then_some("attention's products");
    let evaluation = run["evaluation"].as_str() == Some("quantized");
    let evaluation = evaluation.then_some("evaluation too");
    let parts = [
        Some(text(run, "recipe")?),
        contexts,
        again,
        composed,
        products,
        evaluation,
        threshold,
    ];
    Ok(parts.into_iter().flatten().collect::<Vec<_>>().join(", "))
}

/// Names the compute dtype of a run, and whether one in FP16 scaled its losses.
fn compute(run: &Value) -> Result<&str> {
    let is_scaled = run["loss_scaling"].as_str() == Some("on");
    Ok(match text(run, "compute")? {
        "f16" if is_scaled => "f16, losses scaled",
        "f16" => "f16, losses not scaled",
        other => other,
    })
}

fn mean(runs: &[&Value], field: &str) -> Result<f64> {
    let values: Vec<f64> = runs
        .iter()
        .map(|run| number(run, field))
        .collect::<Result<_>>()?;
    Ok(Mean::of(&values).map_or(f64::NAN, |it| it.value))
}

/// `seeds 1, 2, 3`.
fn seeds(runs: &[Value]) -> String {
    let mut seeds: Vec<u64> = runs.iter().filter_map(|run| run["seed"].as_u64()).collect();
    seeds.sort_unstable();
    seeds.dedup();
    match seeds.as_slice() {
        [seed] => format!("seed {seed} alone, so that there is no interval"),
        seeds => {
            let seeds: Vec<String> = seeds.iter().map(u64::to_string).collect();
            format!("seeds {}", seeds.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::table::of;

    fn run(recipe: &str, seed: u64, val_loss: f64, fork: &str) -> String {
        format!(
            r#"{{"recipe": "{recipe}", "preset": "small", "device": "cuda", "compute": "bf16", "steps": 1250, "batch": 32,
            "sequence": 512, "seed": {seed}, "forked_from": {fork}, "parameters": 30942720, "tokens": 20480000,
            "val_loss": {val_loss}, "tokens_per_s": {seed}000.0, "activation_bytes": 1572864}}"#
        )
    }

    /// The 97.5% point of Student's t with one degree of freedom.
    const T_1: f64 = 12.706_204_7;

    #[test]
    fn recipes_are_compared_with_the_first_over_the_seeds() {
        let json = format!(
            "[{}, {}, {}, {}, {}]",
            run("mixed-precision", 1, 2.0, "null"),
            run("block-int8", 2, 1.01, "null"),
            run("block-int8", 1, 2.06, "null"),
            run("mixed-precision", 2, 1.0, "null"),
            run("fallback-int8", 2, 0.99, "null"),
        );
        let table = of(&json).unwrap();
        let lines: Vec<&str> = table.lines().collect();
        // +1% and +3%: their standard error is 1%.
        let interval = format!("{:+.2} to {:+.2}%", 2.0 - T_1, 2.0 + T_1);
        assert_eq!(
            lines[..5],
            [
                "| recipe | seeds | validation loss, mean | against mixed-precision | 95% interval | tokens/s \
                 | saved activations |",
                "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
                "| `mixed-precision` | 2 | 1.5000 | - | - | 1,500 | 1.5 MiB |",
                &format!("| `block-int8` | 2 | 1.5350 | +2.00% | {interval} | 1,500 | 1.5 MiB |"),
                "| `fallback-int8` | 1 | 0.9900 | -1.00% | - | 2,000 | 1.5 MiB |",
            ]
        );
        assert!(lines[6].ends_with("20,480,000 tokens, seeds 1, 2."));
    }

    #[test]
    fn compute_dtypes_are_named_where_they_differ() {
        let of_half = |scaling: &str, val_loss| {
            run("mixed-precision", 1, val_loss, "null").replace(
                r#""compute": "bf16""#,
                &format!(r#""compute": "f16", "loss_scaling": "{scaling}""#),
            )
        };
        let json = format!(
            "[{}, {}, {}, {}]",
            run("mixed-precision", 1, 2.0, "null"),
            run("mixed-precision", 2, 2.0, "null"),
            of_half("on", 2.02),
            of_half("off", 4.0),
        );
        let table = of(&json).unwrap();
        let lines: Vec<&str> = table.lines().collect();
        assert!(lines[0].contains("| against mixed-precision, bf16 |"));
        assert!(lines[2].starts_with("| `mixed-precision, bf16` | 2 | 2.0000 | - |"));
        assert!(
            lines[3].starts_with("| `mixed-precision, f16, losses scaled` | 1 | 2.0200 | +1.00% |")
        );
        assert!(lines[4].starts_with("| `mixed-precision, f16, losses not scaled` | 1 | 4.0000 |"));
        assert!(lines[6].contains("on `cuda`, computing as is said: 1,250 steps"));
    }

    #[test]
    fn rates_that_were_read_are_shown() {
        let rated = |seed, threshold: &str, rates: &str, shares: &str| {
            let run = run("fallback-int8", seed, 1.0, "null");
            let run = run.strip_suffix('}').unwrap();
            format!(
                r#"{run}, "threshold": "{threshold}", "rate_readings": 8, "fallback_rates": {rates},
                "rates_in_range": {shares}}}"#
            )
        };
        let json = format!(
            "[{}, {}, {}, {}]",
            run("mixed-precision", 1, 1.0, "null"),
            rated(
                1,
                "paper",
                r#"{"up": 0.0, "down": 0.3}"#,
                r#"{"up": 0.25, "down": 0.75}"#
            ),
            rated(
                2,
                "paper",
                r#"{"up": 0.9, "down": 0.9}"#,
                r#"{"up": 0.0, "down": 0.0}"#
            ),
            rated(
                1,
                "settling",
                r#"{"up": 0.1, "down": 0.2}"#,
                r#"{"up": 1.0, "down": 0.5}"#
            ),
        );
        let table = of(&json).unwrap();
        let lines: Vec<&str> = table.lines().collect();
        assert!(lines[0].ends_with(
            "| saved activations | layers in range at the end | steps in range, mean of layers |"
        ));
        assert!(lines[1].ends_with("| ---: | ---: |"));
        assert!(lines[2].ends_with("| 1.5 MiB | - | - |"), "{}", lines[2]);
        assert!(lines[3].starts_with("| `fallback-int8, paper` | 2 |"));
        assert!(lines[3].ends_with("| 1.5 MiB | 1 of 4 | 25% |"));
        assert!(lines[4].starts_with("| `fallback-int8, settling` | 1 |"));
        assert!(lines[4].ends_with("| 1.5 MiB | 2 of 2 | 75% |"));
    }

    #[test]
    fn forks_name_their_checkpoint() {
        let fork = |step: usize| {
            format!(
                r#"{{"recipe": "mixed-precision", "seed": 7, "step": {step}, "planned_steps": 1250}}"#
            )
        };
        let json = format!(
            "[{}, {}, {}, {}]",
            run("mixed-precision", 7, 1.0, &fork(500)),
            run("block-int8", 7, 1.001, &fork(500)),
            run("mixed-precision", 7, 0.9, &fork(1000)),
            run("block-int8", 7, 0.9, &fork(1000)),
        );
        let table = of(&json).unwrap();
        let lines: Vec<&str> = table.lines().collect();
        assert!(lines[0].starts_with("| checkpoint | recipe | seeds |"));
        assert!(lines[1].starts_with("| --- | --- | ---: |"));
        let columns = |line: &str| line.matches('|').count();
        assert!(
            lines[..6]
                .iter()
                .all(|line| columns(line) == columns(lines[0]))
        );
        assert_eq!(
            lines[3],
            "| `mixed-precision`, seed 7, step 500 | `block-int8` | 1 | 1.0010 | +0.10% | - | 7,000 | 1.5 MiB |"
        );
        assert!(lines[5].starts_with(
            "| `mixed-precision`, seed 7, step 1,000 | `block-int8` | 1 | 0.9000 | +0.00% |"
        ));
        assert!(lines[7].ends_with("seed 7 alone, so that there is no interval."));
    }

    #[test]
    fn runs_that_cannot_be_compared_are_errors() {
        let runs = |runs: &[String]| of(&format!("[{}]", runs.join(", ")));
        let first = run("mixed-precision", 1, 1.0, "null");
        let second = run("mixed-precision", 2, 1.0, "null");
        let twice = runs(&[first.clone(), second.clone(), second.clone()]).unwrap_err();
        assert!(twice.to_string().contains("same seed, 2"), "{twice}");
        let longer = second.replace("\"steps\": 1250", "\"steps\": 1300");
        let steps = runs(&[first, longer]).unwrap_err();
        assert!(steps.to_string().contains("`steps`"), "{steps}");
    }
}
