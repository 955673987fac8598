//! The tables at the end.

use burn_quant_train::recipe::Name;

use crate::data;
use crate::report::Report;
use crate::statistics::{Mean, paired_differences, percent};

/// A line for each run.
pub fn runs(reports: &[Report]) -> String {
    let several = several_seeds(reports);
    let on_gpu = reports.iter().any(|it| it.taken_bytes.is_some());
    let mut lines = vec![columns([
        "recipe",
        "seed",
        "train loss",
        "val loss",
        "bits/byte",
        "tokens/s",
        "saved activations",
        "optimizer state",
        "device memory",
        "first step after",
        "fallback rate (min / mean / max of layers)",
    ])];
    lines.extend(reports.iter().map(|it| {
        columns([
            it.recipe.to_string(),
            it.seed.to_string(),
            format!("{:.4}", it.train_loss),
            format!("{:.4}", it.val_loss),
            format!("{:.4}", it.bits_per_byte),
            format!("{:.0}", it.tokens_per_s),
            data::bytes(it.activation_bytes as usize),
            data::bytes(it.optimizer_bytes as usize),
            it.taken_bytes
                .map_or_else(String::new, |bytes| data::bytes(bytes as usize)),
            it.first_step_s
                .map_or_else(String::new, |seconds| format!("{seconds:.1} s")),
            it.fallback_range(),
        ])
    }));
    for line in &mut lines {
        if !on_gpu {
            // On a CPU the process's memory is not a run's alone, and nothing is compiled.
            line.drain(8..10);
        }
        if !several {
            line.remove(1);
        }
    }
    aligned(&lines)
}

/// A line for each recipe: its mean loss over the seeds, and its mean difference to `first` with a 95% interval. Empty
/// where there is nothing to compare.
pub fn comparison(reports: &[Report], first: Name) -> String {
    let mut recipes: Vec<Name> = Vec::new();
    for report in reports {
        if !recipes.contains(&report.recipe) {
            recipes.push(report.recipe);
        }
    }
    let several = several_seeds(reports);
    if recipes.len() < 2 && !several {
        return String::new();
    }
    let losses = |recipe| -> Vec<(u64, f64)> {
        let of_recipe = reports.iter().filter(|it| it.recipe == recipe);
        of_recipe.map(|it| (it.seed, it.val_loss)).collect()
    };
    let baseline = losses(first);
    let mut lines = vec![columns([
        "recipe".into(),
        "seeds".into(),
        "mean val loss".into(),
        format!("against {first}"),
        "95% interval".into(),
    ])];
    for recipe in recipes {
        let losses = losses(recipe);
        let differences = match recipe == first {
            true => Vec::new(),
            false => paired_differences(&losses, &baseline),
        };
        let values: Vec<_> = losses.iter().map(|(_, loss)| *loss).collect();
        let difference = Mean::of(&differences);
        let none = || String::from("-");
        lines.push(columns([
            recipe.to_string(),
            losses.len().to_string(),
            Mean::of(&values).map_or_else(none, |it| format!("{:.4}", it.value)),
            difference.map_or_else(none, |it| percent(it.value)),
            difference
                .and_then(|it| it.interval_in_percent())
                .unwrap_or_else(none),
        ]));
    }
    let mut text = aligned(&lines);
    if !several {
        text += "One seed: no interval, and a difference that may be chance. --seeds N trains N of them.\n";
    }
    text
}

fn several_seeds(reports: &[Report]) -> bool {
    reports.windows(2).any(|pair| pair[0].seed != pair[1].seed)
}

pub(crate) fn columns<T: Into<String>, const N: usize>(cells: [T; N]) -> Vec<String> {
    cells.into_iter().map(Into::into).collect()
}

/// The first column to the left, the others to the right, and a rule under the first line.
pub(crate) fn aligned(lines: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = lines.iter().map(|line| line[column].chars().count());
        cells.max().unwrap_or(0)
    };
    let widths: Vec<_> = (0..lines[0].len()).map(width).collect();
    let line = |cells: &Vec<String>| {
        let cells = cells.iter().zip(&widths).enumerate();
        let cells: Vec<_> = cells
            .map(|(column, (cell, width))| match column {
                0 => format!("{cell:<width$}"),
                _ => format!("{cell:>width$}"),
            })
            .collect();
        cells.join("  ").trim_end().to_owned()
    };
    let rule = "-".repeat(widths.iter().sum::<usize>() + 2 * (widths.len() - 1));
    let mut out: Vec<_> = lines.iter().map(line).collect();
    out.insert(1, rule);
    out.push(String::new());
    out.join("\n")
}
