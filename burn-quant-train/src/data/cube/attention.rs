//! Attention by its own kernel, or from products and a softmax that is one kernel; nothing of the size of the scores is
//! saved.

use burn_backend::{
    BoolStore, DType, TensorMetadata,
    tensor::{Device, FloatTensor},
};
use burn_cubecl::{
    CubeBackend, CubeRuntime, FloatElement, IntElement, element::BoolElement,
    kernel::into_contiguous, tensor::CubeTensor,
};
use cubecl::{client::ComputeClient, std::tensor::TensorHandle};
use cubecl_kernels::{
    attention::{self, AttentionKernel, AttentionOutput, AttentionTensors},
    gemm,
    softmax::{self, AttentionScores},
};

use super::{
    product::{float_product, float_product_in_rows, matrices},
    tensors::{Cube, handle, reshaped, tensor},
};
use crate::data::{
    attention::{
        Attention, AttentionBackward, AttentionGradients, AttentionInputs, AttentionKernels,
        AttentionOptions, AttentionProblem, AttentionProducts, AttentionWay, Band, Composed, Flash,
        FlashOutput, OfInputs,
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
            way: way::<R>,
            flash: Flash {
                forward: flash::<Self, R>,
                backward: flash_backward::<Self, R>,
            },
            composed: Some(Composed {
                forward: forward::<Self, R>,
                backward: backward::<Self, R>,
            }),
        })
    }
}

/// Scores that our own composition may hold while it runs: kernels index with 32 bits.
const MAX_COMPOSED: usize = u32::MAX as usize;
/// Scores that Burn's composition may hold from the forward pass to the backward pass, 12 bytes each.
const MAX_SAVED: usize = 1 << 26;

/// The rule by which attention is computed.
///
/// A kernel on matrix instructions where there is one. Else products on tensor cores, since the portable kernel
/// computes on ordinary FP32 units, of which a GPU has a tenth of the arithmetic or less: our own composition where
/// only a scale and a causal mask are asked for, and Burn's elsewhere. The portable kernel where these hold too many
/// scores in memory; and for what our own composition does not compute, on devices without tensor cores. Both in
/// training, or where Burn's would repeat keys. Between the portable kernel and the compositions the rule is by
/// arithmetic.
fn way<R: CubeRuntime>(
    device: &R::Device,
    problem: &AttentionProblem,
    trains: bool,
) -> Option<AttentionWay> {
    let client = R::client(device);
    let scores = problem.shape.scores().into_iter();
    let scores = scores.fold(1usize, |product, extent| product.saturating_mul(extent));
    let composed = composes(problem) && (1..=MAX_COMPOSED).contains(&scores);
    let saves_or_repeats = trains || problem.shape.heads != problem.shape.kv_heads;
    match AttentionKernel::of(&client, &of_kernel(problem)) {
        Some(AttentionKernel::Hopper | AttentionKernel::TensorCore) => Some(AttentionWay::Flash),
        Some(AttentionKernel::Portable)
            if saves_or_repeats
                && !composed
                && (scores > MAX_SAVED || !gemm::has_tensor_cores(&client)) =>
        {
            Some(AttentionWay::Flash)
        }
        Some(AttentionKernel::Portable) | None => composed.then_some(AttentionWay::Composed),
    }
}

/// True where a softmax between two products is all.
fn composes(problem: &AttentionProblem) -> bool {
    let AttentionProblem {
        shape,
        options,
        is_masked,
        is_biased,
        ..
    } = problem;
    !is_masked
        && !is_biased
        && options.softcap.is_none()
        && options.dropout.is_none()
        && options.products == AttentionProducts::Float
        && [Band::ALL, Band::CAUSAL].contains(&options.band)
        && shape.heads == shape.kv_heads
}

fn of_kernel(problem: &AttentionProblem) -> attention::AttentionProblem {
    let AttentionProblem {
        dtype,
        shape,
        options,
        is_masked,
        is_biased,
    } = *problem;
    attention::AttentionProblem {
        dtype: dtype.into(),
        shape,
        options,
        is_masked,
        is_biased,
    }
}

/// Inputs as a kernel reads them.
struct Launch<R: CubeRuntime> {
    kernel: AttentionKernel,
    tensors: AttentionTensors<R>,
    /// Q.
    like: CubeTensor<R>,
}

impl<R: CubeRuntime> Launch<R> {
    /// For the fastest kernel that computes this.
    fn of<B: Cube<R>>(inputs: AttentionInputs<B>, options: &AttentionOptions) -> Self {
        let like = inputs.query.clone();
        let problem = inputs.problem(like.dtype, *options);
        let kernel = problem.and_then(|it| AttentionKernel::of(&like.client, &of_kernel(&it)));
        let kernel = kernel.expect("attention without scores is for what has a kernel");
        let readable = |tensor| readable_by(kernel, tensor);
        Self {
            kernel,
            tensors: AttentionTensors {
                query: readable(inputs.query),
                key: readable(inputs.key),
                value: readable(inputs.value),
                mask: inputs.mask.map(flags),
                bias: inputs.bias.map(of_scores),
            },
            like,
        }
    }

