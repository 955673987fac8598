//! Both norms on a CPU, of numbers and of floats, against their formulas in the order in which kernels add up, to the bit.

use cubecl::{ir::StorageType, std::tensor::TensorHandle};
use cubecl_kernels::{
    granularity::Granularity,
    layer_norm::{layer_norm, layer_norm_backward, row_deviations},
    number::Number,
    operator_input::OperatorInput,
    output_gradient::{OutputGradient, Terms},
    quantize::{QuantizeSpec, Quantized, quantize},
    reference,
    rms_norm::{inverse_rms, rms_norm, rms_norm_backward},
    shape::MatrixShape,
};
use half::{bf16, f16};

use super::{
    Client,
    device::{rounded, to_bytes},
    dtype,
    emulate::{UNWRITTEN, bytes, check, one_nan},
    emulator::Sanitizer,
    offline::{OfflineCuda, Source, sources_of},
    random::Random,
    tensor,
};

const EPSILON: f32 = 1e-5;
/// Elements of a vector.
const WIDTH: usize = 8;

/// Rows, columns, and the units of a row, as row_units.rs has them: part of a warp's vectors, several warps, the last of
/// which have no vector of the last turn.
const SHAPES: [([usize; 2], usize); 3] = [([11, 272], 32), ([3, 1056], 96), ([300, 4096], 256)];

/// What the kernels read.
#[derive(Debug, Clone, Copy)]
enum Waits {
    AsFloats,
    As(QuantizeSpec),
}

#[derive(Debug, Clone, Copy)]
struct Case {
    float: StorageType,
    gain: StorageType,
    waits: Waits,
    centred: bool,
    terms: usize,
    /// What the kernel reads of the terms.
    terms_wait: Waits,
    other: bool,
    shape: [usize; 2],
    lanes: usize,
}

impl Waits {
    /// The buffers of a matrix that is read so, and its elements.
    fn read(
        self,
        x: Vec<f32>,
        [rows, cols]: [usize; 2],
        float: StorageType,
    ) -> (Vec<Vec<u8>>, Vec<f32>) {
        let spec = match self {
            Self::AsFloats => return (vec![to_bytes(&x, float)], x),
            Self::As(spec) => spec,
        };
        let quantized = reference::quantize(&x, MatrixShape::new(rows, cols), &spec);
        let elements = rounded(&reference::dequantize(&quantized), float);
        let scales = bytemuck::cast_slice(&quantized.scales).to_vec();
        (vec![bytes(&quantized.values), scales], elements)
    }
}

/// The sums over a row of what each element gives, in the order of the kernels.
fn row_sum(cols: usize, lanes: usize, add: impl Fn(f32, usize) -> f32) -> f32 {
    let mut sums: Vec<f32> = (0..lanes)
        .map(|lane| {
            let vectors = (lane..cols / WIDTH).step_by(lanes);
            let elements = vectors.flat_map(|vector| vector * WIDTH..(vector + 1) * WIDTH);
            elements.fold(0.0, &add)
        })
        .collect();
    let tree = lanes.min(32);
    for level in (0..tree.ilog2()).rev() {
        sums = (0..lanes)
            .map(|lane| sums[lane] + sums[lane ^ 1 << level])
            .collect();
    }
    sums.chunks(tree)
        .map(|warp| warp[0])
        .reduce(|sum, warp| sum + warp)
        .expect("a warp")
}

/// What a norm finds of a row, and makes of it.
struct Row {
    mean: f32,
    inverse: f32,
    normalized: Vec<f32>,
}

impl Row {
    fn of(x: &[f32], lanes: usize, centred: bool) -> Self {
        let cols = x.len();
        let mean_of = |sum: f32| sum * (1.0 / cols as f64) as f32;
        let mean = match centred {
            true => mean_of(row_sum(cols, lanes, |sum, at| sum + x[at])),
            false => 0.0,
        };
        let x: Vec<f32> = x.iter().map(|x| x - mean).collect();
        let squares = row_sum(cols, lanes, |sum, at| x[at].mul_add(x[at], sum));
        let inverse = 1.0 / (mean_of(squares) + EPSILON).sqrt();
        Self {
            mean,
            inverse,
            normalized: x.iter().map(|x| x * inverse).collect(),
        }
    }
}

fn round(float: StorageType, x: f32) -> f32 {
    rounded(&[x], float)[0]
}

/// Draws a matrix or a vector of elements that are not all small.
fn draw(random: &mut Random, len: usize, float: StorageType) -> Vec<f32> {
    rounded(&random.with_outliers(len), float)
}

