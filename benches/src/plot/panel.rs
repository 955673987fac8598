//! Panels of lines, and of rows of points, with a legend below.

use anyhow::Result;
use examples::picture::{self, Area, Drawn};
use plotters::{
    element::DashedPathElement,
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

/// Colours that people tell apart, also those who see few (Okabe and Ito).
pub const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(60, 60, 60),
];
const TEXT: RGBColor = RGBColor(40, 40, 40);
const GRID: RGBColor = RGBColor(222, 222, 222);

const WIDTH: u32 = 960;
const TITLE: u32 = 44;
const LEGEND_LINE: u32 = 26;
const FONT: &str = "sans-serif";
const SMALL: u32 = 17;
const LARGE: u32 = 20;

/// How the values of a line or of points are marked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    /// A line with filled points.
    Line,
    /// A dashed line with hollow points.
    Dashed,
    /// Filled points.
    Points,
    /// Hollow points.
    Hollow,
}

/// Values that belong together.
#[derive(Debug, Clone)]
pub struct Series {
    pub name: String,
    pub colour: RGBColor,
    pub mark: Mark,
    /// Place on the horizontal axis, and the value.
    pub points: Vec<(f64, f64)>,
}

/// A scale of values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scale {
    /// From 0 or another number up to a number, with marks this far apart.
    Linear { from: f64, to: f64, step: f64 },
    /// Between two numbers, given by their decimal logarithms.
    Logarithmic { from: f64, to: f64 },
}

/// How the values of a [`Scale`] are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// As numbers: `0.5`, `1e-4`.
    Number,
    /// In percent.
    Percent,
}

impl Scale {
    /// The place of a value; at an end of the scale where it is beyond it.
    fn place(self, value: f64) -> f64 {
        let (from, to) = self.ends();
        match self {
            Self::Linear { .. } => value.clamp(from, to),
            Self::Logarithmic { .. } => value.max(f64::MIN_POSITIVE).log10().clamp(from, to),
        }
    }

    fn ends(self) -> (f64, f64) {
        match self {
            Self::Linear { from, to, .. } | Self::Logarithmic { from, to } => (from, to),
        }
    }

    /// Places and names of marks.
    fn marks(self, unit: Unit) -> Vec<(f64, String)> {
        match self {
            Self::Linear { from, to, step } => {
                let count = ((to - from) / step).round() as usize;
                let values = (0..=count).map(|index| from + step * index as f64);
                values.map(|value| (value, number(value, unit))).collect()
            }
            Self::Logarithmic { from, to } => {
                let powers = from.floor() as i32..=to.ceil() as i32;
                // Over many decades at most eight powers of ten, over few also what lies between.
                let (mantissas, every) = match to - from {
                    decades if decades > 3.0 => (&[1.0][..], (decades / 8.0).ceil()),
                    _ => (&MANTISSAS[..], 1.0),
                };
                let powers = powers.filter(|power| power % every as i32 == 0);
                let values = powers.flat_map(|power| {
                    let of_power = mantissas.iter().map(move |mantissa| (*mantissa, power));
                    of_power.collect::<Vec<(f64, i32)>>()
                });
                let mark = |(mantissa, power): (f64, i32)| {
                    let name = match unit {
                        Unit::Number => format!("{mantissa}e{power}"),
                        Unit::Percent => number(mantissa * 10f64.powi(power), unit),
                    };
                    (f64::from(power) + mantissa.log10(), name)
                };
                let inside = |place: f64| (from - 1e-9..=to + 1e-9).contains(&place);
                values
                    .map(mark)
                    .filter(|(place, _)| inside(*place))
                    .collect()
            }
        }
    }

