//! INT8 with a scale for each matrix.

use std::marker::PhantomData;

use burn_backend::bf16;

use super::{ComputeDtype, Granularity, Recipe, Row, block_int8::int8};

/// INT8 linear layers with one scale for each matrix, a baseline of jetfire-int8 (section 7, table 4): a single outlier
/// makes a whole matrix coarse. All but the granularity is as in [`BlockInt8`](super::BlockInt8).
#[derive(Debug, Clone, Copy, Default)]
pub struct PerTensorInt8<E = bf16>(PhantomData<E>);

impl<E: ComputeDtype> Recipe for PerTensorInt8<E> {
    const ROW: Row = Row {
        name: "per-tensor-int8",
        about: "INT8 products, a scale for each matrix",
        compute: E::DTYPE,
        context: None,
        flow: None,
        embedding: None,
        linear: Some(int8(Granularity::Tensor)),
    };
}
