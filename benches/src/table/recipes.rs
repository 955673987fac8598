//! All recipes: what their losses differ by, how fast they train, and what they hold.

use std::fmt::Write;

use anyhow::{Result, ensure};
use burn_quant_train::recipe::NAMES;

use super::{conditions_of_peer, features, grouped, paired, ratio};
use crate::{
    recipe_results::RecipeResults,
    results::{Subject, TrainingSpeed},
};

/// One line for each recipe, in the order of [`NAMES`], those of PyTorch, and one on what all have in common.
pub(super) fn table(results: &RecipeResults) -> Result<String> {
    let models = results.models();
    let mut out = String::from("| |");
    for losses in &results.losses {
        write!(
            out,
            " loss against {}, seed {} |",
            losses.baseline, losses.fork.seed
        )?;
    }
    for model in &models {
        write!(
            out,
            " `{model}`: tokens/s, against PyTorch compiled | held, taken, MiB |"
        )?;
    }
    let columns = results.losses.len() + 2 * models.len();
    writeln!(out, "\n| --- |{}", " ---: |".repeat(columns))?;
    let recipes = NAMES.iter().copied().map(Subject::Recipe);
    for subject in recipes.chain([Subject::TorchEager, Subject::TorchCompiled]) {
        line(&mut out, results, &models, subject)?;
    }
    let forks = results.losses.iter().map(paired::conditions);
    let forks = forks.collect::<Vec<_>>().join(" ");
    let differences = results.losses.first().map(paired::differences);
    writeln!(out, "\n{forks} {}", differences.unwrap_or_default())?;
    notes(&mut out, results, &models)?;
    Ok(out)
}

/// Nothing, if the subject was not measured.
fn line(
    out: &mut String,
    results: &RecipeResults,
    models: &[&str],
    subject: Subject,
) -> Result<()> {
    let step = |model: &str, subject| -> Option<&TrainingSpeed> {
        let mut rows = results.recipes.iter();
        rows.find(|row| row.model == model && row.subject == subject)
    };
    if models.iter().all(|model| step(model, subject).is_none()) {
        return Ok(());
    }
    write!(out, "| {} |", subject.name())?;
    for losses in &results.losses {
        let mut runs = losses.paired.iter();
        let run =
            runs.find(|run| matches!(subject, Subject::Recipe(it) if run.recipe == it.as_str()));
        write!(out, " {} |", paired::cell(run.and_then(|run| run.common)))?;
    }
    for model in models {
        let Some(row) = step(model, subject) else {
            out.push_str(" - | - |");
            continue;
        };
        let rival = step(model, Subject::TorchCompiled).filter(|rival| *rival != row);
        let against = rival.map_or(String::new(), |rival| {
            format!(", {}", ratio(Some(row.tokens_per_s / rival.tokens_per_s)))
        });
        let [held, taken] = [row.activation_bytes, row.peak_bytes].map(whole_mebibytes);
        write!(
            out,
            " {}{against} | {held}, {taken} |",
            grouped(row.tokens_per_s)
        )?;
    }
    out.push('\n');
    Ok(())
}

/// `5,839`.
fn whole_mebibytes(bytes: Option<u64>) -> String {
    bytes.map_or(String::from("-"), |it| {
        grouped(it as f64 / (1u64 << 20) as f64)
    })
}

