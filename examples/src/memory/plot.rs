//! The values that wait, drawn: for each layer a bar of its formats, and under it what BF16 would take.

use anyhow::Result;
use burn_quant_train::saved::ActivationReport;
use burn_quant_train::saved::report::Total;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::data;
use crate::picture::{GREY, alone, draw};

/// Layers that have a bar of their own; where there are more, those of one module share one.
const MOST: usize = 48;
const WIDTH: i32 = 960;
const MARGIN: i32 = 16;
/// Room for the figures behind a bar.
const FIGURES: i32 = 150;
const ROW: i32 = 30;
const BAR: i32 = 14;
/// The bar of BF16.
const THIN: i32 = 6;
const LETTER: i32 = 7;
/// Colours that the colour-blind tell apart, on light and on dark (Okabe & Ito, 2008).
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(213, 94, 0),
    RGBColor(240, 228, 66),
];

/// The figures of one bar.
struct Bar {
    name: String,
    /// The bytes of each format, in the order of the legend.
    bytes: Vec<usize>,
    bf16_bytes: usize,
}

impl Bar {
    fn total(&self) -> usize {
        self.bytes.iter().sum()
    }
}

/// The picture, as a file of its own.
///
/// # Errors
///
/// A picture that the library does not draw.
pub fn layers(title: &str, report: &ActivationReport) -> Result<String> {
    let formats = report.totals(|value| value.format());
    let formats: Vec<_> = formats
        .into_iter()
        .filter(|(_, total)| total.bytes > 0)
        .map(|(format, _)| format)
        .collect();
    let bars = bars(report, &formats);
    let longest = bars.iter().map(|bar| bar.name.chars().count()).max();
    let names = (LETTER * longest.unwrap_or(0) as i32 + 12).clamp(80, 320);
    let left = MARGIN + names;
    let most = bars.iter().map(|bar| bar.total().max(bar.bf16_bytes)).max();
    let most = most.unwrap_or(0).max(1) as f64;
    let wide = f64::from(WIDTH - FIGURES - left);
    let length = |bytes: usize| (bytes as f64 / most * wide).round() as i32;
    let top = 84;
    let height = top + ROW * bars.len() as i32 + MARGIN;
    let Total {
        bytes, bf16_bytes, ..
    } = report.total();
    let headline = format!(
        "{} wait for the backward pass, in BF16 {}",
        data::bytes(bytes),
        data::bytes(bf16_bytes)
    );
    let svg = draw((WIDTH as u32, height as u32), |area| {
        let font = |size: i32| TextStyle::from(("sans-serif", size).into_font());
        let to_the_left = Pos::new(HPos::Right, VPos::Center);
        let to_the_right = Pos::new(HPos::Left, VPos::Center);
        area.draw(&Text::new(title, (MARGIN, 12), font(18)))?;
        area.draw(&Text::new(headline.as_str(), (MARGIN, 36), font(13)))?;

        let mut x = MARGIN;
        let legend = formats.iter().map(|it| it.as_str()).chain(["BF16"]);
        for (index, format) in legend.enumerate() {
            let colour = match index < formats.len() {
                true => COLOURS[index % COLOURS.len()],
                false => GREY,
            };
            let corners = [(x, 60), (x + 12, 72)];
            area.draw(&Rectangle::new(corners, colour.filled()))?;
            let style = font(12).pos(to_the_right);
            area.draw(&Text::new(format, (x + 18, 66), style))?;
            x += 40 + LETTER * format.chars().count() as i32;
        }

        for (index, bar) in bars.iter().enumerate() {
            let y = top + ROW * index as i32;
            let style = font(12).pos(to_the_left);
            area.draw(&Text::new(
                shortened(&bar.name, names),
                (left - 8, y + BAR / 2),
                style,
            ))?;
            let mut so_far = 0;
            for (bytes, colour) in bar.bytes.iter().zip(COLOURS.iter().cycle()) {
                let from = left + length(so_far);
                so_far += bytes;
                let corners = [(from, y), (left + length(so_far), y + BAR)];
                if *bytes > 0 {
                    area.draw(&Rectangle::new(corners, colour.filled()))?;
                }
            }
            let under = [
                (left, y + BAR + 1),
                (left + length(bar.bf16_bytes), y + BAR + 1 + THIN),
            ];
            area.draw(&Rectangle::new(under, GREY.filled()))?;
            let figures = format!("{}, {}", data::bytes(so_far), data::bytes(bar.bf16_bytes));
            let end = left + length(so_far.max(bar.bf16_bytes)) + 8;
            let style = font(11).pos(to_the_right);
            area.draw(&Text::new(figures, (end, y + (BAR + THIN) / 2), style))?;
        }
        Ok(())
    })?;
    Ok(alone(&svg))
}

