//! The layout of result files.

use anyhow::{Context, Result};
use examples::{curve, rows};
use serde_json::Value;

/// A result file as programs write it today: a row a line, and loss curves [thinned](curve::thinned). Nothing else of it
/// changes.
///
/// # Errors
///
/// It is not JSON, or has a loss curve that is none.
pub fn tidy(json: &str) -> Result<String> {
    let mut value: Value = serde_json::from_str(json).context("not JSON")?;
    for run in value.as_array_mut().into_iter().flatten() {
        if let Some(curve) = run.get_mut("loss_curve") {
            *curve = thinned(curve).context("`loss_curve` is not of steps and losses")?;
        }
    }
    Ok(rows::to_string(&value)?)
}

fn thinned(curve: &Value) -> Option<Value> {
    let point = |point: &Value| {
        let (step, loss) = (point.get(0)?.as_u64()?, point.get(1)?);
        // The loss of a run that diverged is `null`.
        let loss = if loss.is_null() {
            f64::NAN
        } else {
            loss.as_f64()?
        };
        Some((step as usize, loss))
    };
    let points: Vec<_> = curve.as_array()?.iter().map(point).collect::<Option<_>>()?;
    serde_json::to_value(curve::thinned(&points)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_lines_with_thinned_curves() {
        let curve: Vec<(usize, f64)> = (1..=120).map(|step| (step, 0.1 * step as f64)).collect();
        let run = serde_json::json!({"recipe": "block-int8", "val_loss": 0.769_793_733_954_429_6, "a": null});
        let mut runs = [run.clone(), run.clone(), run];
        runs[0]["loss_curve"] = serde_json::to_value(&curve).unwrap();
        runs[1]["loss_curve"] = serde_json::json!([[1, 5.5], [2, null]]);
        let text = tidy(&serde_json::to_string_pretty(&runs).unwrap()).unwrap();
        assert_eq!(text.lines().count(), 5);
        assert_eq!(tidy(&text).unwrap(), text);

        let tidied: Vec<Value> = serde_json::from_str(&text).unwrap();
        assert_eq!(tidied[0]["loss_curve"].as_array().unwrap().len(), 60);
        assert_eq!(tidied[0]["loss_curve"][59][0], 120);
        assert_eq!(tidied[1..], runs[1..]);
        // The order of the fields stays.
        assert!(text.starts_with(
            "[\n  {\"recipe\": \"block-int8\", \"val_loss\": 0.7697937339544296, \"a\": null, "
        ));
    }

    #[test]
    fn other_files_keep_their_content() {
        let json = r#"{"run": {"seed": 1}, "bench": "gemm", "rows": [{"m": 1}, {"m": 2}]}"#;
        let text = tidy(json).unwrap();
        assert_eq!(text.lines().count(), 10);
        let [before, after] = [json, &text].map(|it| serde_json::from_str::<Value>(it).unwrap());
        assert_eq!(before, after);
        assert!(tidy("{").is_err());
        assert!(tidy(r#"[{"loss_curve": [[1]]}]"#).is_err());
    }
}
