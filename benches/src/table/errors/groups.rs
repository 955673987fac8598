//! E4M3 by the size of groups, beside COAT's.

use std::fmt::Write;

use anyhow::{Context, Result};

use super::percent;
use crate::errors::groups::{Flow, GroupError};

/// COAT's Table 10: the error of the forward and of the backward pass.
pub(crate) const TABLE_10: [(Flow, [f64; 2]); 7] = [
    (Flow::LinearByGroup, [372.0, 285.0]),
    (Flow::LinearByTensor, [438.0, 286.0]),
    (Flow::Operators(4), [464.0, 319.0]),
    (Flow::Operators(8), [480.0, 334.0]),
    (Flow::Operators(16), [492.0, 363.0]),
    (Flow::Operators(32), [512.0, 361.0]),
    (Flow::Operators(64), [520.0, 371.0]),
];

/// Both errors of the flow that all are compared with: linear layers per tensor, nothing else.
pub(crate) fn unit(errors: &[GroupError]) -> Result<[f64; 2]> {
    let mut errors = errors.iter();
    let unit = errors.find(|it| it.flow == Flow::LinearByTensor);
    let unit = unit.context("no error of linear layers per tensor")?;
    Ok([unit.forward, unit.backward])
}

/// COAT's errors of a flow as parts of [`unit`]'s.
pub(crate) fn paper(flow: Flow) -> Option<[f64; 2]> {
    let [forward, backward] = TABLE_10[1].1;
    let (_, of_flow) = TABLE_10.iter().find(|(it, _)| *it == flow)?;
    Some([of_flow[0] / forward, of_flow[1] / backward])
}

/// The flow's errors with COAT's in brackets, and those of contexts alone.
pub(super) fn table(errors: &[GroupError]) -> Result<String> {
    let unit = unit(errors)?;
    let mut out = String::from(
        "Mean squared errors of E4M3 as a part of those with linear layers per tensor (in brackets COAT's):\n\n\
         | rounded | forward: the last layer's output | backward: the gradient before the first layer |\n\
         | --- | ---: | ---: |\n",
    );
    for error in errors {
        let name = match error.flow {
            Flow::LinearByGroup => String::from("linear layers, 1x128"),
            Flow::LinearByTensor => String::from("linear layers, per tensor"),
            Flow::Operators(group) => format!("per tensor, and operators 1x{group}"),
        };
        write!(out, "| {name} |")?;
        let ours = [error.forward, error.backward];
        for pass in 0..2 {
            let part = ours[pass] / unit[pass];
            match paper(error.flow) {
                Some(paper) => write!(out, " {part:.2} ({:.2}) |", paper[pass])?,
                None => write!(out, " {part:.2} |")?,
            }
        }
        out.push('\n');
    }
    writeln!(
        out,
        "\nOf mean squares, linear layers per tensor have an error of {:.1e} forward and {:.1e} backward.\n\n\
         E4M3 contexts of what operators read, everything else exact:\n\n\
         | group | bytes an element, BF16 scales (FP32) | error of what is read | in square blocks of as many | \
         error of the gradient before the first layer | one less cosine, all gradients | norms' |\n\
         | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        unit[0], unit[1]
    )?;
    for error in errors {
        if let (Flow::Operators(group), Some(contexts)) = (error.flow, &error.contexts) {
            let bytes = |scale: f64| 1.0 + scale / group as f64;
            let blocks = contexts.read_in_blocks;
            writeln!(
                out,
                "| 1x{group} | {:.2} ({:.2}) | {} | {} | {} | {:.1e} | {:.1e} |",
                bytes(2.0),
                bytes(4.0),
                percent(contexts.read),
                blocks.map_or(String::from("-"), percent),
                percent(contexts.backward.sqrt()),
                contexts.model,
                contexts.norms,
            )?;
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        errors::{ErrorRows, groups::ContextsAlone},
        table::errors::tests::table_of,
    };

    /// COAT's own errors, in a unit of a thousandth of the size, and one that it does not have.
    fn errors() -> Vec<GroupError> {
        let flows = TABLE_10
            .into_iter()
            .chain([(Flow::Operators(128), [876.0, 572.0])]);
        flows
            .map(|(flow, [forward, backward])| GroupError {
                flow,
                forward: 1e-3 * forward,
                backward: 1e-3 * backward,
                contexts: (flow == Flow::Operators(16)).then_some(ContextsAlone {
                    read: 0.0251,
                    read_in_blocks: Some(0.031),
                    backward: 1e-4,
                    model: 2e-5,
                    norms: 3e-5,
                }),
            })
            .collect()
    }

    #[test]
    fn errors_stand_beside_those_of_the_paper() {
        let text = table_of(ErrorRows::Groups(errors())).unwrap();
        for line in [
            "| linear layers, 1x128 | 0.85 (0.85) | 1.00 (1.00) |",
            "| linear layers, per tensor | 1.00 (1.00) | 1.00 (1.00) |",
            "| per tensor, and operators 1x16 | 1.12 (1.12) | 1.27 (1.27) |",
            "| per tensor, and operators 1x128 | 2.00 | 2.00 |",
            "| 1x16 | 1.12 (1.25) | 2.5% | 3.1% | 1.0% | 2.0e-5 | 3.0e-5 |",
        ] {
            assert!(text.lines().any(|it| it == line), "{line}\n{text}");
        }
    }

    #[test]
    fn a_missing_unit_is_an_error() {
        let mut errors = errors();
        errors.retain(|it| it.flow != Flow::LinearByTensor);
        assert!(table_of(ErrorRows::Groups(errors)).is_err());
    }
}
