//! Pictures, as SVG.

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;

/// A grey that shows on light and on dark.
pub(crate) const GREY: RGBColor = RGBColor(128, 128, 128);

/// The canvas.
pub type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// The outcome of drawing a part of a picture.
pub type Drawn = Result<(), Box<dyn std::error::Error>>;

/// A picture of this width and height, for a page that gives its text a colour.
///
/// # Errors
///
/// A picture that the library does not draw.
pub fn draw(size: (u32, u32), picture: impl FnOnce(&Area<'_>) -> Drawn) -> Result<String> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        let drawn = picture(&area).and_then(|()| Ok(area.present()?));
        drawn.map_err(|error| anyhow!("cannot draw: {error}"))?;
    }
    Ok(svg)
}

/// The page of a picture that is a file of its own, in the reader's light or dark scheme.
const PAGE: &str = "<style>.page { fill: #fff; } text { fill: #1b1b1b; } \
    @media (prefers-color-scheme: dark) { .page { fill: #16181d; } text { fill: #e6e6e6; } }</style>\n\
    <rect class=\"page\" width=\"100%\" height=\"100%\"/>";

/// The same picture as a file of its own.
pub(crate) fn alone(svg: &str) -> String {
    let inside = svg.find("<svg").and_then(|start| {
        let end = svg[start..].find('>')?;
        Some(start + end + 1)
    });
    match inside {
        Some(inside) => format!("{}{PAGE}{}", &svg[..inside], &svg[inside..]),
        None => svg.to_owned(),
    }
}
