//! Layers that run again in the backward pass.

use super::*;

/// Runs of both recipes on a batch of which no tensor is too small to be let go.
fn runs(data: &Path, checkpointing: &str) -> Vec<Value> {
    let out = tempfile::tempdir().unwrap();
    let file = out.path().join("results.json");
    let flags = [
        &["--data", path(data), "--out", path(out.path())][..],
        &["--steps", "3", "--batch", "4", "--sequence", "32"],
        &["--validation", "4", "--json", path(&file)],
        &["--checkpointing", checkpointing],
        &BOTH,
    ];
    succeeded(&pretrain(&flags.concat()));
    json(&file)
}

#[test]
fn checkpointing_saves_memory_and_changes_no_loss() {
    let data = corpus();
    let [without, with] = ["none", "layers"].map(|it| runs(data.path(), it));
    assert_eq!([without.len(), with.len()], [2, 2]);
    for (without, with) in without.iter().zip(&with) {
        assert_same(without, with);
        assert_eq!(with["checkpointing"], "layers");
        let bytes = |run: &Value| run["activation_bytes"].as_u64().unwrap();
        assert!(2 * bytes(with) < bytes(without), "{with}\n{without}");
    }
}
