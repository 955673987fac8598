//! SwiGLU and its gradients, and RMSNorm once more, quantized in blocks as they are computed, on a CPU, against the
//! reference of the quantizer to the bit, of floats and of what waits in INT8.

use cubecl::{ir::StorageType, std::tensor::TensorHandle};
use cubecl_kernels::{
    fallback::FallbackState,
    granularity::Granularity,
    layout::Layout,
    linear_input::quantize_linear_input,
    operator_input::OperatorInput,
    quantize::{MatrixSource, QuantizeSpec, Quantized},
    reference,
    rms_norm::quantize_rms_norm,
    rounding::Rounding,
    shape::MatrixShape,
    swiglu::quantize_swiglu_gradients,
};
use half::{bf16, f16};

use super::{
    Client,
    device::{rounded, to_bytes},
    dtype,
    emulate::{UNWRITTEN, bytes, check, fallback_of, one_nan},
    emulator::Sanitizer,
    offline::{OfflineCuda, Source, sources_of},
    random::Random,
    tensor,
};

const SHAPE: MatrixShape = MatrixShape {
    batch: 1,
    rows: 256,
    cols: 256,
};
const BLOCK: usize = 128;
const LAYERS: usize = 3;
const LAYER: usize = 1;

/// `1 / (1 + exp(-x))` and what it lacks to 1, as the kernel has them.
fn sigmoids(x: f32) -> [f32; 2] {
    let power = (-x.abs()).exp();
    let larger = 1.0 / (1.0 + power);
    let smaller = power * larger;
    match x >= 0.0 {
        true => [larger, smaller],
        false => [smaller, larger],
    }
}

/// `silu(gate) up`, as the kernel has it.
pub fn gated(gate: f32, up: f32) -> f32 {
    gate * sigmoids(gate)[0] * up
}

/// Its gradients, as the kernel has them.
pub fn gradients(gate: f32, up: f32, gradient: f32) -> [f32; 2] {
    let [sigmoid, rest] = sigmoids(gate);
    let half_slope = 0.5 * gate.mul_add(rest, 1.0) * sigmoid;
    let (larger, smaller) = match up.abs() > gradient.abs() {
        true => (up, gradient),
        false => (gradient, up),
    };
    [
        2.0 * (smaller * (larger * half_slope)),
        gradient * (gate * sigmoid),
    ]
}

/// Blocks of all kinds, each time other ones.
fn draw<const N: usize>(random: &mut Random, float: StorageType) -> [Vec<f32>; N] {
    std::array::from_fn(|_| rounded(&random.with_blocks_of_all_kinds(SHAPE), float))
}

fn source_of(float: StorageType, launch: impl Fn(&Client, &TensorHandle<OfflineCuda>)) -> Source {
    let mut sources = sources_of(90, |client: &Client| {
        launch(client, &tensor(client, &[SHAPE.rows, SHAPE.cols], float));
    });
    assert_eq!(sources.len(), 1);
    sources.remove(0)
}

/// The row-major copy, the transposed one, and the scales, by the reference.
fn quantized(x: &[f32], row_major: Rounding, transposed: Rounding) -> [Vec<u8>; 3] {
    let spec = QuantizeSpec::int8(Granularity::Block(BLOCK));
    let copy = |rounding| reference::quantize(x, SHAPE, &spec.with_rounding(rounding));
    let (row_major, transposed) = (copy(row_major), copy(transposed));
    let mut scales = bytemuck::cast_slice(&row_major.scales).to_vec();
    one_nan(&mut scales);
    [
        bytes(&row_major.values),
        bytes(&transposed.transposed().values),
        scales,
    ]
}

/// How gate and up wait.
const CONTEXT: QuantizeSpec = QuantizeSpec::int8(Granularity::Group(128));

/// The codes and the scales of a factor that waits, by the reference.
fn compressed(factor: &[f32]) -> [Vec<u8>; 2] {
    let copy = reference::quantize(factor, SHAPE, &CONTEXT);
    let mut scales = bytemuck::cast_slice(&copy.scales).to_vec();
    one_nan(&mut scales);
    [bytes(&copy.values), scales]
}

