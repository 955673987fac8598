//! INT4 after Hadamard transforms.

use anyhow::Result;

use super::panel::{COLOURS, Lines, Mark, Scale, Series, Unit, picture as panels, two_columns};
use crate::{
    errors::hadamard::{HadamardError, Matrices},
    table::errors::hadamard::name,
};

/// Errors over the size of the transform, as parts of that without one: planted outliers at the left, a step's matrices
/// at the right.
pub(super) fn picture(errors: &[HadamardError]) -> Result<String> {
    let of = |planted: bool| -> Vec<Series> {
        let of_panel = errors
            .iter()
            .filter(|it| matches!(it.matrices, Matrices::Planted(_)) == planted);
        let series = of_panel.zip(COLOURS).map(|(error, colour)| {
            let first = error.best.first().copied().unwrap_or(f64::NAN);
            let parts = error.best.iter().map(|error| error / first);
            Series {
                name: name(error.matrices),
                colour,
                mark: Mark::Line,
                points: parts
                    .enumerate()
                    .map(|(k, part)| (k as f64, part))
                    .collect(),
            }
        });
        series.collect()
    };
    let panels_of = [
        ("normal numbers, 2 of 128 columns larger", of(true)),
        ("activations", of(false)),
    ];
    let drawn = panels_of.clone().map(|(title, series)| Lines {
        title: String::from(title),
        x_title: String::from("k, of a transform of 2^k elements"),
        y_title: String::from("error, without a transform = 1"),
        names: (0..8).map(|k| k.to_string()).collect(),
        scale: Scale::Linear {
            from: 0.0,
            to: 1.2,
            step: 0.2,
        },
        unit: Unit::Number,
        series,
        levels: Vec::new(),
    });
    let [(_, left), (_, right)] = &panels_of;
    panels(
        "INT4 with one step size: error by the size of the Hadamard transform",
        400,
        2,
        &two_columns(left, right),
        2,
        |area, index| drawn[index].draw(area),
    )
}
