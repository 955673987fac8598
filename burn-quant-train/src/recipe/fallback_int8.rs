//! INT8 in square blocks, with dynamic block-level fallback.

use std::marker::PhantomData;

use burn_backend::bf16;

use super::{
    Cast, ComputeDtype, Granularity, LinearRow, Number, Product, Recipe, Residual, Row, Slot,
    SlotKind, THRESHOLD, block_int8::int8,
};

const SLOT: Slot = Slot {
    name: THRESHOLD,
    kind: SlotKind::DelayThreshold,
};

/// INT8 linear layers with dynamic block-level fallback: blocks of X whose largest magnitude exceeds the layer's
/// threshold carry a second INT8 block with the residual (fallback-int8, sections 4 and 5.1).
#[derive(Debug, Clone, Copy, Default)]
pub struct FallbackInt8<E = bf16, const BLOCK: usize = 128>(PhantomData<E>);

impl<E: ComputeDtype, const BLOCK: usize> Recipe for FallbackInt8<E, BLOCK> {
    const ROW: Row = Row {
        name: "fallback-int8",
        about: "INT8 in square blocks, with a second INT8 term for blocks that hold outliers",
        compute: E::DTYPE,
        context: None,
        flow: None,
        embedding: None,
        linear: Some(fallback_int8(BLOCK)),
    };
}

const fn fallback_int8(side: usize) -> LinearRow {
    let granularity = Granularity::Block(side);
    let nearest = Cast::new(Number::Int8, granularity);
    LinearRow {
        forward: Product::of(
            nearest.with_residual(Residual::Above(SLOT.name)),
            nearest,
        ),
        slots: &[SLOT],
        ..int8(granularity)
    }
}
