//! Layers that run again in the backward pass.

use super::*;

#[test]
fn checkpointing_saves_memory_and_changes_no_loss() {
    let data = corpus();
    let runs = |of| three_steps(data.path(), &[&["--checkpointing", of][..], &BOTH].concat());
    let [without, with] = ["none", "layers"].map(runs);
    assert_eq!([without.len(), with.len()], [2, 2]);
    for (without, with) in without.iter().zip(&with) {
        assert_same(without, with);
        assert_eq!(with["checkpointing"], "layers");
        let bytes = |run: &Value| run["activation_bytes"].as_u64().unwrap();
        assert!(2 * bytes(with) < bytes(without), "{with}\n{without}");
    }
}
