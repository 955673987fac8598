//! FP8 in groups and square blocks of 128.

use std::marker::PhantomData;

use burn_backend::bf16;

use super::{
    Cast, ComputeDtype, Granularity, LinearRow, Number, Product, Recipe, Row, SavedX, ScaleNumber,
};

/// FP8 linear layers in blocks (DeepSeek-V3, arXiv 2412.19437, section 3.3): E4M3 everywhere, a scale for each 1x128
/// group of X and dY and for each 128x128 block of W.
///
/// Groups lie along the dimension that a product sums over. dX reads dY in groups along the outputs, dW reads dY and X
/// in groups along the tokens: both copies are quantized from the matrix itself, since a requantized copy would carry
/// two rounding errors. Blocks turn with W: one copy serves Y and dX. dY has no square blocks: with these DeepSeek-V3's
/// runs diverged (appendix B.2).
///
/// With `POWERS`, the default, scales are powers of two, the smallest with which nothing saturates, in one byte, as
/// TransformerEngine has them by default; else FP32, as the paper's. A power of two changes no bit of a number's
/// mantissa, so an operand with its scales is exact in BF16 and products need no FP32 copies.
#[derive(Debug, Clone, Copy, Default)]
pub struct BlockFp8<E = bf16, const POWERS: bool = true>(PhantomData<E>);

impl<E: ComputeDtype, const POWERS: bool> Recipe for BlockFp8<E, POWERS> {
    const ROW: Row = Row {
        name: "block-fp8",
        about: "E4M3 products, a scale for each 1x128 group of X and dY and each 128x128 block of W",
        compute: E::DTYPE,
        context: None,
        flow: None,
        embedding: None,
        linear: Some(block_fp8(match POWERS {
            true => ScaleNumber::E8M0,
            false => ScaleNumber::F32,
        })),
    };
}

const SIDE: usize = 128;

const fn block_fp8(scale: ScaleNumber) -> LinearRow {
    let group = Cast::new(Number::E4M3, Granularity::Group(SIDE)).with_scale(scale);
    let block = Cast::new(Number::E4M3, Granularity::Block(SIDE)).with_scale(scale);
    LinearRow {
        forward: Product::of(group, block),
        input_gradient: Product::of(group, block),
        weight_gradient: Product::of(group, group),
        saved_x: SavedX::Operand,
        slots: &[],
    }
}
