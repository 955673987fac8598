//! How an operand of a product is quantized.

pub use cubecl_kernels::{number::Number, scale::ScaleNumber};

/// How a scaled value becomes one of its number format (fallback-int8, section 3.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// To the nearest number, ties to even.
    Nearest,
    /// Up or down at random, so that the expectation is the value; the random bits come from Philox.
    Stochastic,
}

/// Which elements of an operand share a scale.
///
/// It is seen from the product, whose *inner* dimension is the one that it sums over. A scale can leave the sum only if
/// it covers a stretch of that dimension. So one word serves every operand, whichever way its matrix lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Granularity {
    /// Square blocks of this side.
    Block(usize),
    /// This many neighbours along the inner dimension.
    Group(usize),
    /// All of the inner dimension: a row of the left operand, a column of the right one. Per token for X in Y = X W and
    /// for dY in dX = dY Wᵀ, per channel for W.
    Row,
    /// The whole matrix.
    Tensor,
}

/// A second quantized copy, of the rest that the first one leaves (fallback-int8, section 4.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Residual {
    /// None.
    Never,
    /// For blocks whose largest magnitude exceeds the layer's threshold, which is in the slot of this name.
    Above(&'static str),
    /// For every block.
    Always,
}

/// How an operand of a product is quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Cast {
    /// The number format.
    pub number: Number,
    /// The number format of the scales. A scale comes from the largest magnitude of the elements that share it.
    pub scale: ScaleNumber,
    /// Which elements share one scale.
    pub granularity: Granularity,
    /// How values are rounded.
    pub rounding: Rounding,
    /// The second quantized copy, of the rest.
    pub residual: Residual,
}

impl Cast {
    /// A cast to nearest, with FP32 scales and without a residual.
    pub const fn new(number: Number, granularity: Granularity) -> Self {
        Self {
            number,
            scale: ScaleNumber::F32,
            granularity,
            rounding: Rounding::Nearest,
            residual: Residual::Never,
        }
    }

    /// The same with other scales.
    pub const fn with_scale(self, scale: ScaleNumber) -> Self {
        Self { scale, ..self }
    }

    /// The same, rounded stochastically.
    pub const fn stochastic(self) -> Self {
        Self {
            rounding: Rounding::Stochastic,
            ..self
        }
    }

    /// The same with a residual.
    pub const fn with_residual(self, residual: Residual) -> Self {
        Self { residual, ..self }
    }
}
