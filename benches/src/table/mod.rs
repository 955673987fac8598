//! Markdown tables of result files. What a file holds shows in its fields.

mod optimizers;
mod runs;
mod speed;
mod states;

use anyhow::{Context, Result};
use serde_json::Value;

/// The table of a result file, and a line on what it was measured with.
///
/// | content | table |
/// | --- | --- |
/// | runs of `pretrain` | by recipe, or by recipe and optimizer where not all are FP32 AdamW |
/// | `qt-bench optimizer` | by optimizer |
/// | `states` | errors by the formats of both moments, beside those of the paper |
///
/// # Errors
///
/// It is none of these, or a field is missing, or rows differ in more than they may.
pub fn of(json: &str) -> Result<String> {
    let value: Value = serde_json::from_str(json).context("not JSON")?;
    if value.get("pairs").is_some() {
        return states::table(&serde_json::from_value(value)?);
    }
    let rows = value.as_array().context("not an array of results")?;
    let first = rows.first().context("no results")?;
    if first.get("median_ms").is_some() {
        speed::table(&serde_json::from_value::<Vec<_>>(value)?)
    } else if rows
        .iter()
        .any(|run| optimizers::of(run) != optimizers::BASELINE)
    {
        optimizers::table(rows)
    } else {
        runs::table(rows)
    }
}

/// A whole number with commas: `20,480,000`.
fn grouped(number: f64) -> String {
    let digits = format!("{number:.0}");
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

fn mebibytes(bytes: f64) -> String {
    const MIB: f64 = (1u64 << 20) as f64;
    format!("{:.1} MiB", bytes / MIB)
}

/// A change in percent: `+1.25%`.
fn change(value: f64, baseline: f64) -> String {
    format!("{:+.2}%", 100.0 * (value / baseline - 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_files_are_errors() {
        for json in [
            "",
            "{}",
            "[]",
            "[1]",
            "[{}]",
            "{\"pairs\": 1}",
            "[{\"median_ms\": 1}]",
        ] {
            assert!(of(json).is_err(), "{json}");
        }
    }

    #[test]
    fn thousands_are_grouped() {
        assert_eq!(grouped(999.4), "999");
        assert_eq!(grouped(1000.0), "1,000");
        assert_eq!(grouped(20_480_000.0), "20,480,000");
    }
}
