//! Attention in tiles, on all cores, without scores in memory.

use burn_backend::{
    DType, Shape, TensorData, TensorMetadata,
    tensor::{Device, FloatTensor},
};
use cubecl_kernels::{
    host::{self, HostAttention},
    reference::attention::{AttentionInputs as HostInputs, Broadcast},
};

use super::HostBackend;
use crate::data::{
    attention::{
        Attention, AttentionBackward, AttentionGradients, AttentionInputs, AttentionKernels,
        AttentionOptions, AttentionProblem, AttentionShape, AttentionWay, Flash, FlashOutput,
        OfInputs,
    },
    cast::cast_to,
    kernels::checked,
    read::bools,
};

impl<B: HostBackend> AttentionKernels for B {
    fn attention_kernels(_device: &Device<B>) -> Option<Attention<B>> {
        Some(Attention {
            way: way::<B>,
            flash: Flash {
                forward: forward::<B>,
                backward: backward::<B>,
            },
            composed: None,
        })
    }
}

/// Everything in 16 bits: the composition widens each operand for each product there.
fn way<B: HostBackend>(
    _device: &Device<B>,
    problem: &AttentionProblem,
    _trains: bool,
) -> Option<AttentionWay> {
    match problem.dtype {
        DType::F16 | DType::BF16 => Some(AttentionWay::Flash),
        _ => None,
    }
}

/// Calls `compute` with the inputs as the functions of `host` take them.
fn with_inputs<B: HostBackend, A>(
    inputs: AttentionInputs<B>,
    compute: impl FnOnce(&HostInputs<'_, f32>) -> A,
) -> A {
    let [query, key, value] = [&inputs.query, &inputs.key, &inputs.value].map(|it| it.shape());
    let shape = checked(AttentionShape::new("attention", &query, &key, &value));
    let mask = inputs
        .mask
        .map(|mask| (dimensions(&mask), bools::<B>(mask)));
    let with_bias = |bias: Option<Broadcast<'_, f32>>| {
        B::with_floats(inputs.query, |query| {
            B::with_floats(inputs.key, |key| {
                B::with_floats(inputs.value, |value| {
                    compute(&HostInputs {
                        shape,
                        query,
                        key,
                        value,
                        mask: (mask.as_ref()).map(|(shape, data)| Broadcast {
                            data,
                            shape: *shape,
                        }),
                        bias,
                    })
                })
            })
        })
    };
    match inputs.bias {
        None => with_bias(None),
        Some(bias) => {
            let shape = dimensions(&bias);
            B::with_floats(bias, |data| with_bias(Some(Broadcast { data, shape })))
        }
    }
}

/// The dimensions of a tensor of four.
fn dimensions(tensor: &impl TensorMetadata) -> [usize; 4] {
    tensor.shape().dims()
}

fn forward<B: HostBackend>(
    inputs: AttentionInputs<B>,
    options: &AttentionOptions,
) -> FlashOutput<FloatTensor<B>> {
    let device = B::float_device(&inputs.query);
    let dtype = inputs.query.dtype();
    with_inputs(inputs, |inputs| {
        let forward = checked(host::attention(inputs, options));
        let floats = |data, shape: &[usize]| {
            B::float_from_data(TensorData::new(data, shape.to_vec()), &device)
        };
        let output = floats(forward.output, &inputs.shape.output());
        FlashOutput {
            output: in_rows::<B>(cast_to::<B>(output, Some(dtype.into()))),
            log_sum_exp: floats(forward.log_sum_exp, &inputs.shape.rows()),
        }
    })
}

/// The same tensor `[batch, heads, queries, features]` in the memory of `[batch, queries, heads, features]`: the layer
/// behind it reads rows, and then shares them with what waits for the backward pass.
fn in_rows<B: HostBackend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    let [batch, heads, queries, features] = dimensions(&tensor);
    let rows = B::float_swap_dims(tensor, 1, 2);
    let rows = B::float_reshape(rows, Shape::new([batch, queries, heads * features]));
    let rows = B::float_reshape(rows, Shape::new([batch, queries, heads, features]));
    B::float_swap_dims(rows, 1, 2)
}

fn backward<B: HostBackend>(
    backward: AttentionBackward<B>,
    forward: FlashOutput<FloatTensor<B>>,
) -> OfInputs<B> {
    let AttentionBackward {
        inputs,
        gradient,
        wanted,
        options,
    } = backward;
    let device = B::float_device(&inputs.query);
    let dtype = inputs.query.dtype();
    let of_bias = inputs.bias.as_ref().map(|bias| bias.shape().to_vec());
    let forward = HostAttention {
        output: B::with_floats(forward.output, <[f32]>::to_vec),
        log_sum_exp: B::with_floats(forward.log_sum_exp, <[f32]>::to_vec),
    };
    with_inputs(inputs, |inputs| {
        let gradients = B::with_floats(gradient, |gradient| {
            host::attention_backward(inputs, &options, &forward, gradient, wanted)
        });
        let gradients = checked(gradients);
        let floats = |data: Option<Vec<f32>>, shape: &[usize]| {
            let data = TensorData::new(data?, shape.to_vec());
            let tensor = B::float_from_data(data, &device);
            Some(cast_to::<B>(tensor, Some(dtype.into())))
        };
        AttentionGradients {
            query: floats(gradients.query, &inputs.shape.query()),
            key: floats(gradients.key, &inputs.shape.key()),
            value: floats(gradients.value, &inputs.shape.value()),
            bias: floats(gradients.bias, &of_bias.unwrap_or_default()),
        }
    })
}
