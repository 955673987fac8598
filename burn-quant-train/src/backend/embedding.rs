//! Rows of an embedding's table: as they are, or rounded by the table's learned step size.

use burn_backend::{
    DType, TensorMetadata,
    ops::ModuleOps,
    tensor::{FloatTensor, IntTensor},
};

use super::{
    QuantTrain,
    precision::{Class, in_class},
    tensor::QuantTensor,
};
use crate::{
    ops::{
        learned_embedding::{EvaluatedEmbedding, LearnedEmbedding},
        run::Run,
    },
    recipe::Recipe,
    saved::recorded::QuantBackend,
};

/// `ModuleOps::embedding`: the rows of a table `[rows, columns]` at indices, in the compute dtype. The table itself is
/// never copied to it.
pub(super) fn embedding<B: QuantBackend, R: Recipe>(
    table: FloatTensor<QuantTrain<B, R>>,
    indices: IntTensor<QuantTrain<B, R>>,
) -> FloatTensor<QuantTrain<B, R>> {
    if let Some(operation) = rounding::<B, R>(&table, &indices) {
        return QuantTensor::new(B::record(operation, [table.into_primitive()]));
    }
    if let Some(operation) = evaluation::<B, R>(&table, &indices) {
        return QuantTensor::new(B::record(operation, [table.into_primitive()]));
    }
    let rows = <B::Inside>::embedding(table.into_primitive(), indices);
    QuantTensor::new(in_class::<B, R>(Class::Compute, rows))
}

/// The operation that rounds what it looks up, if the recipe and the policy ask for it, there is something to look up,
/// and a backward pass follows.
fn rounding<B: QuantBackend, R: Recipe>(
    table: &QuantTensor<B>,
    indices: &IntTensor<B>,
) -> Option<LearnedEmbedding<B::Base>> {
    let row = R::row();
    let slot = row.embedding_step()?;
    let layer = table.tag().layer().filter(|layer| layer.rounds_rows())?;
    (B::is_tracked(table.primitive()) && can_round(table, indices)).then(|| LearnedEmbedding {
        layer: layer.clone(),
        run: Run::Next,
        slot,
        compute: row.compute,
        indices: indices.clone(),
    })
}

/// The same where no backward pass follows, and evaluation is quantized too.
fn evaluation<B: QuantBackend, R: Recipe>(
    table: &QuantTensor<B>,
    indices: &IntTensor<B>,
) -> Option<EvaluatedEmbedding<B::Base>> {
    let row = R::row();
    let slot = row.embedding_step()?;
    let layer = table.tag().weight_of()?;
    let quantizes = layer.quantizes_evaluation()
        && layer.rounds_rows()
        && !B::is_tracked(table.primitive())
        && can_round(table, indices);
    let step = quantizes.then(|| layer.known_step(slot, &table.device()))??;
    Some(EvaluatedEmbedding {
        step,
        compute: row.compute,
        indices: indices.clone(),
    })
}

/// True if there is something to look up, of a dtype that is rounded.
fn can_round<B: QuantBackend>(table: &QuantTensor<B>, indices: &IntTensor<B>) -> bool {
    let is_empty = indices.shape().num_elements() == 0 || table.shape().num_elements() == 0;
    !is_empty && table.dtype() != DType::F64
}
