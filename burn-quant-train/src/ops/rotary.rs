//! Rotary positions, which save nothing but the tables that they were made with.

use burn_backend::tensor::FloatTensor;

use crate::{
    data::{
        DataBackend,
        composition::{RotaryPass, RotaryPositions},
    },
    saved::{HeldTensor, recorded::Recorded},
};

/// Rotary positions of x `[.., positions, features]`, by a matrix and a table that are not trained, on a device that has
/// the kernel.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rotary;

impl<B: DataBackend> Recorded<B, 3> for Rotary {
    /// The matrix and the table.
    type Saved = [HeldTensor<B>; 2];

    fn again(&mut self, _inputs: &[HeldTensor<B>; 3]) -> Option<Self> {
        Some(*self)
    }

    /// The tables stay exact: an error in them turns every gradient of a position.
    fn forward(
        self,
        [x, turn, table]: [HeldTensor<B>; 3],
        _wanted: [bool; 3],
    ) -> (HeldTensor<B>, Self::Saved) {
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
