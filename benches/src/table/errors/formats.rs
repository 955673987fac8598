//! Formats beside each other.

use std::fmt::Write;

use anyhow::Result;

use super::{granularity::of, percent};
use crate::errors::{
    capture::Kind,
    granularity::{COARSE_TO_FINE, FORMATS, MatrixError, name},
    numbers::Numbers,
};

/// A line for each kind of matrices: errors, then the shares of values that become zero.
pub(super) fn table(errors: &[MatrixError]) -> Result<String> {
    let mut out = String::from("Errors to nearest, as parts of the norm of the matrix:\n\n");
    section(&mut out, errors, |it| it.error)?;
    out.push_str("\nValues other than zero of which zero becomes:\n\n");
    section(&mut out, errors, |it| it.zeroed)?;
    Ok(out)
}

fn section(
    out: &mut String,
    errors: &[MatrixError],
    figure: impl Fn(&MatrixError) -> f64,
) -> Result<()> {
    let columns = COARSE_TO_FINE.iter().flat_map(|&granularity| {
        let numbers = FORMATS.iter().map(|&number| Numbers::Format(number).name());
        numbers.map(move |numbers| (numbers, name(granularity)))
    });
    let columns: Vec<(String, String)> = columns.collect();
    let names = columns
        .iter()
        .map(|(numbers, granularity)| format!("{numbers} {granularity}"));
    let names: Vec<String> = names.collect();
    writeln!(out, "| matrices | {} |", names.join(" | "))?;
    writeln!(out, "| --- |{}", " ---: |".repeat(names.len()))?;
    for kind in Kind::ALL {
        write!(out, "| {} |", kind.name())?;
        for (numbers, granularity) in &columns {
            let error = of(errors, kind, numbers, granularity)?;
            write!(out, " {} |", percent(figure(error)))?;
        }
        out.push('\n');
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{errors::ErrorRows, table::errors::tests::table_of};

    #[test]
    fn errors_stand_above_zeros() {
        let mut rows = Vec::new();
        for kind in Kind::ALL {
            for number in FORMATS {
                for granularity in COARSE_TO_FINE {
                    let numbers = Numbers::Format(number).name();
                    let is_int8 = numbers == "INT8";
                    rows.push(MatrixError {
                        kind,
                        matrices: 9,
                        granularity: name(granularity),
                        error: if is_int8 { 0.005 } else { 0.025 },
                        mean_error: 0.001,
                        zeroed: if is_int8 { 0.4 } else { 0.0 },
                        peak: 12.34,
                        numbers,
                    });
                }
            }
        }
        let text = table_of(ErrorRows::Formats(rows)).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[2],
            "| matrices | INT8 tensor | E4M3 tensor | E5M2 tensor | INT8 128x128 | E4M3 128x128 | E5M2 128x128 | INT8 \
             1x128 | E4M3 1x128 | E5M2 1x128 |"
        );
        assert_eq!(
            lines[4],
            "| residual stream | 0.50% | 2.5% | 2.5% | 0.50% | 2.5% | 2.5% | 0.50% | 2.5% | 2.5% |"
        );
        let zeros = "| dY of the head | 40% | 0% | 0% | 40% | 0% | 0% | 40% | 0% | 0% |";
        assert!(lines.contains(&zeros), "{text}");
    }
}
