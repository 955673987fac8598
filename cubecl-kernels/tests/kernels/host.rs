//! The vectorized host functions against the reference, to the bit.

use cubecl_kernels::{
    adamw::Hyperparameters,
    granularity::Granularity,
    host::{self, HostQuantized, HostScales, HostValues},
    layout::Layout,
    number::{Number, Signedness},
    optimizer_state::{Moment, StateFormat},
    quantize::QuantizeSpec,
    reference::{
        self, ReferenceQuantized,
        adamw::{MomentChunk, StateDither, Step},
        optimizer_state::{HostState, quantize_state},
    },
    rounding::{Rounding, StochasticKey},
    scale::ScaleNumber,
    shape::MatrixShape,
};
use rstest::rstest;

use crate::random::Random;

/// The stored elements, each as its bits.
fn stored_bits(values: &HostValues<'_>) -> Vec<u32> {
    match values {
        HostValues::I8(values) => values.iter().map(|&value| u32::from(value as u8)).collect(),
        HostValues::U8(values) => values.iter().copied().map(u32::from).collect(),
        HostValues::U32(values) => values.to_vec(),
    }
}

#[track_caller]
pub fn assert_same(got: &HostQuantized<'_>, expected: &ReferenceQuantized) {
    assert_eq!(got.shape, [expected.shape.rows, expected.shape.cols]);
    let stored = reference::stored(&expected.values, expected.shape.cols, got.number.storage());
    let bits = stored_bits(&got.values);
    assert_eq!(bits.len(), stored.len(), "stored values");
    let different = bits.iter().zip(&stored).position(|(a, e)| a != e);
    assert_eq!(
        different.map(|index| (index, bits[index], stored[index])),
        None
    );
    let bits = |scales: &[f32]| -> Vec<Option<u32>> {
        let bits = |scale: &f32| (!scale.is_nan()).then(|| scale.to_bits());
        scales.iter().map(bits).collect()
    };
    assert_eq!(got.scales.number(), expected.scale_number);
    match &got.scales {
        HostScales::F32(scales) => assert_eq!(bits(scales), bits(&expected.scales), "scales"),
        HostScales::E8M0(bytes) => assert_eq!(bytes[..], expected.scale_bytes, "scales"),
        HostScales::E4M3 {
            scales,
            tensor_scale,
        } => {
            assert_eq!(scales[..], expected.scale_bytes, "scales");
            assert_eq!([*tensor_scale][..], expected.tensor_scales, "tensor scale");
        }
    }
}

#[track_caller]
fn assert_same_values(got: &[f32], expected: impl Iterator<Item = f32>) {
    for (got, expected) in got.iter().zip(expected) {
        assert!(
            got.to_bits() == expected.to_bits() || (got.is_nan() && expected.is_nan()),
            "{got} and {expected}"
        );
    }
}

/// Matrices of every kind that the kernels are tested with, and of sizes around the blocks'.
fn matrices(random: &mut Random) -> Vec<(Vec<f32>, MatrixShape)> {
    let mut matrices = Vec::new();
    for [rows, cols] in [
        [1, 1],
        [3, 5],
        [128, 128],
        [129, 127],
        [200, 300],
        [257, 16],
    ] {
        let shape = MatrixShape::new(rows, cols);
        matrices.push((random.with_outliers(rows * cols), shape));
        matrices.push((random.with_special_values(shape), shape));
        matrices.push((vec![0.0; rows * cols], shape));
        let denormal = (0..rows * cols).map(|_| random.normal() * 1e-39).collect();
        matrices.push((denormal, shape));
        // Halves of the step: ties, and draws that fall on the fraction itself.
        let ties = (0..rows * cols)
            .map(|_| random.index(255) as f32 / 2.0 - 63.5)
            .chain([63.5])
            .skip(1)
            .collect();
        matrices.push((ties, shape));
    }
    matrices
}

#[rstest]
fn quantize_equals_the_reference(
    #[values(
        Granularity::Block(16),
        Granularity::Block(128),
        Granularity::Group(16),
        Granularity::Token,
        Granularity::Channel,
        Granularity::Tensor
    )]
    granularity: Granularity,
    #[values(true, false)] stochastic: bool,
) {
    let mut random = Random::fresh();
    for (x, shape) in matrices(&mut random) {
        let spec = QuantizeSpec::int8(granularity).with_rounding(rounding(stochastic, &mut random));
        check(&x, shape, &spec);
    }
}

