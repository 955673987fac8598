//! INT8 by granularity.

use std::fmt::Write;

use anyhow::{Context, Result};

use super::percent;
use crate::errors::{
    capture::Kind,
    granularity::{GRANULARITIES, MatrixError, name},
};

/// The errors of a kind of matrices.
pub(crate) fn of<'a>(
    errors: &'a [MatrixError],
    kind: Kind,
    numbers: &str,
    granularity: &str,
) -> Result<&'a MatrixError> {
    let mut all = errors.iter();
    all.find(|it| (it.kind, &*it.numbers, &*it.granularity) == (kind, numbers, granularity))
        .with_context(|| format!("no error of {kind:?} in {numbers} by {granularity}"))
}

/// A line for each kind of matrices.
pub(super) fn table(errors: &[MatrixError]) -> Result<String> {
    let columns = GRANULARITIES.map(name);
    let mut out = String::from(
        "Errors of INT8 to nearest, as parts of the norm of the matrix (in brackets mean magnitudes as parts of the \
         mean magnitude). Peak: the largest magnitude over the root mean square.\n\n",
    );
    writeln!(out, "| matrices | peak | {} |", columns.join(" | "))?;
    writeln!(out, "| --- | ---: |{}", " ---: |".repeat(columns.len()))?;
    for kind in Kind::ALL {
        let first = of(errors, kind, "INT8", &columns[0])?;
        write!(
            out,
            "| {} ({}) | {:.1} |",
            kind.name(),
            first.matrices,
            first.peak
        )?;
        for column in &columns {
            let error = of(errors, kind, "INT8", column)?;
            write!(
                out,
                " {} ({}) |",
                percent(error.error),
                percent(error.mean_error)
            )?;
        }
        out.push('\n');
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{errors::ErrorRows, table::errors::tests::table_of};

    #[test]
    fn kinds_are_lines_and_granularities_columns() {
        let mut rows = Vec::new();
        for kind in Kind::ALL {
            for (index, granularity) in GRANULARITIES.into_iter().enumerate() {
                rows.push(MatrixError {
                    kind,
                    matrices: 9,
                    numbers: String::from("INT8"),
                    granularity: name(granularity),
                    error: 0.01 * (index + 1) as f64,
                    mean_error: 0.001,
                    zeroed: 0.0,
                    peak: 12.34,
                });
            }
        }
        let text = table_of(ErrorRows::Granularity(rows.clone())).unwrap();
        assert_eq!(
            text.lines().nth(4).unwrap(),
            "| residual stream (9) | 12.3 | 1.0% (0.10%) | 2.0% (0.10%) | 3.0% (0.10%) | 4.0% (0.10%) | 5.0% (0.10%) | \
             6.0% (0.10%) | 7.0% (0.10%) |"
        );
        rows.pop();
        assert!(table_of(ErrorRows::Granularity(rows)).is_err());
    }
}
