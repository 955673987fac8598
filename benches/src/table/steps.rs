//! The measurements of `qt-bench linear` and `qt-bench layer`.

use std::fmt::Write;

use anyhow::{Result, ensure};

use super::{conditions, grouped, mebibytes, ratio, spread};
use crate::results::{Peer, Run, Spread, StepSpeed, Subject};

/// One line for each size and subject, one for each part, and one on the device.
pub(super) fn table(run: &Run, peer: Option<&Peer>, rows: &[StepSpeed]) -> Result<String> {
    ensure!(!rows.is_empty(), "no results");
    let mut out = String::from(
        "| hidden | tokens | | forward | forward + backward (10% to 90%) | host | alone | held | fallback | error \
         | against Burn | against PyTorch |\n\
         | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n",
    );
    let sizes = sizes(rows);
    for size in &sizes {
        let compiled = of_size(rows, *size).any(|row| row.subject == Subject::TorchCompiled);
        let torch = if compiled {
            Subject::TorchCompiled
        } else {
            Subject::TorchEager
        };
        for row in of_size(rows, *size) {
            let optional = |value: Option<String>| value.unwrap_or_else(|| String::from("-"));
            let milliseconds = |time: Option<Spread>| {
                optional(time.map(|time| format!("{:.3} ms", time.median_ms)))
            };
            let percent = |part: Option<f64>, digits: usize| {
                optional(part.map(|part| format!("{:.digits$}%", 100.0 * part)))
            };
            let against = |subject: Subject| {
                let rival = of_size(rows, *size).find(|rival| rival.subject == subject);
                let rival = rival.filter(|_| row.subject != subject);
                ratio(rival.map(|rival| rival.both.median_ms / row.both.median_ms))
            };
            writeln!(
                out,
                "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
                features(*size),
                tokens(*size),
                row.subject.name_with(row.contexts),
                forward(row),
                spread(row.both),
                milliseconds(row.enqueue),
                milliseconds(row.alone),
                optional(row.activation_bytes.map(|bytes| mebibytes(bytes as f64))),
                percent(row.fallback_rate, 0),
                percent(row.error, 1),
                against(Subject::Burn),
                against(torch),
            )?;
        }
    }
    for size in &sizes {
        parts(&mut out, rows, *size)?;
    }
    let rival = match rows.iter().any(|row| row.subject == Subject::TorchCompiled) {
        true => "Against PyTorch compiled, where it is measured. ",
        false => "",
    };
    writeln!(
        out,
        "\nPasses follow each other without waiting, as in training; each has a new input and, as after an optimizer \
         step, quantizes its weights. Alone: both passes from an idle device until it is idle again; host: the part of \
         that until the last operation is handed over. Held: bytes in use after a forward pass and not before it. \
         Error: of outputs and gradients, root mean square over root mean square. {rival}{}",
        conditions(run, peer).trim_end(),
    )?;
    Ok(out)
}

/// What rows that are compared have in common.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Size {
    hidden: usize,
    outputs: usize,
    tokens: usize,
    sequence: Option<usize>,
}

impl Size {
    fn of(row: &StepSpeed) -> Self {
        Self {
            hidden: row.hidden,
            outputs: row.outputs.unwrap_or(row.hidden),
            tokens: row.tokens,
            sequence: row.sequence,
        }
    }
}

/// The features of the input, and of the output, where these are others.
fn features(size: Size) -> String {
    match size.outputs == size.hidden {
        true => size.hidden.to_string(),
        false => format!("{} x {}", size.hidden, size.outputs),
    }
}

/// The time of a forward pass; of a product of two sizes of features its rate too.
fn forward(row: &StepSpeed) -> String {
    let ms = row.forward.median_ms;
    let size = Size::of(row);
    if size.outputs == size.hidden {
        return format!("{ms:.3} ms");
    }
    let operations = 2.0
        * [size.tokens, size.hidden, size.outputs]
            .map(|it| it as f64)
            .iter()
            .product::<f64>();
    format!("{ms:.3} ms, {} TFLOP/s", grouped(operations / ms / 1e9))
}