/// What the columns say, and how they were measured.
fn notes(out: &mut String, results: &RecipeResults, models: &[&str]) -> Result<()> {
    let shapes = models.iter().map(|model| {
        let mut rows = results.recipes.iter();
        let first = rows
            .find(|row| row.model == *model)
            .expect("a model is that of a step");
        let alike =
            |row: &&TrainingSpeed| (row.batch, row.sequence) == (first.batch, first.sequence);
        let others = results.recipes.iter().filter(|row| row.model == *model);
        ensure!(
            others.clone().filter(alike).count() == others.count(),
            "the batches of `{model}` differ"
        );
        Ok(format!(
            "`{model}`, {} parameters, {} x {}",
            grouped(first.parameters as f64),
            first.batch,
            grouped(first.sequence as f64)
        ))
    });
    let shapes: Vec<String> = shapes.collect::<Result<_>>()?;
    let run = &results.runs[0];
    let peers: String = results.peers.iter().map(conditions_of_peer).collect();
    let mut dates: Vec<&str> = results.runs.iter().map(|run| run.date.as_str()).collect();
    dates.sort_unstable();
    writeln!(
        out,
        "\nSteps: forward pass, backward pass and AdamW, following each other without waiting: {}. Held: what waits \
         between the passes. Taken: what the program had taken from the device. {}, driver {}, Burn {}, {} to \
         {}{peers}.",
        shapes.join("; "),
        run.device,
        run.driver,
        features(run),
        dates.first().unwrap_or(&"-"),
        dates.last().unwrap_or(&"-"),
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::{recipe_results::RecipeResults, table::of};

    /// A file of `qt-bench memory`.
    fn steps(model: &str, rows: &[(&str, f64)]) -> Value {
        let rows: Vec<Value> = rows
            .iter()
            .map(|(subject, tokens_per_s)| {
                json!({
                    "subject": subject, "model": model, "parameters": 1_000_000, "batch": 16, "sequence": 1024,
                    "step": {"median_ms": 1.0, "p10_ms": 1.0, "p90_ms": 1.0}, "tokens_per_s": tokens_per_s,
                    "contexts": "exact", "activation_bytes": 3 << 20, "peak_bytes": 4 << 20,
                })
            })
            .collect();
        json!({
            "bench": "pretrain", "peer": null, "rows": rows,
            "run": {
                "device": "NVIDIA H100", "driver": "580.0", "max_sm_mhz": 1980, "sm_mhz": 1980, "memory_mhz": 2619,
                "date": "2026-11-27T12:00:00Z", "command": "qt-bench memory", "features": ["fusion", "autotune"],
                "seed": 1,
            },
        })
    }

    /// A file of `report pair`.
    fn losses(seed: u64, mean: f64) -> Value {
        let run = |recipe: &str, common: Value| json!({"recipe": recipe, "step": 1221, "common": common, "last": null, "validation": null});
        json!({
            "baseline": "mixed-precision", "tokens": 16384, "of": ["small", "cuda", "bf16"], "seed": 21, "step": 1221,
            "fork": {"recipe": "mixed-precision", "seed": seed, "step": 500, "planned_steps": 1221},
            "paired": [
                run("mixed-precision", Value::Null),
                run("fallback-int8", json!({"mean": mean, "interval": [0.0, 0.002]})),
            ],
        })
    }

    fn gathered(files: &[Value]) -> anyhow::Result<RecipeResults> {
        let texts: Vec<String> = files.iter().map(Value::to_string).collect();
        RecipeResults::of(&texts)
    }

    #[test]
    fn a_recipe_has_its_losses_and_its_steps_in_one_line() {
        let results = gathered(&[
            losses(11, 0.001),
            steps(
                "small",
                &[("fallback-int8", 900_000.0), ("mixed-precision", 800_000.0)],
            ),
            steps(
                "medium",
                &[
                    ("mixed-precision", 300_000.0),
                    ("torch-compiled", 400_000.0),
                ],
            ),
            losses(12, -0.001),
        ])
        .unwrap();
        let table = of(&serde_json::to_string(&results).unwrap()).unwrap();
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(
            lines[2],
            "| `MixedPrecision` | - | - | 800,000 | 3, 4 | 300,000, 0.75x | 3, 4 |"
        );
        assert_eq!(
            lines[3],
            "| `FallbackInt8` | +0.10% (+0.00 to +0.20%) | -0.10% (+0.00 to +0.20%) | 900,000 | 3, 4 | - | - |"
        );
        assert_eq!(
            lines[4],
            "| PyTorch BF16, compiled | - | - | - | - | 400,000 | 3, 4 |"
        );
        let bars = |line: &&str| line.matches('|').count();
        assert!(lines[..5].iter().all(|line| bars(line) == bars(&lines[0])));
    }

    #[test]
    fn files_that_do_not_belong_together_are_errors() {
        let of_medium = steps("medium", &[("mixed-precision", 1.0)]);
        let mut of_another_device = of_medium.clone();
        of_another_device["run"]["device"] = json!("NVIDIA H200");
        let mut compressed = of_medium.clone();
        compressed["rows"][0]["contexts"] = json!("int8");
        let mut of_another_batch = steps("medium", &[("fallback-int8", 1.0)]);
        of_another_batch["rows"][0]["batch"] = json!(8);
        for (files, problem) in [
            (vec![losses(11, 0.0)], "are needed"),
            (vec![of_medium.clone()], "are needed"),
            (
                vec![losses(11, 0.0), of_medium.clone(), of_medium.clone()],
                "two steps of `medium`",
            ),
            (
                vec![losses(11, 0.0), of_medium.clone(), of_another_device],
                "other devices",
            ),
            (
                vec![losses(11, 0.0), compressed],
                "none of the recipe alone",
            ),
        ] {
            let error = gathered(&files).unwrap_err();
            assert!(error.to_string().contains(problem), "{error}");
        }
        let results = gathered(&[losses(11, 0.0), of_medium, of_another_batch]).unwrap();
        let error = of(&serde_json::to_string(&results).unwrap()).unwrap_err();
        assert!(error.to_string().contains("batches of `medium`"), "{error}");
    }
}
