//! FP8 by one scale for a matrix on a CPU, against the reference to the bit: `quantize/matrix_scale`, by current and by
//! delayed scaling, and around it SwiGLU's output and gradients, with gate and up as floats and as they flow, and of what
//! flows the output of norms, and GELU's and its gradient.

use cubecl::{ir::StorageType, std::tensor::TensorHandle};
use cubecl_kernels::{
    gelu::{quantize_gelu, quantize_gelu_gradient},
    granularity::Granularity,
    layer_norm::quantize_layer_norm,
    layout::Layout,
    number::Number,
    operator_input::OperatorInput,
    quantize::{DelayedMaximum, QuantizeSpec, Quantized, quantize, quantize_delayed},
    reference,
    rms_norm::quantize_rms_norm,
    shape::MatrixShape,
    swiglu::{quantize_swiglu, quantize_swiglu_gradients},
};
use half::{bf16, f16};

use super::{
    Client,
    device::{rounded, to_bytes},
    dtype,
    emulate::{UNWRITTEN, bytes, check, one_nan, pitched},
    emulate_swiglu::{gated, gradients},
    emulator::Sanitizer,
    offline::{OfflineCuda, Source, sources_of},
    random::Random,
    tensor,
};

const SHAPE: MatrixShape = MatrixShape {
    batch: 1,
    rows: 128,
    cols: 256,
};
/// From one row of X to the next one, in elements.
const PITCH: usize = SHAPE.cols + 8;
/// The words by which blocks tell each other how far they are: 0 before and after.
const COUNTERS: [u8; 32] = [0; 32];
const LAYERS: usize = 3;
const LAYER: usize = 1;

/// The only source of a launch, by its name.
fn only_source(name: &str, launch: impl FnOnce(&Client)) -> Source {
    let mut sources = sources_of(90, launch);
    sources.retain(|source| source.name == name);
    assert_eq!(sources.len(), 1, "{name}");
    sources.remove(0)
}