/// `4 x 2,048`, or the number of tokens where the length of a sequence does not matter.
fn tokens(size: Size) -> String {
    match size.sequence {
        Some(sequence) => format!("{} x {}", size.tokens / sequence, grouped(sequence as f64)),
        None => grouped(size.tokens as f64),
    }
}

/// The sizes of the rows, in order, but of those that PyTorch alone has: a file of peers may have more.
fn sizes(rows: &[StepSpeed]) -> Vec<Size> {
    let ours = rows.iter().filter(|row| !row.subject.is_torch());
    let mut sizes: Vec<_> = ours.map(Size::of).collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

fn of_size(rows: &[StepSpeed], size: Size) -> impl Iterator<Item = &StepSpeed> {
    rows.iter().filter(move |row| Size::of(row) == size)
}

/// Where the time goes: forward, and forward and backward, of each part times how often it is there.
fn parts(out: &mut String, rows: &[StepSpeed], size: Size) -> Result<()> {
    let subjects: Vec<_> = of_size(rows, size)
        .filter(|row| !row.parts.is_empty())
        .collect();
    let Some(first) = subjects.first() else {
        return Ok(());
    };
    let names = |row: &StepSpeed| -> Vec<_> {
        let parts = row.parts.iter();
        parts.map(|part| (part.name.clone(), part.count)).collect()
    };
    ensure!(
        subjects.iter().all(|row| names(row) == names(first)),
        "the subjects have other parts"
    );
    write!(
        out,
        "\nHidden {}, {} tokens: forward, forward + backward, host, in ms.\n\n| part |",
        size.hidden,
        tokens(size)
    )?;
    for row in &subjects {
        write!(out, " {} |", row.subject.name_with(row.contexts))?;
    }
    writeln!(out, "\n| --- |{}", " ---: |".repeat(subjects.len()))?;
    for (index, part) in first.parts.iter().enumerate() {
        let times = if part.count > 1 {
            format!("{} x ", part.count)
        } else {
            String::new()
        };
        write!(out, "| {times}{} |", part.name)?;
        for row in &subjects {
            let part = &row.parts[index];
            let all = |time: Spread| part.count as f64 * time.median_ms;
            write!(
                out,
                " {:.3}, {:.3}, {:.3} |",
                all(part.forward),
                all(part.both),
                all(part.enqueue)
            )?;
        }
        out.push('\n');
    }
    write!(out, "| all parts |")?;
    for row in &subjects {
        let sum = |of: fn(&crate::results::PartSpeed) -> Spread| -> f64 {
            let parts = row.parts.iter();
            parts
                .map(|part| part.count as f64 * of(part).median_ms)
                .sum()
        };
        write!(
            out,
            " {:.3}, {:.3}, {:.3} |",
            sum(|part| part.forward),
            sum(|part| part.both),
            sum(|part| part.enqueue)
        )?;
    }
    out.push('\n');
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::{
        results::{PartSpeed, Results, Rows},
        table::{of, tests::run},
    };

    use examples::args::Contexts;

    use super::*;

    fn time(ms: f64) -> Spread {
        Spread::of(vec![ms])
    }

    fn row(subject: Subject, hidden: usize, ms: f64) -> StepSpeed {
        StepSpeed {
            subject,
            tokens: 2048,
            sequence: None,
            hidden,
            outputs: None,
            contexts: None,
            forward: time(ms / 4.0),
            both: time(ms),
            enqueue: Some(time(0.5)),
            alone: Some(time(1.5)),
            activation_bytes: Some(3 << 20),
            fallback_rate: None,
            error: Some(0.012),
            parts: Vec::new(),
        }
    }

    fn lines(rows: Vec<StepSpeed>) -> Vec<String> {
        let results = Results {
            run: run(),
            peer: None,
            rows: Rows::Layer(rows),
        };
        let table = of(&serde_json::to_string(&results).unwrap()).unwrap();
        table.lines().map(String::from).collect()
    }

    #[test]
    fn sizes_stand_together_and_are_compared() {
        let torch = StepSpeed {
            enqueue: None,
            alone: None,
            error: None,
            ..row(Subject::TorchEager, 1024, 1.0)
        };
        let ours = StepSpeed {
            fallback_rate: Some(0.2),
            contexts: Some(Contexts::Int8),
            ..row(Subject::recipe("fallback-int8"), 1024, 2.0)
        };
        let lines = lines(vec![
            row(Subject::Burn, 1024, 6.0),
            row(Subject::Burn, 4096, 20.0),
            ours,
            torch,
        ]);
        assert_eq!(
            lines[2],
            "| 1024 | 2,048 | Burn BF16 | 1.500 ms | 6.000 ms (6.000 to 6.000) | 0.500 ms | 1.500 ms | 3.0 MiB | - \
             | 1.2% | - | 0.17x |"
        );
        assert!(
            lines[3].contains("| `FallbackInt8`, int8 contexts |")
                && lines[3].contains("| 20% | 1.2% |")
        );
        assert!(lines[3].ends_with("| 3.00x | 0.50x |"));
        assert!(lines[4].contains("| PyTorch BF16 |") && lines[4].ends_with("| - | 6.00x | - |"));
        assert!(lines[5].starts_with("| 4096 |") && lines[5].ends_with("| - | - |"));
        assert!(lines[7].contains("NVIDIA H200"));
    }

    #[test]
    fn other_outputs_stand_beside_the_inputs() {
        let ours = StepSpeed {
            outputs: Some(4096),
            ..row(Subject::recipe("delayed-fp8"), 1024, 2.0)
        };
        let square = row(Subject::TorchCompiled, 1024, 1.0);
        let lines = lines(vec![ours, square]);
        // 2 * 2048 * 1024 * 4096 operations in half a millisecond.
        assert!(
            lines[2].starts_with("| 1024 x 4096 | 2,048 | `DelayedFp8` | 0.500 ms, 34 TFLOP/s |")
        );
        assert!(
            lines[2].ends_with("| - | - |"),
            "that of another size is no rival"
        );
    }

    #[test]
    fn sequences_of_other_lengths_are_apart_and_compiled_pytorch_is_the_rival() {
        let of = |subject, sequence, ms| StepSpeed {
            sequence: Some(sequence),
            ..row(subject, 4096, ms)
        };
        let lines = lines(vec![
            of(Subject::recipe("coat-fp8"), 2048, 2.0),
            of(Subject::recipe("coat-fp8"), 1024, 2.0),
            of(Subject::TorchEager, 1024, 6.0),
            of(Subject::TorchCompiled, 1024, 4.0),
            of(Subject::TorchCompiled, 4096, 9.0),
        ]);
        assert!(lines[2].starts_with("| 4096 | 2 x 1,024 | `CoatFp8` |"));
        assert!(lines[2].ends_with("| - | 2.00x |"));
        assert!(lines[3].ends_with("| - | 0.67x |") && lines[4].ends_with("| - | - |"));
        assert!(lines[5].starts_with("| 4096 | 1 x 2,048 |") && lines[5].ends_with("| - | - |"));
        assert!(lines[6].is_empty(), "a size of PyTorch's alone");
    }

    #[test]
    fn parts_count_as_often_as_they_are_there() {
        let part = |name: &str, count| PartSpeed {
            name: String::from(name),
            count,
            forward: time(0.25),
            both: time(1.0),
            enqueue: time(0.5),
        };
        let broken_down = |subject| StepSpeed {
            parts: vec![part("norm", 2), part("attention", 1)],
            ..row(subject, 1024, 6.0)
        };
        let lines = lines(vec![
            broken_down(Subject::Burn),
            broken_down(Subject::recipe("fallback-int8")),
            row(Subject::TorchEager, 1024, 1.0),
        ]);
        let start = lines
            .iter()
            .position(|line| line.starts_with("Hidden 1024, 2,048 tokens"))
            .unwrap();
        assert_eq!(lines[start + 2], "| part | Burn BF16 | `FallbackInt8` |");
        assert_eq!(
            lines[start + 4..start + 7],
            [
                "| 2 x norm | 0.500, 2.000, 1.000 | 0.500, 2.000, 1.000 |",
                "| attention | 0.250, 1.000, 0.500 | 0.250, 1.000, 0.500 |",
                "| all parts | 0.750, 3.000, 1.500 | 0.750, 3.000, 1.500 |",
            ]
        );
    }
}
