//! `quant-train advise` as its users see it.

mod results;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;

fn advise(args: &[&str]) -> Output {
    let mut program = Command::new(env!("CARGO_BIN_EXE_quant-train"));
    program.arg("advise").args(args).output().unwrap()
}

fn text(args: &[&str]) -> String {
    let output = advise(args);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&text(&[args, &["--json"]].concat())).unwrap()
}

/// The line of an error.
#[track_caller]
fn error(args: &[&str]) -> String {
    let output = advise(args);
    assert_eq!(output.status.code(), Some(2), "{args:?}");
    let line = String::from_utf8(output.stderr).unwrap();
    assert_eq!(line.lines().count(), 1, "{line}");
    line
}

fn row<'a>(advice: &'a Value, recipe: &str, contexts: &str, optimizer: &str) -> &'a Value {
    let rows = advice["rows"].as_array().unwrap();
    let found = rows.iter().find(|row| {
        row["recipe"] == recipe && row["contexts"] == contexts && row["optimizer"] == optimizer
    });
    found.unwrap_or_else(|| panic!("no row of {recipe}, {contexts}, {optimizer}"))
}

/// A safetensors file with tensors of these shapes, all zeros, in BF16.
fn safetensors(folder: &TempDir, tensors: &[(String, Vec<usize>)]) -> String {
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (name, shape) in tensors {
        let start = end;
        end += 2 * shape.iter().product::<usize>();
        header.insert(
            name.clone(),
            json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}),
        );
    }
    let header = Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + end, 0);
    let path = folder.path().join("model.safetensors");
    fs::write(&path, bytes).unwrap();
    path.to_str().unwrap().to_owned()
}

fn llama() -> Vec<(String, Vec<usize>)> {
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_owned(), vec![320, 64]),
        ("model.norm.weight".to_owned(), vec![64]),
        ("lm_head.weight".to_owned(), vec![320, 64]),
    ];
    for layer in 0..11 {
        let shapes: [(&str, &[usize]); 9] = [
            ("self_attn.q_proj", &[64, 64]),
            ("self_attn.k_proj", &[32, 64]),
            ("self_attn.v_proj", &[32, 64]),
            ("self_attn.o_proj", &[64, 64]),
            ("mlp.gate_proj", &[160, 64]),
            ("mlp.up_proj", &[160, 64]),
            ("mlp.down_proj", &[64, 160]),
            ("input_layernorm", &[64]),
            ("post_attention_layernorm", &[64]),
        ];
        for (name, shape) in shapes {
            tensors.push((
                format!("model.layers.{layer}.{name}.weight"),
                shape.to_vec(),
            ));
        }
    }
    tensors
}

fn gpt2() -> Vec<(String, Vec<usize>)> {
    let mut tensors = vec![
        ("wte.weight".to_owned(), vec![500, 48]),
        ("wpe.weight".to_owned(), vec![128, 48]),
        ("ln_f.weight".to_owned(), vec![48]),
        ("ln_f.bias".to_owned(), vec![48]),
    ];
    for layer in 0..2 {
        let shapes: [(&str, &[usize]); 12] = [
            ("ln_1.weight", &[48]),
            ("ln_1.bias", &[48]),
            ("attn.c_attn.weight", &[48, 144]),
            ("attn.c_attn.bias", &[144]),
            ("attn.c_proj.weight", &[48, 48]),
            ("attn.c_proj.bias", &[48]),
            ("ln_2.weight", &[48]),
            ("ln_2.bias", &[48]),
            ("mlp.c_fc.weight", &[48, 192]),
            ("mlp.c_fc.bias", &[192]),
            ("mlp.c_proj.weight", &[192, 48]),
            ("mlp.c_proj.bias", &[48]),
        ];
        for (name, shape) in shapes {
            tensors.push((format!("h.{layer}.{name}"), shape.to_vec()));
        }
    }
    tensors
}

fn elements(tensors: &[(String, Vec<usize>)]) -> usize {
    tensors
        .iter()
        .map(|(_, shape)| shape.iter().product::<usize>())
        .sum()
}

#[test]
fn a_preset_gets_tables_and_a_recommendation() {
    let text = text(&["--preset", "medium", "--device", "h200", "--memory", "100"]);
    println!("{text}");
    let result = include_str!("../../../book/results/h200-recipes.json");
    let result: Value = serde_json::from_str(result).unwrap();
    let rows = result["recipes"].as_array().unwrap().iter();
    let mut speeds =
        rows.filter(|row| row["subject"] == "mixed-precision" && row["sequence"] == 1024);
    let speed = speeds.next_back().expect("a row")["tokens_per_s"].as_f64();
    let measured = format!("{:.0} tokens/s", speed.unwrap());
    for expected in [
        "123101952 parameters",
        "mixed-precision",
        "nvfp4",
        "int8-adamw",
        "not measured",
        &measured,
        "Take mixed-precision in bf16, with exact contexts and adamw",
    ] {
        assert!(text.contains(expected), "no {expected:?} in:\n{text}");
    }
}

