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

/// The product by the backend's kernel, else by Burn's.
pub(super) fn product<B: QuantOps>(lhs: FloatTensor<B>, rhs: FloatTensor<B>) -> FloatTensor<B> {
    match B::matmul_kernel(&B::float_device(&lhs)) {
        Some(kernel) => kernel(lhs, rhs),
        None => B::float_matmul(lhs, rhs),
    }
}

/// The backward pass, for parents `lhs` and `rhs`.
#[derive(Debug)]
struct Matmul;

impl<B: QuantOps> Backward<B, 2> for Matmul {
    type State = (Option<FloatTensor<B>>, Option<FloatTensor<B>>);

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let grad = grads.consume::<B>(&ops.node);
        let [lhs_node, rhs_node] = ops.parents;
        let (lhs, rhs) = ops.state;
        if let (Some(node), Some(rhs)) = (lhs_node, rhs) {
            let grad = product::<B>(grad.clone(), B::float_transpose(rhs));
            grads.register::<B>(node.id, grad);
        }
        if let (Some(node), Some(lhs)) = (rhs_node, lhs) {
            let grad = product::<B>(B::float_transpose(lhs), grad);
            grads.register::<B>(node.id, grad);
        }
    }
}

/// The product, recorded; each operand is saved if the other one needs a gradient.
pub(super) fn recorded<B: QuantOps, C: CheckpointStrategy>(
    lhs: FloatTensor<Autodiff<B, C>>,
    rhs: FloatTensor<Autodiff<B, C>>,
) -> FloatTensor<Autodiff<B, C>> {
    let output = product::<B>(lhs.primitive.clone(), rhs.primitive.clone());
    let nodes = [lhs.node.clone(), rhs.node.clone()];
    match Matmul.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => {
            let saved_lhs = rhs.is_tracked().then(|| lhs.primitive.clone());
            let saved_rhs = lhs.is_tracked().then(|| rhs.primitive.clone());
            prep.finish((saved_lhs, saved_rhs), output)
        }
        OpsKind::UnTracked(prep) => prep.finish(output),
    }
}
