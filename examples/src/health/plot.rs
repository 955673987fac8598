//! Pictures of the page.

use anyhow::Result;
use burn_quant_train::health::{HealthReport, TINY};
use plotters::prelude::*;
use plotters::style::colors::colormaps::{ColorMap, ViridisRGB};

use super::figures::{Histogram, on_scale, rows};
use crate::picture::{GREY, draw};

const LINE: RGBColor = RGBColor(66, 133, 244);
const ROW: u32 = 16;
const WIDTH: u32 = 900;
/// Room for the names of layers.
const NAMES: u32 = 260;
/// Octaves of a histogram that are drawn; what is below is drawn as one.
const OCTAVES: usize = 40;

/// The loss of each step.
///
/// # Errors
///
/// A picture that the library does not draw.
pub fn losses(losses: &[f64]) -> Result<String> {
    let finite: Vec<(f64, f64)> = (1..)
        .zip(losses)
        .filter(|(_, loss)| loss.is_finite())
        .map(|(step, loss)| (f64::from(step), *loss))
        .collect();
    let Some(&(last, _)) = finite.last() else {
        return Ok(String::new());
    };
    let largest = finite.iter().map(|(_, loss)| *loss).fold(0.0, f64::max);
    draw((WIDTH, 280), |area| {
        let mut chart = ChartBuilder::on(area)
            .margin(10)
            .x_label_area_size(30)
            .y_label_area_size(50)
            .build_cartesian_2d(0.0..last.max(1.0), 0.0..1.05 * largest)?;
        chart
            .configure_mesh()
            .axis_style(GREY)
            .bold_line_style(GREY.mix(0.3))
            .light_line_style(GREY.mix(0.1))
            .x_desc("step")
            .y_desc("loss")
            .draw()?;
        chart.draw_series(LineSeries::new(finite, LINE.stroke_width(2)))?;
        Ok(())
    })
}

/// The lowest signal-to-noise ratio of each layer in each report.
///
/// # Errors
///
/// As [`losses`].
pub fn layers_by_step(layers: &[String], reports: &[HealthReport]) -> Result<String> {
    let tables: Vec<_> = reports.iter().map(rows).collect();
    let cells = layers.iter().map(|layer| {
        let rows = tables
            .iter()
            .map(|rows| rows.iter().find(|row| row.layer == layer));
        rows.map(|row| row.map(|row| on_scale(row.worst())))
            .collect()
    });
    let steps: Vec<_> = reports
        .iter()
        .map(|report| report.step.to_string())
        .collect();
    grid(layers, &cells.collect::<Vec<_>>(), &steps)
}

/// Histograms by powers of two, the largest magnitude at the left: dark where there are few.
///
/// # Errors
///
/// As [`losses`].
pub fn histograms(histograms: &[Histogram<'_>]) -> Result<String> {
    let names: Vec<_> = histograms.iter().map(|it| it.layer.to_owned()).collect();
    let cells = histograms.iter().map(|histogram| {
        let counts = histogram.counts;
        let mut shown = counts[..OCTAVES].to_vec();
        shown.push(counts[OCTAVES..=TINY].iter().sum());
        // On the scale of logarithms: one of a million still shows.
        let share = |count: u64| count as f64 / histogram.elements.max(1) as f64;
        let shade = |count: u64| (count > 0).then(|| 1.0 + share(count).log10() / 6.0);
        shown.into_iter().map(shade).collect()
    });
    let octaves: Vec<_> = (0..=OCTAVES).map(|octave| format!("2^-{octave}")).collect();
    grid(&names, &cells.collect::<Vec<_>>(), &octaves)
}

/// Rows of shades from 0 to 1; none is left out.
fn grid(names: &[String], cells: &[Vec<Option<f64>>], columns: &[String]) -> Result<String> {
    let height = ROW * (names.len() as u32 + 2);
    let count = columns.len().max(1) as u32;
    let cell = ((WIDTH - NAMES) / count).clamp(2, 40) as i32;
    draw((WIDTH, height), |area| {
        let row_of = |index: usize| (ROW * index as u32) as i32;
        let small = ("sans-serif", 12).into_font();
        for (index, (name, shades)) in names.iter().zip(cells).enumerate() {
            area.draw(&Text::new(
                name.clone(),
                (0, row_of(index) + 3),
                small.clone(),
            ))?;
            for (column, shade) in shades.iter().enumerate() {
                let left = NAMES as i32 + cell * column as i32;
                let corners = [
                    (left, row_of(index) + 1),
                    (left + cell - 1, row_of(index + 1) - 1),
                ];
                if let Some(shade) = shade {
                    // Figures that are not defined are not on the scale.
                    let colour = match shade.is_nan() {
                        true => RED,
                        false => ViridisRGB.get_color(shade.clamp(0.0, 1.0)),
                    };
                    area.draw(&Rectangle::new(corners, colour.filled()))?;
                }
            }
        }
        // As many labels as have room.
        let every = (60 / cell).max(1) as usize;
        for (column, label) in columns.iter().enumerate().step_by(every) {
            let left = NAMES as i32 + cell * column as i32;
            let at = (left, row_of(names.len()) + 4);
            area.draw(&Text::new(label.clone(), at, small.clone()))?;
        }
        Ok(())
    })
}
