//! INT4 after Hadamard transforms.

use std::fmt::Write;

use anyhow::{Context, Result, ensure};

use super::percent;
use crate::errors::hadamard::{HadamardError, Matrices};

/// Sizes of transforms, `k` from 0 to 7.
const ORDERS: usize = 8;

/// The name of matrices: `outliers of 16`.
pub(crate) fn name(matrices: Matrices) -> String {
    match matrices {
        Matrices::Planted(1.0) => String::from("no outliers"),
        Matrices::Planted(factor) => format!("outliers of {factor}"),
        Matrices::Step(kind) => String::from(kind.name()),
    }
}

/// Errors without a transform, and with transforms as parts of it, by the best step size and by that of a cold start.
pub(super) fn table(errors: &[HadamardError]) -> Result<String> {
    let mut out = String::from(
        "Errors of INT4 with one step size, as parts of the norm of the matrix at k = 0, and as parts of that error \
         after transforms of 2^k. With the step size that has the smallest error:\n\n",
    );
    section(&mut out, errors, |it| &it.best)?;
    out.push_str("\nWith the step size of a cold start, 2 mean|XH| / sqrt(7):\n\n");
    section(&mut out, errors, |it| &it.cold)?;
    Ok(out)
}

fn section(
    out: &mut String,
    errors: &[HadamardError],
    of: impl Fn(&HadamardError) -> &Vec<f64>,
) -> Result<()> {
    let orders: Vec<String> = (1..ORDERS).map(|k| k.to_string()).collect();
    writeln!(out, "| matrices | k = 0 | {} |", orders.join(" | "))?;
    writeln!(out, "| --- |{}", " ---: |".repeat(ORDERS))?;
    for error in errors {
        let by_order = of(error);
        ensure!(by_order.len() == ORDERS, "not one error for each k");
        let first = by_order.first().context("no error at k = 0")?;
        write!(out, "| {} | {} |", name(error.matrices), percent(*first))?;
        for error in &by_order[1..] {
            write!(out, " {:.2} |", error / first)?;
        }
        out.push('\n');
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        errors::{ErrorRows, capture::Kind},
        table::errors::tests::table_of,
    };

    #[test]
    fn errors_are_parts_of_that_without_a_transform() {
        let error = |matrices| HadamardError {
            matrices,
            best: vec![0.4, 0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.05],
            cold: vec![0.8; ORDERS],
        };
        let rows = vec![
            error(Matrices::Planted(1.0)),
            error(Matrices::Planted(16.0)),
            error(Matrices::Step(Kind::Product)),
        ];
        let text = table_of(ErrorRows::Hadamard(rows.clone())).unwrap();
        for line in [
            "| no outliers | 40% | 0.75 | 0.50 | 0.25 | 0.25 | 0.25 | 0.25 | 0.12 |",
            "| outliers of 16 | 80% | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 |",
            "| SwiGLU's outputs | 40% | 0.75 | 0.50 | 0.25 | 0.25 | 0.25 | 0.25 | 0.12 |",
        ] {
            assert!(text.lines().any(|it| it == line), "{line}\n{text}");
        }
        let mut short = rows;
        short[0].best.pop();
        assert!(table_of(ErrorRows::Hadamard(short)).is_err());
    }
}
