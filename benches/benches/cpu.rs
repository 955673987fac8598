//! The CPU path: a linear layer on Flex with and without quantization, the quantizers of slices, and a step of AdamW.
//!
//! `cargo bench -p benches` measures; `cargo bench -p benches -- --test` only runs everything once.

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use benches::{
    random::Random,
    step::{
        architecture::{Architecture, Layer, Weight},
        contender::{Contender, settle},
        input::Input,
        passes::Renewed,
    },
};
use burn::{
    backend::{Autodiff, Flex},
    tensor::DType,
};
use burn_quant_train::{QuantTrain, recipe::FallbackInt8};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use cubecl_kernels::{
    adamw::Hyperparameters,
    granularity::Granularity,
    host,
    optimizer_state::{Moment, StateFormat},
    quantize::QuantizeSpec,
    reference::{
        adamw::{MomentChunk, Step},
        optimizer_state::quantize_state,
    },
    rounding::{Rounding, StochasticKey},
};

/// Rows of the linear layer's input, and its features.
const TOKENS: usize = 512;
const FEATURES: [usize; 2] = [256, 512];
/// Rows and columns of a quantized matrix, and of its blocks.
const SHAPE: [usize; 2] = [512, 1024];
const BLOCK: usize = 128;
/// Parameters of the optimizer's tensor.
const PARAMETERS: usize = 1 << 20;

fn linear(c: &mut Criterion) {
    let mut random = Random::new(1);
    let weight = Weight::random(&mut random, FEATURES);
    let input = Input::random(&mut random, [1, TOKENS], FEATURES);
    let mut group = c.benchmark_group("linear");
    group.throughput(Throughput::Elements(TOKENS as u64));

    type Plain = Autodiff<Flex>;
    passes::<Plain>(&mut group, "plain FP32", &weight, &input);
    passes::<QuantTrain<Plain, FallbackInt8<f32>>>(&mut group, "FallbackInt8", &weight, &input);
    group.finish();
}

/// The forward pass, and both passes.
fn passes<B: Contender<Device: Default>>(
    group: &mut criterion::BenchmarkGroup<'_, criterion::measurement::WallTime>,
    name: &str,
    weight: &Weight,
    input: &Input,
) {
    let device = Default::default();
    let inputs = input.on::<B>(DType::F32, &device);
    let model = Architecture::init::<B>(weight, DType::F32, &device);
    let (model, _) = settle::<B, _>(model, |model| inputs.backward(model.forward(inputs.x())));
    let model = Renewed::new(model);
    group.bench_function(format!("{name}, both passes"), |b| {
        b.iter(|| model.backward(&inputs, model.forward(&inputs)));
    });
    // The backward pass frees what the forward pass saved; its time does not count.
    group.bench_function(format!("{name}, forward"), |b| {
        b.iter_custom(|iterations| {
            let mut forward = Duration::ZERO;
            for _ in 0..iterations {
                let start = Instant::now();
                let tensors = model.forward(&inputs);
                forward += start.elapsed();
                model.backward(&inputs, tensors);
            }
            forward
        });
    });
}

fn quantizers(c: &mut Criterion) {
    let x = Random::new(2).normals(SHAPE[0] * SHAPE[1], 1.0);
    let key = StochasticKey { seed: 3, stream: 4 };
    let spec = QuantizeSpec::int8(Granularity::Block(BLOCK));
    let quantized = host::quantize(&x, SHAPE, &spec).expect("a matrix");
    let mut group = c.benchmark_group("quantize");
    group.throughput(Throughput::Elements(x.len() as u64));
    for (name, rounding) in [
        ("nearest", Rounding::Nearest),
        ("stochastic", Rounding::Stochastic(key)),
    ] {
        group.bench_function(name, |b| {
            let spec = spec.with_rounding(rounding);
            b.iter(|| host::quantize(black_box(&x), SHAPE, &spec));
        });
    }
    // About half of the blocks of 16,384 normal numbers have one above 4.
    group.bench_function("fallback", |b| {
        b.iter(|| host::quantize_fallback(black_box(&x), SHAPE, BLOCK, 4.0));
    });
    group.bench_function("dequantize", |b| {
        b.iter(|| host::dequantize(black_box(&quantized)));
    });
    group.finish();
}

fn adamw(c: &mut Criterion) {
    let mut random = Random::new(5);
    let hyperparameters = Hyperparameters {
        learning_rate: 1e-4,
        beta_1: 0.9,
        beta_2: 0.999,
        epsilon: 1e-8,
        weight_decay: 0.1,
        clip_norm: None,
    };
    let step = Step::new(&hyperparameters, 10).expect("hyperparameters in their ranges");
    let mut parameter = random.tiled(PARAMETERS, 0.02);
    let gradient = random.tiled(PARAMETERS, 1e-3);
    let mut first = random.tiled(PARAMETERS, 1e-3);
    let mut second: Vec<f32> = first.iter().map(|m| 2.0 * m * m).collect();
    let mut group = c.benchmark_group("adamw");
    group.throughput(Throughput::Elements(PARAMETERS as u64));
    for (name, format) in [
        ("E4M3 + expand", StateFormat::E4M3.expanded()),
        ("INT8", StateFormat::INT8),
    ] {
        let mut states = [
            quantize_state(&first, format, Moment::First),
            quantize_state(&second, format, Moment::Second),
        ];
        group.bench_function(name, |b| {
            b.iter(|| {
                let [first, second] = states.each_mut().map(|state| MomentChunk::Compressed {
                    format,
                    codes: &mut state.codes,
                    scales: &mut state.scales,
                    exponents: &mut state.exponents,
                });
                host::adamw(&step, &mut parameter, &gradient, first, second, None);
            });
        });
    }
    group.bench_function("FP32", |b| {
        b.iter(|| {
            let moments = [&mut first, &mut second].map(|it| MomentChunk::Full(it));
            let [first, second] = moments;
            host::adamw(&step, &mut parameter, &gradient, first, second, None);
        });
    });
    group.finish();
}

criterion_group! {
    name = cpu;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2));
    targets = linear, quantizers, adamw
}
criterion_main!(cpu);
