//! INT4 with learned step sizes, gradients in powers of two.

use std::marker::PhantomData;

use burn_backend::bf16;

use super::{
    Cast, ComputeDtype, Granularity, Number, Recipe, Row, Sampling,
    hadamard_int4::{EMBEDDING, LSQ, learned_int4},
};

/// The state of the art that int4-hq-lss compares with (section 5): learned step sizes without a transform (LSQ), and
/// dY in powers of two of 4 bits, rounded stochastically (LUQ: Chmiel et al., arXiv 2112.10769).
///
/// No hardware multiplies powers of two by INT4: products of dY are computed from FP32 copies.
#[derive(Debug, Clone, Copy, Default)]
pub struct LuqInt4<E = bf16>(PhantomData<E>);

impl<E: ComputeDtype> Recipe for LuqInt4<E> {
    const ROW: Row = Row {
        name: "luq-int4",
        about: "INT4 products with learned step sizes, gradients in powers of two",
        compute: E::DTYPE,
        context: None,
        flow: None,
        embedding: Some(EMBEDDING),
        linear: Some(learned_int4(LSQ, LUQ, Sampling::All)),
    };
}

const LUQ: Cast = Cast::new(Number::E3M0, Granularity::Tensor).stochastic();