/// [`check`], where the buffers of `written` hold nothing before.
fn check_written(
    source: &Source,
    expected: &[Vec<u8>],
    written: &[usize],
    scales: &[usize],
    (name, float): (&str, StorageType),
) {
    let mut before = expected.to_vec();
    for &index in written {
        // Counts go up from zero.
        let byte = if index == COUNTS { 0 } else { UNWRITTEN };
        before[index].fill(byte);
    }
    let (what, sanitizer) = (format!("{name}-{float}"), Sanitizer::of(float));
    check(source, [&before, expected], scales, &what, sanitizer);
}

/// The counts among the buffers of the input's kernel.
const COUNTS: usize = 9;

#[test]
fn the_input_equals_the_reference() {
    let mut random = Random::fresh();
    for float in random.few([dtype::<f16>(), dtype::<bf16>()], 1) {
        for (threshold, contexts) in [(None, true), (Some(0.0), false), (Some(100.0), true)] {
            println!("{float}, threshold {threshold:?}, contexts {contexts}");
            let key = random.key();
            let source = source_of(float, |client, x| {
                let thresholds = &tensor(client, &[LAYERS], dtype::<f32>());
                let counts = &tensor(client, &[LAYERS, 2], dtype::<i32>());
                let state = threshold.map(|_| FallbackState {
                    thresholds,
                    layer: LAYER as u32,
                    counts,
                });
                let x = MatrixSource::Swiglu {
                    gate: x,
                    up: x,
                    contexts: contexts.then_some(CONTEXT),
                };
                quantize_linear_input(client, x, BLOCK, Some(key), state).expect("a matrix");
            });
            assert_eq!(source.name, "quantize_swiglu");
            let [gate, up] = draw(&mut random, float);
            let product: Vec<f32> = gate.iter().zip(&up).map(|(&g, &u)| gated(g, u)).collect();
            let product = rounded(&product, float);
            let [values, transposed, of_blocks] =
                quantized(&product, Rounding::Nearest, Rounding::Stochastic(key));
            let [residual, residual_scales, flags, thresholds, counts] =
                fallback_of(&product, SHAPE, threshold);
            let [of_gate, of_up] = [&gate, &up].map(|factor| match contexts {
                true => compressed(factor),
                // A stand-in, which is not touched.
                false => [vec![UNWRITTEN; 4], vec![UNWRITTEN; 4]],
            });
            let [gate_codes, gate_scales] = of_gate;
            let [up_codes, up_scales] = of_up;
            let expected = [
                to_bytes(&gate, float),
                to_bytes(&up, float),
                values,
                transposed,
                of_blocks,
                residual,
                residual_scales,
                flags,
                thresholds,
                counts,
                gate_codes,
                gate_scales,
                up_codes,
                up_scales,
            ];
            let name = format!("emulate-swiglu-{threshold:?}");
            check_written(
                &source,
                &expected,
                &[2, 3, 4, 5, 6, 7, COUNTS, 10, 11, 12, 13],
                &[4, 11, 13],
                (&name, float),
            );
        }
    }
}

