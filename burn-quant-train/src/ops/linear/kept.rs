//! The bytes that a layer keeps, from the same outlines that its passes are planned with.

use super::plan::Factors;
use crate::{
    data::{
        Layout,
        learned_step::{LearnedMatrix, spec},
        quantize::Quantized,
        tensors::{Outline, bytes},
    },
    layer::tag::View,
    ops::learned_linear::most_residual_rows,
    recipe::LinearRow,
};

/// The tensors that a quantized linear layer keeps beside its weight: see [`LinearRow::kept`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kept {
    /// Bytes of the copy of X that the backward pass reads; `None` where X waits as it came.
    pub input: Option<usize>,
    /// True if layers that read the same X share the copy.
    pub shares_input: bool,
    /// True if the copy does not wait where X can be made again of what waits anyway: where it is RMSNorm's output of an
    /// input that waits compressed, or a view of what waits as it is beside what is compressed.
    pub is_made_again: bool,
    /// Bytes of the copies of W, which stay from step to step.
    pub weight: usize,
}

impl LinearRow {
    /// The bytes that a layer of this row keeps for an X of `rows` rows and a weight of `inputs` x `outputs`, scales
    /// included, on a GPU; a CPU holds one layout where a GPU holds both.
    pub fn kept(&self, rows: usize, [inputs, outputs]: [usize; 2]) -> Kept {
        match self.learned() {
            Some(_) => learned([rows, inputs], [inputs, outputs]),
            None => scaled(self, [rows, inputs], [inputs, outputs]),
        }
    }
}

/// With scales from the data.
fn scaled(row: &LinearRow, x: [usize; 2], weight: [usize; 2]) -> Kept {
    let factors = Factors::of(row, View::Rows);
    let saved = factors.saved();
    let of_weight = factors.weights().into_iter().flatten();
    Kept {
        input: saved.map(|it| bytes::<Quantized<Outline>>(it.outline(x, it.key.layout))),
        shares_input: true,
        is_made_again: factors.is_made_again(),
        weight: of_weight
            .map(|(it, layout)| bytes::<Quantized<Outline>>(it.outline(weight, layout)))
            .sum(),
    }
}

/// With step sizes that are learned, of which each layer has its own.
fn learned(x: [usize; 2], weight: [usize; 2]) -> Kept {
    let [rows, _] = x;
    let saved = LearnedMatrix::outline(x, Layout::RowMajor, Some(most_residual_rows(rows)));
    let copy = Quantized::outline(weight, &spec(Layout::Both));
    Kept {
        input: Some(bytes::<LearnedMatrix<Outline>>(saved)),
        shares_input: false,
        is_made_again: false,
        weight: bytes::<Quantized<Outline>>(copy),
    }
}