fn rounding(stochastic: bool, random: &mut Random) -> Rounding {
    match stochastic {
        true => Rounding::Stochastic(StochasticKey {
            seed: random.index(1 << 40) as u64,
            stream: random.index(1 << 40) as u64,
        }),
        false => Rounding::Nearest,
    }
}

/// Quantizes and dequantizes, and compares with the reference.
#[track_caller]
fn check(x: &[f32], shape: MatrixShape, spec: &QuantizeSpec) {
    println!("{shape:?} {spec:?}");
    let expected = reference::quantize(x, shape, spec);
    let got = host::quantize(x, [shape.rows, shape.cols], spec).expect("a valid spec");
    assert_same(&got, &expected);
    let values = host::dequantize(&got).expect("what was quantized");
    assert_same_values(&values, reference::dequantize(&expected).into_iter());
}

#[rstest]
fn every_number_equals_the_reference(
    #[values(
        Number::Int4,
        Number::Int8,
        Number::Int10,
        Number::E2M1,
        Number::E4M3,
        Number::E5M2
    )]
    number: Number,
    #[values(ScaleNumber::F32, ScaleNumber::E8M0, ScaleNumber::E4M3)] scale: ScaleNumber,
    #[values(
        Granularity::Block(16),
        Granularity::Block(64),
        Granularity::Group(16),
        Granularity::Group(32),
        Granularity::Token,
        Granularity::Channel,
        Granularity::Tensor
    )]
    granularity: Granularity,
) {
    let mut random = Random::fresh();
    for [rows, cols] in [[1, 1], [3, 5], [65, 127], [33, 16], [400, 129]] {
        let shape = MatrixShape::new(rows, cols);
        let mut tiny: Vec<f32> = (0..rows * cols).map(|_| random.normal() * 1e-39).collect();
        tiny[0] = 3e-30;
        for x in [
            random.with_outliers(rows * cols),
            random.with_special_values(shape),
            tiny,
        ] {
            for stochastic in [false, true] {
                let spec = QuantizeSpec::new(number, granularity)
                    .with_scale(scale)
                    .with_rounding(rounding(stochastic, &mut random));
                check(&x, shape, &spec);
            }
        }
    }
}

#[rstest]
fn fallback_equals_the_reference(#[values(16, 128)] block: usize) {
    let mut random = Random::fresh();
    for (x, shape) in matrices(&mut random) {
        for threshold in [0.0, 4.0, f32::INFINITY] {
            let expected = reference::quantize_fallback(&x, shape, block, threshold);
            let size = [shape.rows, shape.cols];
            let got = host::quantize_fallback(&x, size, block, threshold).expect("a matrix");
            assert_same(&got.base, &expected.base);
            assert_same(&got.residual, &expected.residual);
            assert_eq!(got.fallback_blocks as i32, expected.counts()[0]);

            let values = host::dequantize_fallback(&got.base, &got.residual).expect("a pair");
            let residual = reference::dequantize(&expected.residual);
            let sums = reference::dequantize(&expected.base);
            assert_same_values(&values, sums.iter().zip(&residual).map(|(x, y)| x + y));
        }
    }
}

#[test]
fn empty_matrices_stay_empty() {
    for shape in [[0, 5], [5, 0], [0, 0]] {
        for granularity in [Granularity::Block(128), Granularity::Tensor] {
            for spec in [
                QuantizeSpec::int8(granularity),
                QuantizeSpec::NVFP4.with_granularity(granularity),
                QuantizeSpec::new(Number::Int10, granularity),
            ] {
                let q = host::quantize(&[], shape, &spec).expect("a matrix");
                assert!(q.values.is_empty() && q.scales.is_empty());
                assert!(host::dequantize(&q).expect("what was quantized").is_empty());
                let expected =
                    reference::quantize(&[], MatrixShape::new(shape[0], shape[1]), &spec);
                assert_same(&q, &expected);
            }
        }
        let spec = QuantizeSpec::int8(Granularity::Tensor);
        let (_, absmax) = host::quantize_by(&[], shape, &spec, 1.0).expect("a matrix");
        assert_eq!(absmax, 0.0);
    }
}

