//! Runs without flags that say which ones there are.

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

/// Its recommendation, but for the preset and the device, is taken word for word.
#[test]
fn what_comes_next_works() {
    let (data, folder) = (corpus(), tempfile::tempdir().unwrap());
    let printed = succeeded(&small_run(data.path(), &folder.path().join("first"), &[]));
    let next = printed
        .lines()
        .filter_map(|line| line.split_once("pretrain --"));
    let next: Vec<_> = next
        .map(|(_, rest)| rest.split("  ").next().unwrap())
        .collect();
    assert_eq!(next.len(), 4, "{printed}");
    for (index, flags) in next
        .into_iter()
        .filter(|it| !it.contains("cuda"))
        .enumerate()
    {
        let flags = format!("--{flags}");
        let flags: Vec<_> = flags.split_whitespace().collect();
        let out = folder.path().join(index.to_string());
        succeeded(&small_run(data.path(), &out, &flags));
    }
}

#[test]
fn a_third_of_two_steps_is_none() {
    let (data, folder) = (corpus(), tempfile::tempdir().unwrap());
    let out = folder.path().join("out");
    fails(
        &run_of("2", data.path(), &out, &[]),
        "--steps 2 leaves none",
    );
    assert!(!out.exists());
}
