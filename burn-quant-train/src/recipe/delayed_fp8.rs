//! FP8 with a scale for each matrix, from the largest magnitudes of earlier steps.

use std::marker::PhantomData;

use burn_backend::bf16;

use super::{
    Cast, ComputeDtype, Granularity, LinearRow, Number, Product, Recipe, Row, SavedX, Slot,
    SlotKind,
};

/// FP8 linear layers, per-tensor delayed scaling (training-precision-guide, "FP8 Training on Hopper"; NVIDIA's
/// TransformerEngine): X and W in E4M3, dY in E5M2, each scaled by the maxima that it had in earlier steps.
///
/// So a matrix is read once: its own maximum is found in the read in which it is rounded, and serves later steps. What
/// exceeds the earlier maxima saturates. [`DelayedScaling`](crate::layer::DelayedScaling) has the settings. All else is
/// as in [`CurrentFp8`](super::CurrentFp8).
#[derive(Debug, Clone, Copy, Default)]
pub struct DelayedFp8<E = bf16>(PhantomData<E>);

impl<E: ComputeDtype> Recipe for DelayedFp8<E> {
    const ROW: Row = Row {
        name: "delayed-fp8",
        about: "E4M3 products, gradients in E5M2, a scale for each matrix from the maxima of earlier steps",
        compute: E::DTYPE,
        context: None,
        flow: None,
        embedding: None,
        linear: Some(LinearRow {
            forward: Product::of(X, W).fast(),
            input_gradient: Product::of(DY, W),
            weight_gradient: Product::of(X, DY),
            saved_x: SavedX::Operand,
            slots: &HISTORIES,
        }),
    };
}

const HISTORIES: [Slot; 3] = [
    Slot {
        name: "amax-x",
        kind: SlotKind::AmaxHistory,
    },
    Slot {
        name: "amax-w",
        kind: SlotKind::AmaxHistory,
    },
    Slot {
        name: "amax-dy",
        kind: SlotKind::AmaxHistory,
    },
];
const E4M3: Cast = Cast::new(Number::E4M3, Granularity::Tensor);
const X: Cast = E4M3.with_history(HISTORIES[0].name);
const W: Cast = E4M3.with_history(HISTORIES[1].name);
const DY: Cast = Cast::new(Number::E5M2, Granularity::Tensor).with_history(HISTORIES[2].name);
