//! The findings of `errors`, beside the papers' figures.

mod contexts;
mod formats;
pub(crate) mod granularity;
pub(crate) mod groups;
pub(crate) mod hadamard;

use anyhow::Result;

use super::grouped;
use crate::errors::{ErrorResults, ErrorRows, Model};

/// The table of a sweep, and a line on the model.
pub(super) fn table(results: &ErrorResults) -> Result<String> {
    let table = match &results.rows {
        ErrorRows::Contexts(rows) => contexts::table(rows)?,
        ErrorRows::Groups(rows) => groups::table(rows)?,
        ErrorRows::Granularity(rows) => granularity::table(rows)?,
        ErrorRows::Formats(rows) => formats::table(rows)?,
        ErrorRows::Hadamard(rows) => hadamard::table(rows)?,
    };
    Ok(format!("{table}\n{}", about(&results.model)))
}

fn about(model: &Model) -> String {
    let [batch, sequence] = model.batch;
    format!(
        "A decoder of {} layers, width {}, {} parameters, after {} steps (seed {}); a batch of {batch} sequences \
         of {sequence} bytes, loss {:.3}. FP32 but for what is rounded.\n",
        model.layers,
        model.hidden,
        grouped(model.parameters as f64),
        grouped(model.steps as f64),
        model.seed,
        model.loss,
    )
}

/// A share in percent, with two digits: `0.083%`, `2.5%`, `31%`.
fn percent(share: f64) -> String {
    let percent = 100.0 * share;
    // `9.97` has as many digits as `10`, which it becomes.
    let exponent = format!("{percent:.1e}");
    let exponent = exponent.split_once('e').and_then(|it| it.1.parse().ok());
    let digits = match percent {
        0.0 => 0,
        _ => (1 - exponent.unwrap_or(0_i32)).clamp(0, 4) as usize,
    };
    format!("{percent:.digits$}%")
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::table::of;

    /// A result file with these rows, as a table.
    pub fn table_of(rows: ErrorRows) -> Result<String> {
        let model = Model {
            steps: 1500,
            seed: 1,
            parameters: 918_656,
            hidden: 128,
            layers: 4,
            batch: [8, 128],
            loss: 1.5,
        };
        of(&serde_json::to_string(&ErrorResults { model, rows })?)
    }

    #[test]
    fn shares_have_two_digits() {
        for (share, shown) in [
            (0.0, "0%"),
            (0.000_831, "0.083%"),
            (0.0249, "2.5%"),
            (0.0997, "10%"),
            (0.312, "31%"),
            (1.0, "100%"),
            (1e-9, "0.0000%"),
        ] {
            assert_eq!(percent(share), shown);
        }
    }

    #[test]
    fn the_model_stands_below_the_table() {
        let text = table_of(ErrorRows::Contexts(Vec::new())).unwrap();
        let last = text.lines().last().unwrap();
        assert_eq!(
            last,
            "A decoder of 4 layers, width 128, 918,656 parameters, after 1,500 steps (seed 1); a batch of 8 sequences \
             of 128 bytes, loss 1.500. FP32 but for what is rounded."
        );
    }
}
