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
/// compute dtype (section G.5); linear layers read theirs in E5M2, as the authors' code has it. The paper has these with
/// optimizer states in FP8: see [`QuantAdamWConfig`](crate::optim::QuantAdamWConfig).
///
/// X W has fast accumulation. So have the gradients' products, as in the authors' code, unless they are `PROMOTED`; sums
/// over more than 32,768 tokens are promoted.
#[derive(Debug, Clone, Copy, Default)]
pub struct CoatFp8<E = bf16, const GROUP: usize = 16, const PROMOTED: bool = false>(PhantomData<E>);

/// COAT with promoted products for gradients, as the other FP8 recipes have them, for programs that name their recipe.
pub type CoatFp8Promoted<E = bf16> = CoatFp8<E, 16, true>;

impl<E: ComputeDtype, const GROUP: usize, const PROMOTED: bool> Recipe
    for CoatFp8<E, GROUP, PROMOTED>
{
    const ROW: Row = {
        let of_matrix = Cast::new(Number::E4M3, Granularity::Tensor);
        Row {
            name: if PROMOTED {
                "coat-fp8-promoted"
            } else {
                "coat-fp8"
            },
            about: if PROMOTED {
                "coat-fp8 whose gradients are added up in FP32"
            } else {
                "E4M3 products, and E4M3 in groups between them, gradients in E5M2"
            },
            compute: E::DTYPE,
            context: None,
            flow: Some(Flow {
                activations: Cast::new(Number::E4M3, Granularity::Group(GROUP)),
                gradients: None,
            }),
            embedding: None,
            linear: Some(LinearRow {
                forward: Product::of(of_matrix, of_matrix).fast(),
                input_gradient: of_gradients(PROMOTED, E5M2, of_matrix),
                weight_gradient: of_gradients(PROMOTED, of_matrix, E5M2),
                saved_x: SavedX::Operand,
                slots: &[],
            }),
        }
    };
}

/// A gradient's product of operands quantized like this.
const fn of_gradients(promoted: bool, left: Cast, right: Cast) -> Product {
    let product = Product::of(left, right);
    if promoted { product } else { product.fast() }
}
