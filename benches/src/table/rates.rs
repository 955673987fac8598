//! Columns on the fallback rates of layers: how many lie in the range that the thresholds follow.

use anyhow::{Context, Result};
use examples::statistics::Mean;
use serde_json::Value;

/// The range that `pretrain` trains with.
const RANGE: std::ops::RangeInclusive<f64> = 0.1..=0.3;

/// The columns' names.
pub(super) const HEADER: &str = " layers in range at the end | steps in range, mean of layers |";
/// The line under them.
pub(super) const RULE: &str = " ---: | ---: |";

/// True if the rates of a run were read as it trained.
pub(super) fn were_read(run: &Value) -> bool {
    run["rate_readings"].as_u64().is_some_and(|it| it > 0)
}

/// The cells of several runs: layers of all of them, and the mean over these of the share of steps.
pub(super) fn cells(runs: &[&Value]) -> Result<String> {
    let read: Vec<&Value> = runs.iter().copied().filter(|run| were_read(run)).collect();
    let (rates, shares) = (
        by_layer(&read, "fallback_rates")?,
        by_layer(&read, "rates_in_range")?,
    );
    Ok(match Mean::of(&shares) {
        Some(share) => {
            let inside = rates.iter().filter(|it| RANGE.contains(*it));
            let (inside, all) = (inside.count(), rates.len());
            format!(" {inside} of {all} | {:.0}% |", 100.0 * share.value)
        }
        None => String::from(" - | - |"),
    })
}

/// The values of a field that has one for each layer.
fn by_layer(runs: &[&Value], field: &str) -> Result<Vec<f64>> {
    let of_run = |run: &&Value| -> Result<Vec<f64>> {
        let layers = run[field].as_object();
        let layers = layers.with_context(|| format!("no `{field}`"))?;
        let values = layers.values().map(|value| {
            let value = value.as_f64();
            value.with_context(|| format!("`{field}` holds what is no number"))
        });
        values.collect()
    };
    let all: Result<Vec<Vec<f64>>> = runs.iter().map(of_run).collect();
    Ok(all?.concat())
}
