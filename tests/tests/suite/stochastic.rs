//! Stochastic rounding: unbiased, and a function of seed, stream and coordinates alone.

use burn::tensor::FloatDType;
use burn_quant_train::data::{
    DataBackend, Layout, StochasticKey,
    quantize::{QuantizeSpec, dequantize, quantize},
};
use cubecl_kernels::{granularity::Granularity, reference, rounding::Rounding, shape::MatrixShape};
use quant_train_tests::{
    Rng,
    data::{lifted, primitive, primitive_ints, tensor},
    on_every_backend,
};

on_every_backend! {
    the_mean_of_many_draws_is_the_value => unbiased;
    a_key_names_the_bits => reproducible;
    dequantized_draws_bracket_the_value => brackets;
}

fn stochastic(block: usize, layout: Layout, key: StochasticKey) -> QuantizeSpec {
    QuantizeSpec::int8(Granularity::Block(block))
        .with_rounding(Rounding::Stochastic(key))
        .with_layout(layout)
}

fn draw<B: DataBackend>(
    x: &[f32],
    shape: [usize; 2],
    block: usize,
    key: StochasticKey,
) -> Vec<i32> {
    let x = tensor::<B, 2>(x, shape, &Default::default());
    let quantized = quantize::<B>(primitive(x), &stochastic(block, Layout::RowMajor, key));
    primitive_ints::<B>(&quantized.values.expect("the row-major copy was asked for"))
}

/// A z-test of the sum over all elements and draws, and one of each element. With 400 elements the bounds 6.5 (each)
/// and 5.5 (sum) give a false alarm in less than one of 10 million runs.
fn unbiased<B: DataBackend>(seed: u64) {
    const DRAWS: usize = 1500;
    let shape = [20, 20];
    let mut rng = Rng::new(seed);
    let x = rng.normals(shape[0] * shape[1], 1.0);
    // The scaled values, from the definition: x * (127 / absmax of the block).
    let block = 16;
    let nearest = reference::quantize(
        &x,
        MatrixShape::new(shape[0], shape[1]),
        &QuantizeSpec::int8(Granularity::Block(block)),
    );
    let scaled: Vec<f64> = (0..x.len())
        .map(|index| {
            let (row, col) = (index / shape[1], index % shape[1]);
            let in_block = |&(other, _): &(usize, &f32)| {
                nearest.block_of(0, other / shape[1], other % shape[1])
                    == nearest.block_of(0, row, col)
            };
            let absmax = reference::absmax(x.iter().enumerate().filter(in_block).map(|(_, x)| *x));
            f64::from(x[index] * (127.0 / absmax))
        })
        .collect();

    let mut sums = vec![0i64; x.len()];
    for stream in 0..DRAWS as u64 {
        let draws = draw::<B>(&x, shape, block, StochasticKey { seed, stream });
        for (sum, q) in sums.iter_mut().zip(draws) {
            *sum += i64::from(q);
        }
    }

    let (mut error, mut variance) = (0.0, 0.0);
    for (sum, v) in sums.iter().zip(&scaled) {
        let fraction = v - v.floor();
        let expected = DRAWS as f64 * v;
        let element_variance = DRAWS as f64 * fraction * (1.0 - fraction);
        // f32 arithmetic and 24-bit random numbers shift the probability by less than 2^-16.
        let slack = DRAWS as f64 * 2f64.powi(-16) + 1e-6;
        let difference = *sum as f64 - expected;
        assert!(
            difference.abs() <= 6.5 * element_variance.sqrt() + slack + 1.0,
            "seed {seed}: value {v}, mean of {DRAWS} draws {}",
            *sum as f64 / DRAWS as f64
        );
        error += difference;
        variance += element_variance;
    }
    let z = error / variance.sqrt();
    assert!(
        z.abs() < 5.5,
        "seed {seed}: z = {z} over {} draws",
        DRAWS * x.len()
    );
}

/// The bits are those of the reference, so the same on every backend and for every stride; another seed or stream gives
/// others.
fn reproducible<B: DataBackend>(seed: u64) {
    let mut rng = Rng::new(seed);
    for block in [16, 32, 64, 128] {
        let shape = [1 + rng.below(150), 5 + rng.below(150)];
        let x = rng.normals(shape[0] * shape[1], 3.0);
        let key = StochasticKey {
            seed: rng.bits(),
            stream: rng.bits(),
        };
        let expected = reference::quantize(
            &x,
            MatrixShape::new(shape[0], shape[1]),
            &stochastic(block, Layout::RowMajor, key),
        );
        let first = draw::<B>(&x, shape, block, key);
        assert_eq!(
            first, expected.values,
            "seed {seed}, shape {shape:?}, block {block}: not the reference's bits"
        );
        assert_eq!(
            first,
            draw::<B>(&x, shape, block, key),
            "seed {seed}: the same key, other bits"
        );
        let other_stream = StochasticKey {
            stream: key.stream ^ 1,
            ..key
        };
        let other_seed = StochasticKey {
            seed: key.seed ^ (1 << 40),
            ..key
        };
        if x.len() > 100 {
            assert_ne!(
                first,
                draw::<B>(&x, shape, block, other_stream),
                "seed {seed}: another stream, the same bits"
            );
            assert_ne!(
                first,
                draw::<B>(&x, shape, block, other_seed),
                "seed {seed}: another seed, the same bits"
            );
        }

        // A transposed view has logical coordinates of its own.
        let view = tensor::<B, 2>(&x, shape, &Default::default()).swap_dims(0, 1);
        let quantized = quantize::<B>(primitive(view), &stochastic(block, Layout::Both, key));
        let turned = reference::transpose(&x, MatrixShape::new(shape[0], shape[1]));
        let expected = reference::quantize(
            &turned,
            MatrixShape::new(shape[1], shape[0]),
            &stochastic(block, Layout::RowMajor, key),
        );
        let values = quantized
            .values
            .as_ref()
            .expect("both copies were asked for");
        assert_eq!(
            primitive_ints::<B>(values),
            expected.values,
            "seed {seed}, shape {shape:?}, block {block}: a transposed view"
        );
    }
}

/// Each draw is the integer below or above, never further away; integers and zeros never move.
fn brackets<B: DataBackend>(seed: u64) {
    let mut rng = Rng::new(seed);
    let mut x: Vec<f32> = (0..256).map(|_| rng.below(255) as f32 - 127.0).collect();
    x[17] = 127.0;
    let key = StochasticKey { seed, stream: 3 };
    let draws = draw::<B>(&x, [16, 16], 16, key);
    let whole: Vec<i32> = x.iter().map(|&x| x as i32).collect();
    assert_eq!(
        draws, whole,
        "seed {seed}: whole numbers in units of the scale moved"
    );

    let x: Vec<f32> = rng.normals(256, 1.0);
    let device = Default::default();
    let quantized = quantize::<B>(
        primitive(tensor::<B, 2>(&x, [16, 16], &device)),
        &stochastic(16, Layout::RowMajor, key),
    );
    let back = lifted::<B, 2>(dequantize::<B>(&quantized, FloatDType::F32));
    let step = x.iter().fold(0.0f32, |max, x| max.max(x.abs())) / 127.0;
    for (x, back) in x.iter().zip(back.to_data().iter::<f32>()) {
        assert!(
            (x - back).abs() < step * 1.0001,
            "seed {seed}: {x} became {back}, with steps of {step}"
        );
    }
}
