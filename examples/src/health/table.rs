//! Layers by tensors, on the terminal.

use burn_quant_train::health::HealthReport;
use plotters::style::colors::colormaps::{ColorMap, ViridisRGB};

use super::figures::{Cell, TENSORS, columns, decibel, on_scale, rows};

/// Layers that are shown; the others are better.
const LAYERS: usize = 20;
const WIDTH: usize = 14;

/// The signal-to-noise ratio in decibel of each operand and moment of the worst layers, and the share of values that
/// became 0.
pub fn heat_map(report: &HealthReport, colours: bool) -> String {
    let rows = rows(report);
    if rows.is_empty() {
        return String::from("no layer is quantized, and no moment\n");
    }
    let columns = columns(&rows);
    let shown = &rows[..rows.len().min(LAYERS)];
    let width = shown.iter().map(|row| row.layer.len()).max().unwrap_or(0);
    let mut text = format!("{:width$}", "dB, lost");
    for &column in &columns {
        text += &format!("  {:>WIDTH$}", TENSORS[column].to_string());
    }
    text.push('\n');
    for row in shown {
        text += &format!("{:width$}", row.layer);
        for &column in &columns {
            text += "  ";
            text += &row.cells[column].map_or_else(|| " ".repeat(WIDTH), |it| cell(it, colours));
        }
        text = text.trim_end().to_owned() + "\n";
    }
    match rows.len() - shown.len() {
        0 => text,
        more => text + &format!("and {more} layers that are better\n"),
    }
}

fn cell(cell: Cell, colours: bool) -> String {
    let lost = format!("{:.1}%", 100.0 * cell.underflow);
    let text = format!("{:>6} {lost:>6}", decibel(cell.snr_db));
    let text = format!("{text:>WIDTH$}");
    match (colours, cell.snr_db) {
        (true, Some(ratio)) => {
            let colour = ViridisRGB.get_color(on_scale(ratio));
            let ink = if on_scale(ratio) > 0.55 { 16 } else { 231 };
            format!(
                "\x1b[48;2;{};{};{}m\x1b[38;5;{ink}m{text}\x1b[0m",
                colour.0, colour.1, colour.2
            )
        }
        (true, None) => format!("\x1b[7m{text}\x1b[0m"),
        (false, _) => text,
    }
}
