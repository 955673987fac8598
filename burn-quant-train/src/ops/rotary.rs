//! Rotary positions, which save nothing but the tables that they were made with.

use std::{
    fmt,
    sync::{Arc, Weak},
};

use burn_backend::{TensorMetadata, tensor::FloatTensor};

use crate::{
    data::{
        DataBackend,
        composition::{Dense, RotaryPass, RotaryPositions},
    },
    layer::tag::Tag,
    saved::{HeldTensor, recorded::Recorded},
};

/// Rotary positions of x `[.., positions, features]`, by a matrix and a table that are not trained, on a device that
/// has the kernel.
#[derive(Debug, Clone)]
pub(crate) struct Rotary<B: DataBackend> {
    /// The tag of the table, if the table is the matrix that the tag speaks of: all layers share it, and all steps.
    pub table: Option<Arc<Tag<B>>>,
}

/// The matrix and the table.
pub(crate) struct Tables<B: DataBackend> {
    turn: HeldTensor<B>,
    table: HeldTensor<B>,
    /// The tag of the table, as long as the module or anybody else holds the table.
    tag: Weak<Tag<B>>,
}

impl<B: DataBackend> Clone for Tables<B> {
    fn clone(&self) -> Self {
        Self {
            turn: self.turn.clone(),
            table: self.table.clone(),
            tag: self.tag.clone(),
        }
    }
}

impl<B: DataBackend> fmt::Debug for Tables<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tables")
            .field("turn", &self.turn)
            .field("table", &self.table)
            .finish_non_exhaustive()
    }
}

impl<B: DataBackend> Tables<B> {
    /// Both as the kernel reads them: the table without the padding that Burn leaves between the rows of what it
    /// allocates on CUDA.
    fn values(self) -> (FloatTensor<B>, FloatTensor<B>) {
        let shape = self.table.shape();
        let tag = self.tag.upgrade();
        let dense = || B::run(Dense, self.table.into_value());
        let table = match tag {
            Some(tag) => tag.dense(&shape, dense),
            None => dense(),
        };
        (self.turn.into_value(), table)
    }
}

impl<B: DataBackend> Recorded<B, 3> for Rotary<B> {
    type Saved = Tables<B>;

    fn again(&mut self, _inputs: &[HeldTensor<B>; 3]) -> Option<Self> {
        Some(self.clone())
    }

    /// The tables stay exact: an error in them turns every gradient of a position.
    fn forward(
        self,
        [x, turn, table]: [HeldTensor<B>; 3],
        _wanted: [bool; 3],
    ) -> (HeldTensor<B>, Self::Saved) {
        for table in [&turn, &table] {
            table.cell().keep_exact();
        }
        let tag = self.table.as_ref().map_or_else(Weak::new, Arc::downgrade);
        let tables = Tables { turn, table, tag };
        let pass = RotaryPass::Forward;
        let inputs = (x.into_value(), tables.clone().values());
        let output = B::run(RotaryPositions { pass }, inputs);
        (HeldTensor::of("rotary", output), tables)
    }

    fn backward(
        tables: Self::Saved,
        gradient: FloatTensor<B>,
        _wanted: [bool; 3],
    ) -> [Option<FloatTensor<B>>; 3] {
        let pass = RotaryPass::Backward;
        let gradient = B::run(RotaryPositions { pass }, (gradient, tables.values()));
        [Some(gradient), None, None]
    }
}
