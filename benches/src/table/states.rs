//! The findings of `states`, beside those of COAT.

use std::fmt::Write;

use anyhow::{Context, Result};

use super::grouped;
use crate::state_error::StateErrors;

const E4M3: &str = "E4M3";
const E4M3_EXPAND: &str = "E4M3 + expand";
const SECOND: [&str; 6] = [
    E4M3,
    E4M3_EXPAND,
    "E5M2",
    "E5M2 + expand",
    "DE8",
    "DE8 + expand",
];

/// The errors of a first moment's format with each second one, in COAT's unit.
type Line = (&'static str, &'static [f64]);

/// COAT's table 1.
const TABLE_1: [Line; 4] = [
    (E4M3, &[20.10, 18.08, 25.65, 18.16]),
    (E4M3_EXPAND, &[15.13, 12.31, 21.96, 12.43]),
    ("E5M2", &[37.02, 35.96, 40.30, 36.00]),
    ("E5M2 + expand", &[17.79, 15.48, 23.84, 15.57]),
];

/// COAT's table 9.
const TABLE_9: [Line; 3] = [
    (E4M3_EXPAND, &[15.13, 12.31, 21.96, 12.43, 14.01, 18.84]),
    ("DE8", &[12.11, 8.27, 20.02, 8.43, 10.54, 16.25]),
    ("DE8 + expand", &[11.57, 7.47, 19.69, 7.65, 9.91, 15.81]),
];

/// COAT's error of E4M3 for both moments.
const PAPER_UNIT: f64 = TABLE_1[0].1[0];

/// Both of COAT's tables, each error with COAT's in brackets, as a part of the error of E4M3 for both moments; the same
/// with plain rounding to the nearest; and a line on the states.
pub(super) fn table(errors: &StateErrors) -> Result<String> {
    let mut out =
        String::from("Errors as a part of that of E4M3 for both moments (in brackets COAT's):\n\n");
    section(&mut out, errors, |it| it.0)?;
    writeln!(
        out,
        "\nThe same where second moments round to the nearest number, also where that is zero:\n"
    )?;
    section(&mut out, errors, |it| it.1)?;

    let unit = errors.of(E4M3, E4M3)?;
    let expanded = errors.of(E4M3_EXPAND, E4M3_EXPAND)?;
    writeln!(
        out,
        "\nMoments of {} tensors with {} elements after {} steps, epsilon {:e}. The mean squared error of m / (sqrt(v) + \
         epsilon) with E4M3 for both is {:.3e}, to nearest {:.3e}; the mean square itself is {:.3e}. Expansion of both \
         divides the error by {:.2}, to nearest by {:.2} (COAT: {:.2}).",
        errors.tensors,
        grouped(errors.elements as f64),
        grouped(errors.steps as f64),
        errors.epsilon,
        unit.0,
        unit.1,
        errors.mean_square,
        unit.0 / expanded.0,
        unit.1 / expanded.1,
        PAPER_UNIT / TABLE_1[1].1[1],
    )?;
    Ok(out)
}

/// Both tables, of the errors that `of` takes.
fn section(out: &mut String, errors: &StateErrors, of: impl Fn((f64, f64)) -> f64) -> Result<()> {
    let unit = of(errors.of(E4M3, E4M3)?);
    for (index, lines) in [&TABLE_1[..], &TABLE_9[..]].into_iter().enumerate() {
        let columns = &SECOND[..lines[0].1.len()];
        if index > 0 {
            out.push('\n');
        }
        writeln!(out, "| m \\ v | {} |", columns.join(" | "))?;
        writeln!(out, "| --- |{}", " ---: |".repeat(columns.len()))?;
        for (first, paper) in lines {
            write!(out, "| {first} |")?;
            for (second, paper) in columns.iter().zip(*paper) {
                let error = of(errors.of(first, second)?) / unit;
                write!(out, " {} ({:.2}) |", part(error), paper / PAPER_UNIT)?;
            }
            out.push('\n');
        }
    }
    Ok(())
}

/// Two digits behind the point, or two in all where that says nothing.
fn part(x: f64) -> String {
    if (0.01..1000.0).contains(&x) {
        format!("{x:.2}")
    } else {
        format!("{x:.1e}")
    }
}

impl StateErrors {
    /// The library's error of a pair of formats, and that of plain rounding.
    fn of(&self, first: &str, second: &str) -> Result<(f64, f64)> {
        let pair = self
            .pairs
            .iter()
            .find(|pair| pair.first == first && pair.second == second)
            .with_context(|| format!("no error for {first} and {second}"))?;
        Ok((pair.mse, pair.mse_nearest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{state_error::PairError, table::of};

    /// COAT's own errors, in a unit of half the size.
    fn paper() -> StateErrors {
        let lines = TABLE_1.iter().chain(&TABLE_9);
        let pairs = lines.flat_map(|(first, errors)| {
            errors.iter().zip(SECOND).map(|(error, second)| PairError {
                first: String::from(*first),
                second: String::from(second),
                mse: 2.0 * error,
                mse_nearest: 1e6 * error,
            })
        });
        StateErrors {
            steps: 500,
            tensors: 3,
            elements: 123_456,
            epsilon: 1e-8,
            mean_square: 0.25,
            pairs: pairs.collect(),
        }
    }

    #[test]
    fn errors_stand_beside_those_of_the_paper() {
        let text = of(&serde_json::to_string(&paper()).unwrap()).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[2],
            "| m \\ v | E4M3 | E4M3 + expand | E5M2 | E5M2 + expand |"
        );
        assert_eq!(
            lines[4],
            "| E4M3 | 1.00 (1.00) | 0.90 (0.90) | 1.28 (1.28) | 0.90 (0.90) |"
        );
        let last = "| DE8 + expand | 0.58 (0.58) | 0.37 (0.37) | 0.98 (0.98) | 0.38 (0.38) | 0.49 (0.49) | 0.79 (0.79) |";
        assert_eq!(lines.iter().filter(|line| **line == last).count(), 2);
        let note = lines.last().unwrap();
        assert!(note.starts_with(
            "Moments of 3 tensors with 123,456 elements after 500 steps, epsilon 1e-8."
        ));
        assert!(note.ends_with("divides the error by 1.63, to nearest by 1.63 (COAT: 1.63)."));
    }

    #[test]
    fn a_missing_pair_is_an_error() {
        let mut errors = paper();
        errors.pairs.retain(|pair| pair.first != "E5M2");
        assert!(of(&serde_json::to_string(&errors).unwrap()).is_err());
    }
}
