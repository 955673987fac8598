//! Automatic mixed precision.

use std::marker::PhantomData;

use burn_backend::bf16;

use super::{ComputeDtype, Recipe, Row};

/// FP32 master weights, everything else in the compute dtype `E` (training-precision guide). With `E = f32` it changes
/// no bit of what the inner backend computes.
#[derive(Debug, Clone, Copy, Default)]
pub struct MixedPrecision<E = bf16>(PhantomData<E>);

impl<E: ComputeDtype> Recipe for MixedPrecision<E> {
    const ROW: Row = Row {
        name: "mixed-precision",
        about: "FP32 weights, everything else in the compute dtype",
        compute: E::DTYPE,
        context: None,
        flow: None,
        embedding: None,
        linear: None,
    };
}
