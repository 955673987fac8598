//! `quantize/group/whole_tiles.cu` and `rows.cu` on a CPU, against the reference to the bit.

use cubecl::{ir::StorageType, std::tensor::TensorHandle};
use cubecl_kernels::{
    granularity::Granularity,
    number::Number,
    quantize::{QuantizeSpec, quantize, quantize_both_ways},
    reference,
    scale::ScaleNumber,
    shape::MatrixShape,
};
use half::{bf16, f16};

use super::{
    Client,
    device::{assert_same_integers, rounded, to_bytes},
    dtype,
    emulate::{UNWRITTEN, bytes, integers, one_nan, pitched},
    emulator::{Sanitizer, run},
    offline::sources_of,
    random::Random,
    tensor,
};

const SHAPE: MatrixShape = MatrixShape {
    batch: 1,
    rows: 256,
    cols: 384,
};
const GROUP: usize = 128;
/// From one row of X to the next one, in elements.
const PITCH: usize = SHAPE.cols + 8;

/// X; values and scales of the matrix, and of its transpose.
type Buffers = [Vec<u8>; 5];
const NAMES: [&str; 5] = [
    "X",
    "values",
    "scales",
    "transposed values",
    "transposed scales",
];

#[test]
fn equals_the_reference() {
    let mut random = Random::fresh();
    let mut cases = Vec::new();
    for float in [dtype::<bf16>(), dtype::<f16>()] {
        for number in [Number::E4M3, Number::E5M2] {
            cases.extend([ScaleNumber::F32, ScaleNumber::E8M0].map(|scale| (float, number, scale)));
        }
    }
    for (float, number, scale) in random.few(cases, 2) {
        println!("{float} {number:?} {scale:?}");
        let spec = QuantizeSpec::new(number, Granularity::Group(GROUP)).with_scale(scale);
        emulate(&mut random, float, &spec);
    }
}

fn emulate(random: &mut Random, float: StorageType, spec: &QuantizeSpec) {
    let mut sources = sources_of(90, |client: &Client| {
        let handle = client.empty(SHAPE.rows * PITCH * float.size());
        let x = TensorHandle::new(handle, [SHAPE.rows, SHAPE.cols], [PITCH, 1], float);
        quantize_both_ways(client, &x, spec).expect("a matrix");
    });
    assert_eq!(sources.len(), 1);
    let mut source = sources.remove(0);
    assert_eq!(source.name, "quantize_groups_both_ways");
    // Of six tiles, two have to wait for others.
    source.cubes = [4, 1, 1];
    let x = rounded(&random.with_special_values(SHAPE), float);
    let sanitizer = match spec.scale {
        ScaleNumber::E8M0 => Sanitizer::Threads,
        ScaleNumber::F32 | ScaleNumber::E4M3 => Sanitizer::Addresses,
    };
    let expected = expected(&x, float, spec);
    let mut before = expected.clone();
    before[1..].iter_mut().for_each(|it| it.fill(UNWRITTEN));
    let name = format!("emulate-groups-{float}-{:?}-{:?}", spec.number, spec.scale);
    let mut written = run(&source, &before, &name, sanitizer);
    if spec.scale == ScaleNumber::F32 {
        // Any NaN is as good as any other.
        [2, 4]
            .into_iter()
            .for_each(|scales: usize| one_nan(&mut written[scales]));
    }
    for ((written, expected), name) in written.iter().zip(&expected).zip(NAMES) {
        assert_same_integers(&integers(written), &integers(expected), name);
    }
}

#[test]
fn rows_equal_the_reference() {
    let mut random = Random::fresh();
    let mut cases = Vec::new();
    for group in [16, 64, 128] {
        for number in [Number::E4M3, Number::E5M2] {
            cases.extend([ScaleNumber::F32, ScaleNumber::E8M0].map(|scale| (group, number, scale)));
        }
    }
    // Cubes that are full, and one that is not.
    let shapes = [SHAPE, MatrixShape::new(5, SHAPE.cols)];
    for (index, (group, number, scale)) in random.few(cases, 4).into_iter().enumerate() {
        let float = [dtype::<bf16>(), dtype::<f16>()][index % 2];
        let shape = shapes[index / 2];
        println!("{float} {shape:?} {group} {number:?} {scale:?}");
        let spec = QuantizeSpec::new(number, Granularity::Group(group)).with_scale(scale);
        let mut sources = sources_of(90, |client: &Client| {
            let x = tensor(client, &[shape.rows, shape.cols], float);
            quantize(client, &x, &spec).expect("a matrix");
        });
        assert_eq!(sources.len(), 1);
        let source = sources.remove(0);
        assert_eq!(source.name, "quantize_groups_of_rows");
        let x = rounded(&random.with_special_values(shape), float);
        let [values, scales] = quantized(&x, shape, &spec);
        let expected = [to_bytes(&x, float), values, scales];
        let mut before = expected.clone();
        before[1..].iter_mut().for_each(|it| it.fill(UNWRITTEN));
        let name = format!("emulate-rows-{float}-{group}-{number:?}-{scale:?}");
        let mut written = run(&source, &before, &name, Sanitizer::Addresses);
        if scale == ScaleNumber::F32 {
            one_nan(&mut written[2]);
        }
        for ((written, expected), name) in written.iter().zip(&expected).zip(NAMES) {
            assert_same_integers(&integers(written), &integers(expected), name);
        }
    }
}

/// Values and scales by the reference.
fn quantized(x: &[f32], shape: MatrixShape, spec: &QuantizeSpec) -> [Vec<u8>; 2] {
    let quantized = reference::quantize(x, shape, spec);
    let scales = match spec.scale {
        ScaleNumber::F32 => {
            let mut scales = bytemuck::cast_slice(&quantized.scales).to_vec();
            one_nan(&mut scales);
            scales
        }
        ScaleNumber::E8M0 | ScaleNumber::E4M3 => quantized.scale_bytes,
    };
    [bytes(&quantized.values), scales]
}

/// The buffers after the launch by the reference.
fn expected(x: &[f32], float: StorageType, spec: &QuantizeSpec) -> Buffers {
    let transpose: Vec<f32> = (0..SHAPE.cols)
        .flat_map(|col| x.iter().skip(col).step_by(SHAPE.cols).copied())
        .collect();
    let [values, scales] = quantized(x, SHAPE, spec);
    let [transposed, of_transposed] = quantized(&transpose, SHAPE.transposed(), spec);
    [
        pitched(x, SHAPE.cols, PITCH, float),
        values,
        scales,
        transposed,
        of_transposed,
    ]
}
