//! The claims of fallback-int8 on its own terms, on synthetic GLU activations with sparse outliers.

use cubecl_kernels::{
    granularity::Granularity,
    quantize::QuantizeSpec,
    reference::{self, ReferenceFallbackQuantized},
    rounding::{Rounding, StochasticKey},
    shape::MatrixShape,
};
use quant_train_tests::{Rng, seed};

const BLOCK: usize = 128;

/// Activations of a GLU (section 4.1): silu(g) * u of correlated normal numbers. One channel in a thousand is larger,
/// which the product leaves sparse (P3), and single outliers appear anywhere, hundreds to thousands of times the bulk
/// (P1, P2): about one block of 128 x 128 in five holds an outlier, as in figure 4a, whose fallback rate of 20% is that
/// of the paper's figures.
///
/// `spread` is the standard deviation of the logarithm of the scale of 128 neighbouring channels, outliers included.
fn glu(rng: &mut Rng, tokens: usize, channels: usize, spread: f64) -> Vec<f32> {
    let group_scale: Vec<f32> = (0..channels.div_ceil(BLOCK))
        .map(|_| (spread * rng.normal()).exp() as f32)
        .collect();
    let mut channel_scale = vec![1.0; channels];
    for _ in 0..channels.div_ceil(1024) {
        channel_scale[rng.below(channels)] = 4.0 + 4.0 * rng.uniform();
    }
    let mut x = bulk(rng, tokens * channels, &channel_scale);
    let bulk = median_magnitude(&x);
    for _ in 0..x.len() / 200_000 {
        let at = rng.below(x.len());
        let magnitude = bulk * 300.0 * 10f64.powf(rng.uniform());
        x[at] = if rng.uniform() < 0.5 {
            -magnitude
        } else {
            magnitude
        } as f32;
    }
    for (index, x) in x.iter_mut().enumerate() {
        *x *= group_scale[index % channels / BLOCK];
    }
    x
}

/// silu(g) * u of correlated normal numbers, with a scale for each channel.
fn bulk(rng: &mut Rng, count: usize, channel_scale: &[f64]) -> Vec<f32> {
    (0..count)
        .map(|index| {
            let scale = channel_scale[index % channel_scale.len()];
            let g = scale * rng.normal();
            let u = 0.6 * g + 0.8 * scale * rng.normal();
            (g / (1.0 + (-g).exp()) * u) as f32
        })
        .collect()
}

