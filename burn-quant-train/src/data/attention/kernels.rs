//! The kernels of attention.

use burn_backend::{
    Backend,
    tensor::{Device, FloatTensor},
};
use cubecl_kernels::softmax::AttentionScores;

use crate::data::tensors::{Bundle, Change, Tensors};

/// Attention on a backend that holds data.
pub trait AttentionKernels: Backend {
    /// The kernels of the device, where it has some; without them attention is built from float operations.
    fn attention_kernels(device: &Device<Self>) -> Option<Attention<Self>>;
}

/// Attention by kernels.
pub struct Attention<B: Backend> {
    /// `softmax(scale Q Kᵀ + mask) V`.
    pub forward: fn(AttentionInputs<FloatTensor<B>>, AttentionScores) -> FloatTensor<B>,
    /// The gradients of the inputs.
    pub backward: AttentionBackward<B>,
}

/// The gradients of those inputs for which `wanted` asks, from the inputs and the gradient of the output. Scores and
/// probabilities are computed again.
pub type AttentionBackward<B> = fn(
    inputs: AttentionInputs<FloatTensor<B>>,
    gradient: FloatTensor<B>,
    wanted: AttentionInputs<bool>,
    scores: AttentionScores,
) -> AttentionInputs<Option<FloatTensor<B>>>;

/// Query, key and value, `[batch, heads, sequence, features]`, of one dtype; or one value for each of them.
#[derive(Debug, Clone, Copy)]
pub struct AttentionInputs<A> {
    /// Q.
    pub query: A,
    /// K.
    pub key: A,
    /// V.
    pub value: A,
}

impl<A> AttentionInputs<A> {
    /// Applies `f` to each.
    pub fn map<B>(self, mut f: impl FnMut(A) -> B) -> AttentionInputs<B> {
        AttentionInputs {
            query: f(self.query),
            key: f(self.key),
            value: f(self.value),
        }
    }

    /// Query, key, value.
    pub(crate) fn into_array(self) -> [A; 3] {
        [self.query, self.key, self.value]
    }
}

impl<A> From<[A; 3]> for AttentionInputs<A> {
    fn from([query, key, value]: [A; 3]) -> Self {
        Self { query, key, value }
    }
}

impl<A: Bundle> Bundle for AttentionInputs<A> {
    type On<T: Tensors> = AttentionInputs<A::On<T>>;

    fn rebuild<S: Tensors, T: Tensors>(
        inputs: AttentionInputs<A::On<S>>,
        change: &mut impl Change<S, T>,
    ) -> AttentionInputs<A::On<T>> {
        inputs.map(|input| A::rebuild(input, change))
    }
}
