//! The bytes that a training step holds.

use burn_quant_train::layer::LayerPolicy;
use burn_quant_train::recipe::{Name, Row};
use serde::Serialize;

use super::Question;
use super::activations::Step;
use super::device::Device;
use super::shapes::Shapes;
use crate::args::{Checkpointing, Contexts, Optimizer};
use crate::report::Report;

/// Bytes of an FP32 number.
const FULL: usize = 4;

/// A way to train.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    /// The recipe.
    pub recipe: Name,
    /// How activations wait for the backward pass.
    pub contexts: Contexts,
    /// The format of the optimizer's moments.
    pub optimizer: Optimizer,
}

/// The bytes that a training step holds.
#[derive(Serialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Weights, FP32.
    pub weights: u64,
    /// Their gradients, FP32, at the end of the backward pass.
    pub gradients: u64,
    /// The optimizer's moments, scales included.
    pub moments: u64,
    /// Quantized copies of weights, which stay from step to step.
    pub copies: u64,
    /// The bytes that wait for the backward pass at its beginning.
    pub activations: u64,
    /// The most that is held at once; on a GPU, what its memory pools take: see [`Memory::of`].
    pub peak: u64,
}

impl Memory {
    /// That of a run of `pretrain` on a device of this kind.
    pub fn of_run(report: &Report, device: Device) -> Self {
        let question = Question {
            model: Shapes::from(&report.preset.model(report.sequence)),
            batch: report.batch,
            sequence: report.sequence,
            device,
            compute: report.compute,
            memory: None,
            recipes: Vec::new(),
            contexts: Vec::new(),
            optimizers: Vec::new(),
            checkpointing: report.checkpointing,
        };
        let case = Case {
            recipe: report.recipe,
            contexts: report.contexts,
            optimizer: report.optimizer,
        };
        Self::of(&question, &case, report.batch)
    }

    /// That of a batch of `batch` sequences.
    ///
    /// The peak on a CPU, what operations take for their own time aside, is weights, moments, copies, and at the
    /// beginning of the backward pass activations with the gradient of the logits, or at its end all gradients; or,
    /// where layers run again, what one of them makes beside what waits or has its gradient by then.
    ///
    /// Pools of a GPU that take memory in exact sizes, as `pretrain` has them, keep what they took for the next tensor
    /// of that size: activations do not make room for gradients of weights. So their peak is the sum of both, and of
    /// the new weights, which are beside the old ones as Burn's `Learner` steps a clone of its model. What a layer's
    /// operations take for their own time is added as what one layer saves, and where layers run again as twice that.
    pub fn of(question: &Question, case: &Case, batch: usize) -> Self {
        let model = &question.model;
        let row = case.recipe.row();
        let step = Step {
            model,
            batch,
            sequence: question.sequence,
            compute: question.compute,
            attention: question.attention(),
            keeps_casts: question.device.keeps_casts(),
            row: &row,
            context: case.contexts.context().or(row.context),
            checkpointing: question.checkpointing,
        };
        let weights = model.parameters() * FULL;
        let optimizer = case.optimizer.config();
        let moments: usize = model
            .elements()
            .into_iter()
            .map(|elements| optimizer.state_bytes(elements))
            .sum();
        let copies = copies(model, &row);
        let activations = step.saved();
        let of_logits = batch * question.sequence * model.vocabulary * FULL;
        let (at_start, at_end) = match question.checkpointing {
            Checkpointing::None => (activations + of_logits, weights),
            Checkpointing::Layers => {
                let block = step.of_one_layer();
                // The last layer runs again when the head has its gradient, the first when all others have theirs.
                let head = model.vocabulary * model.hidden * FULL;
                let last = step.of_blocks() + block + head;
                let others = model.with_layers(model.layers - 1);
                let behind = others.parameters() - others.before_layers();
                let first = behind * FULL + block;
                (
                    usize::max(activations + of_logits, last),
                    usize::max(weights, first),
                )
            }
        };
        let of_operations = step.of_one_layer()
            * match question.checkpointing {
                Checkpointing::None => 1,
                Checkpointing::Layers => 2,
            };
        // The logits, whose memory their gradient takes over; the logarithms wait with the activations.
        let logits = batch * question.sequence * model.vocabulary * question.compute.bytes();
        let beside_weights = match question.device.has_pools() {
            true => 2 * weights + activations + logits + of_logits + of_operations,
            false => usize::max(at_start, at_end),
        };
        let peak = weights + moments + copies + beside_weights;
        let [weights, moments, copies, activations, peak] =
            [weights, moments, copies, activations, peak].map(|bytes| bytes as u64);
        Self {
            weights,
            gradients: weights,
            moments,
            copies,
            activations,
            peak,
        }
    }
}

/// Bytes of the quantized copies of all weights.
fn copies(model: &Shapes, row: &Row) -> usize {
    let Some(linear) = row.linear else {
        return 0;
    };
    let policy = LayerPolicy::default();
    let linears = model.linears();
    let quantized = linears
        .iter()
        .filter(|it| policy.decide(it.path, it.shape).is_quantized());
    // Copies of W do not depend on the rows of X.
    let of_layer: usize = quantized.map(|it| linear.kept(1, it.shape).weight).sum();
    model.layers * of_layer
}

/// Sequences in a batch that is larger than any in use.
const MANY: usize = 1 << 24;

/// The largest number of sequences that fits, 0 where one does not; `fits` is true up to some number.
pub fn largest(fits: impl Fn(usize) -> bool) -> usize {
    let (mut good, mut bad) = (0, MANY);
    while bad - good > 1 {
        let middle = good + (bad - good) / 2;
        match fits(middle) {
            true => good = middle,
            false => bad = middle,
        }
    }
    good
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_is_the_last_that_fits() {
        assert_eq!(largest(|batch| batch <= 37), 37);
        assert_eq!(largest(|_| false), 0);
    }
}