    /// The logarithmic scale of these values.
    pub fn of(values: impl Iterator<Item = f64>) -> Self {
        let positive = values.filter(|value| *value > 0.0);
        let (smallest, largest) = positive.fold((f64::INFINITY, 0.0), |(from, to), value| {
            (value.min(from), value.max(to))
        });
        if largest == 0.0 {
            return Self::Logarithmic {
                from: -1.0,
                to: 0.0,
            };
        }
        // The marks around them.
        let marks = |value: f64| {
            let power = value.log10().floor();
            let mantissas = MANTISSAS.into_iter().chain([10.0]);
            mantissas.map(move |mantissa| power + mantissa.log10())
        };
        let below = marks(smallest).filter(|mark| *mark <= smallest.log10() + 1e-9);
        let above = marks(largest).filter(|mark| *mark > largest.log10() + 1e-9);
        Self::Logarithmic {
            from: below.fold(f64::NEG_INFINITY, f64::max),
            to: above.fold(f64::INFINITY, f64::min),
        }
    }
}

/// Where marks stand between two powers of ten.
const MANTISSAS: [f64; 3] = [1.0, 2.0, 5.0];

fn number(value: f64, unit: Unit) -> String {
    // Sums of steps are off by their rounding.
    let rounded = |value: f64| (value * 1e9).round() / 1e9;
    match unit {
        Unit::Number => format!("{}", rounded(value)),
        Unit::Percent => format!("{}%", rounded(100.0 * value)),
    }
}

/// Lines over a horizontal axis with names.
#[derive(Debug, Clone)]
pub struct Lines {
    pub title: String,
    pub x_title: String,
    pub y_title: String,
    /// Names of the places 0, 1, 2, ..
    pub names: Vec<String>,
    pub scale: Scale,
    pub unit: Unit,
    pub series: Vec<Series>,
    /// Levels to look at, with what they are.
    pub levels: Vec<(f64, String)>,
}

/// Points in rows with names.
#[derive(Debug, Clone)]
pub struct Rows {
    pub title: String,
    pub x_title: String,
    /// Names of the rows, from the top.
    pub names: Vec<String>,
    pub scale: Scale,
    pub unit: Unit,
    /// The first number of a point is its row.
    pub series: Vec<Series>,
}

/// The legend of two panels: a column for each.
pub fn two_columns(left: &[Series], right: &[Series]) -> Vec<Option<Series>> {
    let rows = 0..left.len().max(right.len());
    rows.flat_map(|row| [left.get(row).cloned(), right.get(row).cloned()])
        .collect()
}

/// A picture of panels side by side. The legend has the series of `legend`, line by line in so many columns.
pub fn picture(
    title: &str,
    height: u32,
    panels: usize,
    legend: &[Option<Series>],
    columns: usize,
    draw: impl Fn(&Area<'_>, usize) -> Drawn,
) -> Result<String> {
    let legend_lines = legend.len().div_ceil(columns) as u32;
    let size = (WIDTH, height + TITLE + LEGEND_LINE * legend_lines + 12);
    let svg = picture::draw(size, |area| {
        area.fill(&WHITE)?;
        let centred = text(LARGE).pos(Pos::new(HPos::Center, VPos::Center));
        let middle = (WIDTH as i32 / 2, TITLE as i32 / 2 + 2);
        area.draw(&Text::new(title.to_owned(), middle, centred))?;
        let (_, below) = area.split_vertically(TITLE);
        let (above, below) = below.split_vertically(height);
        let parts = above.split_evenly((1, panels));
        for (index, part) in parts.iter().enumerate() {
            draw(part, index)?;
        }
        draw_legend(&below, legend, columns)
    })?;
    Ok(svg + "\n")
}

fn text(size: u32) -> TextStyle<'static> {
    (FONT, size).into_font().color(&TEXT)
}

