//! Attention as one operation, and composed of Burn's.

use super::*;

fn run(data: &Path, more: &[&str]) -> Value {
    let flags = [&["--recipe", "mixed-precision"][..], more].concat();
    three_steps(data, &flags).remove(0)
}

#[test]
fn both_forms_give_the_same_losses() {
    let data = corpus();
    for preset in ["tiny", "gpt2-tiny"] {
        let [fused, composed] = ["fused", "composed"].map(|form| {
            let run = run(data.path(), &["--preset", preset, "--attention", form]);
            assert_eq!(run["attention"], form);
            ["train_loss", "val_loss"].map(|loss| run[loss].as_f64().unwrap())
        });
        for (fused, composed) in fused.iter().zip(composed) {
            assert!(
                (fused - composed).abs() < 1e-4,
                "{preset}: {fused} {composed}"
            );
        }
    }
}

/// Where a kernel computes attention without scores in memory, it does not find the composed form.
#[test]
fn the_composed_form_has_its_scores_in_memory() {
    let data = corpus();
    let [fused, composed] = ["fused", "composed"].map(|form| {
        let run = run(data.path(), &["--compute", "f16", "--attention", form]);
        run["activation_bytes"].as_u64().unwrap()
    });
    // Exponentials in FP32 of 4 layers, with 4 heads of 4 sequences.
    assert!(
        composed > fused + 4 * size_of::<f32>() as u64 * 4 * 4 * 32 * 32,
        "{composed} {fused}"
    );
}
