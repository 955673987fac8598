//! INT8 per token, but for the gradient of the weight.

use std::marker::PhantomData;

use burn_backend::bf16;

use super::{Cast, ComputeDtype, Granularity, LinearRow, Number, Product, Recipe, Row, SavedX};

/// SwitchBack, a baseline of jetfire-int8 (section 2; Wortsman et al., 2023).
///
/// X and dY have a scale for each token. W has one for each output channel in Y = X W, and one for each input channel
/// in dX = dY Wᵀ, so that every scale leaves its sum. dW = Xᵀ dY, which sums over all tokens of a batch, stays in the
/// compute dtype, and X is saved as it came.
#[derive(Debug, Clone, Copy, Default)]
pub struct SwitchBackInt8<E = bf16>(PhantomData<E>);

impl<E: ComputeDtype> Recipe for SwitchBackInt8<E> {
    const ROW: Row = Row {
        name: "switch-back-int8",
        about: "INT8 products per token and channel, the weight's gradient in the compute dtype",
        compute: E::DTYPE,
        context: None,
        flow: None,
        embedding: None,
        linear: Some(LinearRow {
            forward: Product::of(PER_ROW, PER_ROW),
            input_gradient: Product::of(PER_ROW, PER_ROW),
            weight_gradient: Product::Compute,
            saved_x: SavedX::Input,
            slots: &[],
        }),
    };
}

const PER_ROW: Cast = Cast::new(Number::Int8, Granularity::Row);
