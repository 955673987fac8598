//! The figures of the advice beside those that the H200 measured, in the book's result files.

use std::collections::BTreeSet;

use burn_quant_train::recipe::Name;
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

/// Measurements of `qt-bench pretrain`, of recipes with their activations as they are, and of layers that run again.
#[test]
fn activations_are_those_that_gpus_measured() {
    let files = ["h200-pretrain", "h100-pretrain", "h100-pretrain-layers"];
    let seen: Vec<_> = files.into_iter().flat_map(compare_activations).collect();
    for checkpointing in [Checkpointing::None, Checkpointing::Layers] {
        let count = seen.iter().filter(|of| **of == checkpointing).count();
        assert!(count >= 2, "{checkpointing}: {count}");
    }
}

/// The layers that ran again in each run of a recipe in the file.
fn compare_activations(file: &str) -> Vec<Checkpointing> {
    let path = format!("{}/../book/results/{file}.json", env!("CARGO_MANIFEST_DIR"));
    let results: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let mut seen = Vec::new();
    for row in results["rows"].as_array().unwrap() {
        let recipe = row["subject"].as_str().unwrap().parse::<Name>();
        let (Ok(recipe), Some("exact")) = (recipe, row["contexts"].as_str()) else {
            continue;
        };
        // Files from before there was a choice do not name it.
        let checkpointing: Option<Checkpointing> =
            serde_json::from_value(row["checkpointing"].clone()).unwrap();
        let checkpointing = checkpointing.unwrap_or_default();
        let size = |field: &str| row[field].as_u64().unwrap() as usize;
        let [batch, sequence] = ["batch", "sequence"].map(size);
        let model = Shapes::from(&Preset::Medium.model(sequence));
        assert_eq!(model.parameters(), size("parameters"));
        let step = Step {
            model: &model,
            batch,
            sequence,
            compute: Compute::Bf16,
            attention: AttentionForm::Flash,
            row: &recipe.row(),
            context: None,
            checkpointing,
        };
        let what =
            format!("{file}, {recipe}, {batch} x {sequence}, run again: {checkpointing}: saved");
        let measured = row["activation_bytes"].as_u64().unwrap();
        assert_close(&what, step.saved(), measured, 2.5);
        seen.push(checkpointing);
    }
    seen
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
