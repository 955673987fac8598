//! Attention for training in which nothing of the size of the scores is saved, and the softmax is one kernel.

use burn_autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn_backend::tensor::FloatTensor;
pub use cubecl_kernels::softmax::AttentionScores;

use super::{QuantOps, matmul::product};

/// Attention on the backend that holds the data.
pub struct AttentionKernels<B: QuantOps> {
    /// `softmax(scale Q Kᵀ + mask) V`.
    pub forward: fn(AttentionInputs<FloatTensor<B>>, AttentionScores) -> FloatTensor<B>,
    /// The gradients of the inputs.
    pub backward: AttentionBackward<B>,
}

/// The gradients of those inputs for which `wanted` asks, from the inputs and the gradient of the output. Scores and
/// probabilities are computed again.
pub type AttentionBackward<B> = fn(
    inputs: AttentionInputs<FloatTensor<B>>,
    grad: FloatTensor<B>,
    wanted: AttentionInputs<bool>,
    scores: AttentionScores,
) -> AttentionInputs<Option<FloatTensor<B>>>;

/// Query, key and value, `[batch, heads, sequence, features]`, of one dtype; or one thing for each of them.
#[derive(Debug, Clone, Copy)]
pub struct AttentionInputs<T> {
    /// Q.
    pub query: T,
    /// K.
    pub key: T,
    /// V.
    pub value: T,
}

impl<T> AttentionInputs<T> {
    /// `f` of each.
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> AttentionInputs<U> {
        AttentionInputs {
            query: f(self.query),
            key: f(self.key),
            value: f(self.value),
        }
    }

    /// Query, key, value.
    pub fn into_array(self) -> [T; 3] {
        [self.query, self.key, self.value]
    }
}

impl<T> From<[T; 3]> for AttentionInputs<T> {
    fn from([query, key, value]: [T; 3]) -> Self {
        Self { query, key, value }
    }
}

/// Kernels of the softmax of attention's scores.
pub(super) struct SoftmaxKernels<B: QuantOps> {
    /// The probabilities of scores `[batch, heads, queries, keys]`, in their dtype.
    pub forward: fn(FloatTensor<B>, AttentionScores) -> FloatTensor<B>,
    /// The probabilities, and the gradient of the scores, from the scores and the gradient of the probabilities.
    pub backward: SoftmaxBackward<B>,
}

/// See [`SoftmaxKernels::backward`].
type SoftmaxBackward<B> =
    fn(FloatTensor<B>, FloatTensor<B>, AttentionScores) -> (FloatTensor<B>, FloatTensor<B>);

impl<B: QuantOps> SoftmaxKernels<B> {
    /// See [`AttentionKernels::forward`].
    pub fn attention(
        &self,
        inputs: AttentionInputs<FloatTensor<B>>,
        scores: AttentionScores,
    ) -> FloatTensor<B> {
        let AttentionInputs { query, key, value } = inputs;
        let of_scores = product::<B>(query, B::float_transpose(key));
        product::<B>((self.forward)(of_scores, scores), value)
    }

    /// See [`AttentionKernels::backward`].
    pub fn attention_backward(
        &self,
        inputs: AttentionInputs<FloatTensor<B>>,
        grad: FloatTensor<B>,
        wanted: AttentionInputs<bool>,
        scores: AttentionScores,
    ) -> AttentionInputs<Option<FloatTensor<B>>> {
        let AttentionInputs { query, key, value } = inputs;
        let grad_probabilities = product::<B>(grad.clone(), B::float_transpose(value));
        let of_scores = product::<B>(query.clone(), B::float_transpose(key.clone()));
        let (probabilities, grad_scores) = (self.backward)(of_scores, grad_probabilities, scores);
        let of_value = || product::<B>(B::float_transpose(probabilities), grad);
        let of_query = || product::<B>(grad_scores.clone(), key);
        let of_key = || product::<B>(B::float_transpose(grad_scores.clone()), query);
        AttentionInputs {
            value: wanted.value.then(of_value),
            query: wanted.query.then(of_query),
            key: wanted.key.then(of_key),
        }
    }
}

/// What attention keeps for the backward pass.
#[derive(Debug)]
struct Context<B: QuantOps> {
    inputs: AttentionInputs<FloatTensor<B>>,
    scores: AttentionScores,
    backward: AttentionBackward<B>,
}

impl<B: QuantOps> Clone for Context<B> {
    fn clone(&self) -> Self {
        Self {
            inputs: self.inputs.clone(),
            ..*self
        }
    }
}

/// The backward pass, for parents Q, K and V.
#[derive(Debug)]
struct Attention;

impl<B: QuantOps> Backward<B, 3> for Attention {
    type State = Context<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 3>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let grad = grads.consume::<B>(&ops.node);
        let nodes = AttentionInputs::from(ops.parents);
        let wanted = AttentionInputs {
            query: nodes.query.is_some(),
            key: nodes.key.is_some(),
            value: nodes.value.is_some(),
        };
        let context = ops.state;
        let of_inputs = (context.backward)(context.inputs, grad, wanted, context.scores);
        for (node, grad) in nodes.into_array().into_iter().zip(of_inputs.into_array()) {
            if let Some((node, grad)) = node.zip(grad) {
                grads.register::<B>(node.id, grad);
            }
        }
    }
}

/// [`AttentionKernels::forward`], recorded: Q, K and V are saved.
pub(super) fn recorded<B: QuantOps, C: CheckpointStrategy>(
    kernels: AttentionKernels<B>,
    inputs: AttentionInputs<FloatTensor<Autodiff<B, C>>>,
    scores: AttentionScores,
) -> FloatTensor<Autodiff<B, C>> {
    let nodes = [&inputs.query, &inputs.key, &inputs.value].map(|input| input.node.clone());
    let inputs = inputs.map(|input| input.primitive);
    let output = (kernels.forward)(inputs.clone(), scores);
    match Attention.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => {
            let context = Context {
                inputs,
                scores,
                backward: kernels.backward,
            };
            prep.finish(context, output)
        }
        OpsKind::UnTracked(prep) => prep.finish(output),
    }
}
