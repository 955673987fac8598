//! Runs that go on from a checkpoint under other recipes.

use std::collections::BTreeMap;
use std::path::PathBuf;

use burn::record::{FullPrecisionSettings, NamedMpkFileRecorder, Recorder};
use burn_quant_train::optim::{AdamWRecord, QuantRecord};

use super::*;

/// Every file under a folder.
fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => files.extend(self::files(&path)),
            false => drop(files.insert(path.clone(), fs::read(path).unwrap())),
        }
    }
    files
}

/// The seeds of the rounding of layers and of parameters, in the record of an optimizer.
fn rounding_seeds(record: PathBuf) -> (u64, Option<u64>) {
    let recorder = NamedMpkFileRecorder::<FullPrecisionSettings>::new();
    let record: QuantRecord<AdamWRecord> =
        Recorder::<Flex>::load(&recorder, record, &Default::default()).unwrap();
    (record.layers.seed, record.optimizer.seed)
}

fn losses(run: &Value) -> &[Value] {
    run["loss_curve"].as_array().unwrap()
}

#[test]
fn a_fork_goes_on_under_every_recipe() {
    let (data, folder) = (corpus(), tempfile::tempdir().unwrap());
    let [base, fork, half, longer, parts] =
        ["base", "fork", "half", "longer", "parts"].map(|it| folder.path().join(it));
    let stop = ["--recipe", "mixed-precision", "--stop-after", "1"];
    succeeded(&run_of("3", data.path(), &base, &stop));
    let before = files(&base);
    let forked = |out: &Path, more: &[&str]| {
        let results = out.with_extension("json");
        let flags = [
            "--fork",
            path(&base),
            "--out",
            path(out),
            "--json",
            path(&results),
        ];
        let output = succeeded(&pretrain(&[&flags[..], more].concat()));
        (output, json(&results))
    };
    let recipes = "mixed-precision,fallback-int8,block-int8";
    let (output, runs) = forked(&fork, &["--recipe", recipes]);
    let begins = "forked from mixed-precision at step 1";
    assert_eq!(output.matches(begins).count(), 3, "{output}");
    assert_eq!(runs.len(), 3);
    for (run, recipe) in runs.iter().zip(recipes.split(',')) {
        assert_eq!(run["recipe"], recipe);
        assert_eq!(
            run["forked_from"],
            serde_json::json!({"recipe": "mixed-precision", "seed": 1, "step": 1, "planned_steps": 3})
        );
        assert_eq!(losses(run)[0], losses(&runs[0])[0]);
    }
    assert_ne!(runs[0]["val_loss"], runs[1]["val_loss"]);
    assert_ne!(runs[1]["val_loss"], runs[2]["val_loss"]);
    let rates = runs[1]["fallback_rates"].as_object().unwrap();
    assert!(!rates.is_empty(), "layers that were not quantized before");

    // In another compute dtype, with the loss scaling that it needs.
    let (_, of_half) = forked(&half, &["--recipe", "mixed-precision", "--compute", "f16"]);
    assert_eq!(of_half[0]["compute"], "f16");
    assert_eq!(of_half[0]["loss_scaling"], "on");
    assert_ne!(of_half[0]["val_loss"], runs[0]["val_loss"]);
    let refused = pretrain(&["--resume", path(&half), "--compute", "f32"]);
    assert!(!refused.status.success());
    let error = String::from_utf8_lossy(&refused.stderr);
    assert!(
        error.contains("made with --compute f16, not f32"),
        "{error}"
    );

    // Beyond the plan of the source, under its schedule. Another seed gives other data and rounding from the fork on.
    let more = [
        "--recipe",
        "mixed-precision",
        "--steps",
        "5",
        "--seeds",
        "2",
    ];
    let (_, more) = forked(&longer, &more);
    assert_eq!((&more[0]["seed"], &more[1]["seed"]), (&1.into(), &2.into()));
    let [first, second] = [0, 1].map(|run| losses(&more[run]));
    assert_eq!((first.len(), second.len()), (5, 5));
    assert_eq!(first[..3], *losses(&runs[0]));
    assert_eq!(first[0], second[0]);
    assert!((1..5).all(|step| first[step] != second[step]));
    for (run, seed) in [("mixed-precision", 1), ("mixed-precision-seed-2", 2)] {
        let record = longer.join(run).join("step-5/optim-5.mpk");
        assert_eq!(rounding_seeds(record), (seed, Some(seed)));
    }

    // Stopped on the way, and resumed where one run has not begun and the source is gone.
    let stop = [
        "--recipe",
        "mixed-precision,block-int8",
        "--stop-after",
        "2",
    ];
    forked(&parts, &stop);
    assert_eq!(files(&base), before, "the source stays as it is");
    fs::remove_dir_all(parts.join("block-int8")).unwrap();
    fs::remove_dir_all(&base).unwrap();
    let results = parts.with_extension("json");
    succeeded(&pretrain(&[
        "--resume",
        path(&parts),
        "--json",
        path(&results),
    ]));
    let resumed = json(&results);
    assert_eq!(resumed.len(), 2);
    assert_same(&resumed[0], &runs[0]);
    assert_same(&resumed[1], &runs[2]);
}

