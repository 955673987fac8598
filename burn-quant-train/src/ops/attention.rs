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

/// The kernels of a backend that has them.
pub struct SoftmaxKernels<B: QuantOps> {
    /// The probabilities of scores `[batch, heads, queries, keys]`, in their dtype.
    pub forward: fn(FloatTensor<B>, AttentionScores) -> FloatTensor<B>,
    /// The probabilities, and the gradient of the scores, from the scores and the gradient of the probabilities.
    pub backward: SoftmaxBackward<B>,
}

/// See [`SoftmaxKernels::backward`].
pub type SoftmaxBackward<B> =
    fn(FloatTensor<B>, FloatTensor<B>, AttentionScores) -> (FloatTensor<B>, FloatTensor<B>);

/// Query, key and value, `[batch, heads, sequence, features]`, of one dtype.
#[derive(Debug, Clone)]
pub struct AttentionInputs<T> {
    /// Q.
    pub query: T,
    /// K.
    pub key: T,
    /// V.
    pub value: T,
}

fn scores<B: QuantOps>(query: FloatTensor<B>, key: FloatTensor<B>) -> FloatTensor<B> {
    product::<B>(query, B::float_transpose(key))
}

/// What attention keeps for the backward pass.
#[derive(Debug)]
struct Context<B: QuantOps> {
    inputs: AttentionInputs<FloatTensor<B>>,
    attention: AttentionScores,
    backward: SoftmaxBackward<B>,
}

impl<B: QuantOps> Clone for Context<B> {
    fn clone(&self) -> Self {
        Self {
            inputs: self.inputs.clone(),
            ..*self
        }
    }
}

/// The backward pass, for parents Q, K and V: the scores and the probabilities are computed again.
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
        let [query_node, key_node, value_node] = ops.parents;
        let Context {
            inputs: AttentionInputs { query, key, value },
            attention,
            backward,
        } = ops.state;
        let grad_probabilities = product::<B>(grad.clone(), B::float_transpose(value));
        let scores = scores::<B>(query.clone(), key.clone());
        let (probabilities, grad_scores) = backward(scores, grad_probabilities, attention);
        if let Some(node) = value_node {
            let grad = product::<B>(B::float_transpose(probabilities), grad);
            grads.register::<B>(node.id, grad);
        }
        if let Some(node) = query_node {
            grads.register::<B>(node.id, product::<B>(grad_scores.clone(), key));
        }
        if let Some(node) = key_node {
            let grad = product::<B>(B::float_transpose(grad_scores), query);
            grads.register::<B>(node.id, grad);
        }
    }
}

/// `softmax(scale Q Kᵀ + mask) V`.
pub(super) fn forward<B: QuantOps>(
    kernels: &SoftmaxKernels<B>,
    inputs: AttentionInputs<FloatTensor<B>>,
    attention: AttentionScores,
) -> FloatTensor<B> {
    let scores = scores::<B>(inputs.query, inputs.key);
    product::<B>((kernels.forward)(scores, attention), inputs.value)
}

/// [`forward`], recorded: Q, K and V are saved.
pub(super) fn recorded<B: QuantOps, C: CheckpointStrategy>(
    kernels: SoftmaxKernels<B>,
    inputs: AttentionInputs<FloatTensor<Autodiff<B, C>>>,
    attention: AttentionScores,
) -> FloatTensor<Autodiff<B, C>> {
    let nodes = [&inputs.query, &inputs.key, &inputs.value].map(|input| input.node.clone());
    let inputs = AttentionInputs {
        query: inputs.query.primitive,
        key: inputs.key.primitive,
        value: inputs.value.primitive,
    };
    let output = forward(&kernels, inputs.clone(), attention);
    match Attention.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => {
            let context = Context {
                inputs,
                attention,
                backward: kernels.backward,
            };
            prep.finish(context, output)
        }
        OpsKind::UnTracked(prep) => prep.finish(output),
    }
}