/// Matrices that look unlike: special values, no values, values that get no scale, normal ones.
fn matrices(random: &mut Random) -> [(&'static str, Vec<f32>); 4] {
    let count = SHAPE.num_elements();
    [
        ("special values", random.with_special_values(SHAPE)),
        ("zeros", vec![0.0; count]),
        ("tiny", vec![-1e-35; count]),
        ("outliers", random.with_outliers(count)),
    ]
}

/// [`check`], where buffers from `written` on hold nothing before, but for the last one, the counters, in front of which
/// there are so many of floats.
fn check_written(
    source: &Source,
    expected: &[Vec<u8>],
    (written, floats): (usize, usize),
    what: &str,
    float: StorageType,
) {
    let counters = expected.len() - 1;
    let mut before = expected.to_vec();
    before[written..counters]
        .iter_mut()
        .for_each(|it| it.fill(UNWRITTEN));
    let floats: Vec<usize> = (counters - floats..counters).collect();
    let sanitizer = Sanitizer::of(float);
    check(source, [&before, expected], &floats, what, sanitizer);
}

fn float_bytes(value: f32) -> Vec<u8> {
    let value = if value.is_nan() { f32::NAN } else { value };
    value.to_le_bytes().to_vec()
}

/// Row-major codes, transposed ones, and the scale, by current scaling.
fn current(x: &[f32], spec: &QuantizeSpec) -> [Vec<u8>; 3] {
    let quantized = reference::quantize(x, SHAPE, spec);
    [
        bytes(&quantized.values),
        bytes(&quantized.transposed().values),
        float_bytes(quantized.scales[0]),
    ]
}

#[test]
fn current_scaling_equals_the_reference() {
    let mut random = Random::fresh();
    let mut cases = Vec::new();
    for float in [dtype::<f32>(), dtype::<f16>(), dtype::<bf16>()] {
        cases.extend([Number::E4M3, Number::E5M2].map(|number| (float, number)));
    }
    for (float, number) in random.few(cases, 2) {
        let spec = QuantizeSpec::new(number, Granularity::Tensor).with_layout(Layout::Both);
        let source = only_source("quantize_by_matrix", |client| {
            let handle = client.empty(SHAPE.rows * PITCH * float.size());
            let x = TensorHandle::new(handle, [SHAPE.rows, SHAPE.cols], [PITCH, 1], float);
            quantize(client, &x, &spec).expect("a matrix");
        });
        let matrices = matrices(&mut random);
        for (kind, x) in random.few(matrices, 2) {
            let x = rounded(&x, float);
            let [values, transposed, scale] = current(&x, &spec);
            let expected = [
                pitched(&x, SHAPE.cols, PITCH, float),
                values,
                transposed,
                scale,
                COUNTERS.to_vec(),
            ];
            let what = format!("current-{float}-{number:?}-{kind}");
            check_written(&source, &expected, (1, 1), &what, float);
        }
    }
}

#[test]
fn delayed_scaling_equals_the_reference() {
    let mut random = Random::fresh();
    let mut cases = Vec::new();
    for float in [dtype::<f32>(), dtype::<f16>(), dtype::<bf16>()] {
        cases.extend([0.0f32, 2.5].map(|maximum| (float, maximum)));
    }
    for (float, maximum) in random.few(cases, 1) {
        let spec = QuantizeSpec::new(Number::E5M2, Granularity::Tensor).with_layout(Layout::Both);
        let source = only_source("quantize_by_matrix", |client| {
            let handle = client.empty(SHAPE.rows * PITCH * float.size());
            let x = TensorHandle::new(handle, [SHAPE.rows, SHAPE.cols], [PITCH, 1], float);
            let delayed = DelayedMaximum {
                maxima: &tensor(client, &[LAYERS], dtype::<f32>()),
                layer: LAYER,
            };
            quantize_delayed(client, &x, &spec, delayed).expect("a matrix");
        });
        let mut maxima = [f32::NAN; LAYERS];
        maxima[LAYER] = maximum;
        let matrices = matrices(&mut random);
        for (kind, x) in random.few(matrices, 2) {
            // CUDA's conversion from f16 drops the sign of NaN.
            let x: Vec<f32> = rounded(&x, float)
                .into_iter()
                .map(|x| if x.is_nan() { f32::NAN } else { x })
                .collect();
            let (quantized, absmax) = reference::quantize_delayed(&x, SHAPE, &spec, maximum);
            let expected = [
                pitched(&x, SHAPE.cols, PITCH, float),
                bytemuck::cast_slice(&maxima).to_vec(),
                bytes(&quantized.values),
                bytes(&quantized.transposed().values),
                float_bytes(quantized.scales[0]),
                float_bytes(absmax),
                COUNTERS.to_vec(),
            ];
            let what = format!("delayed-{float}-{maximum}-{kind}");
            check_written(&source, &expected, (2, 2), &what, float);
        }
    }
}

/// Gate or up as it flows: E4M3 in groups of 16.
const FLOW: QuantizeSpec = QuantizeSpec::new(Number::E4M3, Granularity::Group(16));

/// The codes and the scales of a factor, and the elements that they stand for, by the reference.
fn as_it_flows(factor: &[f32], float: StorageType) -> ([Vec<u8>; 2], Vec<f32>) {
    let quantized = reference::quantize(factor, SHAPE, &FLOW);
    let elements = rounded(&reference::dequantize(&quantized), float);
    let mut scales = bytemuck::cast_slice(&quantized.scales).to_vec();
    one_nan(&mut scales);
    ([bytes(&quantized.values), scales], elements)
}

/// The output of a norm of rows of so many elements, in the order of operations of rms_norm.rs and layer_norm.rs. `inverses`,
/// and of layer normalization `means`: of rows; `gains` and `biases`: of columns.
pub fn normalized(
    x: &[f32],
    cols: usize,
    (inverses, means): (&[f32], Option<&Vec<f32>>),
    (gains, biases): (&[f32], Option<&Vec<f32>>),
) -> Vec<f32> {
    let of = |(at, &x): (usize, &f32)| {
        let (row, col) = (at / cols, at % cols);
        let x = means.map_or(x, |means| x - means[row]) * inverses[row];
        match biases {
            Some(biases) => x.mul_add(gains[col], biases[col]),
            None => x * gains[col],
        }
    };
    x.iter().enumerate().map(of).collect()
}

/// Quantizes a norm of what waits or flows as this type: layer normalization or RMSNorm, with a bias or without one.
pub fn launch_norm(
    client: &Client,
    (codes, float): (&Quantized<OfflineCuda>, StorageType),
    of_columns: StorageType,
    (centred, bias): (bool, bool),
    spec: &QuantizeSpec,
) {
    let columns = || tensor(client, &[codes.shape.cols], of_columns);
    let rows = || tensor(client, &[codes.shape.rows], dtype::<f32>());
    let (gain, of_rows) = (columns(), [rows(), rows()]);
    let x = OperatorInput::Quantized(codes, float);
    match centred {
        false => quantize_rms_norm(client, x, &gain, &of_rows[0], spec),
        true => {
            let bias = bias.then(columns);
            let of_rows = of_rows.each_ref();
            quantize_layer_norm(client, x, &gain, bias.as_ref(), of_rows, spec)
        }
    }
    .map(drop)
    .expect("a matrix");
}

#[test]
fn norms_equal_the_reference() {
    let mut random = Random::fresh();
    let spec = QuantizeSpec::new(Number::E4M3, Granularity::Tensor).with_layout(Layout::Both);
    let mut cases = Vec::new();
    for types in [
        (dtype::<f16>(), dtype::<f16>()),
        (dtype::<bf16>(), dtype::<f32>()),
    ] {
        let norms = [(false, false), (true, false), (true, true)];
        cases.extend(norms.map(|norm| (types, norm)));
    }
    for ((float, of_columns), (centred, bias)) in random.few(cases, 2) {
        let mut source = only_source("quantize_norm_by_matrix", |client| {
            let x = &tensor(client, &[SHAPE.rows, SHAPE.cols], float);
            let codes = quantize(client, x, &FLOW).expect("a matrix");
            launch_norm(client, (&codes, float), of_columns, (centred, bias), &spec);
        });
        source.cubes = random.few([[1, 1, 1], source.cubes], 1)[0];
        let kinds = kinds::<2>(&mut random);
        for (kind, [x, means]) in random.few(kinds, 2) {
            let ([codes, scales], x) = as_it_flows(&rounded(&x, float), float);
            let means = means[..SHAPE.rows].to_vec();
            let [gains, biases] =
                [(); 2].map(|()| rounded(&random.with_outliers(SHAPE.cols), of_columns));
            let inverses: Vec<f32> = random.with_outliers(SHAPE.rows);
            let inverses: Vec<f32> = inverses.into_iter().map(f32::abs).collect();
            let output = normalized(
                &x,
                SHAPE.cols,
                (&inverses, centred.then_some(&means)),
                (&gains, bias.then_some(&biases)),
            );
            let mut inputs = vec![codes, scales];
            let of_rows = [centred.then_some(means), Some(inverses)];
            let of_rows = of_rows.into_iter().flatten();
            inputs.extend(of_rows.map(|of_rows| bytemuck::cast_slice(&of_rows).to_vec()));
            inputs.push(to_bytes(&gains, of_columns));
            inputs.extend(bias.then(|| to_bytes(&biases, of_columns)));
            let outputs = current(&rounded(&output, float), &spec);
            let all = [&inputs[..], &outputs, &[COUNTERS.to_vec()]].concat();
            let what = format!("norm-{float}-{centred}-{bias}-{kind}");
            check_written(&source, &all, (inputs.len(), 1), &what, float);
        }
    }
}

/// The distribution function of the standard normal distribution and its density, in the operations of gelu.rs.
fn normal(x: f32) -> (f32, f32) {
    const TAIL: [f32; 9] = [
        0.139_621_3,
        0.139_863_52,
        0.119_821_295,
        0.105_552_49,
        -0.023_212_32,
        0.159_319_65,
        -0.255_839,
        0.144_030_93,
        -0.029_157_888,
    ];
    let magnitude = x.abs();
    let power = (-0.5 * magnitude * magnitude).exp();
    let t = 1.0 / 0.35f32.mul_add(magnitude.min(20.0), 1.0);
    let (first, others) = TAIL.split_last().expect("nine factors");
    let polynomial = others
        .iter()
        .rev()
        .fold(*first, |sum, factor| sum.mul_add(t, *factor));
    let tail = polynomial * t * power;
    let distribution = if x >= 0.0 { 1.0 - tail } else { tail };
    (distribution, 0.398_942_3 * power)
}

/// GELU, or from a gradient of the output that of the input.
pub fn gelu_of(x: &[f32], gradient: Option<&Vec<f32>>) -> Vec<f32> {
    let of = |(at, &x): (usize, &f32)| {
        let (distribution, density) = normal(x);
        match gradient {
            Some(gradient) => gradient[at] * x.mul_add(density, distribution),
            None => x * distribution,
        }
    };
    x.iter().enumerate().map(of).collect()
}

#[test]
fn gelu_equals_the_reference() {
    let mut random = Random::fresh();
    let spec = |number| QuantizeSpec::new(number, Granularity::Tensor).with_layout(Layout::Both);
    for (float, is_gradient) in random.few(
        [dtype::<f16>(), dtype::<bf16>()]
            .into_iter()
            .flat_map(|float| [(float, false), (float, true)]),
        1,
    ) {
        let spec = spec(if is_gradient {
            Number::E5M2
        } else {
            Number::E4M3
        });
        let mut source = only_source("quantize_gelu_by_matrix", |client| {
            let dy = &tensor(client, &[SHAPE.rows, SHAPE.cols], float);
            let codes = quantize(client, dy, &FLOW).expect("a matrix");
            let x = OperatorInput::Quantized(&codes, float);
            match is_gradient {
                true => quantize_gelu_gradient(client, x, dy, &spec),
                false => quantize_gelu(client, x, &spec),
            }
            .map(drop)
            .expect("a matrix");
        });
        source.cubes = random.few([[1, 1, 1], source.cubes], 1)[0];
        let kinds = kinds::<2>(&mut random);
        for (kind, drawn) in random.few(kinds, 2) {
            let [x, dy] = drawn.map(|it| rounded(&it, float));
            let ([codes, scales], x) = as_it_flows(&x, float);
            let mut inputs = vec![codes, scales];
            if is_gradient {
                inputs.push(to_bytes(&dy, float));
            }
            let output = gelu_of(&x, is_gradient.then_some(&dy));
            let outputs = current(&rounded(&output, float), &spec);
            let all = [&inputs[..], &outputs, &[COUNTERS.to_vec()]].concat();
            let what = format!("gelu-{float}-{is_gradient}-{kind}-{}", source.cubes[0]);
            check_written(&source, &all, (inputs.len(), 1), &what, float);
        }
    }
}

/// Matrices with special values in all of them, in none, or in one, which the others do not hide.
fn kinds<const N: usize>(random: &mut Random) -> Vec<(String, [Vec<f32>; N])> {
    let mut draw = |is_special: &dyn Fn(usize) -> bool| {
        std::array::from_fn(|index| match is_special(index) {
            true => random.with_special_values(SHAPE),
            false => random.with_outliers(SHAPE.num_elements()),
        })
    };
    let mut kinds = vec![
        ("special".into(), draw(&|_| true)),
        ("outliers".into(), draw(&|_| false)),
    ];
    kinds.extend((0..N).map(|only| (format!("special-{only}"), draw(&|index| index == only))));
    kinds
}

/// What a launch reads of gate and up.
fn factors<'a>(
    floats: &'a TensorHandle<OfflineCuda>,
    codes: &'a Quantized<OfflineCuda>,
    flows: bool,
) -> [OperatorInput<'a, OfflineCuda>; 2] {
    [match flows {
        true => OperatorInput::Quantized(codes, floats.dtype),
        false => floats.into(),
    }; 2]
}