fn median_magnitude(x: &[f32]) -> f64 {
    median(&x.iter().map(|x| f64::from(x.abs())).collect::<Vec<_>>())
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

fn block_maxima(x: &[f32], shape: MatrixShape, block: usize) -> Vec<f32> {
    let quantized =
        reference::quantize_to(x, shape, 1, Granularity::Block(block), Rounding::Nearest);
    quantized.scales
}

/// Nearest INT8 in blocks.
fn int8(x: &[f32], shape: MatrixShape, block: usize) -> Vec<f64> {
    let quantized = reference::quantize(x, shape, &QuantizeSpec::int8(Granularity::Block(block)));
    reference::dequantize(&quantized)
        .into_iter()
        .map(f64::from)
        .collect()
}

fn stochastic(x: &[f32], shape: MatrixShape, key: StochasticKey) -> Vec<f64> {
    let quantized = reference::quantize(
        x,
        shape,
        &QuantizeSpec::int8(Granularity::Block(BLOCK)).with_rounding(Rounding::Stochastic(key)),
    );
    reference::dequantize(&quantized)
        .into_iter()
        .map(f64::from)
        .collect()
}

/// Fallback of the blocks with the largest maxima, a share `rate` of all.
fn fallback(x: &[f32], shape: MatrixShape, rate: f64) -> Vec<f64> {
    let mut maxima = block_maxima(x, shape, BLOCK);
    maxima.sort_by(f32::total_cmp);
    let kept = maxima.len() - (rate * maxima.len() as f64).round() as usize;
    let threshold = if kept == 0 { 0.0 } else { maxima[kept - 1] };
    let quantized = reference::quantize_fallback(x, shape, BLOCK, threshold);
    assert_eq!(
        quantized.counts()[0] as usize,
        maxima.len() - kept,
        "blocks that fell back"
    );
    reference::dequantize_fallback(&quantized)
}

/// Fallback of the blocks that `score` ranks highest: a criterion other than the largest magnitude.
fn fallback_by(
    x: &[f32],
    shape: MatrixShape,
    rate: f64,
    score: impl Fn(&ReferenceFallbackQuantized, &[usize]) -> f64,
) -> Vec<f64> {
    let all = reference::quantize_fallback(x, shape, BLOCK, 0.0);
    let mut members = vec![Vec::new(); all.flags.len()];
    for index in 0..x.len() {
        members[all.base.block_of(0, index / shape.cols, index % shape.cols)].push(index);
    }
    let mut order: Vec<usize> = (0..members.len()).collect();
    let scores: Vec<f64> = members.iter().map(|members| score(&all, members)).collect();
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
    let mut chosen = vec![false; members.len()];
    for block in order
        .iter()
        .take((rate * members.len() as f64).round() as usize)
    {
        chosen[*block] = true;
    }
    reference::dequantize_fallback(&ReferenceFallbackQuantized {
        flags: chosen,
        ..all
    })
}

fn rmse(exact: &[f32], got: &[f64]) -> f64 {
    let sum: f64 = exact
        .iter()
        .zip(got)
        .map(|(exact, got)| (f64::from(*exact) - got).powi(2))
        .sum();
    (sum / exact.len() as f64).sqrt()
}

/// Figure 3b: the first step takes a lone outlier away, and the second has the grid to itself for the rest. With
/// outliers that are not large enough for that (their first step is finer than the largest of the rest) fallback is
/// INT16 with 65,025 instead of 65,535 grid points: it may be worse by their ratio, and no more.
#[test]
fn fallback_is_as_fine_as_int16_and_finer_around_lone_outliers() {
    let seed = seed();
    let mut rng = Rng::new(seed);
    let shape = MatrixShape::new(768, 768);
    let errors = |x: &[f32], block: usize| {
        let all =
            reference::dequantize_fallback(&reference::quantize_fallback(x, shape, block, 0.0));
        let int16 = reference::quantize_to(
            x,
            shape,
            32767,
            Granularity::Block(block),
            Rounding::Nearest,
        );
        let int16: Vec<f64> = reference::dequantize(&int16)
            .into_iter()
            .map(f64::from)
            .collect();
        (
            rmse(x, &all),
            rmse(x, &int16),
            rmse(x, &int8(x, shape, block)),
        )
    };
    let mixed = glu(&mut rng, shape.rows, shape.cols, 0.0);
    let bulk = bulk(&mut rng, shape.num_elements(), &vec![1.0; shape.cols]);
    let median = median_magnitude(&bulk);
    let mut results = Vec::new();
    for block in [64, BLOCK] {
        results.push((
            format!("block {block}, channels and outliers"),
            0.0,
            errors(&mixed, block),
        ));
        for magnitude in [300.0, 1000.0, 3000.0, 10_000.0, 30_000.0] {
            let mut x = bulk.clone();
            // One in each block.
            for row in (0..shape.rows).step_by(block) {
                for col in (0..shape.cols).step_by(block) {
                    x[(row + rng.below(block)) * shape.cols + col + rng.below(block)] =
                        (magnitude * median) as f32;
                }
            }
            results.push((
                format!("block {block}, lone outliers of {magnitude} x bulk"),
                magnitude,
                errors(&x, block),
            ));
        }
    }
    for (what, _, (fallback, int16, int8)) in &results {
        println!(
            "Fig. 3b, {what}: RMSE fallback {fallback:.3e}, INT16 {int16:.3e}, INT8 {int8:.3e}"
        );
    }
    for (what, magnitude, (fallback, int16, int8)) in &results {
        assert!(
            *fallback < 1.03 * int16,
            "seed {seed}, {what}: fallback {fallback:e}, INT16 {int16:e}"
        );
        assert!(
            20.0 * fallback < *int8,
            "seed {seed}, {what}: fallback {fallback:e}, INT8 {int8:e}"
        );
        if *magnitude >= 30_000.0 {
            assert!(
                1.2 * fallback < *int16,
                "seed {seed}, {what}: fallback {fallback:e}, INT16 {int16:e}"
            );
        }
    }
}

/// Figure 4b, on the error of the tensor instead of a model's perplexity: blocks of 128 with 20% fallback against plain
/// blocks of 32.
#[test]
fn large_blocks_with_fallback_are_as_good_as_small_ones() {
    let seed = seed();
    let mut rng = Rng::new(seed);
    let shape = MatrixShape::new(1024, 1024);
    let x = glu(&mut rng, shape.rows, shape.cols, 0.0);
    let large = rmse(&x, &fallback(&x, shape, 0.2));
    let (small, plain) = (
        rmse(&x, &int8(&x, shape, 32)),
        rmse(&x, &int8(&x, shape, BLOCK)),
    );
    println!(
        "Fig. 4b: RMSE B = 128 with 20% fallback {large:.4e}, B = 32 {small:.4e}, B = 128 {plain:.4e}"
    );
    assert!(
        large <= 1.1 * small,
        "seed {seed}: {large:e} against {small:e}"
    );
    assert!(
        plain > 1.5 * small,
        "seed {seed}: without fallback large blocks are worse: {plain:e} against {small:e}"
    );
}

/// A down projection and a classifier on top, in f64: the gradients of both weights and of the activations.
struct Network {
    shape: MatrixShape,
    hidden: usize,
    x: Vec<f32>,
    down: Vec<f64>,
    head: Vec<f64>,
    labels: Vec<usize>,
}

const CLASSES: usize = 16;

impl Network {
    fn new(rng: &mut Rng, spread: f64) -> Self {
        let (tokens, channels, hidden) = (512, 640, 12);
        let x = glu(rng, tokens, channels, spread);
        let norm = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / tokens as f64;
        // Outputs of order 1 for the bulk of the tokens.
        let bulk = median(
            &x.chunks(channels)
                .map(|row| row.iter().map(|x| f64::from(*x).powi(2)).sum())
                .collect::<Vec<f64>>(),
        );
        assert!(bulk > 0.0 && norm.is_finite());
        let scale = bulk.powf(-0.5);
        Self {
            shape: MatrixShape::new(tokens, channels),
            hidden,
            x,
            down: (0..channels * hidden)
                .map(|_| scale * rng.normal())
                .collect(),
            head: (0..hidden * CLASSES)
                .map(|_| (hidden as f64).powf(-0.5) * rng.normal())
                .collect(),
            labels: (0..tokens).map(|_| rng.below(CLASSES)).collect(),
        }
    }

    /// The gradients with `forward` as the layer's input in the forward pass and `saved` in the backward pass.
    fn gradients(&self, forward: &[f64], saved: &[f64]) -> Gradients {
        let (tokens, channels, hidden) = (self.shape.rows, self.shape.cols, self.hidden);
        let y = product(forward, &self.down, [tokens, channels, hidden]);
        let h: Vec<f64> = y.iter().map(|y| y.tanh()).collect();
        let logits = product(&h, &self.head, [tokens, hidden, CLASSES]);
        let mut dlogits = vec![0.0; logits.len()];
        for ((row, label), out) in logits
            .chunks(CLASSES)
            .zip(&self.labels)
            .zip(dlogits.chunks_mut(CLASSES))
        {
            let max = row.iter().copied().fold(f64::MIN, f64::max);
            let sum: f64 = row.iter().map(|z| (z - max).exp()).sum();
            for (class, (out, z)) in out.iter_mut().zip(row).enumerate() {
                *out = (z - max).exp() / sum - f64::from(u8::from(class == *label));
            }
        }
        let head = product(
            &turned(&h, tokens, hidden),
            &dlogits,
            [hidden, tokens, CLASSES],
        );
        let dh = product(
            &dlogits,
            &turned(&self.head, hidden, CLASSES),
            [tokens, CLASSES, hidden],
        );
        let dy: Vec<f64> = dh
            .iter()
            .zip(&h)
            .map(|(dh, h)| dh * (1.0 - h * h))
            .collect();
        let down = product(
            &turned(saved, tokens, channels),
            &dy,
            [channels, tokens, hidden],
        );
        let x = product(
            &dy,
            &turned(&self.down, channels, hidden),
            [tokens, hidden, channels],
        );
        Gradients { down, head, x }
    }
}

struct Gradients {
    down: Vec<f64>,
    head: Vec<f64>,
    x: Vec<f64>,
}

impl Gradients {
    /// Cosine similarities of dW, of the gradient of the head, and of dX.
    fn similarity(&self, exact: &Self) -> [f64; 3] {
        [
            cosine(&self.down, &exact.down),
            cosine(&self.head, &exact.head),
            cosine(&self.x, &exact.x),
        ]
    }
}

/// `[m, k] x [k, n]`.
fn product(a: &[f64], b: &[f64], [m, k, n]: [usize; 3]) -> Vec<f64> {
    let mut c = vec![0.0; m * n];
    for (a, c) in a.chunks(k).zip(c.chunks_mut(n)) {
        for (a, b) in a.iter().zip(b.chunks(n)) {
            c.iter_mut().zip(b).for_each(|(c, b)| *c += a * b);
        }
    }
    c
}

fn turned(x: &[f64], rows: usize, cols: usize) -> Vec<f64> {
    (0..rows * cols)
        .map(|index| x[index % rows * cols + index / rows])
        .collect()
}

fn cosine(a: &[f64], b: &[f64]) -> f64 {
    let dot = |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn mean(values: impl Iterator<Item = [f64; 3]>) -> [f64; 3] {
    let (mut sums, mut count) = ([0.0; 3], 0.0);
    for value in values {
        sums.iter_mut()
            .zip(value)
            .for_each(|(sum, value)| *sum += value);
        count += 1.0;
    }
    sums.map(|sum| sum / count)
}

const RATES: [f64; 5] = [0.0, 0.1, 0.2, 0.4, 1.0];

/// Figure 3c: the gradients' similarity to the exact ones rises with the fallback rate, and choosing blocks by their
/// largest magnitude beats choosing by relative L1 error. Both passes use the fallback values.
///
/// Where all blocks have one bulk, the two criteria choose the same blocks but for chance; where the magnitudes of
/// blocks differ, relative error spends fallback on blocks too small to matter.
#[test]
fn gradients_get_better_with_the_fallback_rate_and_absmax_beats_relative_l1() {
    let seed = seed();
    let like = criteria(seed, 0.0);
    let spread = criteria(seed, 1.5);
    for (rate, absmax, relative) in &like {
        for gradient in 0..3 {
            assert!(
                absmax[gradient] >= relative[gradient] - 0.003,
                "seed {seed}, rate {rate}, gradient {gradient}: absmax {absmax:?}, relative L1 {relative:?}"
            );
        }
    }
    let of_all = |similarities: &[f64; 3]| similarities.iter().sum::<f64>() / 3.0;
    // A network has 20 blocks, so a single rate is a matter of chance: what is left to 1, over all rates.
    let missing = |similarities: &mut dyn Iterator<Item = &[f64; 3]>| -> f64 {
        similarities
            .map(|similarity| 1.0 - of_all(similarity))
            .sum()
    };
    let (absmax, relative) = (
        missing(&mut spread.iter().map(|(_, absmax, _)| absmax)),
        missing(&mut spread.iter().map(|(_, _, relative)| relative)),
    );
    println!(
        "Fig. 3c, blocks of different magnitudes: missing similarity, absmax {absmax:.3e}, relative L1 {relative:.3e}"
    );
    assert!(
        absmax < relative,
        "seed {seed}: absmax leaves {absmax:e}, relative L1 {relative:e}"
    );
    for results in [like, spread] {
        for pair in results.windows(2) {
            let ((rate, after, _), before) = (&pair[1], &pair[0].1);
            assert!(
                of_all(after) >= of_all(before) - 1e-6,
                "seed {seed}, rate {rate}: {after:?} after {before:?}"
            );
        }
        let (_, all, _) = results[results.len() - 1];
        assert!(
            all.iter().all(|similarity| *similarity > 0.9999),
            "seed {seed}: all blocks fallen back: {all:?}"
        );
    }
}

/// For each rate, the similarities with blocks chosen by their largest magnitude, and by relative L1 error.
fn criteria(seed: u64, spread: f64) -> Vec<(f64, [f64; 3], [f64; 3])> {
    let mut rng = Rng::new(seed);
    let networks: Vec<Network> = (0..8).map(|_| Network::new(&mut rng, spread)).collect();
    let exact: Vec<Vec<f64>> = networks
        .iter()
        .map(|network| network.x.iter().map(|x| f64::from(*x)).collect())
        .collect();
    let truth: Vec<Gradients> = networks
        .iter()
        .zip(&exact)
        .map(|(network, x)| network.gradients(x, x))
        .collect();
    let similarity = |quantize: &dyn Fn(&Network) -> Vec<f64>| {
        mean(networks.iter().zip(&truth).map(|(network, truth)| {
            let x = quantize(network);
            network.gradients(&x, &x).similarity(truth)
        }))
    };
    let mut results = Vec::new();
    for rate in RATES {
        let absmax = similarity(&|network| fallback(&network.x, network.shape, rate));
        let relative = similarity(&|network| {
            fallback_by(&network.x, network.shape, rate, |quantized, members| {
                let value = |index: usize| {
                    let (row, col) = (index / network.shape.cols, index % network.shape.cols);
                    f64::from(quantized.base.value(0, row, col))
                        * f64::from(quantized.base.scale(0, row, col))
                };
                let error: f64 = members
                    .iter()
                    .map(|&i| (f64::from(network.x[i]) - value(i)).abs())
                    .sum();
                let total: f64 = members.iter().map(|&i| f64::from(network.x[i]).abs()).sum();
                error / total
            })
        });
        println!(
            "Fig. 3c, spread {spread}, rate {rate}: cosine similarity of dW, dHead, dX by absmax {absmax:.6?}, by \
             relative L1 {relative:.6?}"
        );
        results.push((rate, absmax, relative));
    }
    results
}

/// Figure 5b: fallback in the forward pass alone, with plain stochastic INT8 saved for dW, against fallback in both.
/// The other gradients do not see what was saved. dW is that of both passes plus noise of mean 0 (section 5.1): one
/// draw is noisier on this single layer, and what is left over 32 draws, as a run accumulates them, is as near to the
/// exact gradient.
#[test]
fn fallback_in_the_forward_pass_alone_costs_dw_only_noise() {
    const DRAWS: u64 = 32;
    let seed = seed();
    let mut rng = Rng::new(seed);
    let networks: Vec<Network> = (0..2).map(|_| Network::new(&mut rng, 0.0)).collect();
    let saved: Vec<(Vec<f64>, Vec<f64>)> = networks
        .iter()
        .map(|network| {
            let draw =
                |stream| stochastic(&network.x, network.shape, StochasticKey { seed, stream });
            let mut mean = vec![0.0; network.x.len()];
            for stream in 0..DRAWS {
                mean.iter_mut()
                    .zip(draw(stream))
                    .for_each(|(mean, x)| *mean += x / DRAWS as f64);
            }
            (draw(0), mean)
        })
        .collect();
    let mut results = Vec::new();
    for rate in RATES {
        let (mut one_draw, mut draws, mut both) = (Vec::new(), Vec::new(), Vec::new());
        for (network, (first, averaged)) in networks.iter().zip(&saved) {
            let exact: Vec<f64> = network.x.iter().map(|x| f64::from(*x)).collect();
            let truth = network.gradients(&exact, &exact);
            let forward = fallback(&network.x, network.shape, rate);
            one_draw.push(network.gradients(&forward, first).similarity(&truth));
            draws.push(network.gradients(&forward, averaged).similarity(&truth));
            both.push(network.gradients(&forward, &forward).similarity(&truth));
        }
        let [one_draw, draws, both] = [one_draw, draws, both].map(|all| mean(all.into_iter()));
        println!(
            "Fig. 5b, rate {rate}: cosine similarity of dW, dHead, dX, forward only {one_draw:.6?}, over {DRAWS} draws \
             {draws:.6?}, both {both:.6?}"
        );
        results.push((rate, one_draw, draws, both));
    }
    for (rate, one_draw, draws, both) in results {
        assert_eq!(
            one_draw[1..],
            both[1..],
            "seed {seed}, rate {rate}: the gradients that do not use the saved input"
        );
        assert!(
            one_draw[0] > 0.9,
            "seed {seed}, rate {rate}: dW of one draw {one_draw:?}"
        );
        assert!(
            draws[0] > both[0] - 0.002,
            "seed {seed}, rate {rate}: dW over {DRAWS} draws {draws:?}, both {both:?}"
        );
    }
}
