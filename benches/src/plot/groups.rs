//! E4M3 by the size of groups, beside COAT's.

use anyhow::Result;

use super::panel::{COLOURS, Lines, Mark, Scale, Series, Unit, picture as panels};
use crate::{
    errors::groups::{Flow, GROUPS, GroupError},
    table::errors::groups::{paper, unit},
};

/// Errors of both passes over the size of groups, as parts of those of linear layers per tensor.
pub(super) fn picture(errors: &[GroupError]) -> Result<String> {
    let unit = unit(errors)?;
    let flows = GROUPS.map(Flow::Operators);
    let series = |pass: usize, name: &str, is_paper: bool| {
        let value = |flow| match is_paper {
            true => paper(flow).map(|parts| parts[pass]),
            false => {
                let error = errors.iter().find(|it| it.flow == flow)?;
                Some([error.forward, error.backward][pass] / unit[pass])
            }
        };
        let points = flows
            .iter()
            .enumerate()
            .filter_map(|(index, &flow)| Some((index as f64, value(flow)?)));
        Series {
            name: String::from(name),
            colour: COLOURS[pass],
            mark: if is_paper { Mark::Dashed } else { Mark::Line },
            points: points.collect(),
        }
    };
    let series = [
        series(0, "forward: the last layer's output", false),
        series(0, "the same in COAT's Table 10", true),
        series(1, "backward: the gradient before the first layer", false),
        series(1, "the same in COAT's Table 10", true),
    ];
    let values = series.iter().flat_map(|it| &it.points).map(|point| point.1);
    let highest = values.fold(1.0, f64::max);
    let lines = Lines {
        title: String::new(),
        x_title: String::from("neighbours that share a scale"),
        y_title: String::from("MSE, linear layers alone = 1"),
        names: GROUPS.map(|group| group.to_string()).into(),
        scale: Scale::Linear {
            from: 0.8,
            to: 0.8 + 0.2 * ((highest - 0.8) / 0.2).ceil().max(1.0),
            step: 0.2,
        },
        unit: Unit::Number,
        levels: vec![(
            1.0,
            String::from("linear layers in E4M3 per tensor, nothing else"),
        )],
        series: series.clone().into(),
    };
    panels(
        "E4M3 in groups for norms and SwiGLU, beside linear layers per tensor",
        380,
        1,
        &series.map(Some),
        2,
        |area, _| lines.draw(area),
    )
}
