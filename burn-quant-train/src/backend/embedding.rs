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
    ops::{learned_embedding::LearnedEmbedding, run::Run},
    recipe::Recipe,
    saved::recorded::QuantBackend,
};

/// `ModuleOps::embedding`: the rows of a table `[rows, columns]` at indices, in the compute dtype. The table itself is
/// never copied to it.
pub(super) fn embedding<B: QuantBackend, R: Recipe>(
    table: FloatTensor<QuantTrain<B, R>>,
    indices: IntTensor<QuantTrain<B, R>>,
) -> FloatTensor<QuantTrain<B, R>> {
    QuantTensor::new(match rounding::<B, R>(&table, &indices) {
        Some(operation) => B::record(operation, [table.into_primitive()]),
        None => {
            let rows = <B::Inside>::embedding(table.into_primitive(), indices);
            in_class::<B, R>(Class::Compute, rows)
        }
    })
}

/// The operation that rounds what it looks up, if the recipe and the policy ask for it, there is something to look up,
/// and a backward pass follows: evaluation is not quantized, as that of linear layers.
fn rounding<B: QuantBackend, R: Recipe>(
    table: &QuantTensor<B>,
    indices: &IntTensor<B>,
) -> Option<LearnedEmbedding<B::Base>> {
    let row = R::row();
    let slot = row.embedding_step()?;
    let layer = table.tag().layer().filter(|layer| layer.rounds_rows())?;
    let is_empty = indices.shape().num_elements() == 0 || table.shape().num_elements() == 0;
    let is_recorded = B::is_tracked(table.primitive());
    (is_recorded && !is_empty && table.dtype() != DType::F64).then(|| LearnedEmbedding {
        layer: layer.clone(),
        run: Run::Next,
        slot,
        compute: row.compute,
        indices: indices.clone(),
    })
}