fn draw_legend(area: &Area<'_>, legend: &[Option<Series>], columns: usize) -> Drawn {
    let column = (WIDTH as usize - 60) / columns;
    let places = legend.iter().enumerate();
    for (index, series) in places.filter_map(|(index, it)| Some((index, it.as_ref()?))) {
        let x = (40 + index % columns * column) as i32;
        let y = (index as u32 / columns as u32 * LEGEND_LINE + LEGEND_LINE / 2) as i32;
        match series.mark {
            Mark::Line => area.draw(&PathElement::new(
                vec![(x, y), (x + 34, y)],
                series.colour.stroke_width(3),
            ))?,
            Mark::Dashed => area.draw(&DashedPathElement::new(
                vec![(x, y), (x + 34, y)],
                7,
                5,
                series.colour.stroke_width(3),
            ))?,
            Mark::Points | Mark::Hollow => {}
        }
        area.draw(&Circle::new((x + 17, y), 5, style(series)))?;
        let left = text(SMALL).pos(Pos::new(HPos::Left, VPos::Center));
        area.draw(&Text::new(series.name.clone(), (x + 44, y), left))?;
    }
    Ok(())
}

/// The style of a series' points.
fn style(series: &Series) -> ShapeStyle {
    match series.mark {
        Mark::Line | Mark::Points => series.colour.filled(),
        Mark::Dashed | Mark::Hollow => series.colour.stroke_width(2),
    }
}

/// Space around the coordinates of a panel.
struct Frame {
    left: i32,
    right: i32,
    top: i32,
    bottom: i32,
}

/// The horizontal place of `share` of the way through a frame, and so the vertical one from its bottom.
impl Frame {
    fn x(&self, share: f64) -> i32 {
        self.left + (share * f64::from(self.right - self.left)).round() as i32
    }

    fn y(&self, share: f64) -> i32 {
        self.bottom - (share * f64::from(self.bottom - self.top)).round() as i32
    }
}

fn share(scale: Scale, place: f64) -> f64 {
    let (from, to) = scale.ends();
    (place - from) / (to - from)
}

impl Lines {
    /// Draws the panel.
    pub fn draw(&self, area: &Area<'_>) -> Drawn {
        let (width, height) = area.dim_in_pixel();
        let (width, height) = (width as i32, height as i32);
        let frame = Frame {
            left: 92,
            right: width - 18,
            top: if self.title.is_empty() { 12 } else { 34 },
            bottom: height - 64,
        };
        let centred = |size| text(size).pos(Pos::new(HPos::Center, VPos::Center));
        let middle = (frame.left + frame.right) / 2;
        area.draw(&Text::new(self.title.clone(), (middle, 14), centred(SMALL)))?;
        for (place, name) in self.scale.marks(self.unit) {
            let y = frame.y(share(self.scale, place));
            grid_line(area, [(frame.left, y), (frame.right, y)])?;
            let right = text(SMALL).pos(Pos::new(HPos::Right, VPos::Center));
            area.draw(&Text::new(name, (frame.left - 8, y), right))?;
        }
        // Room at both sides of the first and the last name.
        let count = self.names.len().max(1) as f64;
        let x = |place: f64| frame.x((place + 0.5) / count);
        for (index, name) in self.names.iter().enumerate() {
            let x = x(index as f64);
            grid_line(area, [(x, frame.top), (x, frame.bottom)])?;
            let at = (x, frame.bottom + 16);
            area.draw(&Text::new(name.clone(), at, centred(SMALL)))?;
        }
        let at = (middle, height - 20);
        area.draw(&Text::new(self.x_title.clone(), at, centred(SMALL)))?;
        let turned = (FONT, SMALL)
            .into_font()
            .transform(FontTransform::Rotate270)
            .color(&TEXT)
            .pos(Pos::new(HPos::Center, VPos::Center));
        let at = (16, (frame.top + frame.bottom) / 2);
        area.draw(&Text::new(self.y_title.clone(), at, turned))?;
        for (level, name) in &self.levels {
            let y = frame.y(share(self.scale, self.scale.place(*level)));
            let line = vec![(frame.left, y), (frame.right, y)];
            area.draw(&DashedPathElement::new(line, 3, 4, TEXT.stroke_width(1)))?;
            let above = text(SMALL - 2).pos(Pos::new(HPos::Right, VPos::Bottom));
            area.draw(&Text::new(name.clone(), (frame.right - 4, y - 3), above))?;
        }
        for series in &self.series {
            let at = |&(place, value): &(f64, f64)| {
                (
                    x(place),
                    frame.y(share(self.scale, self.scale.place(value))),
                )
            };
            let points: Vec<(i32, i32)> = series.points.iter().map(at).collect();
            match series.mark {
                Mark::Line => {
                    let line = PathElement::new(points.clone(), series.colour.stroke_width(3));
                    area.draw(&line)?;
                }
                Mark::Dashed => {
                    let stroke = series.colour.stroke_width(3);
                    area.draw(&DashedPathElement::new(points.clone(), 7, 5, stroke))?;
                }
                Mark::Points | Mark::Hollow => {}
            }
            for point in points {
                area.draw(&Circle::new(point, 5, style(series)))?;
            }
        }
        Ok(())
    }
}

