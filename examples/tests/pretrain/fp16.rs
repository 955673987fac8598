//! Runs that compute in FP16, and losses that are scaled.

use super::*;

/// The results of a run of six steps under mixed precision.
fn results(data: &Path, out: &Path, more: &[&str]) -> Value {
    let file = out.with_extension("json");
    let flags = ["--recipe", "mixed-precision", "--json", path(&file)];
    succeeded(&small_run(data, out, &[&flags, more].concat()));
    json(&file).remove(0)
}

#[test]
fn scaled_losses_train_as_unscaled_ones() {
    let (data, folder) = (corpus(), tempfile::tempdir().unwrap());
    let run = |name: &str, more: &[&str]| results(data.path(), &folder.path().join(name), more);
    let plain = run("plain", &[]);
    let scaled = run("scaled", &["--loss-scaling", "on"]);
    assert_eq!(plain["loss_scaling"], "off");
    assert_eq!(scaled["loss_scaling"], "on");
    // FP32 on a CPU: to the bit.
    assert_same(&plain, &scaled);
    assert_eq!(scaled["skipped_steps"], 0);
    assert_eq!(plain["optimizer_bytes"], scaled["optimizer_bytes"]);
}

#[test]
fn fp16_trains_and_resumes() {
    let (data, folder) = (corpus(), tempfile::tempdir().unwrap());
    let [exact, whole, parts] = ["exact", "whole", "parts"].map(|it| folder.path().join(it));
    let fp16 = ["--compute", "f16"];
    let exact = results(data.path(), &exact, &[]);
    let whole = results(data.path(), &whole, &fp16);
    assert_eq!(whole["loss_scaling"], "on", "it is the default in FP16");
    // The first loss is of the same weights. A scale of 2^16 is too large for so few tokens, which costs a step or two.
    let first = |run: &Value| run["loss_curve"][0][1].as_f64().unwrap();
    let change = first(&whole) / first(&exact) - 1.0;
    assert!(change != 0.0 && change.abs() < 1e-3, "{change}");
    let skipped = whole["skipped_steps"].as_u64().unwrap();
    assert!(skipped <= 3, "{whole}");
    let learned = first(&whole) - whole["val_loss"].as_f64().unwrap();
    assert!(learned > 0.5, "{whole}");

    let stop = [
        &["--recipe", "mixed-precision", "--stop-after", "3"],
        &fp16[..],
    ];
    succeeded(&small_run(data.path(), &parts, &stop.concat()));
    let file = parts.with_extension("json");
    let resume = ["--resume", path(&parts), "--json", path(&file)];
    succeeded(&pretrain(&resume));
    let resumed = json(&file).remove(0);
    assert_same(&whole, &resumed);
    assert_eq!(whole["skipped_steps"], resumed["skipped_steps"]);
}

/// Of each kind one: with a residual, with learned step sizes, in FP8, with a flow.
#[test]
fn fp16_trains_by_quantized_recipes() {
    let (data, folder) = (corpus(), tempfile::tempdir().unwrap());
    let file = folder.path().join("runs.json");
    let recipes = "fallback-int8,hadamard-int4,delayed-fp8,coat-fp8";
    let flags = [
        "--compute",
        "f16",
        "--recipe",
        recipes,
        "--json",
        path(&file),
    ];
    succeeded(&small_run(data.path(), &folder.path().join("runs"), &flags));
    let runs = json(&file);
    assert_eq!(runs.len(), 4);
    for run in runs {
        let first = run["loss_curve"][0][1].as_f64().unwrap();
        let learned = first - run["val_loss"].as_f64().unwrap();
        assert!(learned > 0.5, "{run}");
    }
}

#[test]
fn refuses_other_words() {
    fails(&pretrain(&["--compute", "bf16"]), "not in bf16");
    fails(&pretrain(&["--loss-scaling", "maybe"]), "--loss-scaling");
}
