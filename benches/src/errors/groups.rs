//! E4M3 in groups between linear layers, by the size of the groups (coat-fp8, sections 5.1 and 5.2, Appendix H).

use anyhow::{Context, Result};
use burn::{
    nn::{Linear, RmsNorm},
    tensor::Tensor,
};
use cubecl_kernels::{granularity::Granularity, number::Number};
use examples::data::Batch;
use serde::{Deserialize, Serialize};

use super::{
    capture::{Captured, Exactly, Kind},
    contexts::{self, Compressed, Gradients},
    decoder::{Decoder, Exact, Place, Step, gated, product},
    metric::{Distance, root_mean_square},
    numbers::Numbers,
    straight_through::{floats, rounded},
};

/// Sizes of groups: those of COAT's Table 10, and 128.
pub const GROUPS: [usize; 6] = [4, 8, 16, 32, 64, 128];

const E4M3: Numbers = Numbers::Format(Number::E4M3);

/// The tensors that a pass rounds to E4M3.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Flow {
    /// The operands of linear layers, in groups of 128.
    LinearByGroup,
    /// The same with a scale for each matrix.
    LinearByTensor,
    /// Those, and what norms and SwiGLU's product read, in groups of so many.
    Operators(usize),
}

/// The error of a flow in the forward and the backward pass, and of contexts alone.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GroupError {
    /// The tensors that are rounded.
    pub flow: Flow,
    /// Of what the last decoder layer gives: the mean squared error over the mean square.
    pub forward: f64,
    /// The same of the gradient of what the first layer reads.
    pub backward: f64,
    /// Contexts of operators in these groups, everything else exact.
    pub contexts: Option<ContextsAlone>,
}

/// The effect of contexts alone.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ContextsAlone {
    /// Error of what operators read, the norm of the error over that of the matrix, root mean square over the matrices.
    pub read: f64,
    /// The same in square blocks of as many elements as a group, where there are any: section 5.2's comparison.
    pub read_in_blocks: Option<f64>,
    /// The mean squared error of the gradient of what the first layer reads, over its mean square.
    pub backward: f64,
    /// One less the cosine of the gradients of all parameters.
    pub model: f64,
    /// The same of the gradients of norms' weights.
    pub norms: f64,
}

/// Rounds what linear layers and, where asked for, operators read. Gradients are not rounded (section G.5), and neither
/// is what the head reads.
#[derive(Debug, Clone, Copy)]
struct Coat {
    operands: Granularity,
    operators: Option<Granularity>,
}

impl Coat {
    fn new(flow: Flow) -> Self {
        let (operands, operators) = match flow {
            Flow::LinearByGroup => (Granularity::Group(128), None),
            Flow::LinearByTensor => (Granularity::Tensor, None),
            Flow::Operators(group) => (Granularity::Tensor, Some(Granularity::Group(group))),
        };
        Self {
            operands,
            operators,
        }
    }

    fn read(&self, x: Tensor<Exactly, 3>) -> Tensor<Exactly, 3> {
        match self.operators {
            Some(granularity) => rounded(x, E4M3, granularity),
            None => x,
        }
    }
}

impl Step<Exactly> for Coat {
    fn linear(
        &mut self,
        place: Place,
        x: Tensor<Exactly, 3>,
        layer: &Linear<Exactly>,
    ) -> Tensor<Exactly, 3> {
        if place == Place::Head {
            return product(x, layer.weight.val());
        }
        // Groups lie along what the product sums over: the rows of X, the columns of Burn's weight.
        let weight = rounded(layer.weight.val().transpose(), E4M3, self.operands).transpose();
        product(rounded(x, E4M3, self.operands), weight)
    }

    fn norm(
        &mut self,
        _is_last: bool,
        x: Tensor<Exactly, 3>,
        norm: &RmsNorm<Exactly>,
    ) -> Tensor<Exactly, 3> {
        norm.forward(self.read(x))
    }

    fn gate(&mut self, gate: Tensor<Exactly, 3>, up: Tensor<Exactly, 3>) -> Tensor<Exactly, 3> {
        gated(self.read(gate), self.read(up))
    }
}

/// A step of which both ends of the layers are noted.
struct Ends<S> {
    step: S,
    /// Zeros that were added to what the first layer reads: their gradient is its.
    first: Option<Tensor<Exactly, 3>>,
    /// The output of the last layer.
    last: Vec<f32>,
}

impl<S: Step<Exactly>> Step<Exactly> for Ends<S> {
    fn first(&mut self, x: Tensor<Exactly, 3>) -> Tensor<Exactly, 3> {
        let zeros = Tensor::zeros_like(&x.clone().detach()).require_grad();
        self.first = Some(zeros.clone());
        x + zeros
    }

    fn last(&mut self, x: Tensor<Exactly, 3>) -> Tensor<Exactly, 3> {
        self.last = floats(x.clone().inner());
        x
    }

    fn linear(
        &mut self,
        place: Place,
        x: Tensor<Exactly, 3>,
        layer: &Linear<Exactly>,
    ) -> Tensor<Exactly, 3> {
        self.step.linear(place, x, layer)
    }

