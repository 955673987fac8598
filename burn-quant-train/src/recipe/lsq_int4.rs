//! INT4 with learned step sizes, gradients by their largest magnitude.

use std::marker::PhantomData;

use burn_backend::bf16;

use super::{
    Cast, ComputeDtype, Granularity, Number, Recipe, Row, Sampling,
    hadamard_int4::{EMBEDDING, LSQ, learned_int4},
};

/// A baseline of int4-hq-lss (section 5): learned step sizes without a transform (LSQ), and dY in INT4 by its largest
/// magnitude, rounded stochastically (minimax).
#[derive(Debug, Clone, Copy, Default)]
pub struct LsqInt4<E = bf16>(PhantomData<E>);

impl<E: ComputeDtype> Recipe for LsqInt4<E> {
    const ROW: Row = Row {
        name: "lsq-int4",
        about: "INT4 products with learned step sizes, gradients in INT4 by their largest magnitude",
        compute: E::DTYPE,
        context: None,
        flow: None,
        embedding: Some(EMBEDDING),
        linear: Some(learned_int4(LSQ, MINIMAX, Sampling::All)),
    };
}

const MINIMAX: Cast = Cast::new(Number::Int4, Granularity::Tensor).stochastic();
