//! Training losses of forks, step by step.

use std::fmt::Write;

use anyhow::Result;
use examples::statistics::percent;

use super::grouped;
use crate::paired::{Difference, PairedLosses};

/// One line for each fork, and one on what all have in common.
pub(super) fn table(losses: &PairedLosses) -> Result<String> {
    let PairedLosses {
        baseline,
        fork,
        step,
        paired,
        ..
    } = losses;
    let mut out = format!(
        "| recipe | to step | training loss against {baseline}, steps {} to {} | last 200 steps | validation loss |\n\
         | --- | ---: | ---: | ---: | ---: |\n",
        grouped((fork.step + 1) as f64),
        grouped(*step as f64),
    );
    for run in paired {
        let validation = run
            .validation
            .map_or(String::from("-"), |it| format!("{it:.4}"));
        let (common, last) = (cell(run.common), cell(run.last));
        writeln!(
            out,
            "| `{}` | {} | {common} | {last} | {validation} |",
            run.recipe,
            grouped(run.step as f64),
        )?;
    }
    writeln!(
        out,
        "\n{} {} A validation loss is there where a run went to its end.",
        conditions(losses),
        differences(losses)
    )?;
    Ok(out)
}

/// What is compared.
pub(super) fn differences(losses: &PairedLosses) -> String {
    format!(
        "Differences of training losses are those of the steps that both runs took, their 95% intervals over means of {} \
         steps.",
        losses.window
    )
}

/// What the forks have in common.
pub(super) fn conditions(losses: &PairedLosses) -> String {
    let PairedLosses {
        fork,
        tokens,
        of: [preset, device, compute],
        seed,
        ..
    } = losses;
    format!(
        "Forks of `{}`, seed {}, from step {} of {} on, with seed {seed}: `{preset}` preset on `{device}`, computing \
         in `{compute}`, {} tokens a step.",
        fork.recipe,
        fork.seed,
        grouped(fork.step as f64),
        grouped(fork.planned_steps as f64),
        grouped(*tokens as f64),
    )
}

/// `+0.12% (+0.10 to +0.14%)`.
pub(super) fn cell(difference: Option<Difference>) -> String {
    let Some(Difference { mean, interval }) = difference else {
        return String::from("-");
    };
    let interval = interval.map_or(String::new(), |[low, high]| {
        format!(" ({:+.2} to {:+.2}%)", 100.0 * low, 100.0 * high)
    });
    format!("{}{interval}", percent(mean))
}

#[cfg(test)]
mod tests {
    use burn_quant_train::recipe::{MixedPrecision, Recipe};
    use examples::config::Fork;

    use super::*;
    use crate::paired::PairedRun;

    #[test]
    fn shows_what_was_compared() {
        let run = |recipe: &str, common, validation| PairedRun {
            recipe: recipe.into(),
            step: 1031,
            common,
            last: None,
            validation,
        };
        let difference = Difference {
            mean: 0.0012,
            interval: Some([0.001, 0.0014]),
        };
        let losses = PairedLosses {
            window: 20,
            baseline: "mixed-precision".into(),
            fork: Fork {
                recipe: <MixedPrecision as Recipe>::ROW.name(),
                seed: 11,
                step: 500,
                planned_steps: 1221,
            },
            tokens: 16_384,
            of: ["small", "cuda", "bf16"].map(String::from),
            seed: 21,
            step: 1031,
            paired: vec![
                run("mixed-precision", None, None),
                run("block-fp8", Some(difference), Some(0.70834)),
            ],
        };
        let table = table(&losses).expect("a table");
        assert!(
            table.contains("| `mixed-precision` | 1,031 | - | - | - |"),
            "{table}"
        );
        assert!(
            table.contains("| `block-fp8` | 1,031 | +0.12% (+0.10 to +0.14%) | - | 0.7083 |"),
            "{table}"
        );
        assert!(
            table.contains("seed 11, from step 500 of 1,221 on"),
            "{table}"
        );
    }
}
