//! MXFP4 forward, FP8 backward.

use std::marker::PhantomData;

use burn_backend::bf16;

use super::{
    Cast, ComputeDtype, LinearRow, Number, Product, Recipe, Row, SavedX, current_fp8::E5M2,
    mxfp8::microscaled,
};

/// MXFP4 linear layers (training-precision-guide, "FP4 Training on Blackwell"): Y = X W of E2M1 in groups of 32 with
/// powers of two as scales; dY in E5M2 with a scale for the matrix, and W in dX = dY Wᵀ in E4M3, since gradients lose
/// too much in four bits.
///
/// X is saved for dW = Xᵀ dY in E2M1, in groups along the tokens: 4.25 bits an element. The guide has 16 elements to a
/// scale; OCP's MXFP4 has 32 (OCP Microscaling Formats, section 5), and so have the products of hardware.
#[derive(Debug, Clone, Copy, Default)]
pub struct Mxfp4<E = bf16>(PhantomData<E>);

impl<E: ComputeDtype> Recipe for Mxfp4<E> {
    const ROW: Row = Row {
        name: "mxfp4",
        about: "E2M1 products in groups of 32 with powers of two as scales, gradients in E5M2",
        compute: E::DTYPE,
        context: None,
        flow: None,
        embedding: None,
        linear: Some(LinearRow {
            forward: Product::of(E2M1, E2M1),
            input_gradient: Product::of(E5M2, microscaled(Number::E4M3)),
            weight_gradient: Product::of(E2M1, E5M2),
            saved_x: SavedX::Operand,
            slots: &[],
        }),
    };
}

const E2M1: Cast = microscaled(Number::E2M1);
