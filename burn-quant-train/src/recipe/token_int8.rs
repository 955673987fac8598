//! INT8 with a scale for each token.

use std::marker::PhantomData;

use burn_backend::bf16;

use super::{Cast, ComputeDtype, Granularity, LinearRow, Number, Product, Recipe, Row, SavedX};

/// INT8 linear layers with a scale for each row of a product's left operand and each column of its right one.
///
/// That is per token where tokens are not summed over, and per channel where they are (jetfire-int8, section 4). Unlike
/// [`SwitchBackInt8`](super::SwitchBackInt8) it quantizes all three products; all but the granularity is as in
/// [`BlockInt8`](super::BlockInt8).
#[derive(Debug, Clone, Copy, Default)]
pub struct TokenInt8<E = bf16>(PhantomData<E>);

impl<E: ComputeDtype> Recipe for TokenInt8<E> {
    const ROW: Row = Row {
        name: "token-int8",
        about: "INT8 products, a scale for each token or channel",
        compute: E::DTYPE,
        linear: Some(LinearRow {
            forward: Product::of(NEAREST, NEAREST),
            input_gradient: Product::of(STOCHASTIC, NEAREST),
            weight_gradient: Product::of(STOCHASTIC, STOCHASTIC),
            saved_x: SavedX::Operand,
            slots: &[],
        }),
    };
}

const NEAREST: Cast = Cast::new(Number::Int8, Granularity::Row);
const STOCHASTIC: Cast = NEAREST.stochastic();
