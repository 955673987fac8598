//! Operators of a recipe's [flow](Flow): what they read, and what they make.

use std::sync::Arc;

use burn_backend::{DType, TensorMetadata};

use super::tensor::QuantTensor;
use crate::{
    layer::tag::{Tag, View},
    ops::flow::ReadRounded,
    recipe::{Flow, Recipe},
    saved::recorded::{InsideTensor, QuantBackend},
};

/// The flow of which an operator on this tensor may be a part: of a recipe that has one, where a backward pass may
/// follow.
pub(super) fn of<B: QuantBackend, R: Recipe>(x: &QuantTensor<B>) -> Option<Flow> {
    let flow = R::row().flow.filter(|_| B::RECORDS)?;
    let is_float = matches!(x.dtype(), DType::F32 | DType::BF16 | DType::F16);
    let has_rows = x.rank() >= 2 && x.shape().num_elements() > 0;
    // A tensor that is computed from a weight remembers its layer, which an operator would forget.
    let takes_part = is_float && has_rows && x.origin().is_none();
    (takes_part && B::ad_enabled(&x.device())).then_some(flow)
}

/// The value that an operator reads of a tensor: in a flow as it flows. It is for [`QuantBackend::record`] alone, as
/// what is read straight through.
pub(super) fn enter<B: QuantBackend>(flow: Option<Flow>, x: QuantTensor<B>) -> InsideTensor<B> {
    read::<B>(flow, x, true)
}

/// The same of the residual stream, whose value others read too.
pub(super) fn enter_stream<B: QuantBackend>(
    flow: Option<Flow>,
    x: QuantTensor<B>,
) -> InsideTensor<B> {
    read::<B>(flow, x, false)
}

fn read<B: QuantBackend>(
    flow: Option<Flow>,
    x: QuantTensor<B>,
    by_product: bool,
) -> InsideTensor<B> {
    let Some(flow) = flow else {
        return x.into_primitive();
    };
    let operation = ReadRounded {
        cast: flow.activations,
        by_product,
        tag: (x.view() == View::Rows).then(|| x.tag().clone()),
    };
    B::record(operation, [x.into_primitive()])
}

/// The output of an operator: in a flow its gradient flows back.
pub(super) fn leave<B: QuantBackend>(flow: Option<Flow>, made: InsideTensor<B>) -> QuantTensor<B> {
    match flow {
        Some(_) => QuantTensor::with_tag(made, Arc::new(Tag::of_flow())),
        None => QuantTensor::new(made),
    }
}
