//! SwiGLU and its gradients, quantized in blocks as they are computed, on a CPU, against the reference of the quantizer to
//! the bit, of floats and of what waits or flows in INT8.

use cubecl::{ir::StorageType, std::tensor::TensorHandle};
use cubecl_kernels::{
    fallback::FallbackState,
    granularity::Granularity,
    layout::Layout,
    linear_input::quantize_linear_input,
    operator_input::OperatorInput,
    quantize::{MatrixSource, QuantizeSpec, Quantized},
    reference,
    rounding::Rounding,
    shape::MatrixShape,
    swiglu::{quantize_swiglu, quantize_swiglu_gradients},
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

pub const SHAPE: MatrixShape = MatrixShape {
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
pub fn draw<const N: usize>(random: &mut Random, float: StorageType) -> [Vec<f32>; N] {
    std::array::from_fn(|_| rounded(&random.with_blocks_of_all_kinds(SHAPE), float))
}

/// The only source of a launch on a matrix.
pub fn source_of(
    float: StorageType,
    launch: impl Fn(&Client, &TensorHandle<OfflineCuda>),
) -> Source {
    let mut sources = sources_of(90, |client: &Client| {
        launch(client, &tensor(client, &[SHAPE.rows, SHAPE.cols], float));
    });
    assert_eq!(sources.len(), 1);
    sources.remove(0)
}

/// The row-major copy, the transposed one, and the scales, by the reference.
pub fn quantized(x: &[f32], row_major: Rounding, transposed: Rounding) -> [Vec<u8>; 3] {
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
pub const CONTEXT: QuantizeSpec = QuantizeSpec::int8(Granularity::Group(128));
/// How they flow.
pub const FLOW: QuantizeSpec = QuantizeSpec::int8(Granularity::Block(BLOCK));

/// The codes and the scales of a matrix that waits or flows, by the reference.
pub fn compressed(x: &[f32], spec: &QuantizeSpec) -> [Vec<u8>; 2] {
    let copy = reference::quantize(x, SHAPE, spec);
    let mut scales = bytemuck::cast_slice(&copy.scales).to_vec();
    one_nan(&mut scales);
    [bytes(&copy.values), scales]
}

/// The elements that they stand for.
pub fn decompressed(x: &[f32], spec: &QuantizeSpec, float: StorageType) -> Vec<f32> {
    let values = reference::dequantize(&reference::quantize(x, SHAPE, spec));
    rounded(&values, float)
}

/// [`check`], where the buffers of `written` hold nothing before.
pub fn check_written(
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
                true => compressed(factor, &CONTEXT),
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
    let mut cases = vec![(dtype::<bf16>(), None, false)];
    for (spec, gradient_flows) in [(CONTEXT, false), (FLOW, false), (FLOW, true)] {
        let floats = [dtype::<f16>(), dtype::<bf16>()];
        cases.extend(floats.map(|float| (float, Some(spec), gradient_flows)));
    }
    for (float, waiting, gradient_flows) in random.few(cases, 3) {
        println!("{float}, waiting {waiting:?}, gradient in numbers {gradient_flows}");
        let roundings = [(); 2].map(|()| Rounding::Stochastic(random.key()));
        let spec = QuantizeSpec::int8(Granularity::Block(BLOCK)).with_layout(Layout::Both);
        let specs = roundings.map(|rounding| spec.with_rounding(rounding));
        let source = source_of(float, |client, x| {
            let codes = waiting.map(|spec| allocated(client, &spec));
            let factor = match &codes {
                Some(codes) => OperatorInput::Quantized(codes, float),
                None => x.into(),
            };
            let gradient = if gradient_flows { factor } else { x.into() };
            quantize_swiglu_gradients(client, [factor; 2], gradient, specs.each_ref())
                .expect("matrices");
        });
        assert_eq!(source.name, "quantize_swiglu_gradients");
        let [gate, up, mut gradient] = draw(&mut random, float);
        let [of_gradient, scales_of_gradient] = match gradient_flows {
            true => compressed(&gradient, &FLOW),
            // A stand-in, which is not read.
            false => [to_bytes(&gradient, float), vec![UNWRITTEN; 4]],
        };
        if gradient_flows {
            gradient = decompressed(&gradient, &FLOW, float);
        }
        let spec = waiting.unwrap_or(CONTEXT);
        let codes = [&gate, &up].map(|factor| compressed(factor, &spec));
        let [gate, up] = match waiting {
            Some(spec) => [&gate, &up].map(|factor| decompressed(factor, &spec, float)),
            None => [gate, up],
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
        let [[gate_codes, scales_of_gate], [up_codes, scales_of_up]] = codes;
        let [gate, up] = match waiting {
            Some(_) => [gate_codes, up_codes],
            None => [to_bytes(&gate, float), to_bytes(&up, float)],
        };
        let expected = [
            gate,
            up,
            of_gradient,
            gate_values,
            gate_transposed,
            gate_scales,
            up_values,
            up_transposed,
            up_scales,
            scales_of_gate,
            scales_of_up,
            scales_of_gradient,
        ];
        let granularity = waiting.map(|spec| spec.granularity);
        let name = format!("emulate-swiglu-gradients-{granularity:?}-{gradient_flows}");
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
fn the_input_of_what_flows_equals_the_reference() {
    let mut random = Random::fresh();
    let mut cases = Vec::new();
    for float in [dtype::<f16>(), dtype::<bf16>()] {
        let roundings = [Rounding::Nearest, Rounding::Stochastic(random.key())];
        cases.extend(roundings.map(|rounding| (float, rounding)));
    }
    for (float, rounding) in random.few(cases, 2) {
        println!("{float}, {rounding:?}");
        let spec = FLOW.with_rounding(rounding).with_layout(Layout::Both);
        let source = source_of(float, |client, _| {
            let codes = allocated(client, &FLOW);
            let factors = [OperatorInput::Quantized(&codes, float); 2];
            quantize_swiglu(client, factors, &spec).expect("a matrix");
        });
        assert_eq!(source.name, "quantize_swiglu_of_codes");
        let [gate, up] = draw(&mut random, float);
        let [of_gate, of_up] = [&gate, &up].map(|factor| compressed(factor, &FLOW));
        let [gate, up] = [&gate, &up].map(|factor| decompressed(factor, &FLOW, float));
        let product: Vec<f32> = gate.iter().zip(&up).map(|(&g, &u)| gated(g, u)).collect();
        let outputs = quantized(&rounded(&product, float), rounding, rounding);
        let expected = [of_gate.to_vec(), of_up.to_vec(), outputs.to_vec()].concat();
        let name = "emulate-swiglu-of-codes";
        check_written(&source, &expected, &[4, 5, 6], &[6], (name, float));
    }
}

/// A matrix as it waits or flows, of which nothing is read.
pub fn allocated(client: &Client, spec: &QuantizeSpec) -> Quantized<OfflineCuda> {
    let MatrixShape { rows, cols, .. } = spec.granularity.scales_shape(SHAPE);
    Quantized {
        values: Some(tensor(client, &[SHAPE.rows, SHAPE.cols], dtype::<i8>())),
        transposed: None,
        scales: tensor(client, &[rows, cols], dtype::<f32>()),
        tensor_scale: None,
        number: spec.number,
        scale: spec.scale,
        granularity: spec.granularity,
        shape: SHAPE,
        batched: false,
    }
}