/// The sources of a case: of codes that of the output, and of RMSNorm that of the rows' numbers alone; of the gradients.
fn sources(case: &Case) -> Vec<Source> {
    let [rows, cols] = case.shape;
    let launch = |client: &Client| {
        let x = &tensor(client, &case.shape, case.float);
        let gain = &tensor(client, &[cols], case.gain);
        let of_rows = || tensor(client, &[rows], dtype::<f32>());
        let codes = match case.waits {
            Waits::AsFloats => None,
            Waits::As(spec) => Some(quantize(client, x, &spec).expect("a matrix")),
        };
        let input = || input(x, codes.as_ref());
        let floats = vec![tensor(client, &case.shape, case.float); case.terms];
        let numbers: Vec<_> = match case.terms_wait {
            Waits::AsFloats => vec![],
            Waits::As(spec) => {
                let term = || quantize(client, x, &spec).expect("a matrix");
                (0..case.terms).map(|_| term()).collect()
            }
        };
        let terms = match case.terms_wait {
            Waits::AsFloats => Terms::Floats(&floats),
            Waits::As(_) => Terms::Numbers(&numbers, case.float),
        };
        let gradient = OutputGradient {
            terms,
            other: case.other.then_some(x),
        };
        if case.centred {
            layer_norm(client, input(), gain, Some(gain), EPSILON).expect("rows");
            row_deviations(client, input(), EPSILON).expect("rows");
            layer_norm_backward(client, input(), gain, &of_rows(), &of_rows(), gradient)
                .map(drop)
                .expect("rows");
        } else {
            rms_norm(client, input(), gain, EPSILON).expect("rows");
            inverse_rms(client, input(), EPSILON).expect("rows");
            rms_norm_backward(client, input(), gain, &of_rows(), gradient)
                .map(drop)
                .expect("rows");
        }
    };
    let mut sources = sources_of(90, launch);
    sources.retain(|source| source.name.starts_with("norm_"));
    let of_codes = matches!(case.waits, Waits::As(_));
    let expected = 1 + usize::from(of_codes) * 2;
    assert_eq!(sources.len(), expected, "{case:?}");
    sources
}

/// The sources of all cases.
pub fn all_sources() -> Vec<Source> {
    cases().iter().flat_map(sources).collect()
}

fn input<'a>(
    x: &'a TensorHandle<OfflineCuda>,
    codes: Option<&'a Quantized<OfflineCuda>>,
) -> OperatorInput<'a, OfflineCuda> {
    match codes {
        Some(codes) => OperatorInput::Quantized(codes, x.dtype),
        None => x.into(),
    }
}

/// Runs a kernel on inputs, and compares its outputs; those that are FP32 come last.
fn run(
    source: &Source,
    inputs: &[Vec<u8>],
    outputs: Vec<Vec<u8>>,
    floats: usize,
    (what, float): (&str, StorageType),
) {
    let unwritten = outputs.iter().map(|it| vec![UNWRITTEN; it.len()]);
    let before: Vec<_> = inputs.iter().cloned().chain(unwritten).collect();
    let mut after = [inputs.to_vec(), outputs].concat();
    let floats: Vec<usize> = (after.len() - floats..after.len()).collect();
    for &index in &floats {
        one_nan(&mut after[index]);
    }
    check(
        source,
        [&before, &after],
        &floats,
        what,
        Sanitizer::of(float),
    );
}

