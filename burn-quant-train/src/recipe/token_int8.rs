//! INT8 with a scale for each token.

use std::marker::PhantomData;

use burn_backend::bf16;

use super::{ComputeDtype, Granularity, Recipe, Row, block_int8::int8};

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
        context: None,
        flow: None,
        embedding: None,
        linear: Some(int8(Granularity::Row)),
    };
}
