//! Presets in GPT-2's style: every recipe trains them, they resume with the numbers that dropout draws, and their
//! checkpoints are none of a Llama's.

use burn_quant_train::recipe::NAMES;

use super::*;

const GPT2: [&str; 2] = ["--preset", "gpt2-tiny"];

#[test]
fn a_gpt2_learns_under_every_recipe() {
    let (data, folder) = (corpus(), tempfile::tempdir().unwrap());
    let results = folder.path().join("runs.json");
    let recipes: Vec<_> = NAMES.iter().map(|name| name.as_str()).collect();
    let recipes = recipes.join(",");
    let more = [
        "--recipe",
        &recipes,
        "--memory",
        "--health",
        "10",
        "--json",
        path(&results),
    ];
    let out = folder.path().join("out");
    let printed = succeeded(&run_of(
        "40",
        data.path(),
        &out,
        &[&GPT2[..], &more].concat(),
    ));
    assert!(printed.contains("gpt2.layers.0.attention.qkv"), "{printed}");
    assert!(printed.contains("gpt2-tiny preset"), "{printed}");
    let runs = json(&results);
    assert_eq!(runs.len(), NAMES.len());
    for run in runs {
        let (recipe, curve) = (&run["recipe"], run["loss_curve"].as_array().unwrap());
        assert_eq!(run["preset"], "gpt2-tiny");
        assert_eq!(run["dropout"], 0.1);
        let first = curve[0][1].as_f64().unwrap();
        let [last, valid] = ["train_loss", "val_loss"].map(|it| run[it].as_f64().unwrap());
        assert!((first - 256f64.ln()).abs() < 0.1, "{recipe}: {first}");
        assert!(
            last < 0.75 * first && valid < 0.75 * first,
            "{recipe}: {first}, {last}, {valid}"
        );
    }
}

#[test]
fn a_resumed_run_drops_what_it_would_have_dropped() {
    let (data, folder) = (corpus(), tempfile::tempdir().unwrap());
    let run = |name: &str, steps: &str, more: &[&str]| -> Value {
        let out = folder.path().join(name);
        let results = out.with_extension("json");
        let flags = [
            &GPT2[..],
            &["--recipe", "fallback-int8", "--json", path(&results)],
            more,
        ];
        succeeded(&run_of(steps, data.path(), &out, &flags.concat()));
        json(&results).pop().unwrap_or_default()
    };
    let whole = run("whole", "6", &[]);
    run("parts", "6", &["--stop-after", "3"]);
    let [parts, results] = ["parts", "resumed.json"].map(|it| folder.path().join(it));
    // Forks of one seed go on alike, of another otherwise.
    let fork = |name: &str, seed: &str| -> Value {
        let [out, results] =
            [name.to_owned(), format!("{name}.json")].map(|it| folder.path().join(it));
        let flags = [
            "--fork",
            path(&parts),
            "--recipe",
            "fallback-int8",
            "--seed",
            seed,
        ];
        let files = ["--out", path(&out), "--json", path(&results)];
        succeeded(&pretrain(&[&flags[..], &files].concat()));
        json(&results).remove(0)
    };
    let (same, other) = (fork("same", "1"), fork("other", "2"));
    assert_eq!(same["val_loss"], whole["val_loss"]);
    assert_ne!(other["val_loss"], whole["val_loss"]);

    let resume = ["--resume", path(&parts), "--json", path(&results)];
    succeeded(&pretrain(&resume));
    assert_same(&whole, &json(&results)[0]);
    // Without dropout it is another run.
    let dry = run("dry", "6", &["--dropout", "0"]);
    assert_eq!(dry["dropout"], 0.0);
    assert_ne!(whole["loss_curve"], dry["loss_curve"]);
}

#[test]
fn a_checkpoint_of_one_family_is_refused_by_the_other() {
    let (data, folder) = (corpus(), tempfile::tempdir().unwrap());
    let [llama, gpt2, out] = ["llama", "gpt2", "out"].map(|it| folder.path().join(it));
    let of = |out: &Path, more: &[&str]| {
        let flags = [&["--recipe", "mixed-precision", "--stop-after", "2"], more].concat();
        succeeded(&small_run(data.path(), out, &flags))
    };
    of(&llama, &[]);
    of(&gpt2, &GPT2);
    for (folder, preset, made) in [(&llama, "gpt2-tiny", "tiny"), (&gpt2, "tiny", "gpt2-tiny")] {
        let what = format!("was made with --preset {made}, not {preset}");
        for flag in ["--resume", "--fork"] {
            let flags = [flag, path(folder), "--preset", preset, "--out", path(&out)];
            fails(&pretrain(&flags), &what);
        }
    }
    let other = ["--resume", path(&gpt2), "--dropout", "0.2"];
    fails(&pretrain(&other), "was made with --dropout 0.1, not 0.2");
    fails(&pretrain(&["--dropout", "0.1"]), "GPT-2");
    fails(
        &pretrain(&["--preset", "gpt2-tiny", "--dropout", "1"]),
        "below 1",
    );
}
