//! The reference against what the definitions say, and the paper's two claims on the accuracy of fallback.

use cubecl_kernels::{
    granularity::Granularity,
    quantize::QuantizeSpec,
    reference::{
        ReferenceFallbackQuantized, dequantize, dequantize_fallback, gemm, pack_int10, quantize,
        quantize_fallback, quantize_to,
    },
    rounding::{Rounding, StochasticKey},
    scale::MIN_ABSMAX,
    shape::MatrixShape,
};

use crate::random::Random;

#[test]
fn quantization_error_is_half_a_step() {
    let mut random = Random::fresh();
    let shape = MatrixShape::batched(2, 40, 70);
    let x = random.with_outliers(shape.num_elements());
    for granularity in [
        Granularity::Block(32),
        Granularity::Group(16),
        Granularity::Token,
        Granularity::Channel,
        Granularity::Tensor,
    ] {
        let q = quantize(&x, shape, &QuantizeSpec::int8(granularity));
        let back = dequantize(&q);
        for (index, (x, y)) in x.iter().zip(&back).enumerate() {
            let (batch, rest) = (index / (40 * 70), index % (40 * 70));
            let step = q.scale(batch, rest / 70, rest % 70);
            assert!(
                (x - y).abs() <= step * 0.50001,
                "{granularity:?}: {x} became {y}"
            );
        }
    }
}

#[test]
fn special_blocks() {
    let shape = MatrixShape::new(1, 64);
    let group = Granularity::Group(16);
    let mut x = vec![0.0; 64];
    x[1] = f32::NAN;
    x[17] = f32::NEG_INFINITY;
    x[33] = MIN_ABSMAX * 0.99;
    x[49] = MIN_ABSMAX;
    let q = quantize(&x, shape, &QuantizeSpec::int8(group));
    assert!(q.scales[0].is_nan() && q.scales[1].is_nan());
    assert_eq!(q.scales[2], 0.0);
    assert!(q.scales[3].is_normal());
    assert_eq!(q.values[49], 127);
    assert_eq!(q.values.iter().filter(|&&q| q != 0).count(), 1);
}

#[test]
fn packing_keeps_every_bit() {
    let values: Vec<i32> = (-511..=511).collect();
    let words = pack_int10(&values, values.len());
    assert_eq!(words.len(), 5 * values.len().div_ceil(16));
    for (index, &value) in values.iter().enumerate() {
        let group = &words[index / 16 * 5..][..5];
        let bits: u32 = (0..10)
            .map(|bit| {
                let position = index % 16 * 10 + bit;
                (group[position / 32] >> (position % 32) & 1) << bit
            })
            .sum();
        assert_eq!((bits << 22) as i32 >> 22, value);
    }
}

#[test]
fn stochastic_rounding_is_unbiased() {
    let key = StochasticKey {
        seed: Random::fresh().index(1 << 20) as u64,
        stream: 3,
    };
    let shape = MatrixShape::new(64, 1024);
    for fraction in [0.1f32, 0.5, 0.77] {
        // The first value of each row fixes the scale at 1.
        let mut x = vec![3.0 + fraction; shape.num_elements()];
        for row in x.chunks_mut(1024) {
            row[0] = 127.0;
        }
        let q = quantize(
            &x,
            shape,
            &QuantizeSpec::int8(Granularity::Token).with_rounding(Rounding::Stochastic(key)),
        );
        let draws: Vec<i32> = q
            .values
            .chunks(1024)
            .flat_map(|row| row[1..].to_vec())
            .collect();
        assert!(draws.iter().all(|q| (3..=4).contains(q)));
        let ups = draws.iter().filter(|&&q| q == 4).count() as f32;
        let count = draws.len() as f32;
        let z = (ups - count * fraction) / (count * fraction * (1.0 - fraction)).sqrt();
        assert!(z.abs() < 5.0, "{fraction} was rounded up at z = {z}");
    }
}