#[test]
fn the_gradients_equal_the_reference() {
    let mut random = Random::fresh();
    for (float, contexts) in [
        (dtype::<f16>(), true),
        (dtype::<bf16>(), false),
        (dtype::<bf16>(), true),
    ] {
        println!("{float}, contexts {contexts}");
        let roundings = [(); 2].map(|()| Rounding::Stochastic(random.key()));
        let spec = QuantizeSpec::int8(Granularity::Block(BLOCK)).with_layout(Layout::Both);
        let specs = roundings.map(|rounding| spec.with_rounding(rounding));
        let source = source_of(float, |client, x| {
            let codes = allocated(client);
            let factor = match contexts {
                true => OperatorInput::Quantized(&codes, float),
                false => x.into(),
            };
            quantize_swiglu_gradients(client, [factor; 2], x, specs.each_ref()).expect("matrices");
        });
        assert_eq!(source.name, "quantize_swiglu_gradients");
        let [gate, up, gradient] = draw(&mut random, float);
        let waiting = [&gate, &up].map(|factor| compressed(factor));
        let [gate, up] = match contexts {
            true => [&gate, &up].map(|factor| {
                let values = reference::dequantize(&reference::quantize(factor, SHAPE, &CONTEXT));
                rounded(&values, float)
            }),
            false => [gate, up],
        };
        let of = |index: usize| -> Vec<f32> {
            let elements = 0..gate.len();
            let of_element = |at: usize| gradients(gate[at], up[at], gradient[at])[index];
            rounded(&elements.map(of_element).collect::<Vec<_>>(), float)
        };
        let [of_gate, of_up] =
            [0, 1].map(|index| quantized(&of(index), roundings[index], roundings[index]));
        let [gate_values, gate_transposed, gate_scales] = of_gate;
        let [up_values, up_transposed, up_scales] = of_up;
        let [[gate_codes, scales_of_gate], [up_codes, scales_of_up]] = waiting;
        let [gate, up] = match contexts {
            true => [gate_codes, up_codes],
            false => [to_bytes(&gate, float), to_bytes(&up, float)],
        };
        let expected = [
            gate,
            up,
            to_bytes(&gradient, float),
            gate_values,
            gate_transposed,
            gate_scales,
            up_values,
            up_transposed,
            up_scales,
            scales_of_gate,
            scales_of_up,
        ];
        let name = format!("emulate-swiglu-gradients-{contexts}");
        check_written(
            &source,
            &expected,
            &[3, 4, 5, 6, 7, 8],
            &[5, 8],
            (&name, float),
        );
    }
}

#[test]
fn a_norm_once_more_equals_the_reference() {
    let mut random = Random::fresh();
    for (float, gain_type) in [
        (dtype::<f16>(), dtype::<f16>()),
        (dtype::<bf16>(), dtype::<f32>()),
    ] {
        println!("{float}, gains {gain_type}");
        let rounding = Rounding::Stochastic(random.key());
        let spec = QuantizeSpec::int8(Granularity::Block(BLOCK))
            .with_rounding(rounding)
            .with_layout(Layout::Transposed);
        let source = source_of(float, |client, _| {
            let gain = tensor(client, &[SHAPE.cols], gain_type);
            let roots = tensor(client, &[SHAPE.rows], dtype::<f32>());
            let codes = allocated(client);
            let x = OperatorInput::Quantized(&codes, float);
            quantize_rms_norm(client, x, &gain, &roots, &spec).expect("a matrix");
        });
        assert_eq!(source.name, "quantize_rms_norm");
        let [x] = draw(&mut random, float);
        let gain = rounded(&random.with_outliers(SHAPE.cols), gain_type);
        let roots = random.with_outliers(SHAPE.rows);
        let waiting = reference::dequantize(&reference::quantize(&x, SHAPE, &CONTEXT));
        let of = |(at, x): (usize, f32)| x * roots[at / SHAPE.cols] * gain[at % SHAPE.cols];
        let output = rounded(&waiting, float).into_iter().enumerate().map(of);
        let output = rounded(&output.collect::<Vec<_>>(), float);
        let [_, transposed, scales] = quantized(&output, rounding, rounding);
        let [codes, scales_of_x] = compressed(&x);
        let expected = [
            codes,
            scales_of_x,
            bytemuck::cast_slice(&roots).to_vec(),
            to_bytes(&gain, gain_type),
            transposed,
            scales,
        ];
        check_written(
            &source,
            &expected,
            &[4, 5],
            &[5],
            ("emulate-rms-norm", float),
        );
    }
}

/// A matrix as gate and up wait, of which nothing is read.
fn allocated(client: &Client) -> Quantized<OfflineCuda> {
    Quantized {
        values: Some(tensor(client, &[SHAPE.rows, SHAPE.cols], dtype::<i8>())),
        transposed: None,
        scales: tensor(client, &[SHAPE.rows, SHAPE.cols / 128], dtype::<f32>()),
        tensor_scale: None,
        number: CONTEXT.number,
        scale: CONTEXT.scale,
        granularity: CONTEXT.granularity,
        shape: SHAPE,
        batched: false,
    }
}
