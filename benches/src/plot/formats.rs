//! Formats beside each other.

use anyhow::Result;

use super::panel::{COLOURS, Mark, Rows, Scale, Series, Unit, picture as panels};
use crate::{
    errors::{
        capture::Kind,
        granularity::{FORMATS, MatrixError},
        numbers::Numbers,
    },
    table::errors::granularity::of,
};

/// Errors, and shares of values that become zero, a row for each kind of matrices.
pub(super) fn picture(errors: &[MatrixError]) -> Result<String> {
    let of_figure = |figure: fn(&MatrixError) -> f64| -> Result<Vec<Series>> {
        let mut all = Vec::new();
        for (granularity, mark) in [("tensor", Mark::Points), ("1x128", Mark::Hollow)] {
            for (number, colour) in FORMATS.into_iter().zip(COLOURS) {
                let numbers = Numbers::Format(number).name();
                let points = Kind::ALL.into_iter().enumerate().map(|(row, kind)| {
                    let error = of(errors, kind, &numbers, granularity)?;
                    Ok((row as f64, figure(error)))
                });
                let scale = match granularity {
                    "tensor" => "a scale for the tensor",
                    _ => "for 128 neighbours",
                };
                all.push(Series {
                    name: format!("{numbers}, {scale}"),
                    colour,
                    mark,
                    points: points.collect::<Result<_>>()?,
                });
            }
        }
        Ok(all)
    };
    let (error, zeroed) = (of_figure(|it| it.error)?, of_figure(|it| it.zeroed)?);
    let names: Vec<String> = Kind::ALL.map(|kind| String::from(kind.name())).into();
    let values = error.iter().flat_map(|it| &it.points).map(|point| point.1);
    let highest = zeroed.iter().flat_map(|it| &it.points);
    let highest = highest.map(|point| point.1).fold(0.2, f64::max);
    let drawn = [
        Rows {
            title: String::from("error"),
            x_title: String::from("norm of the error over that of the matrix"),
            names: names.clone(),
            scale: Scale::of(values),
            unit: Unit::Percent,
            series: error.clone(),
        },
        Rows {
            title: String::from("zeros"),
            x_title: String::from("values that become zero"),
            names,
            scale: Scale::Linear {
                from: 0.0,
                to: 0.2 * (highest / 0.2).ceil(),
                step: 0.2,
            },
            unit: Unit::Percent,
            series: zeroed,
        },
    ];
    panels(
        "INT8, E4M3 and E5M2 on activations and gradients",
        480,
        2,
        &error.into_iter().map(Some).collect::<Vec<_>>(),
        3,
        |area, index| drawn[index].draw(area, index == 0),
    )
}
