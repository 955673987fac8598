//! INT8 by granularity.

use anyhow::Result;
use cubecl_kernels::granularity::Granularity;

use super::panel::{COLOURS, Lines, Mark, Scale, Series, Unit, picture as panels, two_columns};
use crate::{
    errors::{
        capture::Kind,
        granularity::{GRANULARITIES, MatrixError, name},
    },
    table::errors::granularity::of,
};

/// Errors of activations and of gradients, a line for each kind.
pub(super) fn picture(errors: &[MatrixError]) -> Result<String> {
    let names = GRANULARITIES.map(name);
    let short = |granularity| match granularity {
        Granularity::Block(size) => format!("{size}\u{b2}"),
        Granularity::Group(_) | Granularity::Token | Granularity::Channel | Granularity::Tensor => {
            name(granularity)
        }
    };
    let of_kinds = |gradients: bool| -> Result<Vec<Series>> {
        let kinds = Kind::ALL
            .into_iter()
            .filter(|kind| kind.is_gradient() == gradients);
        let series = kinds.zip(COLOURS).map(|(kind, colour)| {
            let points = names.iter().enumerate().map(|(index, granularity)| {
                Ok((index as f64, of(errors, kind, "INT8", granularity)?.error))
            });
            Ok(Series {
                name: String::from(kind.name()),
                colour,
                mark: Mark::Line,
                points: points.collect::<Result<_>>()?,
            })
        });
        series.collect()
    };
    let panels_of = [
        ("activations", of_kinds(false)?),
        ("gradients", of_kinds(true)?),
    ];
    let all = panels_of.iter().flat_map(|(_, series)| series);
    let scale = Scale::of(all.flat_map(|it| &it.points).map(|point| point.1));
    let drawn = panels_of.clone().map(|(title, series)| Lines {
        title: String::from(title),
        x_title: String::from("elements that share a scale"),
        y_title: String::from("norm of the error over that of the matrix"),
        names: GRANULARITIES.map(short).into(),
        scale,
        unit: Unit::Percent,
        series,
        levels: Vec::new(),
    });
    let [(_, left), (_, right)] = &panels_of;
    panels(
        "INT8: error by granularity",
        440,
        2,
        &two_columns(left, right),
        2,
        |area, index| drawn[index].draw(area),
    )
}
