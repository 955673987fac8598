//! The measurements of `qt-bench pretrain`.

use std::fmt::Write;

use anyhow::{Result, ensure};
use clap::ValueEnum;
use examples::args::{Checkpointing, Optimizer};

use super::{conditions, grouped, mebibytes, ratio, spread};
use crate::results::{Peer, Run, Subject, TrainingSpeed};

/// One line for each subject, and one on the device.
pub(super) fn table(run: &Run, peer: Option<&Peer>, rows: &[TrainingSpeed]) -> Result<String> {
    ensure!(!rows.is_empty(), "no results");
    let mut out = String::from(
        "| preset | parameters | batch | | step (10% to 90%) | tokens/s | against Burn | against PyTorch compiled | held | \
         taken |\n\
         | --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n",
    );
    for row in rows {
        let against = |subject: Subject| {
            let same = |other: &&TrainingSpeed| {
                other.subject == subject
                    && other.checkpointing == Checkpointing::None
                    && other.model == row.model
                    && [other.batch, other.sequence] == [row.batch, row.sequence]
            };
            let other = rows.iter().find(same).filter(|other| *other != row);
            ratio(other.map(|other| row.tokens_per_s / other.tokens_per_s))
        };
        let memory =
            |bytes: Option<u64>| bytes.map_or(String::from("-"), |it| mebibytes(it as f64));
        writeln!(
            out,
            "| `{}` | {} | {} x {} | {} | {} | {} | {} | {} | {} | {} |",
            row.model,
            grouped(row.parameters as f64),
            row.batch,
            row.sequence,
            name(row),
            spread(row.step),
            grouped(row.tokens_per_s),
            against(Subject::Burn),
            against(Subject::TorchCompiled),
            memory(row.activation_bytes),
            memory(row.peak_bytes),
        )?;
    }
    write!(
        out,
        "\nForward pass, backward pass and AdamW, steps following each other without waiting. Burn keeps parameters and moments in \
         BF16, the recipes and PyTorch, which casts by itself, in FP32, moments that are named excepted. Held: what waits between the passes. Taken: what the \
         program had taken from the device after these steps, free bytes of its pools among them. {}",
        conditions(run, peer),
    )?;
    Ok(out)
}

/// Whose step it is; how its activations wait; its moments, where they are not FP32; and what of the model runs again.
fn name(row: &TrainingSpeed) -> String {
    let mut name = row.subject.name_with(row.contexts);
    if let Some(moments) = row.moments.filter(|it| *it != Optimizer::Adamw) {
        let format = moments.to_possible_value().expect("no format is hidden");
        name += &format!(", {}", format.get_name());
    }
    match row.checkpointing {
        Checkpointing::None => name,
        Checkpointing::Layers => name + ", layers run again",
    }
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
            contexts: None,
            checkpointing: Checkpointing::None,
            moments: None,
            activation_bytes: Some(3 << 20),
            peak_bytes: None,
        };
        let rows = [
            row(Subject::Burn, 300.0),
            row(Subject::recipe("fallback-int8"), 150.0),
            row(Subject::TorchCompiled, 100.0),
        ];
        let table = table(&run(), None, &rows).unwrap();
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(
            lines[2],
            "| `medium` | 123,456,789 | 16 x 1024 | Burn BF16 | 300.000 ms (299.000 to 301.000) | 54,613 | - | 0.33x | 3.0 MiB | - |"
        );
        assert!(
            lines[3].ends_with("| 109,227 | 2.00x | 0.67x | 3.0 MiB | - |"),
            "{}",
            lines[3]
        );
        assert!(super::table(&run(), None, &[]).is_err());
    }
}
