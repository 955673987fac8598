//! The content of a recipe.

use std::fmt;

use burn_backend::FloatDType;
use cubecl_kernels::granularity;
use serde::{Deserialize, Serialize};

use super::{
    Cast, Context, Flow, Granularity, Name, Number, Residual, ScaleNumber, ScaleSource, Slot,
    Transform,
};
use crate::data::product::{Accumulation, LayerOperands};

/// A product of a linear layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Product {
    /// Of operands in the compute dtype.
    Compute,
    /// Of quantized operands.
    Quantized {
        /// The left operand: X, dY or Xᵀ.
        left: Cast,
        /// The right operand: W, Wᵀ or dY.
        right: Cast,
        /// Which rows of dY are multiplied.
        sampling: Sampling,
        /// How products of FP8 numbers are added up.
        accumulation: Accumulation,
    },
}

/// Which rows of the output gradient a backward product multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Sampling {
    /// All.
    All,
    /// Of the high and the low parts of all rows half, at random, by their share in the product; a row that is taken
    /// with probability p is multiplied by 1/p (leverage score sampling: int4-hq-lss, section 4.2).
    LeverageScore,
}

impl Product {
    /// The product of operands quantized like this, of all rows, promoted.
    pub const fn of(left: Cast, right: Cast) -> Self {
        Self::Quantized {
            left,
            right,
            sampling: Sampling::All,
            accumulation: Accumulation::Promoted,
        }
    }

    /// The same with fast accumulation. A product in the compute dtype stays as it is.
    pub const fn fast(self) -> Self {
        match self {
            Self::Compute => Self::Compute,
            Self::Quantized {
                left,
                right,
                sampling,
                accumulation: _,
            } => Self::Quantized {
                left,
                right,
                sampling,
                accumulation: Accumulation::Fast,
            },
        }
    }

    /// How products of FP8 numbers are added up.
    pub(crate) const fn accumulation(&self) -> Accumulation {
        match self {
            Self::Compute => Accumulation::Promoted,
            Self::Quantized { accumulation, .. } => *accumulation,
        }
    }

    /// The casts of the left and the right operand; none in the compute dtype.
    pub(crate) const fn operands(&self) -> [Option<Cast>; 2] {
        match self {
            Self::Compute => [None, None],
            Self::Quantized { left, right, .. } => [Some(*left), Some(*right)],
        }
    }

    /// The same of sampled rows of dY. A product in the compute dtype stays as it is.
    pub const fn sampled(self, sampling: Sampling) -> Self {
        match self {
            Self::Compute => Self::Compute,
            Self::Quantized {
                left,
                right,
                sampling: _,
                accumulation,
            } => Self::Quantized {
                left,
                right,
                sampling,
                accumulation,
            },
        }
    }
}

/// The form in which X waits for the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SavedX {
    /// As the operand of dW = Xᵀ dY, quantized in the forward pass.
    Operand,
    /// As it came. A quantized dW quantizes it in the backward pass.
    Input,
}

/// How the operands of a linear layer's three products are quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearRow {
    /// Y = X W.
    pub forward: Product,
    /// dX = dY Wᵀ.
    pub input_gradient: Product,
    /// dW = Xᵀ dY.
    pub weight_gradient: Product,
    /// The form in which X is kept for the weight's gradient.
    pub saved_x: SavedX,
    /// The state that each layer keeps between steps.
    pub slots: &'static [Slot],
}

