//! What the advice computes beside what the H200 measured, in the book's result files.

use burn_quant_train::recipe::Name;
use examples::advise::activations::{AttentionForm, Step};
use examples::advise::shapes::Shapes;
use examples::args::{Compute, Preset};
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

/// What `qt-bench pretrain` measured, of recipes with their activations as they are.
#[test]
fn activations_are_those_that_the_h200_measured() {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../book/results/h200-pretrain.json"
    );
    let results: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let mut seen = 0;
    for row in results["rows"].as_array().unwrap() {
        let recipe = row["subject"].as_str().unwrap().parse::<Name>();
        let (Ok(recipe), Some("exact")) = (recipe, row["contexts"].as_str()) else {
            continue;
        };
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
        };
        let what = format!("{recipe}, {batch} x {sequence}: activations");
        assert_close(
            &what,
            step.saved(),
            row["activation_bytes"].as_u64().unwrap(),
            2.5,
        );
        seen += 1;
    }
    assert!(seen >= 2, "{seen}");
}