#[test]
fn a_fork_of_the_wrong_thing_is_one_clear_line() {
    let (data, folder) = (corpus(), tempfile::tempdir().unwrap());
    let base = folder.path().join("base");
    let stop = [
        "--recipe",
        "mixed-precision",
        "--stop-after",
        "1",
        "--seeds",
        "2",
    ];
    succeeded(&small_run(data.path(), &base, &stop));
    let before = files(&base);
    let out = folder.path().join("out");
    let fork = |more: &[&str]| {
        let flags = ["--fork", path(&base), "--out", path(&out)];
        pretrain(&[&flags[..], more].concat())
    };
    let choices = "of mixed-precision, mixed-precision-seed-2";
    fails(&fork(&[]), choices);
    fails(
        &fork(&["--from", "block-int8"]),
        "can be mixed-precision, mixed",
    );
    let from = ["--from", "mixed-precision-seed-2"];
    let forked = |more: &[&str]| fork(&[&from[..], more].concat());
    fails(
        &forked(&["--preset", "small"]),
        "made with --preset tiny, not small",
    );
    fails(&forked(&["--batch", "3"]), "made with --batch 2, not 3");
    fails(&forked(&["--steps", "1"]), "at step 1 of 1");
    fails(
        &forked(&["--recipe", "block-int8,block-int8"]),
        "block-int8 twice",
    );
    fails(&forked(&["--resume", path(&base)]), "cannot be used with");
    fails(&pretrain(&["--from", "mixed-precision"]), "--fork");
    let empty = folder.path().join("empty");
    fs::create_dir(&empty).unwrap();
    fails(&pretrain(&["--fork", path(&empty)]), "no checkpoint in");
    fails(&pretrain(&["--fork", "/nowhere"]), "no checkpoint in");
    let below = base.join("mixed-precision");
    fails(&pretrain(&["--fork", path(&below)]), "no checkpoint in");
    assert!(!out.exists(), "nothing is written before all is checked");

    // The source stays as it is.
    for inside in [base.clone(), base.join("below"), below] {
        let flags = ["--fork", path(&base), "--out", path(&inside)];
        fails(
            &pretrain(&[&flags[..], &from[..]].concat()),
            "choose another",
        );
    }
    let around = folder.path().join("around/mixed-precision");
    fs::create_dir_all(around.parent().unwrap()).unwrap();
    fs::rename(&base, &around).unwrap();
    let flags = [
        "--fork",
        path(&around),
        "--out",
        path(around.parent().unwrap()),
    ];
    fails(
        &pretrain(&[&flags[..], &from[..]].concat()),
        "choose another",
    );
    fs::rename(&around, &base).unwrap();
    assert_eq!(files(&base), before);
}
