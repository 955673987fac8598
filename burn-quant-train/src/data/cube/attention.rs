//! Attention by its own kernel, or from products and a softmax that is one kernel; nothing of the size of the scores is
//! saved.

use burn_backend::{
    DType, Shape, TensorMetadata,
    tensor::{Device, FloatTensor},
};
use burn_cubecl::{
    CubeBackend, CubeRuntime, FloatElement, IntElement, element::BoolElement,
    kernel::into_contiguous, tensor::CubeTensor,
};
use cubecl_kernels::{
    attention::{
        self, AttentionKernel, AttentionOptions, AttentionOutput, AttentionProblem, AttentionShape,
        AttentionTensors, Band,
    },
    gemm, softmax,
};

use super::{
    product::{float_product, float_product_in_rows, matrices},
    tensors::{Cube, handle, reshaped, tensor},
};
use crate::data::{
    attention::{
        Attention, AttentionBackward, AttentionGradients, AttentionInputs, AttentionKernels,
        AttentionScores, FlashOutput,
    },
    kernels::checked,
};

impl<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement> AttentionKernels
    for CubeBackend<R, F, I, BT>
where
    Self: Cube<R>,
{
    fn attention_kernels(_device: &Device<Self>) -> Option<Attention<Self>> {
        Some(Attention {
            is_flash: is_flash::<R>,
            forward: forward::<Self, R>,
            backward: backward::<Self, R>,
            flash,
            flash_backward,
        })
    }
}

/// The kernel that is taken.
const KERNEL: AttentionKernel = AttentionKernel::Hopper;

fn options(scores: AttentionScores) -> AttentionOptions {
    AttentionOptions {
        band: if scores.causal {
            Band::CAUSAL
        } else {
            Band::ALL
        },
        ..AttentionOptions::new(scores.scale)
    }
}

fn is_flash<R: CubeRuntime>(
    device: &R::Device,
    dtype: DType,
    shapes: &AttentionInputs<Shape>,
    scores: AttentionScores,
) -> bool {
    let AttentionInputs { query, key, value } = shapes;
    let shape = AttentionShape::new("attention", query, key, value);
    let client = R::client(device);
    shape.is_ok_and(|shape| {
        let problem = AttentionProblem {
            dtype: dtype.into(),
            shape,
            options: options(scores),
            is_masked: false,
            is_biased: false,
        };
        AttentionKernel::of(&client, &problem) == Some(KERNEL)
    })
}

fn tensors<R: CubeRuntime>(inputs: &AttentionInputs<CubeTensor<R>>) -> AttentionTensors<R> {
    AttentionTensors {
        query: handle(&inputs.query),
        key: handle(&inputs.key),
        value: handle(&inputs.value),
        mask: None,
        bias: None,
    }
}

fn flash<R: CubeRuntime>(
    inputs: AttentionInputs<CubeTensor<R>>,
    scores: AttentionScores,
) -> FlashOutput<CubeTensor<R>> {
    let inputs = inputs.map(heads);
    let like = &inputs.query;
    let forward = KERNEL.forward(&like.client, &tensors(&inputs), &options(scores));
    let AttentionOutput {
        output,
        log_sum_exp,
    } = checked(forward);
    FlashOutput {
        output: tensor(like, output, like.dtype),
        log_sum_exp: tensor(like, log_sum_exp, DType::F32),
    }
}

fn flash_backward<R: CubeRuntime>(
    backward: AttentionBackward<CubeTensor<R>>,
    forward: FlashOutput<CubeTensor<R>>,
) -> AttentionInputs<Option<CubeTensor<R>>> {
    let AttentionBackward {
        inputs,
        gradient,
        wanted,
        scores,
    } = backward;
    let inputs = inputs.map(heads);
    let forward = AttentionOutput {
        output: handle(&heads(forward.output)),
        log_sum_exp: handle(&into_contiguous(forward.log_sum_exp)),
    };
    let like = &inputs.query;
    let gradients = checked(KERNEL.backward(
        &like.client,
        &tensors(&inputs),
        &forward,
        &handle(&heads(gradient)),
        attention::AttentionGradients {
            query: wanted.query,
            key: wanted.key,
            value: wanted.value,
            bias: false,
        },
        &options(scores),
    ));
    AttentionInputs::from([gradients.query, gradients.key, gradients.value])
        .map(|gradient| gradient.map(|gradient| tensor(like, gradient, like.dtype)))
}

/// A tensor in memory as the kernel of attention reads it.
fn heads<R: CubeRuntime>(tensor: CubeTensor<R>) -> CubeTensor<R> {
    match KERNEL.reads(&handle(&tensor)) {
        true => tensor,
        false => into_contiguous(tensor),
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
    backward: AttentionBackward<FloatTensor<B>>,
) -> AttentionGradients<B> {
    let AttentionBackward {
        inputs,
        gradient,
        wanted,
        scores,
    } = backward;
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
