//! The measurements of `qt-bench int4`.

use std::fmt::Write;

use anyhow::{Result, ensure};

use super::{conditions, spread};
use crate::results::{Peer, Run, StageSpeed};

/// One line for each stage, and their sum at each size.
pub(super) fn table(run: &Run, peer: Option<&Peer>, rows: &[StageSpeed]) -> Result<String> {
    ensure!(!rows.is_empty(), "no results");
    let mut out = String::from(
        "| tokens x features | stage | time (10% to 90%) | of all stages | TB/s | of a copy as large | TOP/s |\n\
         | --- | --- | ---: | ---: | ---: | ---: | ---: |\n",
    );
    let size = |row: &StageSpeed| (row.tokens, row.features);
    for of_size in rows.chunk_by(|a, b| size(a) == size(b)) {
        let all: f64 = of_size.iter().map(|row| row.time.median_ms).sum();
        for row in of_size {
            let of_copy = row
                .copy
                .map(|copy| format!("{:.0}%", 100.0 * copy.median_ms / row.time.median_ms));
            let or_none = |text: Option<String>| text.unwrap_or_else(|| String::from("-"));
            writeln!(
                out,
                "| {} x {} | {} | {} | {:.0}% | {} | {} | {} |",
                row.tokens,
                row.features,
                row.stage.name(),
                spread(row.time),
                100.0 * row.time.median_ms / all,
                or_none(row.tb_per_s().map(|rate| format!("{rate:.2}"))),
                or_none(of_copy),
                or_none(row.tops().map(|rate| format!("{rate:.0}"))),
            )?;
        }
        let (tokens, features) = size(&of_size[0]);
        writeln!(
            out,
            "| {tokens} x {features} | all | {all:.3} ms | 100% | - | - | - |"
        )?;
    }
    writeln!(
        out,
        "\nStages of `HadamardInt4`, each on its own; as many output features as inputs, X and dY in BF16, W in FP32. Bytes are \
         those that must move: each input once, each output once. TOP/s count 2 M N K operations, padding among them. {}",
        conditions(run, peer).trim_end(),
    )?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use crate::{
        results::{Results, Rows, Spread, Stage},
        table::{of, tests::run},
    };

    use super::*;

    #[test]
    fn a_stage_is_a_share_of_all_of_its_size() {
        let row = |stage, ms, bytes, operations| StageSpeed {
            stage,
            tokens: 8,
            features: 4,
            time: Spread::of(vec![ms]),
            bytes,
            copy: bytes.map(|_| Spread::of(vec![0.5 * ms])),
            operations,
        };
        let results = Results {
            run: run(),
            peer: None,
            rows: Rows::Int4(vec![
                row(Stage::QuantizeX, 1.0, Some(2_000_000_000), None),
                row(Stage::Forward, 3.0, None, Some(6_000_000_000_000)),
            ]),
        };
        let table = of(&serde_json::to_string(&results).unwrap()).unwrap();
        let lines: Vec<&str> = table.lines().collect();
        assert!(lines[2].ends_with("| 25% | 2.00 | 50% | - |"), "{table}");
        assert!(lines[3].ends_with("| 75% | - | - | 2000 |"), "{table}");
        assert_eq!(lines[4], "| 8 x 4 | all | 4.000 ms | 100% | - | - | - |");
        assert!(table.contains("NVIDIA H200"));
    }
}
