//! Rotary positions, which save nothing but the tables that they were made with.

use std::sync::Arc;

use burn_backend::tensor::FloatTensor;

use crate::{
    data::{
        DataBackend,
        composition::{Dense, RotaryPass, RotaryPositions},
    },
    layer::tag::Tag,
    saved::{HeldTensor, recorded::Recorded},
};

/// Rotary positions of x `[.., positions, features]`, by a matrix and a table that are not trained, on a device that has
/// the kernel.
#[derive(Debug, Clone)]
pub(crate) struct Rotary<B: DataBackend> {
    /// The tag of the table, if the table is the matrix that the tag speaks of: all layers share it, and all steps.
    pub table: Option<Arc<Tag<B>>>,
}

impl<B: DataBackend> Recorded<B, 3> for Rotary<B> {
    /// The matrix and the table.
    type Saved = [HeldTensor<B>; 2];

    fn again(&mut self, _inputs: &[HeldTensor<B>; 3]) -> Option<Self> {
        Some(self.clone())
    }

    /// The tables stay exact: an error in them turns every gradient of a position.
    fn forward(
        self,
        [x, turn, table]: [HeldTensor<B>; 3],
        _wanted: [bool; 3],
    ) -> (HeldTensor<B>, Self::Saved) {
        // The kernel reads a table without padding, and Burn pads the rows of what it allocates on CUDA.
        let dense = || HeldTensor::new(B::run(Dense, table.cell().read()));
        let table = match &self.table {
            Some(tag) => tag.dense(dense),
            None => dense(),
        };
        let tables = [turn, table];
        for table in &tables {
            table.cell().keep_exact();
        }
        let pass = RotaryPass::Forward;
        let output = B::run(
            RotaryPositions { pass },
            (x.into_value(), values(tables.clone())),
        );
        (HeldTensor::of("rotary", output), tables)
    }

    fn backward(
        tables: Self::Saved,
        gradient: FloatTensor<B>,
        _wanted: [bool; 3],
    ) -> [Option<FloatTensor<B>>; 3] {
        let pass = RotaryPass::Backward;
        let gradient = B::run(RotaryPositions { pass }, (gradient, values(tables)));
        [Some(gradient), None, None]
    }
}

fn values<B: DataBackend>([turn, table]: [HeldTensor<B>; 2]) -> (FloatTensor<B>, FloatTensor<B>) {
    (turn.into_value(), table.into_value())
}
