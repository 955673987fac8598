//! How fallback thresholds follow fallback rates, and the readings of the rates.

use super::*;

/// The results of a run of `fallback-int8`.
fn results(out: &Path, args: &[&str]) -> Value {
    let file = out.with_extension("json");
    succeeded(&pretrain(&[args, &["--json", path(&file)]].concat()));
    json(&file).remove(0)
}

#[test]
fn a_run_goes_on_as_its_thresholds_moved() {
    let (data, folder) = (corpus(), tempfile::tempdir().unwrap());
    let steps = ["--data", path(data.path()), "--steps", "12"];
    let run = |out: &str, more: &[&str]| {
        let out = folder.path().join(out);
        let flags = ["--out", path(&out), "--recipe", "fallback-int8"];
        let all = [&steps, &SMALL[..], &flags, more].concat();
        match more.contains(&"--stop-after") {
            true => {
                succeeded(&pretrain(&all));
                Value::Null
            }
            false => results(&out, &all),
        }
    };
    let resume = |out: &str| {
        let out = folder.path().join(out);
        results(&out, &["--resume", path(&out)])
    };
    let settling = run("settling", &[]);
    let paper = ["--threshold", "paper"];
    let whole = run("paper", &paper);
    assert_eq!(settling["threshold"], "settling");
    assert_eq!(whole["threshold"], "paper");
    assert_ne!(settling["fallback_rates"], whole["fallback_rates"]);
    for run in [&settling, &whole] {
        assert_eq!(run["rate_readings"], 12);
        let shares = run["rates_in_range"].as_object().unwrap();
        let rates = run["fallback_rates"].as_object().unwrap();
        assert!(shares.keys().eq(rates.keys()) && !shares.is_empty());
        assert!(
            shares
                .values()
                .all(|it| (0.0..=1.0).contains(&it.as_f64().unwrap()))
        );
    }

    // A checkpoint as versions without another way left it goes on as the paper says.
    run("parts", &[&paper[..], &["--stop-after", "5"]].concat());
    copy(&folder.path().join("parts"), &folder.path().join("old"));
    let old = folder.path().join("old");
    damage::age(&old.join("pretrain.json"));
    damage::age(&old.join("fallback-int8/step-5/run.json"));
    for resumed in [resume("parts"), resume("old")] {
        assert_same(&whole, &resumed);
        for field in ["threshold", "rate_readings", "rates_in_range"] {
            assert_eq!(whole[field], resumed[field], "{field}");
        }
    }
    fails(&pretrain(&["--threshold", "maybe"]), "--threshold");
}
