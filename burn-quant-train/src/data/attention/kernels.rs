//! The kernels of attention.

use burn_backend::{
    Backend, DType, Shape,
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
    /// True where tensors of this dtype and of these shapes have a kernel that holds no scores in memory.
    pub is_flash: fn(&Device<B>, DType, &AttentionInputs<Shape>, AttentionScores) -> bool,
    /// `softmax(scale Q Kᵀ + mask) V`, in memory in the order of rows.
    pub forward: fn(AttentionInputs<FloatTensor<B>>, AttentionScores) -> FloatTensor<B>,
    /// The gradients of those inputs that are wanted. Scores and probabilities are computed again.
    pub backward: fn(AttentionBackward<FloatTensor<B>>) -> AttentionGradients<B>,
    /// `forward` where `is_flash`, with what `flash_backward` needs.
    pub flash: fn(AttentionInputs<FloatTensor<B>>, AttentionScores) -> FlashOutput<FloatTensor<B>>,
    /// `backward` where `is_flash`.
    pub flash_backward: FlashBackward<B>,
}

/// The gradients, from what those of the composition follow from and what the forward pass left.
pub type FlashBackward<B> =
    fn(AttentionBackward<FloatTensor<B>>, FlashOutput<FloatTensor<B>>) -> AttentionGradients<B>;

/// What the gradients follow from.
#[derive(Debug, Clone)]
pub struct AttentionBackward<A> {
    /// Those of the forward pass.
    pub inputs: AttentionInputs<A>,
    /// That of the output.
    pub gradient: A,
    /// The inputs whose gradients are wanted.
    pub wanted: AttentionInputs<bool>,
    /// The scores of the forward pass.
    pub scores: AttentionScores,
}

/// The gradients that are wanted.
pub type AttentionGradients<B> = AttentionInputs<Option<FloatTensor<B>>>;

/// What attention without scores in memory leaves.
#[derive(Debug, Clone)]
pub struct FlashOutput<A> {
    /// O, `[batch, heads, queries, features of V]`, in the dtype of the inputs.
    pub output: A,
    /// L, f32 `[batch, heads, queries]`: the logarithm of the sum of a row's exponentials.
    pub log_sum_exp: A,
}

impl<A> FlashOutput<A> {
    /// Applies `f` to each.
    pub fn map<B>(self, mut f: impl FnMut(A) -> B) -> FlashOutput<B> {
        FlashOutput {
            output: f(self.output),
            log_sum_exp: f(self.log_sum_exp),
        }
    }
}

impl<A: Bundle> Bundle for FlashOutput<A> {
    type On<T: Tensors> = FlashOutput<A::On<T>>;

    fn rebuild<S: Tensors, T: Tensors>(
        outputs: FlashOutput<A::On<S>>,
        change: &mut impl Change<S, T>,
    ) -> FlashOutput<A::On<T>> {
        outputs.map(|output| A::rebuild(output, change))
    }
}

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
