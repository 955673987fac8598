//! INT8 between layers too.

use std::marker::PhantomData;

use burn_backend::bf16;

use super::{
    Cast, ComputeDtype, Flow, Granularity, LinearRow, Number, Product, Recipe, Row, SavedX,
};

/// Jetfire: INT8 in `BLOCK` x `BLOCK` blocks in linear layers and between them (jetfire-int8, sections 3 to 6).
///
/// Everything is rounded to nearest in the forward pass, and stochastically in the backward pass. What a layer reads is
/// what it keeps for its gradients: a byte an element. A square block turns with its matrix, so no second copy is
/// needed.
#[derive(Debug, Clone, Copy, Default)]
pub struct JetfireInt8<E = bf16, const BLOCK: usize = 32>(PhantomData<E>);

/// Jetfire in blocks of 64, for programs that name their recipe.
pub type JetfireInt8Of64<E = bf16> = JetfireInt8<E, 64>;

/// Jetfire in blocks of 128, whose products are the fastest where a product of tensor cores is deeper than 32.
pub type JetfireInt8Of128<E = bf16> = JetfireInt8<E, 128>;

impl<E: ComputeDtype, const BLOCK: usize> Recipe for JetfireInt8<E, BLOCK> {
    const ROW: Row = {
        let forward = Cast::new(Number::Int8, Granularity::Block(BLOCK));
        let backward = forward.stochastic();
        Row {
            name: match BLOCK {
                64 => "jetfire-int8-64",
                128 => "jetfire-int8-128",
                _ => "jetfire-int8",
            },
            about: match BLOCK {
                64 => "INT8 in blocks of 64, in linear layers and between them",
                128 => "INT8 in blocks of 128, in linear layers and between them",
                _ => "INT8 in small blocks, in linear layers and between them",
            },
            compute: E::DTYPE,
            context: None,
            flow: Some(Flow {
                activations: forward,
                gradients: Some(backward),
            }),
            embedding: None,
            linear: Some(LinearRow {
                forward: Product::of(forward, forward),
                input_gradient: Product::of(backward, forward),
                weight_gradient: Product::of(forward, backward),
                saved_x: SavedX::Operand,
                slots: &[],
            }),
        }
    };
}
