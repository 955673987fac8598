//! The figures of the advice beside those that the H200 measured, in the book's result files.

use std::collections::BTreeSet;

use burn_quant_train::recipe::Name;
use clap::ValueEnum;
use examples::advise::activations::{AttentionForm, Step};
use examples::advise::device::Device;
use examples::advise::memory::Memory;
use examples::advise::shapes::Shapes;
use examples::args::{Checkpointing, Compute, Contexts, Preset};
use examples::report::Report;

/// Runs that measured moments.
const RUNS: [&str; 3] = [
    "h200-small-seeds.json",
    "h200-small-baselines.json",
    "h200-medium-states.json",
];

#[test]
fn moments_are_those_that_the_h200_measured() {
    let mut seen = Vec::new();
    for file in RUNS {
        let path = format!("{}/../book/results/{file}", env!("CARGO_MANIFEST_DIR"));
        let reports: Vec<Report> =
            serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        for report in reports {
            let key = (report.preset, report.optimizer);
            if seen.contains(&key) {
                continue;
            }
            seen.push(key);
            compare(file, &report);
        }
    }
    assert!(seen.len() >= 3, "{seen:?}");
}

fn compare(file: &str, report: &Report) {
    let model = Shapes::from(&report.preset.model(report.sequence));
    assert_eq!(model.parameters(), report.parameters);
    let config = report.optimizer.config();
    let moments: usize = model
        .elements()
        .into_iter()
        .map(|it| config.state_bytes(it))
        .sum();
    let what = format!("{file}, {}: moments", report.preset);
    assert_close(&what, moments, report.optimizer_bytes, 1.0);
}

/// Within so many percent.
fn assert_close(what: &str, computed: usize, measured: u64, within: f64) {
    let off = 100.0 * (computed as f64 / measured as f64 - 1.0);
    println!("{what} {computed} of {measured} ({off:+.2}%)");
    assert!(off.abs() < within, "{what} {computed} of {measured}");
}

/// Steps of three models by every recipe, whose activations wait as they are, and of one whose layers run again.
#[test]
fn activations_are_those_that_gpus_measured() {
    let as_they_are = compare_activations(
        "h100-recipes",
        "recipes",
        Contexts::Exact,
        Checkpointing::None,
    );
    let recipes: BTreeSet<_> = as_they_are.iter().map(|(_, recipe)| recipe).collect();
    let models: BTreeSet<_> = as_they_are.iter().map(|(model, _)| model).collect();
    assert!(recipes.len() >= 19 && models.len() >= 3, "{as_they_are:?}");
    let with_dropout = compare_activations(
        "h200-gpt2-dropout",
        "rows",
        Contexts::Exact,
        Checkpointing::None,
    );
    assert_eq!(with_dropout.len(), 2, "{with_dropout:?}");
    let layers = compare_activations(
        "h100-pretrain-layers",
        "rows",
        Contexts::Exact,
        Checkpointing::Layers,
    );
    assert!(layers.len() >= 2, "{layers:?}");
}

/// The models and recipes of the file's steps of which so much runs again.
fn compare_activations(
    file: &str,
    rows: &str,
    contexts: Contexts,
    checkpointing: Checkpointing,
) -> Vec<(String, String)> {
    let path = format!("{}/../book/results/{file}.json", env!("CARGO_MANIFEST_DIR"));
    let results: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let mut seen = Vec::new();
    for row in results[rows].as_array().unwrap() {
        let text = |field: &str| row[field].as_str().unwrap_or_default();
        let Ok(recipe) = text("subject").parse::<Name>() else {
            continue;
        };
        let is_asked = text("contexts") == contexts.to_string()
            && text("checkpointing") == checkpointing.to_string();
        if !is_asked {
            continue;
        }
        let size = |field: &str| row[field].as_u64().unwrap() as usize;
        let [batch, sequence] = ["batch", "sequence"].map(size);
        let preset = Preset::from_str(text("model"), false).expect("a preset");
        let model = Shapes::from(&preset.model(sequence));
        assert_eq!(model.parameters(), size("parameters"));
        let step = Step {
            model: &model,
            batch,
            sequence,
            compute: Compute::Bf16,
            attention: AttentionForm::Flash,
            keeps_casts: false,
            row: &recipe.row(),
            context: contexts.context().or(recipe.row().context),
            checkpointing,
        };
        let what = format!("{file}, {preset}, {recipe}, run again: {checkpointing}: saved");
        let is_int4 = recipe.to_string().ends_with("-int4");
        let within = match (checkpointing, preset) {
            // Where the difference lies is not known.
            (Checkpointing::None, Preset::Large) if is_int4 => 0.6,
            (Checkpointing::None, _) if contexts != Contexts::Exact => 0.02,
            (Checkpointing::None, _) => 0.01,
            // Measured when the cast of the head's weight waited.
            (Checkpointing::Layers, _) => 0.1,
        };
        assert_close(&what, step.saved(), size("activation_bytes") as u64, within);
        seen.push((preset.to_string(), recipe.to_string()));
    }
    seen
}

/// Those of steps whose layers make copies of X again.
#[test]
fn compressed_activations_are_those_that_gpus_measured() {
    for contexts in [Contexts::Int8ExactAttention, Contexts::Int8KeptOutput] {
        let file = "h200-rematerialized-before";
        let found = compare_activations(file, "rows", contexts, Checkpointing::None);
        assert_eq!(found.len(), 1, "{found:?}");
    }
}

/// Runs of `pretrain`: three presets by four recipes, and some with compressed contexts, or with layers that run again.
#[test]
fn peaks_are_those_that_a_gpu_measured() {
    let path = format!(
        "{}/../book/results/h100-peaks.json",
        env!("CARGO_MANIFEST_DIR")
    );
    let reports: Vec<Report> =
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    for report in &reports {
        // Measured when quantized layers kept copies of what they make again now.
        let kept_copies =
            report.contexts != Contexts::Exact && report.recipe.row().linear.is_some();
        // When masks of dropout waited, and Burn composed it.
        let kept_masks = report.preset == Preset::Gpt2Medium;
        if kept_copies || kept_masks {
            continue;
        }
        let computed = Memory::of_run(report, Device::H100).peak;
        let (preset, recipe, contexts) = (report.preset, report.recipe, report.contexts);
        let what = format!("{preset}, {recipe}, {contexts}: peak");
        assert_close(&what, computed as usize, report.taken_bytes.unwrap(), 10.0);
    }
    let has = |asked: fn(&Report) -> bool| reports.iter().any(asked);
    assert!(has(|it| it.contexts != Contexts::Exact));
    assert!(has(|it| it.checkpointing == Checkpointing::Layers));
    let presets: BTreeSet<String> = reports.iter().map(|it| it.preset.to_string()).collect();
    assert!(presets.len() >= 3, "{presets:?}");
    for preset in presets {
        let of_preset = reports
            .iter()
            .filter(|it| it.preset.to_string() == preset && it.contexts == Contexts::Exact);
        let recipes: BTreeSet<_> = of_preset.map(|it| it.recipe.as_str()).collect();
        assert!(recipes.len() >= 4, "{preset}: {recipes:?}");
    }
}
