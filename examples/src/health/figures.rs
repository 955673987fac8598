//! Figures in an order for people.

use std::cmp::Ordering;

use burn_quant_train::health::{CastHealth, HealthReport, MatrixHealth};
use burn_quant_train::recipe::{LinearMatrix, LinearOperand};

/// The operands, in the order of columns.
pub const OPERANDS: [LinearOperand; 6] = [
    LinearOperand::X,
    LinearOperand::SavedX,
    LinearOperand::W,
    LinearOperand::WeightOfInput,
    LinearOperand::Gradient,
    LinearOperand::GradientOfWeight,
];

/// The signal-to-noise ratio of a cast, and the share of values that it loses.
#[derive(Clone, Copy)]
pub struct Cell {
    /// In decibel; none where it is not defined.
    pub snr_db: Option<f64>,
    /// Of all values.
    pub underflow: f64,
}

impl Cell {
    fn is_same_as(self, other: Self) -> bool {
        let bits = |cell: Self| (cell.snr_db.map(f64::to_bits), cell.underflow.to_bits());
        bits(self) == bits(other)
    }
}

/// The operands that a row has, but for those that are the same numbers as another one in all of them.
pub fn columns(rows: &[Row<'_>]) -> Vec<usize> {
    let cells = |column: usize| rows.iter().map(move |row| row.cells[column]);
    let same = |a: usize, b: usize| {
        let mut pairs = cells(a).zip(cells(b));
        OPERANDS[a].matrix() == OPERANDS[b].matrix()
            && pairs.all(|(a, b)| a.zip(b).is_some_and(|(a, b)| a.is_same_as(b)))
    };
    let mut columns: Vec<usize> = Vec::new();
    for column in 0..OPERANDS.len() {
        let is_used = cells(column).any(|cell| cell.is_some());
        if is_used && !columns.iter().any(|&other| same(column, other)) {
            columns.push(column);
        }
    }
    columns
}

/// A layer's casts by operand.
pub struct Row<'a> {
    /// The module path.
    pub layer: &'a str,
    /// Those of the running recipe.
    pub cells: [Option<Cell>; OPERANDS.len()],
}

impl Row<'_> {
    /// The lowest ratio; NaN where one is not defined.
    pub fn worst(&self) -> f64 {
        let cells = self.cells.iter().flatten();
        let ratios = cells.map(|cell| cell.snr_db.unwrap_or(f64::NAN));
        ratios.fold(f64::INFINITY, |worst, ratio| {
            match ratio.is_nan() || worst.is_nan() {
                true => f64::NAN,
                false => worst.min(ratio),
            }
        })
    }
}

/// The layers of a report that are quantized, the worst first.
pub fn rows(report: &HealthReport) -> Vec<Row<'_>> {
    let mut rows: Vec<Row<'_>> = Vec::new();
    for matrix in &report.matrices {
        let casts: Vec<_> = matrix.running().collect();
        if casts.is_empty() {
            continue;
        }
        let known = rows.iter().position(|row| row.layer == matrix.layer);
        let index = known.unwrap_or(rows.len());
        if known.is_none() {
            rows.push(Row {
                layer: &matrix.layer,
                cells: [None; OPERANDS.len()],
            });
        }
        for cast in casts {
            let column = OPERANDS.iter().position(|it| *it == cast.operand);
            rows[index].cells[column.expect("all operands are columns")] = Some(cell(cast));
        }
    }
    rows.sort_by(|a, b| worse_first(a.worst(), b.worst()));
    rows
}

fn cell(cast: &CastHealth) -> Cell {
    Cell {
        snr_db: cast.snr_db(),
        underflow: cast.underflow,
    }
}

/// Figures that are not defined come first.
fn worse_first(a: f64, b: f64) -> Ordering {
    b.is_nan().cmp(&a.is_nan()).then(a.total_cmp(&b))
}

/// A ratio on a scale from 0, 10 dB and less, to 1, 50 dB and more.
pub fn on_scale(snr_db: f64) -> f64 {
    ((snr_db - 10.0) / 40.0).clamp(0.0, 1.0)
}

/// A ratio in words.
pub fn decibel(snr_db: Option<f64>) -> String {
    match snr_db {
        None => String::from("-"),
        Some(ratio) if ratio.is_infinite() => String::from("exact"),
        Some(ratio) => format!("{ratio:.1}"),
    }
}

/// All matrices of one kind, with their layers, in the order of the report.
pub fn of_kind(report: &HealthReport, kind: LinearMatrix) -> Vec<&MatrixHealth> {
    let matrices = report.matrices.iter();
    matrices.filter(|matrix| matrix.matrix == kind).collect()
}
