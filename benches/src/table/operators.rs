//! The measurements of `qt-bench operators`.

use std::fmt::Write;

use anyhow::{Result, ensure};

use super::{conditions, grouped, ratio, spread};
use crate::results::{OperatorSpeed, Peer, Run, Spread, Subject};

/// One line for each operator, size and subject, and one on the device.
pub(super) fn table(run: &Run, peer: Option<&Peer>, rows: &[OperatorSpeed]) -> Result<String> {
    ensure!(!rows.is_empty(), "no results");
    let copy = rows.iter().find_map(|row| row.copy_tb_per_s);
    let mut out = String::from(
        "| operator | tokens x columns | | forward (10% to 90%) | backward (10% to 90%) | against Burn \
         | against PyTorch | bytes an element | TB/s | of a copy |\n\
         | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n",
    );
    // A file of peers may have sizes that nobody else has.
    let ours = |row: &&OperatorSpeed| !row.subject.is_torch();
    let mut cases: Vec<&OperatorSpeed> = Vec::new();
    for row in rows.iter().filter(ours) {
        if !cases.iter().any(|case| are_alike(case, row)) {
            cases.push(row);
        }
    }
    for case in cases {
        let of_case: Vec<&OperatorSpeed> = rows.iter().filter(|row| are_alike(case, row)).collect();
        for row in &of_case {
            line(&mut out, row, &of_case, copy)?;
        }
    }
    let copy = copy.map_or(String::new(), |rate| {
        format!("; a copy moves {rate:.2} TB/s, read and written bytes counted")
    });
    let rival = match rows.iter().any(|row| row.subject == Subject::TorchCompiled) {
        true => "Against PyTorch compiled, where it is measured. ",
        false => "",
    };
    writeln!(
        out,
        "\nOf a recipe from the numbers in which values wait for an operator to those that the next linear layer reads, and \
         back; alone: to BF16, and from there. Cells with two numbers are of the forward and of the backward pass, that of \
         gains and biases included. Launches follow each other without waiting, on four sets of matrices by turns. \
         {rival}Bytes are those that must move: each matrix once, with its scales{copy}. {}",
        conditions(run, peer).trim_end(),
    )?;
    Ok(out)
}

fn line(
    out: &mut String,
    row: &OperatorSpeed,
    of_case: &[&OperatorSpeed],
    copy: Option<f64>,
) -> Result<()> {
    let find = |subject| of_case.iter().find(|rival| rival.subject == subject);
    let against = |rival: Option<&&OperatorSpeed>| {
        let rival = rival.filter(|rival| rival.subject != row.subject);
        let of = |pass: fn(&OperatorSpeed) -> Spread| {
            ratio(rival.map(|rival| pass(rival).median_ms / pass(row).median_ms))
        };
        match rival {
            Some(_) => format!("{}, {}", of(|it| it.forward), of(|it| it.backward)),
            None => ratio(None),
        }
    };
    let torch = find(Subject::TorchCompiled).or_else(|| find(Subject::TorchEager));
    let elements = (row.tokens * row.columns) as f64;
    let of_element = |bytes: usize| bytes as f64 / elements;
    let [forward, backward] = row.tb_per_s();
    let of_copy = copy.map_or(String::from("-"), |copy| {
        format!(
            "{:.0}%, {:.0}%",
            100.0 * forward / copy,
            100.0 * backward / copy
        )
    });
    writeln!(
        out,
        "| {} | {} x {} | {} | {} | {} | {} | {} | {:.2}, {:.2} | {forward:.2}, {backward:.2} | {of_copy} |",
        row.operator.name(),
        grouped(row.tokens as f64),
        grouped(row.columns as f64),
        name(row),
        spread(row.forward),
        spread(row.backward),
        against(find(Subject::Burn)),
        against(torch),
        of_element(row.forward_bytes),
        of_element(row.backward_bytes),
    )?;
    Ok(())
}

fn name(row: &OperatorSpeed) -> String {
    let name = row.subject.name();
    match row.alone {
        true => format!("{name}, operator alone"),
        false => name,
    }
}

/// True for rows of one operator on matrices of one size.
fn are_alike(a: &OperatorSpeed, b: &OperatorSpeed) -> bool {
    let case = |row: &OperatorSpeed| (row.operator, row.tokens, row.columns);
    case(a) == case(b)
}

#[cfg(test)]
mod tests {
    use crate::{
        results::{Operator, Results, Rows},
        table::{of, tests::run},
    };

    use super::*;

    fn row(subject: Subject, ms: f64) -> OperatorSpeed {
        OperatorSpeed {
            operator: Operator::Gelu,
            tokens: 1000,
            columns: 1000,
            subject,
            alone: false,
            forward: Spread::of(vec![ms]),
            backward: Spread::of(vec![2.0 * ms]),
            forward_bytes: 2_000_000,
            backward_bytes: 6_000_000,
            copy_tb_per_s: (!subject.is_torch()).then_some(4.0),
        }
    }

    fn lines(rows: Vec<OperatorSpeed>) -> Vec<String> {
        let results = Results {
            run: run(),
            peer: None,
            rows: Rows::Operators(rows),
        };
        let table = of(&serde_json::to_string(&results).unwrap()).unwrap();
        table.lines().map(String::from).collect()
    }

    #[test]
    fn recipes_are_compared_with_both_rivals() {
        let recipe = Subject::recipe("jetfire-int8-128");
        let alone = OperatorSpeed {
            alone: true,
            ..row(recipe, 0.0005)
        };
        let of_peers_alone = OperatorSpeed {
            tokens: 7,
            ..row(Subject::TorchCompiled, 1.0)
        };
        let lines = lines(vec![
            row(recipe, 0.001),
            alone,
            row(Subject::Burn, 0.002),
            row(Subject::TorchEager, 0.004),
            OperatorSpeed {
                backward: Spread::of(vec![0.004]),
                ..row(Subject::TorchCompiled, 0.0015)
            },
            of_peers_alone,
        ]);
        assert_eq!(
            lines[2],
            "| GELU | 1,000 x 1,000 | `JetfireInt8Of128` | 0.001 ms (0.001 to 0.001) | 0.002 ms (0.002 to 0.002) \
             | 2.00x, 2.00x | 1.50x, 2.00x | 2.00, 6.00 | 2.00, 3.00 | 50%, 75% |"
        );
        assert!(lines[3].contains("| `JetfireInt8Of128`, operator alone |"));
        assert!(lines[4].contains("| - | 0.75x, 1.00x |"), "{}", lines[4]);
        assert!(lines[6].contains("| - |") && lines[6].contains("PyTorch BF16, compiled"));
        assert_eq!(lines.len(), 9);
        assert!(lines[8].contains("4.00 TB/s") && lines[8].contains("NVIDIA H200"));
    }

    #[test]
    fn without_rivals_there_is_nothing_to_compare_with() {
        let lines = lines(vec![row(Subject::recipe("coat-fp8"), 0.001)]);
        assert!(
            lines[2].contains("(0.002 to 0.002) | - | - |"),
            "{}",
            lines[2]
        );
        assert!(!lines[4].contains("Against PyTorch"));
    }
}