impl LinearRow {
    /// The kind of kernel that computes the products; `None` where there is none of its own.
    pub(crate) fn layer_operands(&self) -> Option<LayerOperands> {
        let [Some(left), Some(right)] = self.forward.operands() else {
            return Some(LayerOperands::Floats);
        };
        let is_int = |cast: Cast| matches!(cast.number, Number::Int8 | Number::Int4);
        let [of_gradient, _] = self.input_gradient.operands();
        let [saved, _] = self.weight_gradient.operands();
        let has_residual =
            |cast: Option<Cast>| cast.is_some_and(|cast| cast.residual != Residual::Never);
        match (left.granularity, right.granularity) {
            _ if [left, right]
                .iter()
                .any(|cast| cast.scale != ScaleNumber::F32) =>
            {
                None
            }
            (Granularity::Block(side), Granularity::Block(of_right))
                if side == of_right && is_int(left) && is_int(right) =>
            {
                Some(LayerOperands::Int8Blocks {
                    side,
                    fallback: [has_residual(Some(left)), has_residual(saved)],
                })
            }
            (Granularity::Row | Granularity::Tensor, Granularity::Row | Granularity::Tensor)
                if is_int(left) && is_int(right) =>
            {
                Some(LayerOperands::Int8Rows)
            }
            (Granularity::Tensor, Granularity::Tensor)
                if [left.number, right.number] == [Number::E4M3; 2] =>
            {
                Some(LayerOperands::E4M3 {
                    accumulation: self.forward.accumulation(),
                    of_gradients: self.input_gradient.accumulation(),
                    gradient: of_gradient.map_or(Number::E5M2, |cast| cast.number),
                })
            }
            _ => None,
        }
    }
}

/// A recipe.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Row {
    /// The recipe's name, in lower case with hyphens: on command lines and in result files.
    pub name: &'static str,
    /// The recipe in a line.
    pub about: &'static str,
    /// The dtype of what is not quantized: see [`precision`](crate::backend::precision).
    pub compute: FloatDType,
    /// How all other values wait for the backward pass; `None`: as they are.
    pub context: Option<Context>,
    /// The numbers in which values pass between linear layers; `None`: in the compute dtype.
    pub flow: Option<Flow>,
    /// How rows of embeddings' tables are rounded when a model in training looks them up; `None`: not at all.
    pub embedding: Option<Cast>,
    /// The products of quantized linear layers; `None`: nothing is quantized.
    pub linear: Option<LinearRow>,
}

impl Row {
    /// The slot of the step size by which rows of embeddings are rounded, if they are.
    pub(crate) const fn embedding_step(&self) -> Option<&'static str> {
        match self.embedding {
            Some(Cast {
                source: ScaleSource::Step(slot),
                ..
            }) => Some(slot),
            Some(Cast {
                source: ScaleSource::Data | ScaleSource::History(_),
                ..
            })
            | None => None,
        }
    }

    /// What shares a scale where linear layers quantize X, if that is a square of its own elements, or all of them: a copy
    /// that a kernel can make as it computes X.
    pub(crate) fn reads_x_in(&self) -> Option<granularity::Granularity> {
        let cast = self.linear.and_then(|row| row.forward.operands()[0])?;
        match cast.source {
            ScaleSource::Data => {}
            ScaleSource::Step(_) | ScaleSource::History(_) => return None,
        }
        match cast.granularity {
            Granularity::Tensor => Some(granularity::Granularity::Tensor),
            Granularity::Block(side) => Some(granularity::Granularity::Block(side)),
            Granularity::Group(_) | Granularity::Row => None,
        }
    }

    /// The recipe's name as a type, with the line about it.
    pub const fn name(&self) -> Name {
        Name {
            name: self.name,
            about: self.about,
        }
    }
}

/// An operand of the products of a linear layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum LinearOperand {
    /// X in Y = X W.
    X,
    /// W in Y = X W.
    W,
    /// dY in dX = dY Wᵀ.
    Gradient,
    /// W in dX = dY Wᵀ.
    WeightOfInput,
    /// X in dW = Xᵀ dY.
    SavedX,
    /// dY in dW = Xᵀ dY.
    GradientOfWeight,
}

/// A matrix that products of a linear layer read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum LinearMatrix {
    /// The input.
    X,
    /// The weight.
    W,
    /// The gradient of the output.
    Gradient,
}

impl LinearOperand {
    /// The matrix that it is.
    pub const fn matrix(self) -> LinearMatrix {
        match self {
            Self::X | Self::SavedX => LinearMatrix::X,
            Self::W | Self::WeightOfInput => LinearMatrix::W,
            Self::Gradient | Self::GradientOfWeight => LinearMatrix::Gradient,
        }
    }
}

impl fmt::Display for LinearOperand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::X => "X",
            Self::W => "W",
            Self::Gradient => "dY",
            Self::WeightOfInput => "W in dX",
            Self::SavedX => "saved X",
            Self::GradientOfWeight => "dY in dW",
        })
    }
}

