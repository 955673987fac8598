//! The tensors that a step of the decoder reads, and the gradients that flow back.

use anyhow::{Context, Result};
use burn::{
    backend::{Autodiff, Flex},
    nn::{Linear, RmsNorm},
    tensor::Tensor,
};
use examples::data::Batch;
use serde::{Deserialize, Serialize};

use super::{
    decoder::{Decoder, Place, Step, gated, product},
    straight_through::floats,
};

/// Plain FP32 with gradients.
pub type Exactly = Autodiff<Flex>;

/// The kinds of matrices of a step, a row of a table each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// The inputs of norms.
    Residual,
    /// The outputs of norms: the inputs of queries, keys, values, gate and up.
    Normed,
    /// The outputs of attention.
    Mixed,
    /// Gate and up.
    Gated,
    /// The outputs of SwiGLU.
    Product,
    /// The inputs of the head.
    Last,
    /// The output gradients of queries, keys and values.
    GradientQkv,
    /// Those of the layer behind attention.
    GradientOutput,
    /// Those of gate and up.
    GradientGateUp,
    /// Those of the layer behind SwiGLU.
    GradientDown,
    /// That of the head.
    GradientHead,
}

impl Kind {
    /// All of them, activations first.
    pub const ALL: [Self; 11] = [
        Self::Residual,
        Self::Normed,
        Self::Mixed,
        Self::Gated,
        Self::Product,
        Self::Last,
        Self::GradientQkv,
        Self::GradientOutput,
        Self::GradientGateUp,
        Self::GradientDown,
        Self::GradientHead,
    ];

    /// The name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Residual => "residual stream",
            Self::Normed => "norms' outputs",
            Self::Mixed => "attention's outputs",
            Self::Gated => "gate and up",
            Self::Product => "SwiGLU's outputs",
            Self::Last => "the head's input",
            Self::GradientQkv => "dY of Q, K, V",
            Self::GradientOutput => "dY behind attention",
            Self::GradientGateUp => "dY of gate, up",
            Self::GradientDown => "dY behind SwiGLU",
            Self::GradientHead => "dY of the head",
        }
    }

    /// True for gradients.
    pub const fn is_gradient(self) -> bool {
        match self {
            Self::Residual
            | Self::Normed
            | Self::Mixed
            | Self::Gated
            | Self::Product
            | Self::Last => false,
            Self::GradientQkv
            | Self::GradientOutput
            | Self::GradientGateUp
            | Self::GradientDown
            | Self::GradientHead => true,
        }
    }
}

impl Place {
    /// The gradients of the layer's output.
    const fn gradient(self) -> Kind {
        match self {
            Self::Qkv => Kind::GradientQkv,
            Self::Output => Kind::GradientOutput,
            Self::GateUp => Kind::GradientGateUp,
            Self::Down => Kind::GradientDown,
            Self::Head => Kind::GradientHead,
        }
    }
}

/// A matrix of a step, tokens by features.
#[derive(Debug, Clone, PartialEq)]
pub struct Captured {
    /// Its kind.
    pub kind: Kind,
    /// Rows and columns.
    pub shape: [usize; 2],
    /// Row-major.
    pub values: Vec<f32>,
}

impl Captured {
    fn new(kind: Kind, x: Tensor<Flex, 3>) -> Self {
        let [batch, sequence, features] = x.dims();
        Self {
            kind,
            shape: [batch * sequence, features],
            values: floats(x),
        }
    }
}

/// Notes what is read, and adds zeros to outputs, whose gradients are those of the outputs.
#[derive(Default)]
struct Notes {
    read: Vec<Captured>,
    outputs: Vec<(Place, Tensor<Exactly, 3>)>,
}

impl Notes {
    fn read(&mut self, kind: Kind, x: &Tensor<Exactly, 3>) {
        self.read.push(Captured::new(kind, x.clone().inner()));
    }
}

impl Step<Exactly> for Notes {
    fn linear(
        &mut self,
        place: Place,
        x: Tensor<Exactly, 3>,
        layer: &Linear<Exactly>,
    ) -> Tensor<Exactly, 3> {
        if place == Place::Output {
            self.read(Kind::Mixed, &x);
        }
        let y = product(x, layer.weight.val());
        let zeros = Tensor::zeros_like(&y.clone().detach()).require_grad();
        self.outputs.push((place, zeros.clone()));
        y + zeros
    }

    fn norm(
        &mut self,
        is_last: bool,
        x: Tensor<Exactly, 3>,
        norm: &RmsNorm<Exactly>,
    ) -> Tensor<Exactly, 3> {
        self.read(Kind::Residual, &x);
        let y = norm.forward(x);
        self.read(if is_last { Kind::Last } else { Kind::Normed }, &y);
        y
    }

    fn gate(&mut self, gate: Tensor<Exactly, 3>, up: Tensor<Exactly, 3>) -> Tensor<Exactly, 3> {
        self.read(Kind::Gated, &gate);
        self.read(Kind::Gated, &up);
        let y = gated(gate, up);
        self.read(Kind::Product, &y);
        y
    }
}

/// The matrices of a step, in the order of [`Kind::ALL`].
///
/// # Errors
///
/// A gradient is missing.
pub fn capture(model: &Decoder<Exactly>, batch: Batch<Exactly>) -> Result<Vec<Captured>> {
    let mut notes = Notes::default();
    let gradients = model.loss(batch, &mut notes).backward();
    let mut all = notes.read;
    for (place, zeros) in notes.outputs {
        let gradient = zeros.grad(&gradients).context("no gradient of an output")?;
        all.push(Captured::new(place.gradient(), gradient));
    }
    all.sort_by_key(|captured| Kind::ALL.iter().position(|kind| *kind == captured.kind));
    Ok(all)
}

/// The matrices of each kind.
pub fn by_kind(captured: &[Captured]) -> impl Iterator<Item = (Kind, Vec<&Captured>)> {
    Kind::ALL.into_iter().map(|kind| {
        let of_kind = captured.iter().filter(move |it| it.kind == kind);
        (kind, of_kind.collect())
    })
}
