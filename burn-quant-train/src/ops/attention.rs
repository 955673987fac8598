//! Attention for training in which nothing of the size of the scores is saved, and the softmax is one kernel.

use burn_autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn_backend::tensor::FloatTensor;
pub use cubecl_kernels::softmax::AttentionScores;

use super::QuantOps;

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
        let wanted = ops.parents.each_ref().map(Option::is_some).into();
        let context = ops.state;
        let of_inputs = (context.backward)(context.inputs, grad, wanted, context.scores);
        for (node, grad) in ops.parents.into_iter().zip(of_inputs.into_array()) {
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
