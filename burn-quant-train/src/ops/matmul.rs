//! Products in the compute dtype by a kernel of our own, where the backend has one.

use burn_autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn_backend::tensor::FloatTensor;

use super::QuantOps;

/// `lhs [.., M, K]` times `rhs [.., K, N]`, both BF16 or FP16 with the same leading dimensions, of the same dtype.
pub type MatmulKernel<B> = fn(FloatTensor<B>, FloatTensor<B>) -> FloatTensor<B>;

/// What a product keeps for the backward pass: each operand if the other one needs a gradient.
#[derive(Debug)]
struct Context<B: QuantOps> {
    kernel: MatmulKernel<B>,
    lhs: Option<FloatTensor<B>>,
    rhs: Option<FloatTensor<B>>,
}

impl<B: QuantOps> Clone for Context<B> {
    fn clone(&self) -> Self {
        Self {
            lhs: self.lhs.clone(),
            rhs: self.rhs.clone(),
            ..*self
        }
    }
}

/// The backward pass, for parents `lhs` and `rhs`.
#[derive(Debug)]
struct Matmul;

impl<B: QuantOps> Backward<B, 2> for Matmul {
    type State = Context<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let grad = grads.consume::<B>(&ops.node);
        let [lhs_node, rhs_node] = ops.parents;
        let Context { kernel, lhs, rhs } = ops.state;
        if let (Some(node), Some(rhs)) = (lhs_node, rhs) {
            let grad = kernel(grad.clone(), B::float_transpose(rhs));
            grads.register::<B>(node.id, grad);
        }
        if let (Some(node), Some(lhs)) = (rhs_node, lhs) {
            let grad = kernel(B::float_transpose(lhs), grad);
            grads.register::<B>(node.id, grad);
        }
    }
}

/// The product by `kernel`, recorded.
pub(super) fn recorded<B: QuantOps, C: CheckpointStrategy>(
    kernel: MatmulKernel<B>,
    lhs: FloatTensor<Autodiff<B, C>>,
    rhs: FloatTensor<Autodiff<B, C>>,
) -> FloatTensor<Autodiff<B, C>> {
    let output = kernel(lhs.primitive.clone(), rhs.primitive.clone());
    let nodes = [lhs.node.clone(), rhs.node.clone()];
    match Matmul.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => {
            let context = Context {
                kernel,
                lhs: rhs.is_tracked().then(|| lhs.primitive.clone()),
                rhs: lhs.is_tracked().then(|| rhs.primitive.clone()),
            };
            prep.finish(context, output)
        }
        OpsKind::UnTracked(prep) => prep.finish(output),
    }
}
