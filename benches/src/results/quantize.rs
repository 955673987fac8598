//! The rows of `qt-bench quantize`.

use serde::{Deserialize, Serialize};

use super::{Spread, tb_per_s};

/// A tensor of a linear layer, and what its products need of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Operand {
    /// To nearest with fallback, row-major, for the forward product; stochastic and transposed, for the backward ones.
    X,
    /// Stochastic, row-major and transposed.
    #[serde(rename = "dY")]
    Dy,
    /// To nearest, row-major.
    W,
    /// E4M3 to nearest in groups of 128 with powers of two as scales: along the rows, and of the transpose.
    Groups,
}

impl Operand {
    /// The name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::X => "X, with fallback and saved copy",
            Self::Dy => "dY, both layouts",
            Self::W => "W",
            Self::Groups => "E4M3 in groups, both ways",
        }
    }
}

/// The speed of quantizing one tensor in blocks of 128 x 128.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct QuantizeSpeed {
    /// The quantized tensor.
    pub operand: Operand,
    /// The element type of the input: `BF16` or `FP32`.
    pub input: String,
    /// Rows of the input.
    pub rows: usize,
    /// Columns of the input.
    pub cols: usize,
    /// The share of its blocks that have a residual.
    pub fallback_rate: f64,
    /// Bytes that must move: the input read once, each output written once.
    pub bytes: usize,
    /// The time of one quantization.
    pub time: Spread,
    /// The time of copying half as many bytes, so that as many are moved.
    pub copy: Spread,
    /// The rate of a copy that is too large for the caches, read and written bytes counted.
    pub copy_tb_per_s: f64,
    /// That of PyTorch's copy; none where PyTorch was not measured.
    pub torch_copy_tb_per_s: Option<f64>,
}

impl QuantizeSpeed {
    /// The rate over the bytes that must move.
    pub fn tb_per_s(&self) -> f64 {
        tb_per_s(self.bytes, self.time.median_ms)
    }
}
