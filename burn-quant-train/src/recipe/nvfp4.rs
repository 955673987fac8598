//! NVFP4.

use std::marker::PhantomData;

use burn_backend::bf16;

use super::{
    Cast, ComputeDtype, Granularity, LinearRow, Number, Product, Recipe, Row, SavedX, ScaleNumber,
};

/// NVFP4 linear layers (NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv 2509.25149): E2M1 with E4M3
/// scales under an FP32 scale of the matrix, in groups of 16 for X and dY and in 16x16 blocks for W, so that both
/// products of W read the same numbers.
///
/// dY is rounded stochastically, X and W to nearest. Both operands of dW = Xᵀ dY are transformed along the tokens by a
/// Hadamard transform of 16 with fixed random signs, which cancels in the product and spreads outliers; the other
/// products have no transform.
///
/// The paper keeps embeddings, norms, attention, the output head and some linear layers, most of them the last ones, in
/// BF16; with all of them in FP4 its runs diverged. Which layers stay is said by a
/// [`LayerPolicy`](crate::layer::LayerPolicy): see the book, "FP8 and FP4 training".
#[derive(Debug, Clone, Copy, Default)]
pub struct Nvfp4<E = bf16>(PhantomData<E>);

impl<E: ComputeDtype> Recipe for Nvfp4<E> {
    const ROW: Row = Row {
        name: "nvfp4",
        about: "E2M1 products in groups of 16 with E4M3 scales, the weight's gradient after a Hadamard transform",
        compute: E::DTYPE,
        context: None,
        flow: None,
        embedding: None,
        linear: Some(LinearRow {
            forward: Product::of(GROUP, BLOCK),
            input_gradient: Product::of(GROUP.stochastic(), BLOCK),
            weight_gradient: Product::of(ROTATED, ROTATED.stochastic()),
            saved_x: SavedX::Operand,
            slots: &[],
        }),
    };
}

/// X, and dY in dX.
const GROUP: Cast = e2m1(Granularity::Group(16));
/// W.
const BLOCK: Cast = e2m1(Granularity::Block(16));
/// X and dY in dW.
const ROTATED: Cast = GROUP.with_random_hadamard();

const fn e2m1(granularity: Granularity) -> Cast {
    Cast::new(Number::E2M1, granularity).with_scale(ScaleNumber::E4M3)
}