#[test]
fn swiglu_equals_the_reference() {
    let mut random = Random::fresh();
    for float in random.few([dtype::<f16>(), dtype::<bf16>()], 1) {
        let of_output = QuantizeSpec::new(Number::E4M3, Granularity::Tensor);
        let of_output = of_output.with_layout(Layout::Both);
        let of_gradient = QuantizeSpec::new(Number::E5M2, Granularity::Tensor);
        let of_gradient = of_gradient.with_layout(Layout::Both);
        for flows in [false, true] {
            let launch = |client: &Client, gradient: bool| {
                let x = &tensor(client, &[SHAPE.rows, SHAPE.cols], float);
                let codes = quantize(client, x, &FLOW).expect("a matrix");
                let factors = factors(x, &codes, flows);
                match gradient {
                    false => drop(quantize_swiglu(client, factors, &of_output).expect("matrices")),
                    true => drop(
                        quantize_swiglu_gradients(client, factors, x, [&of_gradient; 2])
                            .expect("matrices"),
                    ),
                }
            };
            let mut output =
                only_source("quantize_swiglu_by_matrix", |client| launch(client, false));
            let name = "quantize_swiglu_gradients_by_matrix";
            let mut gradient = only_source(name, |client| launch(client, true));
            // As on a matrix of more tiles than blocks run at once.
            let cubes = random.few([[1, 1, 1], output.cubes], 1)[0];
            (output.cubes, gradient.cubes) = (cubes, cubes);
            let kinds = kinds::<3>(&mut random);
            for (kind, drawn) in random.few(kinds, 2) {
                let [gate, up, dh] = drawn.map(|it| rounded(&it, float));
                let (inputs, gate, up) = match flows {
                    false => {
                        let inputs = [to_bytes(&gate, float), to_bytes(&up, float)];
                        (inputs.to_vec(), gate, up)
                    }
                    true => {
                        let ([of_gate, gate_scales], gate) = as_it_flows(&gate, float);
                        let ([of_up, up_scales], up) = as_it_flows(&up, float);
                        (vec![of_gate, of_up, gate_scales, up_scales], gate, up)
                    }
                };
                let elements = || gate.iter().zip(&up);
                let y: Vec<f32> = elements().map(|(&gate, &up)| gated(gate, up)).collect();
                let of_y = current(&rounded(&y, float), &of_output);
                let both = elements().zip(&dh);
                let (of_gate, of_up): (Vec<f32>, Vec<f32>) = both
                    .map(|((&gate, &up), &dh)| gradients(gate, up, dh).into())
                    .unzip();
                let [of_gate, of_up] =
                    [of_gate, of_up].map(|it| current(&rounded(&it, float), &of_gradient));
                let what = format!("{float}-{flows}-{kind}-{}", cubes[0]);
                let outputs = [of_y.to_vec(), vec![COUNTERS.to_vec()]].concat();
                let all = [inputs.clone(), outputs].concat();
                let of_output = format!("swiglu-{what}");
                check_written(&output, &all, (inputs.len(), 1), &of_output, float);
                let [gate_values, gate_transposed, gate_scale] = of_gate;
                let [up_values, up_transposed, up_scale] = of_up;
                let all = [
                    inputs.clone(),
                    vec![to_bytes(&dh, float)],
                    vec![gate_values, gate_transposed, up_values, up_transposed],
                    vec![gate_scale, up_scale, COUNTERS.to_vec()],
                ]
                .concat();
                let what = format!("swiglu-gradients-{what}");
                check_written(&gradient, &all, (inputs.len() + 1, 2), &what, float);
            }
        }
    }
}