impl Rows {
    /// Draws the panel, with the names of its rows where there is room for them at its left.
    pub fn draw(&self, area: &Area<'_>, names: bool) -> Drawn {
        let (width, height) = area.dim_in_pixel();
        let (width, height) = (width as i32, height as i32);
        let frame = Frame {
            left: if names { 186 } else { 24 },
            right: width - 30,
            top: 34,
            bottom: height - 64,
        };
        let centred = |size| text(size).pos(Pos::new(HPos::Center, VPos::Center));
        let middle = (frame.left + frame.right) / 2;
        area.draw(&Text::new(self.title.clone(), (middle, 14), centred(SMALL)))?;
        for (place, name) in self.scale.marks(self.unit) {
            let x = frame.x(share(self.scale, place));
            grid_line(area, [(x, frame.top), (x, frame.bottom)])?;
            let at = (x, frame.bottom + 16);
            area.draw(&Text::new(name, at, centred(SMALL)))?;
        }
        let at = (middle, height - 20);
        area.draw(&Text::new(self.x_title.clone(), at, centred(SMALL)))?;
        let count = self.names.len().max(1) as f64;
        let y = |row: f64| frame.y(1.0 - (row + 0.5) / count);
        for (row, name) in self.names.iter().enumerate() {
            let y = y(row as f64);
            grid_line(area, [(frame.left, y), (frame.right, y)])?;
            if names {
                let right = text(SMALL).pos(Pos::new(HPos::Right, VPos::Center));
                area.draw(&Text::new(name.clone(), (frame.left - 8, y), right))?;
            }
        }
        for series in &self.series {
            for &(row, value) in &series.points {
                let x = frame.x(share(self.scale, self.scale.place(value)));
                area.draw(&Circle::new((x, y(row)), 6, style(series)))?;
            }
        }
        Ok(())
    }
}

fn grid_line(area: &Area<'_>, ends: [(i32, i32); 2]) -> Drawn {
    area.draw(&PathElement::new(ends.to_vec(), GRID.stroke_width(1)))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(scale: Scale, unit: Unit) -> Vec<String> {
        scale
            .marks(unit)
            .into_iter()
            .map(|(_, name)| name)
            .collect()
    }

    #[test]
    fn scales_hold_their_values() {
        let scale = Scale::of([3e-3, 0.04, 0.0].into_iter());
        let percent = ["0.2%", "0.5%", "1%", "2%", "5%"];
        assert_eq!(names(scale, Unit::Percent), percent);
        let (from, to) = scale.ends();
        assert_eq!((scale.place(0.0), scale.place(1.0)), (from, to));
        assert!((share(scale, scale.place(0.01)) - 0.5).abs() < 1e-9);

        let scale = Scale::of([1e-9, 3e-3].into_iter());
        let powers = ["1e-9", "1e-8", "1e-7", "1e-6", "1e-5", "1e-4", "1e-3"];
        assert_eq!(names(scale, Unit::Number), powers);
        assert_eq!(names(Scale::of([0.0].into_iter()), Unit::Number).len(), 4);

        let linear = Scale::Linear {
            from: 0.0,
            to: 0.3,
            step: 0.1,
        };
        assert_eq!(names(linear, Unit::Number), ["0", "0.1", "0.2", "0.3"]);
    }
}
