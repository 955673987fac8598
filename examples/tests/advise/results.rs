//! What the advice computes beside what the H200 measured, in the book's result files.

use examples::advise::activations::{AttentionForm, Step};
use examples::advise::shapes::Shapes;
use examples::report::Report;

/// Runs whose attention was two products and a softmax in one node: before the kernel without scores.
const FILES: [&str; 3] = [
    "h200-small-seeds.json",
    "h200-small-baselines.json",
    "h200-medium-states.json",
];

#[test]
fn saved_activations_and_moments_are_those_that_the_h200_measured() {
    let mut seen = Vec::new();
    for file in FILES {
        let path = format!("{}/../book/results/{file}", env!("CARGO_MANIFEST_DIR"));
        let reports: Vec<Report> =
            serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        for report in reports {
            let key = (report.preset, report.recipe, report.optimizer);
            if seen.contains(&key) {
                continue;
            }
            seen.push(key);
            compare(file, &report);
        }
    }
    assert!(seen.len() >= 7, "{seen:?}");
}

fn compare(file: &str, report: &Report) {
    let model = Shapes::from(&report.preset.model(report.sequence));
    assert_eq!(model.parameters(), report.parameters);
    let row = report.recipe.row();
    let step = Step {
        model: &model,
        batch: report.batch,
        sequence: report.sequence,
        compute: report.compute,
        attention: AttentionForm::Products,
        row: &row,
        context: report.contexts.context(),
    };
    let config = report.optimizer.config();
    let moments: usize = model
        .elements()
        .into_iter()
        .map(|it| config.state_bytes(it))
        .sum();
    for (what, computed, measured) in [
        ("activations", step.saved(), report.activation_bytes),
        ("moments", moments, report.optimizer_bytes),
    ] {
        let off = 100.0 * (computed as f64 / measured as f64 - 1.0);
        let (preset, recipe) = (report.preset, report.recipe);
        println!("{file}, {preset}, {recipe}: {what} {computed} of {measured} ({off:+.2}%)");
        assert!(
            off.abs() < 1.0,
            "{file}, {recipe}: {what} {computed} of {measured}"
        );
    }
}
