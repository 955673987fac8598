//! `pretrain` as its users see it: the text that it loads, its errors, its checkpoints, its results.

mod attention;
mod checkpointing;
mod damage;
mod first_run;
mod fork;
mod fp16;
mod gpt2;
mod health;
mod memory;
mod seeds;
mod thresholds;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;

use burn::backend::Flex;
use burn::data::dataloader::DataLoader;
use examples::data::{Text, Windows};
use serde_json::Value;
use tempfile::TempDir;

/// Forty files of different sizes in two folders.
fn corpus() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for sub in ["a", "b"] {
        fs::create_dir(folder.path().join(sub)).unwrap();
    }
    for i in 0..40 {
        let text = format!("fn number_{i}() -> usize {{ {i} }}\n").repeat(5 + i);
        let sub = if i % 2 == 0 { "a" } else { "b" };
        fs::write(folder.path().join(sub).join(format!("{i}.txt")), text).unwrap();
    }
    folder
}

fn program(args: &[&str]) -> Command {
    let mut program = Command::new(env!("CARGO_BIN_EXE_pretrain"));
    program.args(args);
    program
}

fn pretrain(args: &[&str]) -> Output {
    program(args).output().unwrap()
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Flags of a run small enough for a test: steps of 32 tokens.
const SMALL: [&str; 6] = ["--batch", "2", "--sequence", "16", "--validation", "4"];

/// Two recipes from scratch.
const BOTH: [&str; 2] = ["--recipe", "fallback-int8,mixed-precision"];

/// A run of 6 steps.
fn small_run(data: &Path, out: &Path, more: &[&str]) -> Output {
    run_of("6", data, out, more)
}

fn run_of(steps: &str, data: &Path, out: &Path, more: &[&str]) -> Output {
    let flags = ["--data", path(data), "--out", path(out), "--steps", steps];
    pretrain(&[&flags, &SMALL[..], more].concat())
}

/// The results of a run of three steps on a batch of which no tensor is too small to be let go.
fn three_steps(data: &Path, more: &[&str]) -> Vec<Value> {
    let out = tempfile::tempdir().unwrap();
    let file = out.path().join("results.json");
    let flags = [
        &["--data", path(data), "--out", path(out.path())][..],
        &["--steps", "3", "--batch", "4", "--sequence", "32"],
        &["--validation", "4", "--json", path(&file)],
        more,
    ];
    succeeded(&pretrain(&flags.concat()));
    json(&file)
}

fn json(file: &Path) -> Vec<Value> {
    match serde_json::from_slice(&fs::read(file).unwrap()).unwrap() {
        Value::Array(runs) => runs,
        other => panic!("not an array: {other}"),
    }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        match entry.path().is_dir() {
            true => copy(&entry.path(), &to),
            false => drop(fs::copy(entry.path(), to).unwrap()),
        }
    }
}

/// Compares all of two runs that does not depend on the machine's speed or memory.
#[track_caller]
fn assert_same(left: &Value, right: &Value) {
    for field in [
        "recipe",
        "seed",
        "steps",
        "forked_from",
        "loss_curve",
        "train_loss",
        "val_loss",
        "fallback_rates",
    ] {
        assert_eq!(left[field], right[field], "{field}");
    }
}

#[track_caller]
fn succeeded(output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{stderr}", output.status);
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Exit code 2 and one line that says `what`.
#[track_caller]
fn fails(output: &Output, what: &str) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert_eq!(stderr.trim_end().lines().count(), 1, "{stderr}");
    assert!(stderr.contains(what), "{stderr:?} does not say {what:?}");
}

#[test]
fn text_is_split_by_file() {
    let folder = corpus();
    let text = Text::load(Some(folder.path()), 16).unwrap();
    let again = Text::load(Some(folder.path()), 16).unwrap();
    assert_eq!(text.train, again.train);
    assert_eq!(text.valid, again.valid);
    assert_eq!(text.fingerprint(), again.fingerprint());

    // Every file lies whole in one of the two splits.
    let files = |split: &[u8]| -> Vec<Vec<u8>> {
        let files = split.split(|byte| *byte == 0);
        files
            .filter(|it| !it.is_empty())
            .map(<[u8]>::to_vec)
            .collect()
    };
    let (train, valid) = (files(&text.train), files(&text.valid));
    assert!(!valid.is_empty() && valid.len() < 10, "{}", valid.len());
    assert_eq!(train.len() + valid.len(), 40);
    assert!(valid.iter().all(|file| !train.contains(file)));

    // The name decides: a new file moves none of the others across.
    fs::write(folder.path().join("a/new.txt"), "new".repeat(50)).unwrap();
    let more = Text::load(Some(folder.path()), 16).unwrap();
    assert!(valid.iter().all(|file| files(&more.valid).contains(file)));
    assert_ne!(text.fingerprint(), more.fingerprint());
}