    fn client(&self) -> &ComputeClient<R> {
        &self.like.client
    }
}

/// A tensor in memory as a kernel reads it.
fn readable_by<R: CubeRuntime>(kernel: AttentionKernel, tensor: CubeTensor<R>) -> TensorHandle<R> {
    let it = handle(&tensor);
    match kernel.reads(&it) {
        true => it,
        false => handle(&into_contiguous(tensor)),
    }
}

/// A mask or a bias in memory as kernels read it: most often as it came, which may be broadcast.
fn of_scores<R: CubeRuntime>(tensor: CubeTensor<R>) -> TensorHandle<R> {
    let it = handle(&tensor);
    match AttentionKernel::reads_scores(&it) {
        true => it,
        false => handle(&into_contiguous(tensor)),
    }
}

/// The bytes or words of a mask.
fn flags<R: CubeRuntime>(mask: CubeTensor<R>) -> TensorHandle<R> {
    let dtype = match mask.dtype {
        DType::Bool(BoolStore::U8 | BoolStore::Native) => DType::U8,
        DType::Bool(BoolStore::U32) => DType::U32,
        other => other,
    };
    let mut it = of_scores(mask);
    it.dtype = dtype.into();
    it
}

fn flash<B: Cube<R>, R: CubeRuntime>(
    inputs: AttentionInputs<B>,
    options: &AttentionOptions,
) -> FlashOutput<CubeTensor<R>> {
    let launch = Launch::of(inputs, options);
    let forward = (launch.kernel).forward(launch.client(), &launch.tensors, options);
    let AttentionOutput {
        output,
        log_sum_exp,
    } = checked(forward);
    let like = &launch.like;
    FlashOutput {
        output: tensor(like, output, like.dtype),
        log_sum_exp: tensor(like, log_sum_exp, DType::F32),
    }
}

fn flash_backward<B: Cube<R>, R: CubeRuntime>(
    backward: AttentionBackward<B>,
    forward: FlashOutput<CubeTensor<R>>,
) -> OfInputs<B> {
    let AttentionBackward {
        inputs,
        gradient,
        wanted,
        options,
    } = backward;
    let launch = Launch::of(inputs, &options);
    let kernel = launch.kernel;
    let forward = AttentionOutput {
        output: readable_by(kernel, forward.output),
        log_sum_exp: handle(&into_contiguous(forward.log_sum_exp)),
    };
    let gradients = checked(kernel.backward(
        launch.client(),
        &launch.tensors,
        &forward,
        &readable_by(kernel, gradient),
        wanted,
        &options,
    ));
    let like = &launch.like;
    let wrap = |it: Option<TensorHandle<R>>| it.map(|it| tensor(like, it, like.dtype));
    AttentionGradients {
        query: wrap(gradients.query),
        key: wrap(gradients.key),
        value: wrap(gradients.value),
        bias: wrap(gradients.bias),
    }
}

fn forward<B: Cube<R>, R: CubeRuntime>(
    inputs: AttentionInputs<B>,
    options: &AttentionOptions,
) -> FloatTensor<B> {
    let [query, key, value] = [inputs.query, inputs.key, inputs.value].map(readable);
    let of_scores = product::<B, R>(query, B::float_transpose(key));
    float_product_in_rows::<B, R>(softmax(of_scores, scores(options)), value)
}

/// The options that the softmax takes; there are no others.
fn scores(options: &AttentionOptions) -> AttentionScores {
    AttentionScores {
        scale: options.scale,
        causal: options.band == Band::CAUSAL,
    }
}

/// The gradients of Q, K and V (the chain rule through `O = P V`, `P = softmax(S)`, `S = scale Q Kᵀ`).
fn backward<B: Cube<R>, R: CubeRuntime>(backward: AttentionBackward<B>) -> OfInputs<B> {
    let AttentionBackward {
        inputs,
        gradient,
        wanted,
        options,
    } = backward;
    let [query, key, value] = [inputs.query, inputs.key, inputs.value].map(readable);
    let gradient = readable(gradient);
    let of_probabilities = product::<B, R>(gradient.clone(), B::float_transpose(value));
    let of_scores = product::<B, R>(query.clone(), B::float_transpose(key.clone()));
    let (probabilities, of_scores) =
        softmax_backward(of_scores, of_probabilities, scores(&options));
    let of_value = || float_product_in_rows::<B, R>(B::float_transpose(probabilities), gradient);
    let of_query = || float_product_in_rows::<B, R>(of_scores.clone(), key);
    let of_key = || float_product_in_rows::<B, R>(B::float_transpose(of_scores.clone()), query);
    AttentionGradients {
        value: wanted.value.then(of_value),
        query: wanted.query.then(of_query),
        key: wanted.key.then(of_key),
        bias: None,
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
    float_product::<B, R>(left, right, dtype)
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
