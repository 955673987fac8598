//! Several seeds of every recipe.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use super::*;

/// Ends a program as Ctrl-C does.
#[cfg(unix)]
fn interrupt(id: u32) {
    let mut kill = Command::new("kill");
    let status = kill.args(["-INT", &id.to_string()]).status();
    assert!(status.unwrap().success());
}

/// The difference of the second recipe to the first over two seeds, as the program prints it: mean and 95% interval.
fn difference(runs: &[Value]) -> String {
    let loss = |run: usize| runs[run]["val_loss"].as_f64().unwrap();
    let differences = [loss(1) / loss(0) - 1.0, loss(3) / loss(2) - 1.0];
    let mean = (differences[0] + differences[1]) / 2.0;
    // The 97.5% point of Student's t with one degree of freedom, times the standard error.
    let error = 12.706_204_7 * (differences[0] - differences[1]).abs() / 2.0;
    let [mean, low, high] = [mean, mean - error, mean + error].map(|it| 100.0 * it);
    format!("{mean:+.2}% {low:+.2} to {high:+.2}%")
}

/// The last line, with a single space between columns.
fn last_line(output: &str) -> String {
    let words: Vec<_> = output.lines().last().unwrap().split_whitespace().collect();
    words.join(" ")
}

/// Two recipes with two seeds: each run is the one that its seed gives alone. The set that is interrupted ends as the
/// one that is left alone, and what is finished is not trained again.
#[test]
#[cfg(unix)]
fn an_interrupted_set_goes_on() {
    let (data, folder) = (corpus(), tempfile::tempdir().unwrap());
    let [whole, parts, alone] = ["whole", "parts", "alone"].map(|it| folder.path().join(it));
    let results = [&whole, &parts, &alone].map(|it| it.with_extension("json"));
    let set = [
        "--recipe",
        "block-int8,mixed-precision",
        "--seeds",
        "2",
        "--seed",
        "5",
    ];
    let flags = [&set[..], &["--json", path(&results[0])]].concat();
    let output = succeeded(&run_of("2", data.path(), &whole, &flags));
    assert!(
        output.contains("run 4 of 4, mixed-precision seed 6: 9"),
        "{output}"
    );
    let text = fs::read_to_string(&results[0]).unwrap();
    assert_eq!(text.lines().count(), 6, "a run a line: {text}");
    let runs = json(&results[0]);
    let expected = [
        ("block-int8", 5),
        ("mixed-precision", 5),
        ("block-int8", 6),
        ("mixed-precision", 6),
    ];
    assert_eq!(runs.len(), 4);
    for (run, (recipe, seed)) in runs.iter().zip(expected) {
        assert_eq!(
            (&run["recipe"], &run["seed"]),
            (&recipe.into(), &seed.into())
        );
        assert!(run["forked_from"].is_null());
    }
    assert_ne!(runs[0]["val_loss"], runs[2]["val_loss"]);
    let loss =
        (runs[1]["val_loss"].as_f64().unwrap() + runs[3]["val_loss"].as_f64().unwrap()) / 2.0;
    let summary = format!("mixed-precision 2 {loss:.4} {}", difference(&runs));
    assert_eq!(last_line(&output), summary);

    let flags = ["--recipe", "mixed-precision", "--seed", "6"];
    let flags = [&flags[..], &["--json", path(&results[2])]].concat();
    let output = succeeded(&run_of("2", data.path(), &alone, &flags));
    assert!(!output.contains("interval"), "nothing to compare: {output}");
    assert_same(&json(&results[2])[0], &runs[3]);

    // Interrupted in the second run.
    let folders = [
        "--data",
        path(data.path()),
        "--out",
        path(&parts),
        "--steps",
        "2",
    ];
    let mut running = program(&[&folders, &SMALL[..], &set[..]].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let lines = BufReader::new(running.stdout.take().unwrap()).lines();
    let mut output = String::new();
    for line in lines {
        let line = line.unwrap();
        if line.contains("mixed-precision seed 5: 9") {
            interrupt(running.id());
        }
        output += &(line + "\n");
    }
    assert_eq!(running.wait().unwrap().code(), Some(130), "{output}");
    assert!(
        output.contains("mixed-precision seed 5: stopped after step"),
        "{output}"
    );
    assert!(output.contains("--resume"), "{output}");
    assert!(!output.contains("run 3 of 4"), "{output}");

    let resume = ["--resume", path(&parts)];
    let fewer = pretrain(&[&resume[..], &["--seeds", "1"]].concat());
    fails(&fewer, "can only add seeds");
    let flags = [&resume[..], &["--json", path(&results[1])]].concat();
    let output = succeeded(&pretrain(&flags));
    assert!(
        output.contains("block-int8 seed 5: finished before"),
        "{output}"
    );
    let output = succeeded(&pretrain(&flags));
    assert_eq!(output.matches("finished before").count(), 4, "{output}");
    assert_eq!(last_line(&output), summary);
    let resumed = json(&results[1]);
    assert_eq!(resumed.len(), 4);
    for (resumed, run) in resumed.iter().zip(&runs) {
        assert_same(resumed, run);
    }

    // Another seed joins the set.
    let more = ["--seeds", "3", "--recipe", "mixed-precision"];
    let output = succeeded(&pretrain(&[&flags[..], &more].concat()));
    assert_eq!(output.matches("finished before").count(), 2, "{output}");
    let more = json(&results[1]);
    assert_eq!(more[..2], [resumed[1].clone(), resumed[3].clone()]);
    assert_eq!((more.len(), &more[2]["seed"]), (3, &7.into()));

    // Results are checked as checkpoints are.
    let report = parts.join("mixed-precision-seed-6/report.json");
    let text = fs::read_to_string(&report).unwrap();
    let at = text.find("val_loss").unwrap() + 12;
    let digit = if text.as_bytes()[at] == b'3' {
        "4"
    } else {
        "3"
    };
    fs::write(&report, [&text[..at], digit, &text[at + 1..]].concat()).unwrap();
    fails(&pretrain(&resume), "report.json is damaged");

    // A new set in the folder of an old one takes nothing of it.
    let new = [
        "--recipe",
        "mixed-precision",
        "--seed",
        "5",
        "--lr",
        "0.002",
    ];
    let output = succeeded(&run_of("1", data.path(), &whole, &new));
    assert!(!output.contains("finished before"), "{output}");
    let resumed = pretrain(&["--resume", path(&whole), "--seeds", "2"]);
    fails(&resumed, "with lr 0.003 instead of 0.002");
}