fn emulate(random: &mut Random, case: Case) {
    println!("{case:?}");
    let Case {
        float,
        gain: gain_type,
        centred,
        shape: [rows, cols],
        lanes,
        ..
    } = case;
    let len = rows * cols;
    let (read, x) = case.waits.read(draw(random, len, float), case.shape, float);
    let [gain, bias] = [(); 2].map(|()| draw(random, cols, gain_type));
    let norms: Vec<Row> = x.chunks(cols).map(|x| Row::of(x, lanes, centred)).collect();
    let of_rows = |of: fn(&Row) -> f32| -> Vec<u8> {
        bytemuck::cast_slice(&norms.iter().map(of).collect::<Vec<_>>()).to_vec()
    };
    let mut statistics = vec![of_rows(|row| row.inverse)];
    if centred {
        statistics.insert(0, of_rows(|row| row.mean));
    }
    let gain_bytes = to_bytes(&gain, gain_type);
    let (mut forward, backward): (Vec<_>, Vec<_>) = sources(&case)
        .into_iter()
        .partition(|source| source.name == "norm_of_codes");
    let what = format!(
        "norm-{float}-{gain_type}-{centred}-{}-{}-{}-{cols}",
        case.terms,
        matches!(case.terms_wait, Waits::As(_)),
        case.other
    );

    if let Some(alone) = forward.pop() {
        let what = format!("{what}-statistics");
        let floats = statistics.len();
        run(&alone, &read, statistics.clone(), floats, (&what, float));
    }
    if let Some(forward) = forward.pop() {
        let mut inputs = [read.clone(), vec![gain_bytes.clone()]].concat();
        if centred {
            inputs.push(to_bytes(&bias, gain_type));
        }
        let output = norms.iter().flat_map(|row| {
            let columns = row.normalized.iter().zip(&gain).zip(&bias);
            columns.map(|((n, gain), bias)| match centred {
                true => n.mul_add(*gain, *bias),
                false => n * gain,
            })
        });
        let output = to_bytes(&rounded(&output.collect::<Vec<_>>(), float), float);
        let outputs = [vec![output], statistics.clone()].concat();
        let floats = statistics.len();
        run(&forward, &inputs, outputs, floats, (&what, float));
    }

    let terms = (0..case.terms).map(|_| draw(random, len, float));
    let terms = terms.map(|term| case.terms_wait.read(term, case.shape, float));
    let (of_terms, terms): (Vec<_>, Vec<_>) = terms.unzip();
    let other = case.other.then(|| draw(random, len, float));
    let dy: Vec<f32> = (0..len)
        .map(|at| {
            let terms = terms.iter().map(|term| term[at]);
            terms
                .reduce(|sum, term| round(float, sum + term))
                .expect("a term")
        })
        .collect();
    let mut of_x = Vec::with_capacity(len);
    for (row, dy) in norms.iter().zip(dy.chunks(cols)) {
        let n = &row.normalized;
        let p: Vec<f32> = dy.iter().zip(&gain).map(|(dy, gain)| dy * gain).collect();
        let mean_of = |sum: f32| sum * (1.0 / cols as f64) as f32;
        let mean_product = mean_of(row_sum(cols, lanes, |sum, at| p[at].mul_add(n[at], sum)));
        let mean = match centred {
            true => mean_of(row_sum(cols, lanes, |sum, at| sum + p[at])),
            false => 0.0,
        };
        of_x.extend((0..cols).map(|at| {
            let p = p[at] - mean;
            round(float, row.inverse * (-n[at]).mul_add(mean_product, p))
        }));
    }
    if let Some(other) = &other {
        for (of_x, other) in of_x.iter_mut().zip(other) {
            *of_x = round(float, *of_x + other);
        }
    }
    // Rows of a block at a time, and blocks.
    let at_once = (128 / lanes).max(1);
    let parts = rows.div_ceil(at_once).min(65_536 / (lanes * at_once));
    let of_columns = |of: &dyn Fn(usize, usize) -> f32| -> Vec<u8> {
        let mut sums = vec![0.0f32; parts * cols];
        for (part, sums) in sums.chunks_mut(cols).enumerate() {
            for (col, sum) in sums.iter_mut().enumerate() {
                let of_thread = |row_of_block: usize| -> f32 {
                    let first = part * at_once + row_of_block;
                    let own = (first..rows).step_by(parts * at_once);
                    own.fold(0.0, |sum, row| sum + of(row, col))
                };
                let threads = (0..at_once).map(of_thread);
                *sum = threads.reduce(|sum, next| next + sum).expect("a row");
            }
        }
        bytemuck::cast_slice(&sums).to_vec()
    };
    let mut parts = vec![of_columns(&|row, col| {
        dy[row * cols + col] * norms[row].normalized[col]
    })];
    if centred {
        parts.push(of_columns(&|row, col| dy[row * cols + col]));
    }
    let mut gradients = of_terms.concat();
    gradients.extend(other.map(|other| to_bytes(&other, float)));
    let inputs = [read, vec![gain_bytes], statistics, gradients].concat();
    let floats = parts.len();
    let outputs = [vec![to_bytes(&of_x, float)], parts].concat();
    run(
        &backward[0],
        &inputs,
        outputs,
        floats,
        (&format!("{what}-gradients"), float),
    );
}

fn cases() -> Vec<Case> {
    let ways = [
        Waits::AsFloats,
        Waits::As(QuantizeSpec::new(Number::E4M3, Granularity::Group(16))),
        Waits::As(QuantizeSpec::int8(Granularity::Group(16))),
        Waits::As(QuantizeSpec::int8(Granularity::Block(16))),
    ];
    let types = [
        (dtype::<f16>(), dtype::<f16>()),
        (dtype::<bf16>(), dtype::<f32>()),
    ];
    let mut cases = Vec::new();
    for (shape, lanes) in SHAPES {
        for (waits, centred) in ways.into_iter().flat_map(|way| [(way, false), (way, true)]) {
            for (terms, terms_wait, other) in [
                (1, ways[0], false),
                (3, ways[0], true),
                (1, ways[3], true),
                (2, ways[1], false),
                (3, ways[3], false),
            ] {
                cases.extend(types.map(|(float, gain)| Case {
                    float,
                    gain,
                    waits,
                    centred,
                    terms,
                    terms_wait,
                    other,
                    shape,
                    lanes,
                }));
            }
        }
    }
    cases
}

#[test]
fn equal_their_formulas() {
    let mut random = Random::fresh();
    for case in random.few(cases(), 3) {
        emulate(&mut random, case);
    }
}
