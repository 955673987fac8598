//! The measurements of `qt-bench optimizer`, by optimizer.

use std::fmt::Write;

use anyhow::{Result, ensure};

use super::grouped;
use crate::results::OptimizerSpeed;

/// One line for each optimizer, and one on the device.
pub(super) fn table(rows: &[OptimizerSpeed]) -> Result<String> {
    let mut out = String::from(
        "| optimizer | states: m, v | a step (10% to 90%) | with the search | bytes a parameter | TB/s | of a copy \
         | against PyTorch | against Burn |\n\
         | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n",
    );
    for row in rows {
        ensure!(
            row.device == rows[0].device && row.copy_tb_per_s == rows[0].copy_tb_per_s,
            "the results are of several runs: they belong in files of their own"
        );
        let spread = match (row.p10_ms, row.p90_ms) {
            (Some(low), Some(high)) => format!(" ({low:.3} to {high:.3})"),
            _ => String::new(),
        };
        let optional = |value: Option<f64>, suffix: &str, digits: usize| {
            value.map_or(String::from("-"), |it| format!("{it:.digits$}{suffix}"))
        };
        writeln!(
            out,
            "| {} | {}, {} | {:.3} ms{spread} | {} | {:.2} | {:.2} | {:.0}% | {} | {:.2}x |",
            row.name,
            row.states[0],
            row.states[1],
            row.median_ms,
            optional(row.with_search_ms, " ms", 3),
            row.bytes as f64 / row.n as f64,
            row.tb_per_s,
            100.0 * row.of_copy,
            optional(row.versus_torch_fused, "x", 2),
            row.versus_burn,
        )?;
    }
    let first = &rows[0];
    writeln!(
        out,
        "\n{}, {} parameters in one tensor; a copy moves {:.2} TB/s, read and written bytes counted. Speed-ups are by time \
         for a parameter.",
        first.device,
        grouped(first.n as f64),
        first.copy_tb_per_s,
    )?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::of;

    fn row() -> OptimizerSpeed {
        OptimizerSpeed {
            name: String::from("fp8-adamw"),
            states: [String::from("E4M3 + expand"), String::from("E4M3 + expand")],
            n: 1 << 28,
            median_ms: 1.25,
            p10_ms: Some(1.2),
            p90_ms: Some(1.3),
            bytes: 16 << 28,
            tb_per_s: 3.44,
            of_copy: 0.81,
            with_search_ms: Some(1.5),
            versus_torch_fused: Some(1.7),
            versus_burn: 9.5,
            device: String::from("NVIDIA H200"),
            copy_tb_per_s: 4.25,
        }
    }

    #[test]
    fn a_line_for_each_optimizer() {
        let other = OptimizerSpeed {
            p10_ms: None,
            p90_ms: None,
            with_search_ms: None,
            versus_torch_fused: None,
            ..row()
        };
        let table = of(&serde_json::to_string(&[row(), other]).unwrap()).unwrap();
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(
            lines[2],
            "| fp8-adamw | E4M3 + expand, E4M3 + expand | 1.250 ms (1.200 to 1.300) | 1.500 ms | 16.00 | 3.44 | 81% \
             | 1.70x | 9.50x |"
        );
        assert_eq!(
            lines[3],
            "| fp8-adamw | E4M3 + expand, E4M3 + expand | 1.250 ms | - | 16.00 | 3.44 | 81% | - | 9.50x |"
        );
        assert!(lines[5].starts_with(
            "NVIDIA H200, 268,435,456 parameters in one tensor; a copy moves 4.25 TB/s"
        ));
    }

    #[test]
    fn several_runs_are_an_error() {
        let other = OptimizerSpeed {
            copy_tb_per_s: 4.2,
            ..row()
        };
        assert!(of(&serde_json::to_string(&[row(), other]).unwrap()).is_err());
    }
}
