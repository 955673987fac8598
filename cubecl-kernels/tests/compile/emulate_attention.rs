//! Attention on matrix instructions on a CPU, against the reference.

use cubecl::{ir::StorageType, std::tensor::TensorHandle};
use cubecl_kernels::attention::{
    AttentionGradients, AttentionKernel, AttentionOutput, AttentionTensors, Band,
};
use half::{bf16, f16};

use super::{
    Client,
    device::{rounded, to_bytes},
    dtype,
    emulator::{Sanitizer, run},
    offline::{OfflineCuda, Source, sources_of},
    problem::{ALL_GRADIENTS, Kind, Problem, assert_close},
    random::Random,
    tensor,
};

/// More queries and keys than a tile has, and heads that do not fill their instructions.
const PLAIN: Kind = Kind::plain([1, 2, 1], [70, 150], [40, 24]);

#[test]
fn equals_the_reference() {
    let mut random = Random::fresh();
    let causal = Kind {
        band: Band::CAUSAL,
        ..Kind::plain([2, 1, 1], [150, 130], [64, 64])
    };
    let wide = Kind::plain([1, 1, 1], [20, 70], [128, 256]);
    let every_option = Kind {
        scale: -0.2,
        softcap: Some(3.0),
        band: Band {
            left: Some(90),
            right: Some(7),
        },
        dropout: 0.25,
        mask: Some([true, false, true, true]),
        bias: Some([false, true, true, true]),
        ..PLAIN
    };
    let cases = [
        (dtype::<f16>(), PLAIN, Sanitizer::Addresses),
        (dtype::<bf16>(), causal, Sanitizer::Threads),
        (dtype::<bf16>(), wide, Sanitizer::Addresses),
        (dtype::<bf16>(), every_option, Sanitizer::Threads),
    ];
    for (float, kind, sanitizer) in random.few(cases, 1) {
        println!("{float} {kind:?}");
        emulate(&mut random, float, kind, sanitizer);
    }
}

fn emulate(random: &mut Random, float: StorageType, kind: Kind, sanitizer: Sanitizer) {
    let mut problem = Problem::draw(random, kind);
    let bias = problem.bias.as_mut().map(|(bias, _)| bias);
    let inputs = [
        &mut problem.query,
        &mut problem.key,
        &mut problem.value,
        &mut problem.gradient,
    ];
    for x in inputs.into_iter().chain(bias) {
        *x = rounded(x, float);
    }
    let expected = problem.solve();
    let tolerance = if float == dtype::<f16>() { 4e-3 } else { 3e-2 };
    let name = |pass: &str| format!("attention-{pass}-{float}-{sanitizer:?}-{}", kind.width[0]);
    let shape = &problem.shape;
    let floats = |x: &[f32]| to_bytes(x, float);
    let none = || vec![0; 16];
    let mask = problem.mask.as_ref().map_or_else(none, hidden);
    let bias = problem
        .bias
        .as_ref()
        .map_or_else(none, |(bias, _)| floats(bias));
    let [query, key, value] = [&problem.query, &problem.key, &problem.value].map(|x| floats(x));
    let new = |elements: [usize; 4]| vec![0xff; elements.iter().product::<usize>() * float.size()];
    let in_heads = |bytes: &[u8], shape| in_heads(&to_floats(bytes, float), shape);
    // An architecture with little shared memory.
    let sources = sources(AttentionKernel::TensorCore, 89, &problem, float);
    let source = |name: &str| {
        let found = sources
            .iter()
            .filter(|source| source.name.starts_with(name));
        found.cloned().collect::<Vec<_>>()
    };

    let rows: usize = shape.rows().iter().product();
    let buffers = [
        query.clone(),
        key.clone(),
        value.clone(),
        mask.clone(),
        bias.clone(),
        new(shape.output()),
        vec![0xff; 4 * rows],
    ];
    let forward = source("attention_forward_tensor_core_kernel");
    let written = run(&forward[0], &buffers, &name("forward"), sanitizer);
    let output = in_heads(&written[5], shape.output());
    assert_close(&output, &expected.forward.output, tolerance, "output");
    let log_sum_exp = of_words(&written[6]);
    let of_rows = &expected.forward.log_sum_exp;
    assert_close(&log_sum_exp, of_rows, 1e-4, "log-sum-exp");

    let width = shape.value_width;
    let outputs = expected.forward.output.chunks(width);
    let products = problem.gradient.chunks(width).zip(outputs).map(|(g, o)| {
        let products = g.iter().zip(o).map(|(&g, &o)| f64::from(g) * o);
        products.sum::<f64>() as f32
    });
    let delta: Vec<f32> = products.collect();
    let of_backward = [
        query,
        key,
        value,
        mask,
        bias,
        floats(&problem.gradient),
        written[6].clone(),
        bytemuck::cast_slice(&delta).to_vec(),
    ];
    let [q, k, v, m, b, g, l, d] = of_backward;
    let of = &expected.gradients;
    let queries = source("attention_queries_tensor_core_kernel");
    let buffers = [q, k, v, m, b, g, l, d, new(shape.query())];
    let written = run(&queries[0], &buffers, &name("queries"), sanitizer);
    let of_query = in_heads(&written[8], shape.query());
    assert_close(&of_query, &of.query, tolerance, "gradient of query");

    let [q, k, v, m, b, g, l, d, _] = buffers;
    let mut buffers = [q, k, v, m, b, g, l, d, new(shape.key()), new(shape.value())];
    // Wide heads have a launch for each gradient.
    for (turn, source) in source("attention_keys_tensor_core_kernel")
        .iter()
        .enumerate()
    {
        let name = name(&format!("keys-{turn}"));
        buffers = run(source, &buffers, &name, sanitizer);
    }
    let of_key = in_heads(&buffers[8], shape.key());
    assert_close(&of_key, &of.key, tolerance, "gradient of key");
    let of_value = in_heads(&buffers[9], shape.value());
    assert_close(&of_value, &of.value, tolerance, "gradient of value");
}