#[test]
fn what_fits_and_what_is_recommended_follow_the_memory() {
    let advice = |gib: &str| json(&["--preset", "medium", "--device", "h200", "--memory", gib]);
    let roomy = advice("100");
    let exact = row(&roomy, "mixed-precision", "exact", "adamw");
    assert_eq!(exact["fits"], true);
    let peak = exact["bytes"]["peak"].as_u64().unwrap() as f64 / (1u64 << 30) as f64;
    assert_eq!(roomy["recommendation"]["optimizer"], "adamw");

    // A little less than what it takes.
    let tight = advice(&format!("{:.4}", peak * 0.99));
    assert_eq!(
        row(&tight, "mixed-precision", "exact", "adamw")["fits"],
        false
    );
    assert_eq!(
        row(&tight, "mixed-precision", "exact", "adamw")["largest_batch"],
        15
    );
    assert_eq!(tight["recommendation"]["optimizer"], "fp8-adamw");
    assert_eq!(tight["recommendation"]["contexts"], "exact");

    let tighter = advice(&format!("{:.4}", peak * 0.7));
    assert_eq!(tighter["recommendation"]["recipe"], "mixed-precision");
    assert_eq!(tighter["recommendation"]["contexts"], "int10");

    let none = advice("0.5");
    assert_eq!(none["recommendation"]["fits"], false);
    assert_eq!(
        row(&none, "mixed-precision", "exact", "adamw")["largest_batch"],
        0
    );
}

#[test]
fn layers_that_run_again_hold_less_and_are_named_where_something_is_given_up() {
    let advice = |gib: &str, more: &[&str]| {
        let args = ["--preset", "medium", "--device", "h200", "--memory", gib];
        json(&[&args, more].concat())
    };
    let reasons = |advice: &Value| advice["recommendation"]["reasons"].to_string();
    let names = |advice: &Value| reasons(advice).contains("--checkpointing layers");
    assert!(!names(&advice("100", &[])));
    let tight = advice("4", &[]);
    let expected = "mixed-precision with exact contexts and adamw would fit: ";
    assert!(reasons(&tight).contains(expected), "{}", reasons(&tight));
    let least = advice("0.5", &[]);
    assert!(
        reasons(&least).contains("would not fit either: "),
        "{}",
        reasons(&least)
    );

    // A recipe that is none of the cautious ways.
    let fallback = |gib: &str| reasons(&advice(gib, &["--recipe", "fallback-int8"]));
    assert!(!fallback("100").contains("--checkpointing"));
    assert!(fallback("3").contains("fallback-int8 with"));
    assert!(fallback("3").contains(" would fit: "));

    let again = advice("4", &["--checkpointing", "layers"]);
    assert_eq!(again["checkpointing"], "layers");
    assert_eq!(again["recommendation"]["contexts"], "exact");
    assert_eq!(again["recommendation"]["optimizer"], "adamw");
    assert!(!names(&again));
    let of = |advice: &Value, recipe: &str| {
        let row = row(advice, recipe, "exact", "adamw");
        let bytes = |what: &str| row["bytes"][what].as_u64().unwrap();
        assert!(bytes("peak") > bytes("activations") + bytes("weights"));
        bytes("activations")
    };
    for recipe in ["mixed-precision", "fallback-int8", "hadamard-int4"] {
        assert!(
            of(&again, recipe) * 8 < of(&tight, recipe),
            "{recipe}: {} of {}",
            of(&again, recipe),
            of(&tight, recipe)
        );
        // Speeds were measured without.
        assert!(row(&again, recipe, "exact", "adamw")["speed"].is_null());
    }
}

#[test]
fn speeds_are_those_of_the_results() {
    for device in ["h200", "h100"] {
        speeds_of_a_layer(device);
    }
    let elsewhere = json(&["--preset", "medium", "--device", "a100"]);
    assert!(
        elsewhere["rows"]
            .as_array()
            .unwrap()
            .iter()
            .all(|row| row["speed"].is_null())
    );
}