impl fmt::Display for LinearMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::X => "X",
            Self::W => "W",
            Self::Gradient => "dY",
        })
    }
}

/// The slot of the history that the first of two casts of a matrix is scaled by, else that of the second.
const fn either(first: Option<Cast>, second: Option<Cast>) -> &'static str {
    let slot = history_of(first);
    match slot.is_empty() {
        true => history_of(second),
        false => slot,
    }
}

/// The slot of the history that an operand is scaled by; an empty name where it has none.
pub(super) const fn history_of(cast: Option<Cast>) -> &'static str {
    match cast {
        Some(Cast {
            source: ScaleSource::History(slot),
            ..
        }) => slot,
        Some(Cast {
            source: ScaleSource::Data | ScaleSource::Step(_),
            ..
        })
        | None => "",
    }
}

/// The slots of a row with learned step sizes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LearnedSlots {
    /// That of the step size of X.
    pub x: &'static str,
    /// That of the step size of W.
    pub weight: &'static str,
    /// That of the size of their transform.
    pub hadamard: Option<&'static str>,
}

impl LearnedSlots {
    /// Those of the step sizes of X and W.
    pub const fn of_operands(self) -> [&'static str; 2] {
        [self.x, self.weight]
    }
}

impl LinearRow {
    /// The operands that are quantized, and how.
    pub fn operands(&self) -> impl Iterator<Item = (LinearOperand, Cast)> {
        use LinearOperand::{Gradient, GradientOfWeight, SavedX, W, WeightOfInput, X};
        let products = [
            (&self.forward, [X, W]),
            (&self.input_gradient, [Gradient, WeightOfInput]),
            (&self.weight_gradient, [SavedX, GradientOfWeight]),
        ];
        products.into_iter().flat_map(|(product, operands)| {
            let casts = operands.into_iter().zip(product.operands());
            casts.filter_map(|(operand, cast)| Some((operand, cast?)))
        })
    }

    /// The slots of the histories of maxima that X, W and dY are scaled by; an empty name where a matrix has none.
    pub(crate) const fn histories(&self) -> [&'static str; 3] {
        let casts = [
            self.forward.operands(),
            self.input_gradient.operands(),
            self.weight_gradient.operands(),
        ];
        let [
            [x, weight],
            [gradient, weight_of_input],
            [x_of_weight, gradient_of_weight],
        ] = casts;
        [
            either(x, x_of_weight),
            either(weight, weight_of_input),
            either(gradient, gradient_of_weight),
        ]
    }

    /// The slot of the threshold above which blocks of X fall back, if they do.
    pub(crate) const fn threshold(&self) -> Option<&'static str> {
        match self.forward {
            Product::Quantized {
                left:
                    Cast {
                        residual: Residual::Above(slot),
                        ..
                    },
                ..
            } => Some(slot),
            Product::Quantized { .. } | Product::Compute => None,
        }
    }

    /// True if attention behind a layer that the policy names ([`LayerPolicy::products`](crate::layer::LayerPolicy::products))
    /// has INT8 products: those of INT8 recipes, whose scales follow from the data.
    pub const fn has_int8_attention(&self) -> bool {
        let [left, right] = self.forward.operands();
        let (Some(left), Some(right)) = (left, right) else {
            return false;
        };
        matches!([left.number, right.number], [Number::Int8, Number::Int8])
            && self.learned().is_none()
    }

    /// The slots, if the forward product takes learned step sizes: then the backward pass reads the operands of the
    /// forward product, and the steps have gradients.
    pub(crate) const fn learned(&self) -> Option<LearnedSlots> {
        let Product::Quantized { left, right, .. } = &self.forward else {
            return None;
        };
        let (ScaleSource::Step(x), ScaleSource::Step(weight)) = (left.source, right.source) else {
            return None;
        };
        Some(LearnedSlots {
            x,
            weight,
            hadamard: match left.transform {
                Transform::Identity | Transform::RandomHadamard => None,
                Transform::Hadamard(slot) => Some(slot),
            },
        })
    }
}
