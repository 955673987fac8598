//! What happens without flags that say which runs there are.

use super::*;

#[test]
fn forks_of_one_run_are_compared() {
    let (data, folder) = (corpus(), tempfile::tempdir().unwrap());
    let [out, again] = ["out", "again"].map(|it| folder.path().join(it));
    let file = |out: &Path| out.with_extension("json");
    let run = |out: &Path| succeeded(&small_run(data.path(), out, &["--json", path(&file(out))]));
    let printed = run(&out);
    for line in [
        "4 of 6 steps under mixed-precision",
        "forked from mixed-precision at step 4",
        "training loss of fallback-int8",
        "loss   fallback-int8 ends",
        "95% interval",
        "saved  ",
        "cost   ",
        "next   pretrain --recipe fallback-int8 --health",
    ] {
        assert!(printed.contains(line), "{line:?} is missing in\n{printed}");
    }
    assert!(
        !printed.contains("--resume"),
        "nothing is left to do: {printed}"
    );

    let runs = json(&file(&out));
    let recipes = ["mixed-precision", "fallback-int8"];
    let expected: Vec<_> = (1..=4)
        .flat_map(|seed| recipes.map(|recipe| (recipe, seed)))
        .collect();
    let found = runs.iter().map(|run| {
        assert_eq!(run["forked_from"]["step"], 4);
        assert_eq!(run["steps"], 6);
        (
            run["recipe"].as_str().unwrap(),
            run["seed"].as_u64().unwrap(),
        )
    });
    assert_eq!(found.collect::<Vec<_>>(), expected);
    run(&again);
    for (first, second) in runs.iter().zip(&json(&file(&again))) {
        assert_same(first, second);
    }
}

/// What it recommends is taken by the command line.
#[test]
fn what_comes_next_works() {
    let data = corpus();
    let folder = tempfile::tempdir().unwrap();
    for next in [
        &["--recipe", "fallback-int8", "--health"][..],
        &["--recipe", "hadamard-int4,luq-int4"],
        &["--contexts", "int10", "--recipe", "fallback-int8"],
    ] {
        succeeded(&small_run(data.path(), folder.path(), next));
    }
}