#[test]
fn product_of_exact_integers() {
    let (a, b) = (
        [127.0, -2.0, 0.0, 5.0, 127.0, 1.0],
        [127.0, 3.0, 9.0, -1.0, 0.0, 127.0],
    );
    let shape = MatrixShape::new(2, 3);
    let quantize = |x: &[f32]| quantize(x, shape, &QuantizeSpec::int8(Granularity::Token));
    let c = gemm(&quantize(&a), &quantize(&b), None, Some(&[0.5, 0.0]));
    assert_eq!(
        c,
        [
            127.0 * 127.0 - 6.0 + 0.5,
            -127.0,
            635.0 + 381.0 + 9.0 + 0.5,
            122.0
        ]
    );
}

/// Activations of a gated linear unit: `silu(gate) * up`, both normal, with the rare large products that a trained
/// model has, thousands of times the bulk: on average `outliers` in each block of 128 x 128.
fn glu_activations(random: &mut Random, shape: MatrixShape, outliers: f32) -> Vec<f32> {
    (0..shape.num_elements())
        .map(|_| {
            let gate = random.normal();
            let value = gate / (1.0 + (-gate).exp()) * random.normal();
            if random.uniform() < outliers / 16384.0 {
                1000.0 * (1.0 + 5.0 * random.uniform()) * value.signum()
            } else {
                value
            }
        })
        .collect()
}

fn rmse(x: &[f32], approximation: impl Iterator<Item = f64>) -> f64 {
    let squares: f64 = x
        .iter()
        .zip(approximation)
        .map(|(&x, y)| (f64::from(x) - y).powi(2))
        .sum();
    (squares / x.len() as f64).sqrt()
}

fn block_rmse(x: &[f32], shape: MatrixShape, block: usize, q_max: i32) -> f64 {
    let granularity = Granularity::Block(block);
    let q = quantize_to(x, shape, q_max, granularity, Rounding::Nearest);
    rmse(x, dequantize(&q).into_iter().map(f64::from))
}

fn fallback_rmse(x: &[f32], quantized: &ReferenceFallbackQuantized) -> f64 {
    rmse(x, dequantize_fallback(quantized).into_iter())
}

/// fallback-int8, figure 3b: two INT8 steps are more accurate than one of INT16, for outliers are sparse.
///
/// The second step takes its scale from the largest value that the first one missed. So fallback gains where a block's
/// outlier is more than 254 times the largest of its other values, and is equal up to the count of grid points below.
#[test]
fn fallback_is_more_accurate_than_int16_blocks() {
    let mut random = Random::fresh();
    let shape = MatrixShape::new(512, 512);
    let x = glu_activations(&mut random, shape, 1.0);
    let fallback = fallback_rmse(&x, &quantize_fallback(&x, shape, 128, 0.0));
    let int16 = block_rmse(&x, shape, 128, 32_767);
    println!("RMSE in blocks of 128: fallback {fallback:e}, INT16 {int16:e}");
    assert!(fallback < int16, "fallback {fallback:e}, INT16 {int16:e}");
}

/// fallback-int8, figure 4b: blocks of 128 of which a fifth fall back are nearly as accurate as plain blocks of 32. It
/// holds as long as the blocks that fall back are all those with outliers, here a tenth.
#[test]
fn fallback_makes_up_for_large_blocks() {
    let mut random = Random::fresh();
    let shape = MatrixShape::new(1024, 1024);
    let x = glu_activations(&mut random, shape, 0.1);
    let all = quantize_fallback(&x, shape, 128, 0.0);
    let mut scales = all.base.scales.clone();
    scales.sort_by(f32::total_cmp);
    // The threshold that the fifth of the blocks with the largest maxima exceed.
    let threshold = scales[scales.len() - scales.len() / 5 - 1] * 127.0 * 1.000_01;
    let fallback = quantize_fallback(&x, shape, 128, threshold);
    let rate = f64::from(fallback.counts()[0]) / f64::from(fallback.counts()[1]);
    let (large, small) = (fallback_rmse(&x, &fallback), block_rmse(&x, shape, 32, 127));
    println!(
        "RMSE: 128 with {rate} fallback {large:e}, 32 {small:e}, 128 {:e}",
        block_rmse(&x, shape, 128, 127)
    );
    assert!((0.15..=0.2).contains(&rate), "rate {rate}");
    assert!(
        large < 1.1 * small,
        "128 with fallback {large:e}, 32 {small:e}"
    );
}
