//! MXFP8.

use std::marker::PhantomData;

use burn_backend::bf16;

use super::{
    Cast, ComputeDtype, Granularity, LinearRow, Number, Product, Recipe, Row, SavedX, ScaleNumber,
};

/// MXFP8 linear layers (OCP Microscaling Formats, section 5): E4M3 in groups of 32 along the dimension that a product
/// sums over, with powers of two as scales.
///
/// Scales are rounded up to the power of two with which nothing saturates: rounding down, as OCP's specification
/// suggests, can diverge (arXiv 2506.08027). Groups do not turn with the matrix, so every operand of every
/// product is a copy of its own.
#[derive(Debug, Clone, Copy, Default)]
pub struct Mxfp8<E = bf16>(PhantomData<E>);

impl<E: ComputeDtype> Recipe for Mxfp8<E> {
    const ROW: Row = Row {
        name: "mxfp8",
        about: "E4M3 products in groups of 32 with powers of two as scales",
        compute: E::DTYPE,
        context: None,
        flow: None,
        embedding: None,
        linear: Some(LinearRow {
            forward: Product::of(E4M3, E4M3),
            input_gradient: Product::of(E4M3, E4M3),
            weight_gradient: Product::of(E4M3, E4M3),
            saved_x: SavedX::Operand,
            slots: &[],
        }),
    };
}

const E4M3: Cast = microscaled(Number::E4M3);

/// Numbers in groups of 32 with an E8M0 scale.
pub(super) const fn microscaled(number: Number) -> Cast {
    Cast::new(number, Granularity::Group(32)).with_scale(ScaleNumber::E8M0)
}