#[test]
fn a_single_file_is_split_at_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("text");
    let content: Vec<u8> = (0..2000u32).map(|i| (i % 251) as u8).collect();
    fs::write(&file, &content).unwrap();
    let text = Text::load(Some(&file), 16).unwrap();
    assert_eq!(text.train, content[..1900]);
    assert_eq!(text.valid, content[1900..]);
}

#[test]
fn samples_depend_on_seed_and_number_alone() {
    let device = Default::default();
    let text: Arc<[u8]> = (0..5000u32).map(|i| (i * i % 251) as u8).collect();
    let windows = |seed, steps| Windows::<Flex>::train(text.clone(), seed, 4, 16, steps, &device);
    let all = windows(7, 0..10);
    let tokens = |it: &Windows<Flex>| -> Vec<_> {
        it.iter().map(|batch| batch.inputs.into_data()).collect()
    };
    // A loader that begins at step 6 serves what one that began at 0 serves from there.
    assert_eq!(tokens(&all)[6..], tokens(&windows(7, 6..10)));
    assert_ne!(tokens(&all), tokens(&windows(8, 0..10)));
    let offsets: Vec<_> = (0..1000).map(|k| all.offset(k)).collect();
    assert!(offsets.iter().all(|it| it + 16 < text.len()));
    assert!(*offsets.iter().min().unwrap() < 100 && *offsets.iter().max().unwrap() > 4850);
    // Targets are the inputs, one byte on.
    let batch = all.batch(3);
    let inputs = batch
        .inputs
        .into_data()
        .convert::<i32>()
        .into_vec::<i32>()
        .unwrap();
    let targets = batch
        .targets
        .into_data()
        .convert::<i32>()
        .into_vec::<i32>()
        .unwrap();
    let sample: Vec<i32> = all.sample(12).iter().map(|it| i32::from(*it)).collect();
    assert_eq!(inputs[..16], sample[..16]);
    assert_eq!(targets[..16], sample[1..]);
}

#[test]
fn validation_reads_every_window_once() {
    let text: Arc<[u8]> = vec![1; 1000].into();
    let windows = Windows::<Flex>::valid(text, 10, 4, 16, &Default::default());
    let sizes: Vec<_> = windows.iter().map(|it| it.inputs.dims()[0]).collect();
    assert_eq!(sizes, [4, 4, 2]);
}

#[test]
fn bad_data_is_one_clear_line() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let data = folder.path().join("data");
    fails(&small_run(&data, &out, &[]), "cannot read the data");
    fs::create_dir(&data).unwrap();
    fails(&small_run(&data, &out, &[]), "holds no text");
    fs::write(data.join("short"), "short").unwrap();
    fails(&small_run(&data, &out, &[]), "too little text");
    assert!(
        !out.exists(),
        "nothing is written before the data is checked"
    );
}

#[test]
fn bad_flags_are_one_clear_line() {
    fails(&pretrain(&["--preset", "huge"]), "tiny");
    fails(&pretrain(&["--recipe", "int3"]), "mixed-precision");
    fails(&pretrain(&["--steps", "0"]), "at least 1");
    fails(&pretrain(&["--batch", "x"]), "whole number");
    fails(&pretrain(&["--lr", "2"]), "--lr");
    fails(&pretrain(&["--what"]), "--what");
    fails(
        &pretrain(&["--recipe", "block-int8,block-int8"]),
        "block-int8 twice",
    );
    fails(
        &pretrain(&["--recipe", "block-int8", "--recipe", "block-int8"]),
        "block-int8 twice",
    );
    fails(&pretrain(&["--resume", "/nowhere"]), "no checkpoint");
    fails(&pretrain(&["--seeds", "0"]), "at least 1");
    fails(&pretrain(&["--seeds", "1001"]), "at most 1000");
    let beyond = ["--seeds", "2", "--seed", "18446744073709551615"];
    fails(&pretrain(&beyond), "no such seeds");
    if cfg!(not(feature = "cuda")) {
        fails(&pretrain(&["--device", "cuda"]), "--features cuda");
    }
    if cfg!(not(feature = "vulkan")) {
        fails(&pretrain(&["--device", "vulkan"]), "--features vulkan");
    }
}

#[test]
fn files_that_cannot_be_written_are_one_clear_line() {
    let (data, folder) = (corpus(), tempfile::tempdir().unwrap());
    let out = folder.path().join("out");
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let run = |json: &Path| small_run(data.path(), &out, &["--json", path(json)]);
    fails(
        &run(&folder.path().join("no/such/folder.json")),
        "folder.json",
    );
    fails(&run(folder.path()), "it is a folder");
    fails(&run(&file.join("below.json")), "below.json");
    assert!(
        !out.exists(),
        "nothing is written before the flags are checked"
    );
    let below = small_run(data.path(), &file.join("below"), &[]);
    fails(&below, "cannot create the output folder");
}

