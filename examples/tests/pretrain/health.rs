//! `--health`: what is printed, the files, and a run that is resumed.

use super::*;

fn lines(file: &Path) -> Vec<Value> {
    let text = fs::read_to_string(file).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[test]
fn health_is_printed_and_written() {
    let (data, folder) = (corpus(), tempfile::tempdir().unwrap());
    let [plain, out] = ["plain", "measured"].map(|it| folder.path().join(it));
    let file = |out: &Path| out.with_extension("json");
    let of = |out: &Path, more: &[&str]| {
        let file = file(out);
        let flags = ["--recipe", "block-int8", "--json", path(&file)];
        succeeded(&small_run(data.path(), out, &[&flags, more].concat()))
    };
    let without = of(&plain, &[]);
    assert!(!without.contains("health"), "{without}");
    assert!(!plain.join("block-int8/health.html").exists());
    let printed = of(
        &out,
        &["--health", "1", "--what-if", "current-fp8,hadamard-int4"],
    );
    let [plain, measured] = [&plain, &out].map(|out| json(&file(out)).remove(0));
    assert_same(&plain, &measured);
    // Measured bytes are not counted; allocators are never the same to the byte.
    let [plain, measured] = [plain, measured].map(|run| run["activation_bytes"].as_f64().unwrap());
    assert!(
        (measured / plain - 1.0).abs() < 0.01,
        "{plain} and {measured} bytes"
    );

    assert!(
        printed.contains("block-int8, tiny preset: health in step 6"),
        "{printed}"
    );
    assert!(
        printed.contains("dB, lost") && printed.contains("layers.0."),
        "{printed}"
    );
    assert!(
        !printed.contains('\x1b'),
        "no colours where nobody sees them: {printed}"
    );
    let folder = out.join("block-int8");
    let reports = lines(&folder.join("health.jsonl"));
    let steps: Vec<_> = reports
        .iter()
        .map(|report| report["step"].as_u64().unwrap())
        .collect();
    assert_eq!(steps, [1, 2, 3, 4, 5, 6]);

    let csv = fs::read_to_string(folder.join("health.csv")).unwrap();
    let casts = reports
        .iter()
        .flat_map(|report| report["matrices"].as_array().unwrap());
    let casts = casts.map(|matrix| matrix["casts"].as_array().unwrap().len().max(1));
    // Both moments of 28 layers, the embedding and the head.
    let moments = reports
        .iter()
        .map(|report| report["moments"].as_array().unwrap().len());
    assert!(moments.clone().all(|count| count == 60));
    let lines = 1 + casts.sum::<usize>() + moments.sum::<usize>();
    assert_eq!(csv.lines().count(), lines);
    assert!(csv.starts_with("step,layer,matrix,"), "{csv}");
    assert!(csv.contains("hadamard-int4,false,X,"), "{csv}");

    let page = fs::read_to_string(folder.join("health.html")).unwrap();
    assert!(
        page.matches("<svg").count() >= 7,
        "loss, layers by step, five histograms"
    );
    for outside in ["http://", "https://", "<script", "@import", "src="] {
        let page = page.replace("http://www.w3.org/2000/svg", "");
        assert!(
            !page.contains(outside),
            "{outside} in a page without network"
        );
    }
}

#[test]
fn a_resumed_run_goes_on_with_its_reports() {
    let (data, folder) = (corpus(), tempfile::tempdir().unwrap());
    let [whole, parts] = ["whole", "parts"].map(|it| folder.path().join(it));
    let recipe = ["--recipe", "fallback-int8", "--health", "1"];
    succeeded(&small_run(data.path(), &whole, &recipe));
    let stop = [&recipe[..], &["--stop-after", "4"]].concat();
    succeeded(&small_run(data.path(), &parts, &stop));
    let reports = |out: &Path| lines(&out.join("fallback-int8/health.jsonl"));
    assert_eq!(reports(&parts).len(), 4);
    succeeded(&pretrain(&["--resume", path(&parts), "--health", "1"]));
    assert_eq!(reports(&parts), reports(&whole));

    fs::write(parts.join("fallback-int8/health.jsonl"), "{\n").unwrap();
    let again = pretrain(&["--resume", path(&parts), "--steps", "7", "--health"]);
    fails(&again, "health.jsonl is damaged; remove it");
}

#[test]
fn a_model_that_is_not_quantized_can_ask_what_if() {
    let (data, folder) = (corpus(), tempfile::tempdir().unwrap());
    let flags = [
        "--recipe",
        "mixed-precision",
        "--health",
        "--what-if",
        "nvfp4",
    ];
    let printed = succeeded(&small_run(data.path(), folder.path(), &flags));
    assert!(printed.contains("no layer is quantized"), "{printed}");
    let reports = lines(&folder.path().join("mixed-precision/health.jsonl"));
    assert_eq!(reports.len(), 6, "a tenth of six steps is every step");
    assert!(reports[0]["matrices"][0]["casts"][0]["recipe"] == "nvfp4");
    fails(&pretrain(&["--what-if", "nvfp4"]), "--health");
    fails(&pretrain(&["--health", "0"]), "must be at least 1");
}