/// The launches of both passes of a kernel that the architecture has.
pub fn sources(
    kernel: AttentionKernel,
    architecture: u16,
    problem: &Problem,
    float: StorageType,
) -> Vec<Source> {
    sources_of(architecture, |client: &Client| {
        let shape = &problem.shape;
        let new = |shape: &[usize]| tensor(client, shape, float);
        let tensors: AttentionTensors<OfflineCuda> = AttentionTensors {
            query: new(&shape.query()),
            key: new(&shape.key()),
            value: new(&shape.value()),
            mask: (problem.mask.as_ref()).map(|(_, shape)| tensor(client, shape, dtype::<u8>())),
            bias: problem.bias.as_ref().map(|(_, shape)| new(shape)),
        };
        let options = &problem.options;
        let forward: AttentionOutput<OfflineCuda> = kernel
            .forward(client, &tensors, options)
            .expect("a kernel of the architecture");
        let gradient: TensorHandle<OfflineCuda> = new(&shape.output());
        let wanted = AttentionGradients {
            bias: false,
            ..ALL_GRADIENTS
        };
        kernel
            .backward(client, &tensors, &forward, &gradient, wanted, options)
            .expect("what has a forward pass");
    })
}

/// The bytes of a mask.
pub fn hidden((mask, _): &(Vec<bool>, [usize; 4])) -> Vec<u8> {
    mask.iter().map(|&hidden| hidden.into()).collect()
}

/// Numbers in FP32.
pub fn of_words(bytes: &[u8]) -> Vec<f32> {
    let words = bytes.chunks_exact(4);
    words
        .map(|it| f32::from_le_bytes([it[0], it[1], it[2], it[3]]))
        .collect()
}

pub fn to_floats(bytes: &[u8], float: StorageType) -> Vec<f32> {
    let words = bytes
        .chunks_exact(2)
        .map(|it| u16::from_le_bytes([it[0], it[1]]));
    match float == dtype::<f16>() {
        true => words.map(|word| f16::from_bits(word).to_f32()).collect(),
        false => words.map(|word| bf16::from_bits(word).to_f32()).collect(),
    }
}

/// `[batch, heads, rows, width]` of a result, whose memory is `[batch, rows, heads, width]`.
pub fn in_heads(x: &[f32], [batch, heads, rows, width]: [usize; 4]) -> Vec<f32> {
    let mut result = Vec::with_capacity(x.len());
    for of_batch in x.chunks_exact(rows * heads * width).take(batch) {
        for head in 0..heads {
            for row in of_batch.chunks_exact(heads * width) {
                result.extend_from_slice(&row[head * width..][..width]);
            }
        }
    }
    result
}
