//! Gradients under contexts by bits.

use anyhow::Result;

use super::panel::{COLOURS, Lines, Mark, Scale, Series, Unit, picture as panels};
use crate::errors::contexts::{BITS, ContextError, Saved};

/// One less the cosine of gradients, over bits.
pub(super) fn picture(errors: &[ContextError]) -> Result<String> {
    let series = |name: &str, saved, colour, mark, of: fn(&ContextError) -> f64| {
        let integers = errors
            .iter()
            .filter(|it| it.saved == saved && it.numbers.starts_with("INT"));
        Series {
            name: String::from(name),
            colour,
            mark,
            points: integers
                .map(|it| (f64::from(it.bits - BITS.start()), of(it)))
                .collect(),
        }
    };
    let (blue, red) = (COLOURS[0], COLOURS[1]);
    let all: fn(&ContextError) -> f64 = |it| it.model;
    let norms: fn(&ContextError) -> f64 = |it| it.norms;
    let series = [
        series(
            "operators' contexts, simulated: all gradients",
            Saved::Operators,
            blue,
            Mark::Line,
            all,
        ),
        series("norms' gradients", Saved::Operators, red, Mark::Line, norms),
        series(
            "all that the library compresses: all gradients",
            Saved::All,
            blue,
            Mark::Dashed,
            all,
        ),
        series("norms' gradients", Saved::All, red, Mark::Dashed, norms),
    ];
    let values = series.iter().flat_map(|it| &it.points).map(|point| point.1);
    let lines = Lines {
        title: String::new(),
        x_title: String::from("bits of an integer, a scale for 128"),
        y_title: String::from("1 - cosine"),
        names: BITS.map(|bits| bits.to_string()).collect(),
        scale: Scale::of(values),
        unit: Unit::Number,
        levels: vec![
            (
                1e-4,
                String::from("what the suite asks of all gradients with INT10"),
            ),
            (1e-3, String::from("of the gradient of each parameter")),
        ],
        series: series.clone().into(),
    };
    panels(
        "Gradients under compressed contexts, beside exact ones",
        420,
        1,
        &series.map(Some),
        2,
        |area, _| lines.draw(area),
    )
}
