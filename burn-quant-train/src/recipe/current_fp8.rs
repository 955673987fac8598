//! FP8 with a scale for each matrix, from its own largest magnitude.

use std::marker::PhantomData;

use burn_backend::bf16;

use super::{Cast, ComputeDtype, Granularity, LinearRow, Number, Product, Recipe, Row, SavedX};

/// FP8 linear layers, per-tensor current scaling: X and W in E4M3, dY in E5M2, each with the scale that its own largest
/// magnitude gives (training-precision-guide, "FP8 Training on Hopper"; the formats are those of Micikevicius et al.,
/// arXiv 2209.05433).
///
/// E4M3 has the precision that products need; gradients need the range of E5M2 more. Everything is rounded to nearest.
/// Whole matrices turn for free, so each of X, W and dY has one copy, which serves two products. X W has fast
/// accumulation, the gradients' products are promoted, as in TransformerEngine and torchao.
#[derive(Debug, Clone, Copy, Default)]
pub struct CurrentFp8<E = bf16>(PhantomData<E>);

impl<E: ComputeDtype> Recipe for CurrentFp8<E> {
    const ROW: Row = Row {
        name: "current-fp8",
        about: "E4M3 products, gradients in E5M2, a scale for each matrix from its data",
        compute: E::DTYPE,
        context: None,
        flow: None,
        embedding: None,
        linear: Some(LinearRow {
            forward: Product::of(E4M3, E4M3).fast(),
            input_gradient: Product::of(E5M2, E4M3),
            weight_gradient: Product::of(E4M3, E5M2),
            saved_x: SavedX::Operand,
            slots: &[],
        }),
    };
}

/// X and W.
const E4M3: Cast = Cast::new(Number::E4M3, Granularity::Tensor);
/// dY, also of other recipes whose gradients have a scale for the matrix.
pub(super) const E5M2: Cast = Cast::new(Number::E5M2, Granularity::Tensor);
