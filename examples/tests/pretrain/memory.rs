//! `--memory`: what is printed, and the files.

use super::*;

#[test]
fn memory_is_printed_and_written() {
    let (data, folder) = (corpus(), tempfile::tempdir().unwrap());
    let out = folder.path().join("out");
    let results = folder.path().join("runs.json");
    let flags = [
        &["--data", path(data.path()), "--out", path(&out)][..],
        &["--recipe", "jetfire-int8", "--memory"],
        // So many tokens that what is counted beside their values is little.
        &["--steps", "2", "--batch", "4", "--sequence", "32"],
        &["--validation", "4", "--json", path(&results)],
    ];
    let printed = succeeded(&pretrain(&flags.concat()));
    for text in [
        "jetfire-int8, tiny preset: what waits for the backward pass",
        "layers.0.mlp.down",
        "flow int8",
        "linear int8 operand",
        "Copies of weights",
        "where the flow broke",
    ] {
        assert!(printed.contains(text), "no {text:?} in {printed}");
    }

    let folder = out.join("jetfire-int8");
    let rows = fs::read_to_string(folder.join("memory.jsonl")).unwrap();
    let rows: Vec<Value> = rows
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let bytes = |row: &Value| row["bytes"].as_u64().unwrap();
    assert!(rows.is_sorted_by_key(|row| std::cmp::Reverse(bytes(row))));
    // Nodes of autodiff, its tables, which double at times, and the tokens are what allocators count beside.
    let reported = rows.iter().map(bytes).sum::<u64>() as f64;
    let counted = json(&results)[0]["activation_bytes"].as_f64().unwrap();
    assert!(
        reported <= counted && reported > 0.75 * counted,
        "{reported} of {counted} bytes"
    );

    let csv = fs::read_to_string(folder.join("memory.csv")).unwrap();
    assert!(
        csv.starts_with("layer,operation,shape,format,values,elements,bytes,bf16_bytes\n"),
        "{csv}"
    );
    assert_eq!(csv.lines().count(), 1 + rows.len());
    let picture = fs::read_to_string(folder.join("memory.svg")).unwrap();
    for text in ["<svg", "layers.3.attention.q", "int8 operand", "BF16"] {
        assert!(picture.contains(text), "no {text:?} in {picture}");
    }
}
