//! Attention from products and a softmax that is one kernel; nothing of the size of the scores is saved.

use burn_backend::{
    TensorMetadata,
    tensor::{Device, FloatTensor},
};
use burn_cubecl::{
    CubeBackend, CubeRuntime, FloatElement, IntElement, element::BoolElement,
    kernel::into_contiguous, tensor::CubeTensor,
};
use cubecl_kernels::{gemm, softmax};

use super::{
    product::{float_product, float_product_in_rows, matrices},
    tensors::{Cube, handle, reshaped, tensor},
};
use crate::data::{
    attention::{Attention, AttentionInputs, AttentionKernels, AttentionScores},
    kernels::checked,
};

impl<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement> AttentionKernels
    for CubeBackend<R, F, I, BT>
where
    Self: Cube<R>,
{
    fn attention_kernels(_device: &Device<Self>) -> Option<Attention<Self>> {
        Some(Attention {
            forward: forward::<Self, R>,
            backward: backward::<Self, R>,
        })
    }
}

fn forward<B: Cube<R>, R: CubeRuntime>(
    inputs: AttentionInputs<FloatTensor<B>>,
    scores: AttentionScores,
) -> FloatTensor<B> {
    let AttentionInputs { query, key, value } = inputs.map(readable);
    let of_scores = product::<B, R>(query, B::float_transpose(key));
    product_in_rows::<B, R>(softmax(of_scores, scores), value)
}

/// The gradients of Q, K and V (the chain rule through `O = P V`, `P = softmax(S)`, `S = scale Q Kᵀ`).
fn backward<B: Cube<R>, R: CubeRuntime>(
    inputs: AttentionInputs<FloatTensor<B>>,
    gradient: FloatTensor<B>,
    wanted: AttentionInputs<bool>,
    scores: AttentionScores,
) -> AttentionInputs<Option<FloatTensor<B>>> {
    let AttentionInputs { query, key, value } = inputs.map(readable);
    let gradient = readable(gradient);
    let of_probabilities = product::<B, R>(gradient.clone(), B::float_transpose(value));
    let of_scores = product::<B, R>(query.clone(), B::float_transpose(key.clone()));
    let (probabilities, of_scores) = softmax_backward(of_scores, of_probabilities, scores);
    let of_value = || product_in_rows::<B, R>(B::float_transpose(probabilities), gradient);
    let of_query = || product_in_rows::<B, R>(of_scores.clone(), key);
    let of_key = || product_in_rows::<B, R>(B::float_transpose(of_scores.clone()), query);
    AttentionInputs {
        value: wanted.value.then(of_value),
        query: wanted.query.then(of_query),
        key: wanted.key.then(of_key),
    }
}

/// An operand of several products, in memory as the kernel reads it.
///
/// Heads are slices of a row. Where the kernel cannot read them so, each product that takes a batch of matrices would
/// copy them; one contiguous copy serves all products.
fn readable<R: CubeRuntime>(operand: CubeTensor<R>) -> CubeTensor<R> {
    match gemm::gemm_float_reads(&operand.client, &handle(&operand)) {
        true => operand,
        false => into_contiguous(operand),
    }
}

/// The product of `[batch, heads, M, K]` and `[batch, heads, K, N]`, in their dtype.
fn product<B: Cube<R>, R: CubeRuntime>(left: CubeTensor<R>, right: CubeTensor<R>) -> CubeTensor<R> {
    let dtype = left.dtype.into();
    match gemm::has_gemm_float(&left.client) {
        true => float_product::<B, R>(left, right, dtype),
        false => B::float_matmul(left, right),
    }
}

/// The same for a result that layers see as rows: in the memory of `[batch, M, heads, N]` where that costs nothing.
fn product_in_rows<B: Cube<R>, R: CubeRuntime>(
    left: CubeTensor<R>,
    right: CubeTensor<R>,
) -> CubeTensor<R> {
    match gemm::has_gemm_float(&left.client) {
        true => float_product_in_rows::<B, R>(left, right),
        false => B::float_matmul(left, right),
    }
}

/// The probabilities of scores `[batch, heads, queries, keys]`, in their dtype.
fn softmax<R: CubeRuntime>(scores: CubeTensor<R>, attention: AttentionScores) -> CubeTensor<R> {
    let (like, shape) = (scores.clone(), scores.shape());
    let p = checked(softmax::softmax(&like.client, &matrices(scores), attention));
    reshaped(tensor(&like, p, like.dtype), shape)
}

/// The probabilities, and the gradient of the scores, from the scores and the gradient of the probabilities.
fn softmax_backward<R: CubeRuntime>(
    scores: CubeTensor<R>,
    gradient: CubeTensor<R>,
    attention: AttentionScores,
) -> (CubeTensor<R>, CubeTensor<R>) {
    let (like, shape) = (scores.clone(), scores.shape());
    let (p, gradient) = checked(softmax::softmax_backward(
        &like.client,
        &matrices(scores),
        &matrices(gradient),
        attention,
    ));
    let wrap = |it| reshaped(tensor(&like, it, like.dtype), shape.clone());
    (wrap(p), wrap(gradient))
}