    fn norm(
        &mut self,
        is_last: bool,
        x: Tensor<Exactly, 3>,
        norm: &RmsNorm<Exactly>,
    ) -> Tensor<Exactly, 3> {
        self.step.norm(is_last, x, norm)
    }

    fn gate(&mut self, gate: Tensor<Exactly, 3>, up: Tensor<Exactly, 3>) -> Tensor<Exactly, 3> {
        self.step.gate(gate, up)
    }
}

/// The output of the last layer, and the gradient of the first one's input.
struct Passes {
    last: Vec<f32>,
    first_gradient: Vec<f32>,
}

impl Passes {
    fn of(
        model: &Decoder<Exactly>,
        batch: &Batch<Exactly>,
        step: impl Step<Exactly>,
    ) -> Result<Self> {
        let mut ends = Ends {
            step,
            first: None,
            last: Vec::new(),
        };
        let gradients = model.loss(batch.clone(), &mut ends).backward();
        let first = ends.first.and_then(|zeros| zeros.grad(&gradients));
        Ok(Self {
            last: ends.last,
            first_gradient: floats(first.context("no gradient of the first layer's input")?),
        })
    }

    fn beside(&self, exact: &Self) -> [f64; 2] {
        [
            Distance::of(&exact.last, &self.last).relative_mse(),
            Distance::of(&exact.first_gradient, &self.first_gradient).relative_mse(),
        ]
    }
}

/// The errors of all flows; `captured` is what the same step reads.
///
/// # Errors
///
/// A gradient is missing.
pub fn errors(
    model: &Decoder<Exactly>,
    batch: &Batch<Exactly>,
    captured: &[Captured],
) -> Result<Vec<GroupError>> {
    let exact = Passes::of(model, batch, Exact)?;
    let exact_gradients = contexts::exact(model, batch);
    let linear = [Flow::LinearByGroup, Flow::LinearByTensor];
    let flows = linear.into_iter().chain(GROUPS.map(Flow::Operators));
    flows
        .map(|flow| {
            let [forward, backward] = Passes::of(model, batch, Coat::new(flow))?.beside(&exact);
            let contexts = match flow {
                Flow::LinearByGroup | Flow::LinearByTensor => None,
                Flow::Operators(group) => {
                    let compressed = Compressed {
                        numbers: E4M3,
                        granularity: Granularity::Group(group),
                    };
                    let gradients = model.loss(batch.clone(), &mut { compressed });
                    let gradients = Gradients::of(model, gradients);
                    let [model_error, norms, _] = gradients.beside(&exact_gradients);
                    let [_, backward] = Passes::of(model, batch, compressed)?.beside(&exact);
                    Some(ContextsAlone {
                        read: read(captured, Granularity::Group(group)),
                        read_in_blocks: block_of(group)
                            .map(|size| read(captured, Granularity::Block(size))),
                        backward,
                        model: model_error,
                        norms,
                    })
                }
            };
            Ok(GroupError {
                flow,
                forward,
                backward,
                contexts,
            })
        })
        .collect()
}

/// The side of a square block of so many elements.
fn block_of(elements: usize) -> Option<usize> {
    let side = elements.isqrt();
    (side * side == elements).then_some(side)
}

/// The error of what operators read.
fn read(captured: &[Captured], granularity: Granularity) -> f64 {
    let read = captured
        .iter()
        .filter(|it| matches!(it.kind, Kind::Residual | Kind::Gated));
    root_mean_square(read.map(|matrix| {
        let rounded = E4M3.round(&matrix.values, matrix.shape, granularity);
        Distance::of(&matrix.values, &rounded).relative_error()
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    fn of(values: Vec<f32>, shape: [usize; 2]) -> Vec<Captured> {
        vec![Captured {
            kind: Kind::Residual,
            shape,
            values,
        }]
    }

    #[test]
    fn larger_groups_have_larger_errors() {
        let captured = of(Random::new(5).normals(128 * 128, 1.0), [128, 128]);
        let errors = GROUPS.map(|group| read(&captured, Granularity::Group(group)));
        for pair in errors.windows(2) {
            assert!(pair[0] < pair[1], "{errors:?}");
        }
        let gradients = vec![Captured {
            kind: Kind::GradientHead,
            ..captured[0].clone()
        }];
        assert_eq!(read(&gradients, Granularity::Group(4)), 0.0);
    }

    /// The largest of a group is a number of E4M3 times the scale: a token of equal values is exact, and beside a
    /// larger one 0.9 is 416 / 448.
    #[test]
    fn a_block_has_the_scale_of_its_larger_token() {
        let captured = of([[1.0; 4], [0.9; 4]].concat(), [2, 4]);
        assert!(read(&captured, Granularity::Group(4)) < 1e-6);
        let side = block_of(4).expect("a square");
        let error = 2f64.sqrt() * (416.0 / 448.0 - 0.9) / (2.0 * (1.0 + 0.81f64)).sqrt();
        let block = read(&captured, Granularity::Block(side));
        assert!((block / error - 1.0).abs() < 1e-3, "{block}, {error}");
        assert_eq!([8, 32, 128].map(block_of), [None; 3]);
    }
}
