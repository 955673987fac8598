//! The rows of `qt-bench operators`.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::{Spread, Subject, tb_per_s};

/// A non-linear operator between linear layers.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Operator {
    /// With a gain.
    RmsNorm,
    /// With a gain and a bias.
    LayerNorm,
    /// Without approximation.
    Gelu,
    /// The gate of a SwiGLU layer, `silu(gate) up`.
    Swiglu,
}

impl Operator {
    /// The name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::RmsNorm => "RMSNorm",
            Self::LayerNorm => "LayerNorm",
            Self::Gelu => "GELU",
            Self::Swiglu => "SwiGLU",
        }
    }

    /// Matrices that it reads.
    pub const fn inputs(self) -> usize {
        match self {
            Self::Swiglu => 2,
            Self::RmsNorm | Self::LayerNorm | Self::Gelu => 1,
        }
    }

    /// Bytes that either pass must move where all matrices are floats of 16 bits: forward the inputs and the output,
    /// backward the inputs, the gradient of the output and those of the inputs.
    pub const fn float_bytes(self, tokens: usize, columns: usize) -> [usize; 2] {
        let matrix = 2 * tokens * columns;
        let inputs = self.inputs();
        [(inputs + 1) * matrix, (2 * inputs + 1) * matrix]
    }
}

/// The speed of both passes of an operator.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OperatorSpeed {
    /// The operator.
    pub operator: Operator,
    /// Rows of its matrices.
    pub tokens: usize,
    /// Their columns.
    pub columns: usize,
    /// Whose: of a recipe from the numbers in which values wait to those that linear layers read.
    pub subject: Subject,
    /// True where it ends in BF16, without the quantization of what it gives, and begins there in the backward pass.
    #[serde(default)]
    pub alone: bool,
    /// The output, from the inputs.
    pub forward: Spread,
    /// The gradients of inputs and parameters, from that of the output.
    pub backward: Spread,
    /// Bytes that the forward pass must move: of matrices and their scales, each read or written once.
    pub forward_bytes: usize,
    /// The same of the backward pass.
    pub backward_bytes: usize,
    /// The rate of a copy too large for the caches, read and written bytes counted; none of other libraries.
    pub copy_tb_per_s: Option<f64>,
}

impl OperatorSpeed {
    /// Of another library, on matrices of 16-bit floats of this shape.
    pub fn of_floats(
        operator: Operator,
        [tokens, columns]: [usize; 2],
        subject: Subject,
        [forward, backward]: [Spread; 2],
    ) -> Self {
        let [forward_bytes, backward_bytes] = operator.float_bytes(tokens, columns);
        Self {
            operator,
            tokens,
            columns,
            subject,
            alone: false,
            forward,
            backward,
            forward_bytes,
            backward_bytes,
            copy_tb_per_s: None,
        }
    }

    /// The rates of both passes over the bytes that they must move.
    pub fn tb_per_s(&self) -> [f64; 2] {
        [
            tb_per_s(self.forward_bytes, self.forward.median_ms),
            tb_per_s(self.backward_bytes, self.backward.median_ms),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_floats() {
        let matrix = 2 * 100 * 10;
        assert_eq!(
            Operator::Gelu.float_bytes(100, 10),
            [2 * matrix, 3 * matrix]
        );
        assert_eq!(
            Operator::Swiglu.float_bytes(100, 10),
            [3 * matrix, 5 * matrix]
        );
    }
}
