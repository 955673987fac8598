//! The kernels of attention.

use burn_backend::{
    Backend, DType, TensorMetadata,
    tensor::{Device, FloatTensor},
};
use cubecl_kernels::attention::{AttentionGradients, AttentionOptions, AttentionShape};

use crate::data::tensors::{Bundle, Change, Outline, Tensors};

/// Attention on a backend that holds data.
pub trait AttentionKernels: Backend {
    /// The kernels of the device, where it has some; without them attention is built from float operations.
    fn attention_kernels(device: &Device<Self>) -> Option<Attention<Self>>;
}

/// Attention by kernels.
pub struct Attention<B: Backend> {
    /// How the device computes this, if its kernels do.
    pub way: fn(&Device<B>, &AttentionProblem, trains: bool) -> Option<AttentionWay>,
    /// Kernels that hold no scores in memory.
    pub flash: Flash<B>,
    /// Kernels that hold scores in memory while they run, where there are some.
    pub composed: Option<Composed<B>>,
}

/// How kernels compute attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionWay {
    /// Without scores in memory.
    Flash,
    /// By products and a softmax that is one kernel: scores are in memory while the operation runs. Nothing but a scale
    /// and a causal mask, as many heads of keys as of queries.
    Composed,
}

/// The properties that say whether kernels compute it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionProblem {
    /// The dtype of Q, K and V.
    pub dtype: DType,
    /// The sizes.
    pub shape: AttentionShape,
    /// The options.
    pub options: AttentionOptions,
    /// True where there is a mask.
    pub is_masked: bool,
    /// True where there is a bias.
    pub is_biased: bool,
}

/// Attention without scores in memory.
pub struct Flash<B: Backend> {
    /// The output, with what the backward pass needs.
    pub forward: fn(AttentionInputs<B>, &AttentionOptions) -> FlashOutput<FloatTensor<B>>,
    /// The gradients that are wanted. Scores are computed again.
    pub backward: fn(AttentionBackward<B>, FlashOutput<FloatTensor<B>>) -> OfInputs<B>,
}

/// Attention by products and a softmax.
pub struct Composed<B: Backend> {
    /// The output, in memory in the order of rows.
    pub forward: fn(AttentionInputs<B>, &AttentionOptions) -> FloatTensor<B>,
    /// The gradients that are wanted. Scores and probabilities are computed again.
    pub backward: fn(AttentionBackward<B>) -> OfInputs<B>,
}

/// The tensors that the gradients follow from.
#[derive(Debug, Clone)]
pub struct AttentionBackward<T: Tensors> {
    /// Those of the forward pass.
    pub inputs: AttentionInputs<T>,
    /// That of the output.
    pub gradient: T::Float,
    /// The inputs whose gradients are wanted.
    pub wanted: AttentionGradients<bool>,
    /// The options of the forward pass.
    pub options: AttentionOptions,
}

/// The gradients that are wanted.
pub type OfInputs<B> = AttentionGradients<Option<FloatTensor<B>>>;

impl<A: Bundle> Bundle for AttentionGradients<A> {
    type On<T: Tensors> = AttentionGradients<A::On<T>>;

    fn rebuild<S: Tensors, T: Tensors>(
        gradients: AttentionGradients<A::On<S>>,
        change: &mut impl Change<S, T>,
    ) -> AttentionGradients<A::On<T>> {
        AttentionGradients {
            query: A::rebuild(gradients.query, change),
            key: A::rebuild(gradients.key, change),
            value: A::rebuild(gradients.value, change),
            bias: A::rebuild(gradients.bias, change),
        }
    }
}

/// The tensors that attention without scores in memory leaves.
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

/// The inputs of attention. Floats are of one dtype.
#[derive(Debug, Clone)]
pub struct AttentionInputs<T: Tensors> {
    /// Q, `[batch, heads, queries, features]`.
    pub query: T::Float,
    /// K, `[batch, heads of keys, keys, features]`.
    pub key: T::Float,
    /// V, `[batch, heads of keys, keys, features of V]`.
    pub value: T::Float,
    /// True where a key is hidden from a query. Each dimension is that of the scores, `[batch, heads, queries, keys]`,
    /// or 1.
    pub mask: Option<T::Bool>,
    /// Added to the scores. Each dimension is that of the scores, or 1.
    pub bias: Option<T::Float>,
}

impl<T: Tensors> AttentionInputs<T> {
    /// The problem that they are for kernels; `None` where their shapes do not fit each other.
    pub fn problem(&self, dtype: DType, options: AttentionOptions) -> Option<AttentionProblem> {
        let [query, key, value] = [&self.query, &self.key, &self.value].map(|it| it.shape());
        Some(AttentionProblem {
            dtype,
            shape: AttentionShape::new("attention", &query, &key, &value).ok()?,
            options,
            is_masked: self.mask.is_some(),
            is_biased: self.bias.is_some(),
        })
    }
}

impl Bundle for AttentionInputs<Outline> {
    type On<T: Tensors> = AttentionInputs<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        inputs: AttentionInputs<S>,
        change: &mut impl Change<S, T>,
    ) -> AttentionInputs<T> {
        AttentionInputs {
            query: change.float(inputs.query),
            key: change.float(inputs.key),
            value: change.float(inputs.value),
            mask: inputs.mask.map(|mask| change.bool(mask)),
            bias: inputs.bias.map(|bias| change.float(bias)),
        }
    }
}
