//! INT4: Hadamard quantizer forward, bit splitting and leverage score sampling backward.

use std::marker::PhantomData;

use burn_backend::bf16;

use super::{
    Cast, ComputeDtype, Granularity, LinearRow, Number, Product, Recipe, Residual, Row, Sampling,
    SavedX, Slot, SlotKind, Transform,
};

/// INT4 linear layers (int4-hq-lss): X and W are quantized after a Hadamard transform, with learned step sizes (section
/// 3); dY is split in two INT4 parts, of whose rows half are sampled by their leverage scores (section 4).
#[derive(Debug, Clone, Copy, Default)]
pub struct HadamardInt4<E = bf16>(PhantomData<E>);

impl<E: ComputeDtype> Recipe for HadamardInt4<E> {
    const ROW: Row = Row {
        name: "hadamard-int4",
        about: "INT4 products of Hadamard-transformed operands; gradients in two INT4 parts, rows sampled by leverage score",
        compute: E::DTYPE,
        context: None,
        flow: None,
        embedding: Some(EMBEDDING),
        linear: Some(learned_int4(HADAMARD, SPLIT, Sampling::LeverageScore)),
    };
}

/// X and W with learned step sizes.
pub(super) const LSQ: [Cast; 2] = [
    Cast::new(Number::Int4, Granularity::Tensor).with_step(STEPS[0].name),
    Cast::new(Number::Int4, Granularity::Tensor).with_step(STEPS[1].name),
];
/// The rows of embeddings, by the step size of their table: LSQ without a transform (section 5).
pub(super) const EMBEDDING: Cast = LSQ[1];
/// The same of their Hadamard transforms.
pub(super) const HADAMARD: [Cast; 2] = [
    LSQ[0].with_hadamard(SIZE.name),
    LSQ[1].with_hadamard(SIZE.name),
];
/// dY in a high and a low part: the high one to nearest, the low one so that the sum is unbiased (section 4.2, equation
/// 5).
pub(super) const SPLIT: Cast = Cast::new(Number::Int4, Granularity::Tensor)
    .stochastic()
    .with_residual(Residual::Always);

const SIZE: Slot = Slot {
    name: "hadamard",
    kind: SlotKind::HadamardSize,
};
const STEPS: [Slot; 2] = [
    Slot {
        name: "step-x",
        kind: SlotKind::StepSize,
    },
    Slot {
        name: "step-w",
        kind: SlotKind::StepSize,
    },
];

/// The forward product of X and W in these forms, and products of these and of dY in this one.
pub(super) const fn learned_int4(
    [x, weight]: [Cast; 2],
    gradient: Cast,
    sampling: Sampling,
) -> LinearRow {
    LinearRow {
        forward: Product::of(x, weight),
        input_gradient: Product::of(gradient, weight).sampled(sampling),
        weight_gradient: Product::of(x, gradient).sampled(sampling),
        saved_x: SavedX::Operand,
        slots: match x.transform {
            Transform::Identity | Transform::RandomHadamard => &STEPS,
            Transform::Hadamard(_) => &[STEPS[0], STEPS[1], SIZE],
        },
    }
}
