//! INT4 with all rows of the gradient's parts.

use std::marker::PhantomData;

use burn_backend::bf16;

use super::{
    ComputeDtype, Recipe, Row, Sampling,
    hadamard_int4::{EMBEDDING, HADAMARD, SPLIT, learned_int4},
};

/// [`HadamardInt4`](super::HadamardInt4) with all rows of both parts of dY in the place of sampled ones (int4-hq-lss,
/// Appendix A.6: the variant that keeps each row with a score above 0).
///
/// Both parts of an element are one INT8 integer, so that the products cost as much as those of sampled rows.
#[derive(Debug, Clone, Copy, Default)]
pub struct SplitInt4<E = bf16>(PhantomData<E>);

impl<E: ComputeDtype> Recipe for SplitInt4<E> {
    const ROW: Row = Row {
        name: "split-int4",
        about: "INT4 products of Hadamard-transformed operands; gradients in two INT4 parts, all rows",
        compute: E::DTYPE,
        context: None,
        flow: None,
        embedding: Some(EMBEDDING),
        linear: Some(learned_int4(HADAMARD, SPLIT, Sampling::All)),
    };
}
