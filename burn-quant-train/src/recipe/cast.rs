//! How an operand of a product is quantized.

use std::fmt;

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

/// The origin of a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScaleSource {
    /// The largest magnitude of the elements that share the scale.
    Data,
    /// A step size that is learned beside the weights, in the layer's slot of this name (LSQ: int4-hq-lss, section
    /// 3.1).
    Step(&'static str),
    /// The largest magnitudes of earlier steps, in the layer's slot of this name (delayed scaling: NVIDIA's
    /// TransformerEngine). Where there are none yet, that of the matrix.
    History(&'static str),
}

/// A linear map of the inner dimension before the operand is quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Transform {
    /// None.
    Identity,
    /// The block-diagonal Hadamard transform, whose size is in the layer's slot of this name (int4-hq-lss, section
    /// 3.3).
    Hadamard(&'static str),
    /// The block-diagonal Hadamard transform of 16 with fixed random signs (NVFP4, arXiv 2509.25149). The dimension is
    /// filled up with zeros to whole blocks.
    RandomHadamard,
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
    /// The number format of the scales.
    pub scale: ScaleNumber,
    /// Where scales come from.
    pub source: ScaleSource,
    /// Which elements share one scale.
    pub granularity: Granularity,
    /// The map before quantization.
    pub transform: Transform,
    /// How values are rounded.
    pub rounding: Rounding,
    /// The second quantized copy, of the rest.
    pub residual: Residual,
}

impl Cast {
    /// A cast to nearest, with FP32 scales from the data, and without a residual.
    pub const fn new(number: Number, granularity: Granularity) -> Self {
        Self {
            number,
            scale: ScaleNumber::F32,
            source: ScaleSource::Data,
            granularity,
            transform: Transform::Identity,
            rounding: Rounding::Nearest,
            residual: Residual::Never,
        }
    }

    /// The same with other scales.
    pub const fn with_scale(self, scale: ScaleNumber) -> Self {
        Self { scale, ..self }
    }

    /// The same with the step size of this slot.
    pub const fn with_step(self, slot: &'static str) -> Self {
        Self {
            source: ScaleSource::Step(slot),
            ..self
        }
    }

    /// The same with the history of maxima of this slot.
    pub const fn with_history(self, slot: &'static str) -> Self {
        Self {
            source: ScaleSource::History(slot),
            ..self
        }
    }

    /// The same of the Hadamard transform whose size is in this slot.
    pub const fn with_hadamard(self, slot: &'static str) -> Self {
        Self {
            transform: Transform::Hadamard(slot),
            ..self
        }
    }

    /// The same of the Hadamard transform of 16 with random signs.
    pub const fn with_random_hadamard(self) -> Self {
        Self {
            transform: Transform::RandomHadamard,
            ..self
        }
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

impl fmt::Display for Cast {
    /// In the words of the tables, such as `INT8 128x128 with fallback`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", format!("{:?}", self.number).to_uppercase())?;
        match (self.source, self.granularity) {
            (ScaleSource::Step(_), _) => write!(f, " by a learned step")?,
            (ScaleSource::History(_), _) => write!(f, " by earlier maxima")?,
            (ScaleSource::Data, Granularity::Block(side)) => write!(f, " {side}x{side}")?,
            (ScaleSource::Data, Granularity::Group(size)) => write!(f, " 1x{size}")?,
            (ScaleSource::Data, Granularity::Row) => write!(f, " per row")?,
            (ScaleSource::Data, Granularity::Tensor) => write!(f, " per tensor")?,
        }
        match self.scale {
            ScaleNumber::F32 => {}
            ScaleNumber::E8M0 => write!(f, ", E8M0 scales")?,
            ScaleNumber::E4M3 => write!(f, ", E4M3 scales")?,
        }
        match self.transform {
            Transform::Identity => {}
            Transform::Hadamard(_) => write!(f, ", Hadamard")?,
            Transform::RandomHadamard => write!(f, ", random Hadamard")?,
        }
        match self.rounding {
            Rounding::Nearest => {}
            Rounding::Stochastic => write!(f, ", stochastic")?,
        }
        match self.residual {
            Residual::Never => Ok(()),
            Residual::Above(_) => write!(f, ", with fallback"),
            Residual::Always => write!(f, ", in two parts"),
        }
    }
}
