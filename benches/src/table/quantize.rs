//! The measurements of `qt-bench quantize`.

use std::fmt::Write;

use anyhow::{Result, ensure};

use super::{conditions, spread};
use crate::results::{Peer, QuantizeSpeed, Run, tb_per_s};

/// One line for each tensor, and one on the device.
pub(super) fn table(run: &Run, peer: Option<&Peer>, rows: &[QuantizeSpeed]) -> Result<String> {
    let first = rows.first();
    ensure!(first.is_some(), "no results");
    let mut out = String::from(
        "| tensor | input | time (10% to 90%) | bytes an element | TB/s | of a copy | of a copy as large |\n\
         | --- | --- | ---: | ---: | ---: | ---: | ---: |\n",
    );
    for row in rows {
        let rate = row.tb_per_s();
        writeln!(
            out,
            "| {} | {} {} x {} | {} | {:.2} | {rate:.2} | {:.0}% | {:.0}% |",
            row.operand.name(),
            row.input,
            row.rows,
            row.cols,
            spread(row.time),
            row.bytes as f64 / (row.rows * row.cols) as f64,
            100.0 * rate / row.copy_tb_per_s,
            100.0 * rate / tb_per_s(row.bytes, row.copy.median_ms),
        )?;
    }
    if let Some(row) = first {
        let torch = row
            .torch_copy_tb_per_s
            .map_or(String::new(), |rate| format!(" (PyTorch's {rate:.2} TB/s)"));
        writeln!(
            out,
            "\nBlocks of 128 x 128, {:.0}% of those of X with a residual. Bytes are those that must move: the input \
             once, each output once. A copy moves {:.2} TB/s, read and written bytes counted{}; one as large moves as \
             many bytes, and may lie in the cache as the input does. {}",
            100.0 * row.fallback_rate,
            row.copy_tb_per_s,
            torch,
            conditions(run, peer).trim_end(),
        )?;
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use crate::{
        results::{Operand, Results, Rows, Spread},
        table::{of, tests::run},
    };

    use super::*;

    #[test]
    fn rates_are_shares_of_both_copies() {
        let results = Results {
            run: run(),
            peer: None,
            rows: Rows::Quantize(vec![QuantizeSpeed {
                operand: Operand::Dy,
                input: String::from("BF16"),
                rows: 1000,
                cols: 1000,
                fallback_rate: 0.2,
                bytes: 4_000_000,
                time: Spread::of(vec![0.002]),
                copy: Spread::of(vec![0.001]),
                copy_tb_per_s: 4.0,
                torch_copy_tb_per_s: Some(3.5),
            }]),
        };
        let table = of(&serde_json::to_string(&results).unwrap()).unwrap();
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(
            lines[2],
            "| dY, both layouts | BF16 1000 x 1000 | 0.002 ms (0.002 to 0.002) | 4.00 | 2.00 | 50% | 50% |"
        );
        assert!(lines[4].contains("20% of those of X") && lines[4].contains("4.00 TB/s"));
        assert!(lines[4].contains("counted (PyTorch's 3.50 TB/s);"));
        assert!(lines[4].ends_with('.') && lines[4].contains("NVIDIA H200"));
    }

    #[test]
    fn no_lines_are_an_error() {
        let results = Results {
            run: run(),
            peer: None,
            rows: Rows::Quantize(Vec::new()),
        };
        assert!(of(&serde_json::to_string(&results).unwrap()).is_err());
    }
}