#[test]
fn bad_input_is_refused() {
    let spec = QuantizeSpec::int8(Granularity::Tensor);
    let refused = |spec: &QuantizeSpec, shape: [usize; 2], part: &str| {
        let error = host::quantize(&[1.0; 6], shape, spec).expect_err("bad input");
        assert!(error.to_string().contains(part), "{error}");
    };
    refused(&spec, [2, 4], "[2, 4]");
    refused(&spec.with_layout(Layout::Both), [2, 3], "RowMajor");
    refused(
        &QuantizeSpec::int8(Granularity::Block(0)),
        [2, 3],
        "at least one",
    );
    refused(
        &QuantizeSpec::int8(Granularity::Group(0)),
        [2, 3],
        "at least one",
    );
    for number in [Number::Square, Number::DynamicExponent(Signedness::Signed)] {
        refused(
            &QuantizeSpec::new(number, Granularity::Tensor),
            [2, 3],
            "optimizer",
        );
    }
    for spec in [
        spec.with_scale(ScaleNumber::E8M0),
        spec.with_granularity(Granularity::Token),
    ] {
        let error = host::quantize_by(&[1.0; 6], [2, 3], &spec, 1.0).expect_err("bad input");
        assert!(error.to_string().contains("Granularity::Tensor"), "{error}");
    }
    let good = host::quantize(&[1.0; 6], [2, 3], &spec).expect("a matrix");
    let other_shape = HostQuantized {
        shape: [3, 3],
        ..good.clone()
    };
    let other_number = HostQuantized {
        number: Number::E4M3,
        ..good.clone()
    };
    let other_scales = HostQuantized {
        granularity: Granularity::Token,
        ..good.clone()
    };
    for bad in [&other_shape, &other_number, &other_scales] {
        assert!(host::dequantize(bad).is_err());
        assert!(host::dequantize_fallback(&good, bad).is_err());
    }
    assert!(host::dequantize(&good).is_ok());
}

/// Groups that divide the chunks of the threads, and groups that do not.
#[rstest]
fn adamw_equals_the_reference(
    #[values([Some(128), Some(128)], [Some(96), Some(192)], [Some(2044), None], [None, None])]
    groups: [Option<usize>; 2],
) {
    fn chunk<'a>(
        full: &'a mut [f32],
        coded: &'a mut Option<(StateFormat, HostState)>,
    ) -> MomentChunk<'a> {
        match coded {
            None => MomentChunk::Full(full),
            Some((format, state)) => MomentChunk::Compressed {
                format: *format,
                codes: &mut state.codes,
                scales: &mut state.scales,
                exponents: &mut state.exponents,
            },
        }
    }
    let mut random = Random::fresh();
    let step = Step::new(
        &Hyperparameters {
            learning_rate: 1e-2,
            beta_1: 0.9,
            beta_2: 0.99,
            epsilon: 1e-8,
            weight_decay: 0.1,
            clip_norm: None,
        },
        3,
    )
    .expect("hyperparameters in range");
    let count = 20_011;
    let gradient = random.with_outliers(count);
    let mut parameter = random.with_outliers(count);
    let mut first = random.with_outliers(count);
    let mut second: Vec<f32> = first.iter().map(|x| x * x).collect();
    let coded = |x: &[f32], group: Option<usize>, moment| {
        let format = StateFormat::E4M3.expanded().with_group(group?);
        Some((format, quantize_state(x, format, moment)))
    };
    let mut first_coded = coded(&first, groups[0], Moment::First);
    let mut second_coded = coded(&second, groups[1], Moment::Second);

    let dither = Some(StateDither {
        key: StochasticKey { seed: 1, stream: 2 },
        t: 3,
        start: 0,
    });
    let mut expected = (parameter.clone(), first.clone(), second.clone());
    let mut expected_coded = (first_coded.clone(), second_coded.clone());
    reference::adamw::adamw(
        &step,
        &mut expected.0,
        &gradient,
        chunk(&mut expected.1, &mut expected_coded.0),
        chunk(&mut expected.2, &mut expected_coded.1),
        dither,
    );
    host::adamw(
        &step,
        &mut parameter,
        &gradient,
        chunk(&mut first, &mut first_coded),
        chunk(&mut second, &mut second_coded),
        dither,
    );
    assert_eq!((parameter, first, second), expected);
    assert_eq!((first_coded, second_coded), expected_coded);
}
