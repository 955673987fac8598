//! FP8 per token and channel, but for the gradient of the weight.

use std::marker::PhantomData;

use burn_backend::bf16;

use super::{
    Cast, ComputeDtype, Granularity, LinearRow, Number, Product, Recipe, Row, SavedX, ScaleNumber,
};

/// FP8 linear layers as torchao's recipe `rowwise_with_gw_hp` has them: E4M3 everywhere, powers of two as scales.
///
/// X and dY have a scale for each token, W one for each output channel in Y = X W. In dX = dY Wᵀ, W has one scale for
/// the matrix. X W has fast accumulation. dW = Xᵀ dY, which sums over all tokens of a batch, stays in the compute
/// dtype, and X is saved as it came.
#[derive(Debug, Clone, Copy, Default)]
pub struct RowwiseFp8<E = bf16>(PhantomData<E>);

impl<E: ComputeDtype> Recipe for RowwiseFp8<E> {
    const ROW: Row = Row {
        name: "rowwise-fp8",
        about: "E4M3 products per token and channel, the weight's gradient in the compute dtype",
        compute: E::DTYPE,
        context: None,
        flow: None,
        embedding: None,
        linear: Some(LinearRow {
            forward: Product::of(PER_ROW, PER_ROW).fast(),
            input_gradient: Product::of(PER_ROW, PER_TENSOR),
            weight_gradient: Product::Compute,
            saved_x: SavedX::Input,
            slots: &[],
        }),
    };
}

const PER_ROW: Cast = e4m3(Granularity::Row);
const PER_TENSOR: Cast = e4m3(Granularity::Tensor);

/// The smallest power of two as a scale with which nothing saturates.
const fn e4m3(granularity: Granularity) -> Cast {
    Cast::new(Number::E4M3, granularity).with_scale(ScaleNumber::E8M0)
}
