//! INT8 in square blocks.

use std::marker::PhantomData;

use burn_backend::bf16;

use super::{Cast, ComputeDtype, Granularity, LinearRow, Number, Product, Recipe, Row, SavedX};

/// INT8 linear layers with one scale for each `BLOCK` x `BLOCK` block (fallback-int8, section 4.2):
/// [`FallbackInt8`](super::FallbackInt8) without fallback, its baseline.
#[derive(Debug, Clone, Copy, Default)]
pub struct BlockInt8<E = bf16, const BLOCK: usize = 128>(PhantomData<E>);

impl<E: ComputeDtype, const BLOCK: usize> Recipe for BlockInt8<E, BLOCK> {
    const ROW: Row = Row {
        name: "block-int8",
        about: "INT8 products, a scale for each square block",
        compute: E::DTYPE,
        context: None,
        flow: None,
        embedding: None,
        linear: Some(int8(Granularity::Block(BLOCK))),
    };
}

/// All three products in INT8. The operands of the forward product are rounded to nearest. dY and the saved X, from
/// which only gradients are computed, are rounded stochastically, so that gradients are unbiased. Square blocks and
/// whole matrices transpose for free: one copy of W and one of dY serve two products each.
pub(super) const fn int8(granularity: Granularity) -> LinearRow {
    let nearest = Cast::new(Number::Int8, granularity);
    let stochastic = nearest.stochastic();
    LinearRow {
        forward: Product::of(nearest, nearest),
        input_gradient: Product::of(stochastic, nearest),
        weight_gradient: Product::of(stochastic, stochastic),
        saved_x: SavedX::Operand,
        slots: &[],
    }
}