fn speeds_of_a_layer(device: &str) {
    let of_layer = json(&[
        "--hidden",
        "4096",
        "--layers",
        "32",
        "--heads",
        "32",
        "--vocabulary",
        "32000",
        "--device",
        device,
    ]);
    let speed = &row(&of_layer, "fallback-int8", "exact", "adamw")["speed"]["layer"];
    assert_eq!(speed["hidden"], 4096);
    let source = speed["source"].as_str().unwrap();
    assert!(
        source.starts_with(&format!("book/results/{device}-layer")),
        "{source}"
    );
    let file = format!("{}/../{source}", env!("CARGO_MANIFEST_DIR"));
    let results: Value = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
    let time = |subject: &str| {
        let rows = results["rows"].as_array().unwrap();
        let row = rows.iter().find(|row| {
            let is_of_batch = row["tokens"] == speed["tokens"];
            row["subject"] == subject && row["hidden"] == 4096 && is_of_batch
        });
        row.unwrap()["both"]["median_ms"].as_f64().unwrap()
    };
    let expected = time("mixed-precision") / time("fallback-int8");
    assert_eq!(speed["of_mixed_precision"].as_f64().unwrap(), expected);
    for (recipe, contexts) in [("nvfp4", "exact"), ("fallback-int8", "int10")] {
        assert_eq!(
            row(&of_layer, recipe, contexts, "adamw")["speed"],
            Value::Null
        );
    }
}

#[test]
fn a_device_without_bf16_gets_scaled_losses() {
    let advice = json(&["--preset", "small", "--device", "v100"]);
    assert_eq!(advice["recommendation"]["compute"], "f16");
    assert_eq!(advice["recommendation"]["loss_scaling"], true);
}

#[test]
fn a_file_gives_the_sizes_of_a_model() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = llama();
    let file = safetensors(&folder, &tensors);
    let advice = json(&["--safetensors", &file, "--heads", "4", "--sequence", "256"]);
    assert_eq!(advice["parameters"], elements(&tensors));
    let model = &advice["model"];
    assert_eq!(
        [
            &model["layers"],
            &model["kv_heads"],
            &model["ffn"],
            &model["head_width"]
        ],
        [11, 2, 160, 16]
    );

    let tensors = gpt2();
    let file = safetensors(&folder, &tensors);
    let advice = json(&["--safetensors", &file, "--heads", "3", "--sequence", "128"]);
    assert_eq!(advice["parameters"], elements(&tensors));
    assert_eq!(advice["model"]["family"], "gpt2");
    assert_eq!(advice["model"]["is_tied"], true);
}

#[test]
fn errors_are_a_line_that_says_what_to_do() {
    assert!(error(&[]).contains("--preset"));
    assert!(error(&["--hidden", "64"]).contains("--layers"));
    assert!(error(&["--preset", "tiny", "--memory", "0"]).contains("above 0"));
    assert!(error(&["--preset", "tiny", "--recipe", "int3"]).contains("int3"));

    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    assert!(error(&["--safetensors", &path("none")]).contains("none"));
    let tensors = llama();
    let file = safetensors(&folder, &tensors);
    assert!(error(&["--safetensors", &file]).contains("--heads"));
    assert!(error(&["--safetensors", &file, "--heads", "5"]).contains("5 heads do not fit"));
    assert!(error(&["--safetensors", &file, "--heads", "4", "--layers", "2"]).contains("--hidden"));

    let bytes = fs::read(Path::new(&file)).unwrap();
    let damaged = |name: &str, bytes: &[u8]| {
        fs::write(path(name), bytes).unwrap();
        error(&["--safetensors", &path(name), "--heads", "4"])
    };
    assert!(damaged("short", &bytes[..5]).contains("5 bytes"));
    assert!(damaged("cut header", &bytes[..100]).contains("cut off"));
    assert!(damaged("cut", &bytes[..bytes.len() - 1]).contains("cut off"));
    assert!(damaged("text", &b"{\"a\": 1}, and so on".repeat(9)).contains("no safetensors file"));
    let mut broken = bytes.clone();
    broken[8] = b'[';
    assert!(damaged("broken", &broken).contains("damaged"));

    let missing: Vec<_> = tensors
        .iter()
        .filter(|(name, _)| !name.contains("layers.3."))
        .cloned()
        .collect();
    let file = safetensors(&folder, &missing);
    assert!(error(&["--safetensors", &file, "--heads", "4"]).contains("10 of 11 layers"));
    let other = vec![("encoder.conv.weight".to_owned(), vec![3, 3])];
    let file = safetensors(&folder, &other);
    assert!(error(&["--safetensors", &file, "--heads", "4"]).contains("encoder.conv.weight"));
}
