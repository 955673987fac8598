//! The plan of a run of a layer: the copies that its products read, from its row.

use std::sync::Arc;

use crate::{
    data::{DataBackend, Layout, product::Accumulation},
    layer::{
        Bank, Call, Layer, Role,
        tag::{CopyKey, Epoch, View},
    },
    ops::operand::{Factor, Make},
    recipe::{Cast, Flow, LinearRow, Product, Residual, Rounding, SavedX},
};

/// The operands of both backward products, left and right; `None` for a product in the compute dtype.
#[derive(Debug, Clone, Copy)]
pub(super) struct BackwardPlan {
    /// dX = dY Wᵀ.
    pub input: Option<[Make; 2]>,
    /// dW = Xᵀ dY.
    pub weight: Option<[Make; 2]>,
    /// How products of FP8 numbers are added up, in dX and in dW.
    pub accumulation: [Accumulation; 2],
}

/// The plan of a run of a layer, from its row.
pub(super) struct Plan {
    /// Operands of the forward product; `None` in the compute dtype.
    pub forward: Option<[Make; 2]>,
    /// How products of FP8 numbers are added up in it.
    pub accumulation: Accumulation,
    pub residual: Residual,
    /// The copy of X for the backward pass, if that reads a copy and not X.
    pub saved: Option<Make>,
    /// True if that copy [may be made in the backward pass](Factors::is_made_again).
    pub is_made_again: bool,
    /// The copy of W that is kept: the forward product's, and that of dX where both are one.
    pub weight: Option<Stored>,
    /// The copy of W that dX reads, where that is another one.
    pub other_weight: Option<Stored>,
    pub backward: BackwardPlan,
    pub call: Call,
}

/// A copy of W that is kept from run to run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stored {
    pub key: CopyKey,
    pub make: Make,
}

/// The operands of a layer's products, left and right, from its row; `None` for a product in the compute dtype.
#[derive(Debug, Clone, Copy)]
pub(super) struct Factors {
    /// Y = X W.
    forward: Option<[Factor; 2]>,
    /// dX = dY Wᵀ.
    input: Option<[Factor; 2]>,
    /// dW = Xᵀ dY.
    weight: Option<[Factor; 2]>,
    saved_x: SavedX,
}

impl Factors {
    /// `weight_view`: how W shows the matrix that copies are made of.
    pub fn of(row: &LinearRow, weight_view: View) -> Self {
        let is_transposed = weight_view == View::Transposed;
        Self {
            forward: casts(&row.forward)
                .map(|[x, weight]| [Factor::left(x, false), Factor::right(weight, is_transposed)]),
            input: casts(&row.input_gradient).map(|[gradient, weight]| {
                [
                    Factor::left(gradient, false),
                    Factor::right(weight, !is_transposed),
                ]
            }),
            weight: casts(&row.weight_gradient)
                .map(|[x, gradient]| [Factor::left(x, true), Factor::right(gradient, false)]),
            saved_x: row.saved_x,
        }
    }

    /// The copy of X that is made in the forward pass for the backward pass.
    pub fn saved(&self) -> Option<Factor> {
        match self.saved_x {
            SavedX::Operand => self.weight.map(|[x, _]| x),
            SavedX::Input => None,
        }
    }

    /// True if the backward pass may make the copy of X, where X can be made again: a copy of other numbers than the
    /// forward product's operand, made of X as it is, costs little more there than in the forward pass.
    pub fn is_made_again(&self) -> bool {
        self.saved().is_some_and(|saved| {
            let is_operand = |[x, _]: [Factor; 2]| x.is_same_as(&saved);
            let has_history = saved.key.history.is_some();
            saved.takes_matrix() && !has_history && !self.forward.is_some_and(is_operand)
        })
    }

    /// The copies of W that are kept from run to run, and their layouts: that of the forward product, and that of dX
    /// where it is another one.
    pub fn weights(&self) -> [Option<(Factor, Layout)>; 2] {
        let of_forward = self.forward.map(|[_, weight]| weight);
        let of_input = self.input.map(|[_, weight]| weight);
        let own = |factor: Factor| (factor, factor.key.layout);
        match (of_forward, of_input) {
            // Row-major where both products read it: each makes the other layout for its own time if it needs that.
            (Some(first), Some(second)) if first.is_same_as(&second) => {
                [Some((first, Layout::RowMajor)), None]
            }
            (first, second) => [first.map(own), second.map(own)],
        }
    }
}