#[test]
fn a_resumed_run_goes_on_bit_for_bit() {
    let (data, folder) = (corpus(), tempfile::tempdir().unwrap());
    let [whole, parts, old, fork] =
        ["whole", "parts", "old", "fork"].map(|it| folder.path().join(it));
    let [whole_json, parts_json, old_json, fork_json] =
        [&whole, &parts, &old, &fork].map(|it| it.with_extension("json"));

    let output = succeeded(&small_run(
        data.path(),
        &whole,
        &[&BOTH[..], &["--json", path(&whole_json)]].concat(),
    ));
    assert!(!output.contains('\u{1b}'), "no escape codes in a pipe");
    assert!(output.contains("step      6/6"), "{output}");
    assert!(output.contains("One seed: no interval"), "{output}");
    assert!(!output.contains("seed 1"), "{output}");

    let stopped = succeeded(&small_run(
        data.path(),
        &parts,
        &[&BOTH[..], &["--stop-after", "3"]].concat(),
    ));
    assert!(stopped.contains("--resume"), "{stopped}");
    for other in [
        ["--preset", "small"],
        ["--recipe", "block-int8"],
        ["--seed", "9"],
    ] {
        let resume = ["--resume", path(&parts)];
        fails(&pretrain(&[resume, other].concat()), "the checkpoint in");
    }
    // A copy as versions without checksums left it, and a fork under the recipe that the checkpoint is of.
    copy(&parts, &old);
    damage::age(&old.join("pretrain.json"));
    damage::age(&old.join("mixed-precision/step-3/run.json"));
    let one = ["--recipe", "mixed-precision", "--json", path(&old_json)];
    let output = succeeded(&pretrain(&[&["--resume", path(&old)], &one[..]].concat()));
    assert!(output.contains("resumed at step 3"), "{output}");
    let one = ["--recipe", "fallback-int8", "--from", "fallback-int8"];
    let flags = [
        "--fork",
        path(&parts),
        "--out",
        path(&fork),
        "--json",
        path(&fork_json),
    ];
    succeeded(&pretrain(&[&flags[..], &one].concat()));
    succeeded(&pretrain(&[
        "--resume",
        path(&parts),
        "--json",
        path(&parts_json),
    ]));

    let (whole, parts) = (json(&whole_json), json(&parts_json));
    assert_eq!(whole.len(), 2);
    assert_eq!(parts.len(), 2);
    for (whole, parts) in whole.iter().zip(&parts) {
        assert_eq!(whole["loss_curve"].as_array().unwrap().len(), 6);
        assert_same(whole, parts);
    }
    assert_same(&whole[1], &json(&old_json)[0]);
    let mut forked = json(&fork_json).remove(0);
    assert_eq!(forked["forked_from"]["step"], 3);
    forked["forked_from"] = Value::Null;
    assert_same(&whole[0], &forked);

    // The fields, and sane values in them.
    for (run, recipe) in whole.iter().zip(["fallback-int8", "mixed-precision"]) {
        assert_eq!(run["recipe"], recipe);
        assert_eq!(run["steps"], 6);
        assert_eq!(run["tokens"], 6 * 32);
        for field in ["train_loss", "val_loss", "bits_per_byte", "tokens_per_s"] {
            let value = run[field].as_f64().unwrap();
            assert!(value.is_finite() && value > 0.0, "{field}: {value}");
        }
        assert!(run["activation_bytes"].as_u64().unwrap() > 0);
        assert!(run["optimizer_bytes"].as_u64().unwrap() > 0);
        assert!(run.get("fallback_rate").is_some());
    }
    assert!(whole[1]["fallback_rate"].is_null());
}

/// The optimizers' bytes a parameter, as measured, and a checkpoint that goes on with moments in another format.
#[test]
fn optimizers_take_the_bytes_that_they_say() {
    let (data, folder) = (corpus(), tempfile::tempdir().unwrap());
    let out = folder.path().join("out");
    let results = folder.path().join("results.json");
    let recipe = ["--recipe", "mixed-precision"];
    succeeded(&small_run(
        data.path(),
        &out,
        &[&recipe[..], &["--stop-after", "3"]].concat(),
    ));
    for (optimizer, bytes) in [("adamw", 8.0), ("fp8-adamw", 2.1), ("int8-adamw", 2.05)] {
        let resumed = out.join(optimizer);
        let resume = ["--resume", path(&out), "--out", path(&resumed)];
        let flags = ["--optimizer", optimizer, "--json", path(&results)];
        succeeded(&pretrain(
            &[&resume[..], &flags[..], &["--data", path(data.path())]].concat(),
        ));
        let run = &json(&results)[0];
        assert_eq!(run["optimizer"], optimizer);
        assert_eq!(run["skipped_steps"], 0);
        let parameters = run["parameters"].as_f64().unwrap();
        let measured = run["optimizer_bytes"].as_f64().unwrap() / parameters;
        // Small parameters have FP32 moments, and the bookkeeping of 900,000 parameters is not nothing.
        assert!(
            (0.98..1.03).contains(&(measured / bytes)),
            "{optimizer}: {measured} bytes a parameter"
        );
    }
}
