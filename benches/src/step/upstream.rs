//! The gradient that a layer gets from above, as PyTorch's `y.backward(gradient)` gives it.

use burn::{
    backend::autodiff::{
        Autodiff,
        checkpoint::{base::Checkpointer, strategy::NoCheckpointing},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    tensor::{
        Slice, TensorMetadata,
        backend::{AutodiffBackend, Backend},
        ops::FloatTensor,
    },
};

/// Ends a graph: whatever the gradient of its result is, that of its input is the given one.
///
/// Burn's backward pass begins with ones in the shape of its tensor, and to multiply them by a gradient takes a kernel
/// as large as the layer's output, which no training step has. Here the result is one number.
///
/// Burn's fusion leaves unfused what follows an operation of ours while unrelated elementwise work is pending. Inside
/// a model there is hardly any: the next layer has used the output, and what came last made the gradient. Here slices,
/// which are not fused, use the output and the ones.
#[derive(Debug)]
struct Upstream;

impl<B: Backend> Backward<B, 1> for Upstream {
    type State = FloatTensor<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let ones = grads.consume::<B>(&ops.node);
        grads.register::<B>(ops.node.id, first::<B>(ones));
        let [y] = ops.parents;
        if let Some(y) = y {
            grads.register::<B>(y.id, ops.state);
        }
    }
}

/// The gradients of all that `y` was computed from, where `gradient` is its own.
pub(super) fn backward<B: Backend>(
    y: FloatTensor<Autodiff<B>>,
    gradient: FloatTensor<B>,
) -> Gradients {
    let end = first::<B>(y.primitive);
    let end = match Upstream
        .prepare::<NoCheckpointing>([y.node])
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prep) => prep.finish(gradient, end),
        OpsKind::UnTracked(prep) => prep.finish(end),
    };
    <Autodiff<B> as AutodiffBackend>::backward(end)
}

/// The first element, with as many dimensions.
fn first<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    let ranges = vec![Slice::from(0..1); tensor.shape().num_dims()];
    B::float_slice(tensor, &ranges)
}
