//! FP8 between layers too.

use std::marker::PhantomData;

use burn_backend::bf16;

use super::{
    Cast, ComputeDtype, Flow, Granularity, LinearRow, Number, Product, Recipe, Row, SavedX,
    current_fp8::E5M2,
};

/// COAT: E4M3 with a scale for each matrix in linear layers, and for each `GROUP` neighbours between them (coat-fp8,
/// section 5.2).
///
/// A layer keeps the input that it reads for its gradients: a byte an element. Gradients between operators stay in the
/// compute dtype; linear layers read theirs in E5M2 (section G.5). The paper has these with optimizer states in FP8:
/// see [`QuantAdamWConfig`](crate::optim::QuantAdamWConfig). X W has fast accumulation, as in the other FP8 recipes:
/// our choice, of which the paper does not speak.
#[derive(Debug, Clone, Copy, Default)]
pub struct CoatFp8<E = bf16, const GROUP: usize = 16>(PhantomData<E>);

impl<E: ComputeDtype, const GROUP: usize> Recipe for CoatFp8<E, GROUP> {
    const ROW: Row = {
        let of_matrix = Cast::new(Number::E4M3, Granularity::Tensor);
        Row {
            name: "coat-fp8",
            about: "E4M3 products, and E4M3 in groups between them, gradients in E5M2",
            compute: E::DTYPE,
            context: None,
            flow: Some(Flow {
                activations: Cast::new(Number::E4M3, Granularity::Group(GROUP)),
                gradients: None,
            }),
            embedding: None,
            linear: Some(LinearRow {
                forward: Product::of(of_matrix, of_matrix).fast(),
                input_gradient: Product::of(E5M2, of_matrix),
                weight_gradient: Product::of(of_matrix, E5M2),
                saved_x: SavedX::Operand,
                slots: &[],
            }),
        }
    };
}
