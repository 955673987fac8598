//! The vectorized host functions against the reference, to the bit.

use cubecl_kernels::{
    adamw::Hyperparameters,
    format::{Format, Granularity, Rounding, StochasticKey},
    host,
    optimizer_state::{Moment, StateFormat},
    reference::{
        self,
        adamw::{MomentChunk, StateDither, Step},
        optimizer_state::{HostState, quantize_state},
    },
    shape::MatrixShape,
};
use rstest::rstest;

use crate::random::Random;

#[track_caller]
fn assert_same(got: &host::Quantized, expected: &reference::Quantized) {
    let integers: Vec<i32> = got.values.iter().map(|&q| i32::from(q)).collect();
    assert_eq!(integers, expected.values, "values");
    let bits = |scales: &[f32]| -> Vec<Option<u32>> {
        let bits = |scale: &f32| (!scale.is_nan()).then(|| scale.to_bits());
        scales.iter().map(bits).collect()
    };
    assert_eq!(bits(&got.scales), bits(&expected.scales), "scales");
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
        let rounding = match stochastic {
            true => Rounding::Stochastic(StochasticKey {
                seed: random.index(1 << 40) as u64,
                stream: random.index(1 << 40) as u64,
            }),
            false => Rounding::Nearest,
        };
        let expected = reference::quantize(&x, shape, Format::Int8, granularity, rounding);
        let size = [shape.rows, shape.cols];
        let block = granularity.scale_block(shape);
        let got = host::quantize(&x, size, block, rounding);
        assert_same(&got, &expected);

        let values = host::dequantize((&got.values, &got.scales), None, size, block);
        assert_same_values(&values, reference::dequantize(&expected).into_iter());
    }
}

#[rstest]
fn fallback_equals_the_reference(#[values(16, 128)] block: usize) {
    let mut random = Random::fresh();
    for (x, shape) in matrices(&mut random) {
        for threshold in [0.0, 4.0, f32::INFINITY] {
            let expected = reference::quantize_fallback(&x, shape, block, threshold);
            let size = [shape.rows, shape.cols];
            let got = host::quantize_fallback(&x, size, (block, block), threshold);
            assert_same(&got.base, &expected.base);
            assert_same(&got.residual, &expected.residual);
            assert_eq!(got.fallback_blocks as i32, expected.counts()[0]);

            let values = host::dequantize(
                (&got.base.values, &got.base.scales),
                Some((&got.residual.values, &got.residual.scales)),
                size,
                (block, block),
            );
            let residual = reference::dequantize(&expected.residual);
            let sums = reference::dequantize(&expected.base);
            assert_same_values(&values, sums.iter().zip(&residual).map(|(x, y)| x + y));
        }
    }
}

#[test]
fn empty_matrices_stay_empty() {
    for shape in [[0, 5], [5, 0], [0, 0]] {
        let q = host::quantize(&[], shape, (128, 128), Rounding::Nearest);
        assert!(q.values.is_empty() && q.scales.is_empty());
        let values = host::dequantize((&q.values, &q.scales), None, shape, (128, 128));
        assert!(values.is_empty());
    }
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
