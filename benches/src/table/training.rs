//! The measurements of `qt-bench pretrain`.

use std::fmt::Write;

use anyhow::{Result, ensure};

use super::{conditions, grouped, ratio, spread};
use crate::results::{Peer, Run, Subject, TrainingSpeed};

/// One line for each subject, and one on the device.
pub(super) fn table(run: &Run, peer: Option<&Peer>, rows: &[TrainingSpeed]) -> Result<String> {
    ensure!(!rows.is_empty(), "no results");
    let mut out = String::from(
        "| preset | parameters | batch | | step (10% to 90%) | tokens/s | against Burn |\n\
         | --- | ---: | ---: | --- | ---: | ---: | ---: |\n",
    );
    for row in rows {
        let burn = rows
            .iter()
            .find(|other| other.subject == Subject::Burn && other.model == row.model)
            .filter(|_| row.subject != Subject::Burn);
        writeln!(
            out,
            "| `{}` | {} | {} x {} | {} | {} | {} | {} |",
            row.model,
            grouped(row.parameters as f64),
            row.batch,
            row.sequence,
            row.subject.name(),
            spread(row.step),
            grouped(row.tokens_per_s),
            ratio(burn.map(|burn| row.tokens_per_s / burn.tokens_per_s)),
        )?;
    }
    write!(
        out,
        "\nForward pass, backward pass and AdamW, steps following each other without waiting. Burn keeps parameters and moments in \
         BF16, the recipes in FP32. {}",
        conditions(run, peer),
    )?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{results::Spread, table::tests::run};

    #[test]
    fn tokens_are_compared_with_those_of_burn() {
        let row = |subject, ms: f64| TrainingSpeed {
            subject,
            model: String::from("medium"),
            parameters: 123_456_789,
            batch: 16,
            sequence: 1024,
            step: Spread {
                median_ms: ms,
                p10_ms: ms - 1.0,
                p90_ms: ms + 1.0,
            },
            tokens_per_s: 16_384_000.0 / ms,
        };
        let rows = [
            row(Subject::Burn, 300.0),
            row(Subject::recipe("fallback-int8"), 150.0),
        ];
        let table = table(&run(), None, &rows).unwrap();
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(
            lines[2],
            "| `medium` | 123,456,789 | 16 x 1024 | Burn BF16 | 300.000 ms (299.000 to 301.000) | 54,613 | - |"
        );
        assert!(lines[3].ends_with("| 109,227 | 2.00x |"), "{}", lines[3]);
        assert!(super::table(&run(), None, &[]).is_err());
    }
}
