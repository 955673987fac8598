//! Blocks of a model of which only what they read and what they give is kept (gradient checkpointing: Chen et al.,
//! 2016, "Training Deep Nets with Sublinear Memory Cost").
//!
//! Nodes of autodiff are recorded as ever. But what an operation of a block makes, and nothing outside of the block
//! holds, is forgotten when forward code lets go of it, and keeps the operation and the cells that this reads. The
//! first node of the block that asks for such a value in the backward pass has it computed again, with all that it
//! stands on; each value then stays until its last reader is done. So there is the memory of one block at a time, and
//! one more forward pass.

use super::scope;

/// Runs a part of a model, such as a layer, of which only `input` and the result wait for the backward pass: what is
/// between is computed again when that comes to it.
///
/// With exact contexts gradients are those without a block, to the bit: operations of the second run draw the same
/// random numbers, dropout drops the same (of what Burn composes masks are kept, a bit an element), and thresholds,
/// histories and step sizes follow the first run alone. They are read as they are in the second run, so the backward pass
/// ends before the optimizer's next step. If contexts compress `input`, the second run reads what the context holds. A stochastic copy of a matrix that
/// a layer outside of the block made first is drawn anew by those inside, which is as unbiased.
///
/// A block inside of a block belongs to the outer one. Without autodiff, and on backends without the decorator, it is
/// a call of `block`.
///
/// ```
/// use burn::{
///     backend::{Autodiff, Flex},
///     nn::LinearConfig,
///     tensor::{Distribution, Tensor, activation::relu},
/// };
/// use burn_quant_train::{QuantTrain, recipe::MixedPrecision, saved::checkpoint};
///
/// type Train = QuantTrain<Autodiff<Flex>, MixedPrecision<f32>>;
///
/// let device = Default::default();
/// let layers = [0; 4].map(|_| LinearConfig::new(64, 64).init::<Train>(&device));
/// let mut x = Tensor::<Train, 2>::random([32, 64], Distribution::Default, &device);
/// for layer in &layers {
///     x = checkpoint(|x| relu(layer.forward(x)), x);
/// }
/// let gradients = x.mean().backward();
/// assert!(layers[0].weight.grad(&gradients).is_some());
/// ```
pub fn checkpoint<I, O>(block: impl FnOnce(I) -> O, input: I) -> O {
    let running = Block::enter();
    let output = block(input);
    drop(running);
    output
}

/// A block that runs; a panic ends it too.
struct Block {
    /// False inside of another one.
    starts: bool,
}

impl Block {
    fn enter() -> Self {
        Self {
            starts: scope::enter_block(),
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.starts {
            scope::leave_block();
        }
    }
}