/// The bars, in the order in which the model runs.
fn bars(report: &ActivationReport, formats: &[String]) -> Vec<Bar> {
    let deepest = report.values.iter().map(|it| it.layer.split('.').count());
    let depth = (1..=deepest.max().unwrap_or(1)).rev().find(|&depth| {
        let totals = report.totals(|value| module(&value.layer, depth));
        totals.len() <= MOST
    });
    let depth = depth.unwrap_or(1);
    let mut bars: Vec<Bar> = Vec::new();
    for value in &report.values {
        let name = module(&value.layer, depth);
        let place = bars.iter().position(|bar| bar.name == name);
        let place = place.unwrap_or_else(|| {
            bars.push(Bar {
                name,
                bytes: vec![0; formats.len()],
                bf16_bytes: 0,
            });
            bars.len() - 1
        });
        let bar = &mut bars[place];
        bar.bf16_bytes += value.bf16_bytes();
        if let Some(format) = formats.iter().position(|it| *it == value.format()) {
            bar.bytes[format] += value.bytes;
        }
    }
    bars
}

/// The first parts of a path.
fn module(path: &str, depth: usize) -> String {
    let parts: Vec<_> = path.split('.').take(depth).collect();
    match path.is_empty() {
        true => String::from("no layer has a path"),
        false => parts.join("."),
    }
}

/// The end of a name that has no room.
fn shortened(name: &str, room: i32) -> String {
    let letters = (room / LETTER) as usize;
    let count = name.chars().count();
    match count > letters {
        true => format!(
            "…{}",
            name.chars().skip(count + 1 - letters).collect::<String>()
        ),
        false => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use burn_quant_train::recipe::Number;
    use burn_quant_train::saved::report::{Form, Saved};

    use super::*;

    fn value(layer: &str, form: Form, elements: usize, bytes: usize) -> Saved {
        Saved {
            layer: layer.to_owned(),
            operation: "linear",
            shape: vec![elements],
            dtype: burn::tensor::DType::F32,
            form,
            elements,
            bytes,
        }
    }

    /// Corners of the rectangles of a colour, from left to right.
    fn widths(svg: &str, colour: RGBColor) -> Vec<i32> {
        let colour = format!("#{:02X}{:02X}{:02X}", colour.0, colour.1, colour.2);
        let rectangles = svg.lines().filter(|line| line.starts_with("<rect"));
        let of_colour = rectangles.filter(|line| line.contains(&colour));
        let width = of_colour.map(|line| {
            let from = line.split("width=\"").nth(1).expect("a width");
            from.split('"')
                .next()
                .and_then(|it| it.parse().ok())
                .expect("a number")
        });
        width.collect()
    }

    #[test]
    fn bars_are_as_long_as_their_bytes() {
        let report = ActivationReport {
            values: vec![
                value("a", Form::Exact, 1000, 4000),
                value("a", Form::Operand(Number::Int8), 1000, 1000),
                value("b", Form::Operand(Number::Int8), 2000, 2000),
                value("b", Form::Again, 2000, 0),
            ],
            weights: Vec::new(),
        };
        let svg = layers("a run", &report).unwrap();
        let [exact, int8] = [COLOURS[0], COLOURS[1]].map(|it| widths(&svg, it));
        // The legend's is first. The longest bar, that of BF16 under b, is 8,000 bytes.
        assert_eq!((exact.len(), int8.len()), (2, 3), "{svg}");
        let near = |got: i32, expected: f64| assert!((f64::from(got) - expected).abs() <= 1.0);
        let grey = widths(&svg, GREY);
        let most = f64::from(grey[2]);
        near(exact[1], most / 2.0);
        near(int8[1], most / 8.0);
        near(int8[2], most / 4.0);
        near(grey[1], most / 2.0);
        for text in [
            "a run",
            "f32",
            "int8 operand",
            "BF16",
            "6.8 KiB wait",
            "prefers-color-scheme: dark",
        ] {
            assert!(svg.contains(text), "{text} in {svg}");
        }
    }

    #[test]
    fn many_layers_share_the_bars_of_their_modules() {
        let values = (0..40).flat_map(|layer| {
            ["q", "k"].map(|name| value(&format!("layers.{layer}.{name}"), Form::Exact, 10, 40))
        });
        let report = ActivationReport {
            values: values.collect(),
            weights: Vec::new(),
        };
        let bars = bars(&report, &[String::from("f32")]);
        assert_eq!(bars.len(), 40);
        assert_eq!(bars[7].name, "layers.7");
        assert_eq!((bars[7].total(), bars[7].bf16_bytes), (80, 40));
    }

    #[test]
    fn nothing_and_long_names_have_a_picture() {
        let empty = layers("a run", &ActivationReport::default()).unwrap();
        assert!(empty.contains("0 B wait"), "{empty}");
        let name = "part".repeat(40);
        let report = ActivationReport {
            values: vec![value(&name, Form::Bits, 320, 40)],
            weights: Vec::new(),
        };
        let svg = layers("a run", &report).unwrap();
        assert!(!svg.contains(&name) && svg.contains('…'), "{svg}");
    }
}
