//! Figures in an order for people.

use std::cmp::Ordering;
use std::fmt;

use burn_quant_train::health::{CastHealth, HealthReport, MomentHealth};
use burn_quant_train::optim::Moment;
use burn_quant_train::recipe::{LinearMatrix, LinearOperand};

/// A tensor of a layer that is stored in fewer bits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Tensor {
    /// An operand of its products.
    Operand(LinearOperand),
    /// A moment of its weight.
    Moment(Moment),
}

impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Operand(operand) => operand.fmt(f),
            Self::Moment(moment) => moment.fmt(f),
        }
    }
}

impl Tensor {
    /// True for two that are numbers of one matrix.
    fn is_of_the_matrix_of(self, other: Self) -> bool {
        match (self, other) {
            (Self::Operand(one), Self::Operand(other)) => one.matrix() == other.matrix(),
            (Self::Moment(_), _) | (_, Self::Moment(_)) => self == other,
        }
    }
}

/// The tensors, in the order of columns.
pub const TENSORS: [Tensor; 8] = [
    Tensor::Operand(LinearOperand::X),
    Tensor::Operand(LinearOperand::SavedX),
    Tensor::Operand(LinearOperand::W),
    Tensor::Operand(LinearOperand::WeightOfInput),
    Tensor::Operand(LinearOperand::Gradient),
    Tensor::Operand(LinearOperand::GradientOfWeight),
    Tensor::Moment(Moment::First),
    Tensor::Moment(Moment::Second),
];

/// The signal-to-noise ratio of a tensor as it is stored, and the share of values that it loses.
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

/// The tensors that a row has, but for operands that are the same numbers as another one in all of them.
pub fn columns(rows: &[Row<'_>]) -> Vec<usize> {
    let cells = |column: usize| rows.iter().map(move |row| row.cells[column]);
    let same = |a: usize, b: usize| {
        let mut pairs = cells(a).zip(cells(b));
        TENSORS[a].is_of_the_matrix_of(TENSORS[b])
            && pairs.all(|(a, b)| a.zip(b).is_some_and(|(a, b)| a.is_same_as(b)))
    };
    let mut columns: Vec<usize> = Vec::new();
    for column in 0..TENSORS.len() {
        let is_used = cells(column).any(|cell| cell.is_some());
        if is_used && !columns.iter().any(|&other| same(column, other)) {
            columns.push(column);
        }
    }
    columns
}

/// A layer's tensors.
pub struct Row<'a> {
    /// The module path.
    pub layer: &'a str,
    /// Those that are stored in fewer bits, as the running recipe and the optimizer have them.
    pub cells: [Option<Cell>; TENSORS.len()],
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

/// The layers of a report of which something is stored in fewer bits, the worst first.
pub fn rows(report: &HealthReport) -> Vec<Row<'_>> {
    let casts = report.matrices.iter().flat_map(|matrix| {
        let of_cast = |cast: &CastHealth| (Tensor::Operand(cast.operand), cell(cast));
        matrix
            .running()
            .map(move |cast| (matrix.layer.as_str(), of_cast(cast)))
    });
    let moments = report.moments.iter().filter(|it| it.format.is_some());
    let moments = moments.map(|it| {
        let tensor = Tensor::Moment(it.moment);
        (it.layer.as_str(), (tensor, cell_of_moment(it)))
    });
    let mut rows: Vec<Row<'_>> = Vec::new();
    for (layer, (tensor, cell)) in casts.chain(moments) {
        let known = rows.iter().position(|row| row.layer == layer);
        let index = known.unwrap_or(rows.len());
        if known.is_none() {
            rows.push(Row {
                layer,
                cells: [None; TENSORS.len()],
            });
        }
        let column = TENSORS.iter().position(|it| *it == tensor);
        rows[index].cells[column.expect("all tensors are columns")] = Some(cell);
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

fn cell_of_moment(moment: &MomentHealth) -> Cell {
    Cell {
        snr_db: moment.snr_db(),
        underflow: moment.underflow,
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

/// The magnitudes of a tensor of a layer.
pub struct Histogram<'a> {
    /// The module path.
    pub layer: &'a str,
    /// Elements of the tensor.
    pub elements: u64,
    /// Of each bin.
    pub counts: &'a [u64],
}

/// Those of all matrices of one kind, in the order of the report.
pub fn of_kind(report: &HealthReport, kind: LinearMatrix) -> Vec<Histogram<'_>> {
    let matrices = report.matrices.iter().filter(|it| it.matrix == kind);
    let histograms = matrices.map(|it| Histogram {
        layer: &it.layer,
        elements: it.elements,
        counts: &it.histogram,
    });
    histograms.collect()
}

/// Those of one moment of all weights, in the order of the report.
pub fn of_moment(report: &HealthReport, moment: Moment) -> Vec<Histogram<'_>> {
    let moments = report.moments.iter().filter(|it| it.moment == moment);
    let histograms = moments.map(|it| Histogram {
        layer: &it.layer,
        elements: it.elements,
        counts: &it.histogram,
    });
    histograms.collect()
}

/// How a moment is stored, in words.
pub fn stored_as(moment: &MomentHealth) -> String {
    let format = moment.format.as_ref();
    format.map_or_else(|| String::from("FP32"), ToString::to_string)
}