impl Plan {
    /// The plan of this run of the layer; `weight_view`: how W shows the matrix that copies are made of.
    pub fn new<B: DataBackend>(
        layer: &Layer<B>,
        row: &LinearRow,
        weight_view: View,
        call: Call,
    ) -> Self {
        let key = |role| move || layer.key(call, role);
        let weight_key = |role| move || layer.key(call.of_weight(), role);
        let factors = Factors::of(row, weight_view);
        let Factors {
            forward,
            input,
            weight,
            ..
        } = factors;

        // Operands of the same numbers are one copy, so one draw.
        let of_saved = match (&forward, &weight) {
            (Some([x, _]), Some([saved, _])) if x.is_same_as(saved) => Role::Input,
            _ => Role::SavedInput,
        };
        let of_gradient = match (&input, &weight) {
            (Some([first, _]), Some([_, second])) if !first.is_same_as(second) => {
                Role::OutputGradientOfWeight
            }
            _ => Role::OutputGradient,
        };
        let of_other = match (&forward, &input) {
            (Some([_, first]), Some([_, second])) if first.is_same_as(second) => Role::Weight,
            _ => Role::WeightOfInput,
        };
        let forward = forward.map(|[x, weight]| {
            [
                Make::new(x, key(Role::Input)),
                Make::new(weight, weight_key(Role::Weight)),
            ]
        });
        let input = input.map(|[gradient, weight]| {
            [
                Make::new(gradient, key(Role::OutputGradient)),
                Make::new(weight, weight_key(of_other)),
            ]
        });
        let weight = weight.map(|[x, gradient]| {
            [
                Make::new(x, key(of_saved)),
                Make::new(gradient, key(of_gradient)),
            ]
        });

        let stored = |(factor, layout): (Factor, Layout), make: Option<[Make; 2]>| {
            let [_, make] = make?;
            let key = CopyKey {
                layout,
                ..factor.key
            };
            Some(Stored { key, make })
        };
        let [of_forward, of_input] = factors.weights();
        Self {
            forward,
            accumulation: row.forward.accumulation(),
            residual: casts(&row.forward).map_or(Residual::Never, |[x, _]| x.residual),
            saved: factors.saved().and(weight.map(|[x, _]| x)),
            is_made_again: factors.is_made_again(),
            weight: of_forward.and_then(|it| stored(it, forward)),
            other_weight: of_input.and_then(|it| stored(it, input)),
            backward: BackwardPlan {
                input,
                weight,
                accumulation: [&row.input_gradient, &row.weight_gradient]
                    .map(Product::accumulation),
            },
            call,
        }
    }

    /// The copy of dX in which it flows back to the operator that made X.
    pub fn input_gradient<B: DataBackend>(&self, layer: &Layer<B>, flow: &Flow) -> Option<Make> {
        let cast = flow.gradients.as_ref()?;
        let key = || layer.key(self.call, Role::InputGradient);
        Some(Make::new(Factor::left(cast, false), key))
    }

    /// The time for which a copy of X is good.
    pub fn epoch<B: DataBackend>(&self, bank: &Arc<Bank<B>>, key: CopyKey) -> Option<Epoch<B>> {
        is_of_a_step(key).then(|| Epoch::of(bank, self.call))
    }

    /// The time for which a copy of W is good.
    pub fn weight_epoch<B: DataBackend>(
        &self,
        bank: &Arc<Bank<B>>,
        key: CopyKey,
    ) -> Option<Epoch<B>> {
        is_of_a_step(key).then(|| Epoch::of(bank, self.call.of_weight()))
    }
}

/// True for a copy that is good for a step only.
fn is_of_a_step(key: CopyKey) -> bool {
    key.rounding == Rounding::Stochastic || key.history.is_some()
}

fn casts(product: &Product) -> Option<[&Cast; 2]> {
    match product {
        Product::Compute => None,
        Product::Quantized { left, right, .. } => Some([left, right]),
    }
}
