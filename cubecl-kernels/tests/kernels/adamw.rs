//! AdamW: the reference against f64, and the kernels against both.

use cubecl_kernels::{
    adamw::Hyperparameters,
    optimizer_state::{Encoding, Moment, StateFormat},
    reference::{
        adamw::{MomentChunk, StateDither, Step, adamw, round_to_bf16},
        optimizer_state::{HostState, dequantize_state, quantize_group_dithered, quantize_state},
    },
    rounding::StochasticKey,
};
use half::bf16;

use crate::random::Random;

const HYPERPARAMETERS: Hyperparameters = Hyperparameters {
    learning_rate: 1e-3,
    beta_1: 0.9,
    beta_2: 0.999,
    epsilon: 1e-8,
    weight_decay: 0.1,
    clip_norm: None,
};

/// AdamW in f64, as its definition says.
struct Exact {
    p: Vec<f64>,
    m: Vec<f64>,
    v: Vec<f64>,
    t: i32,
}

impl Exact {
    fn new(p: &[f32]) -> Self {
        Self {
            p: p.iter().copied().map(f64::from).collect(),
            m: vec![0.0; p.len()],
            v: vec![0.0; p.len()],
            t: 0,
        }
    }

    fn step(&mut self, g: &[f32], hyper: &Hyperparameters) {
        let (beta_1, beta_2) = (f64::from(hyper.beta_1), f64::from(hyper.beta_2));
        let lr = hyper.learning_rate;
        self.t += 1;
        for (index, &g) in g.iter().enumerate() {
            let g = f64::from(g);
            let (m, v) = (&mut self.m[index], &mut self.v[index]);
            *m = beta_1 * *m + (1.0 - beta_1) * g;
            *v = beta_2 * *v + (1.0 - beta_2) * g * g;
            let m_hat = *m / (1.0 - beta_1.powi(self.t));
            let v_hat = *v / (1.0 - beta_2.powi(self.t));
            let decayed = self.p[index] * (1.0 - lr * f64::from(hyper.weight_decay));
            self.p[index] = decayed - lr * m_hat / (v_hat.sqrt() + f64::from(hyper.epsilon));
        }
    }
}

/// Each within 1e-6, relative to itself or to `scale`.
#[track_caller]
fn assert_close(actual: &[f32], expected: &[f64], scale: f64, what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}: length");
    for (index, (&a, &e)) in actual.iter().zip(expected).enumerate() {
        let error = (f64::from(a) - e).abs();
        assert!(
            error <= 1e-6 * e.abs().max(scale),
            "{what}[{index}]: {a:e} instead of {e:e}"
        );
    }
}

fn gradients(random: &mut Random, count: usize) -> Vec<f32> {
    (0..count)
        .map(|_| random.normal() * (-12.0 * random.uniform()).exp2() * 0.01)
        .collect()
}

fn parameters(random: &mut Random, count: usize) -> Vec<f32> {
    (0..count).map(|_| 0.5 + random.uniform()).collect()
}

/// The sixteen pairs of the paper's table 1, those of its table 9, INT8, and FP32 for one of the two.
fn pairs() -> Vec<(Option<StateFormat>, Option<StateFormat>)> {
    let format = |encoding, expand, group| {
        Some(StateFormat {
            encoding,
            expand,
            group,
        })
    };
    let floats: Vec<_> = [Encoding::E4M3, Encoding::E5M2]
        .into_iter()
        .flat_map(|encoding| [format(encoding, false, 128), format(encoding, true, 128)])
        .collect();
    let mut pairs: Vec<_> = floats
        .iter()
        .flat_map(|&first| floats.iter().map(move |&second| (first, second)))
        .collect();
    let dynamic = |expand, group| format(Encoding::DynamicExponent, expand, group);
    let int8 = |expand, group| format(Encoding::Int8, expand, group);
    pairs.extend([
        (dynamic(false, 256), dynamic(false, 256)),
        (dynamic(true, 128), dynamic(true, 128)),
        (dynamic(true, 128), format(Encoding::E4M3, true, 128)),
        (int8(false, 2048), int8(false, 2048)),
        (int8(true, 128), int8(true, 128)),
        (int8(false, 2048), format(Encoding::E5M2, true, 128)),
        (dynamic(false, 128), dynamic(false, 2048)),
        (format(Encoding::E4M3, true, 100), int8(false, 100)),
        (None, format(Encoding::E4M3, true, 128)),
        (dynamic(true, 128), None),
    ]);
    pairs
}

#[test]
fn reference_is_adamw() {
    let mut random = Random::fresh();
    for n in [1, 3, 5000] {
        let mut p = parameters(&mut random, n);
        let mut exact = Exact::new(&p);
        let (mut m, mut v) = (vec![0.0; n], vec![0.0; n]);
        for t in 1..=10 {
            let g = gradients(&mut random, n);
            let step = Step::new(&HYPERPARAMETERS, t).expect("betas below 1");
            exact.step(&g, &HYPERPARAMETERS);
            adamw(
                &step,
                &mut p,
                &g,
                MomentChunk::Full(&mut m),
                MomentChunk::Full(&mut v),
                None,
            );
            assert_close(&m, &exact.m, 1e-3, "m");
            assert_close(&v, &exact.v, 1e-9, "v");
            assert_close(&p, &exact.p, 0.0, "p");
        }
    }
    let wrong = Hyperparameters {
        beta_1: 1.0,
        ..HYPERPARAMETERS
    };
    assert!(Step::new(&wrong, 1).is_err());
}

/// A moment on the host in any format.
#[derive(Clone)]
enum HostMoment {
    Full(Vec<f32>),
    Compressed(HostState, StateFormat),
}

impl HostMoment {
    fn zeros(n: usize, format: Option<StateFormat>, moment: Moment) -> Self {
        match format {
            None => HostMoment::Full(vec![0.0; n]),
            Some(format) => {
                HostMoment::Compressed(quantize_state(&vec![0.0; n], format, moment), format)
            }
        }
    }

    fn chunk(&mut self) -> MomentChunk<'_> {
        match self {
            HostMoment::Full(values) => MomentChunk::Full(values),
            HostMoment::Compressed(state, format) => MomentChunk::Compressed {
                format: *format,
                codes: &mut state.codes,
                scales: &mut state.scales,
                exponents: &mut state.exponents,
            },
        }
    }

    fn values(&self, moment: Moment) -> Vec<f32> {
        match self {
            HostMoment::Full(values) => values.clone(),
            HostMoment::Compressed(state, format) => dequantize_state(state, *format, moment),
        }
    }
}

/// A step with compressed moments is a step with the moments that they stand for, compressed afterwards; in chunks or
/// in one piece.
#[test]
fn reference_compresses_what_it_updates() {
    let (mut random, n) = (Random::fresh(), 5001);
    for (first, second) in pairs() {
        let mut p = parameters(&mut random, n);
        let mut m = HostMoment::zeros(n, first, Moment::First);
        let mut v = HostMoment::zeros(n, second, Moment::Second);
        for t in 1..=4 {
            let g = gradients(&mut random, n);
            let step = Step::new(&HYPERPARAMETERS, t).expect("betas below 1");
            let (mut expected_p, mut expected_m, mut expected_v) =
                (p.clone(), m.values(Moment::First), v.values(Moment::Second));
            adamw(
                &step,
                &mut expected_p,
                &g,
                MomentChunk::Full(&mut expected_m),
                MomentChunk::Full(&mut expected_v),
                None,
            );
            adamw(&step, &mut p, &g, m.chunk(), v.chunk(), None);
            assert_eq!(p, expected_p);
            for (host, values, moment) in [
                (&m, &expected_m, Moment::First),
                (&v, &expected_v, Moment::Second),
            ] {
                match host {
                    HostMoment::Full(actual) => assert_eq!(actual, values),
                    HostMoment::Compressed(state, format) => {
                        assert_eq!(*state, quantize_state(values, *format, moment));
                    }
                }
            }
        }
    }
}

/// Every format of one encoding, of either moment, without and with expansion.
fn formats() -> Vec<StateFormat> {
    [
        StateFormat::E4M3,
        StateFormat::E5M2,
        StateFormat::DYNAMIC_EXPONENT,
        StateFormat::INT8,
    ]
    .into_iter()
    .flat_map(|format| [format, format.expanded()])
    .collect()
}

/// With random dithers a value becomes one of the two numbers around it, and its mean is the value: with expansion that
/// of their powers.
#[test]
fn stochastic_rounding_of_moments_is_unbiased() {
    let mut random = Random::fresh();
    let count = 4096;
    for format in formats() {
        for moment in [Moment::First, Moment::Second] {
            let format = format.with_group(128);
            let sign = |index| match moment {
                Moment::First if index % 3 == 0 => -1.0,
                _ => 1.0,
            };
            // Within the range of the coarsest encoding; the largest fixes the scale.
            let mut x: Vec<f32> = (0..128)
                .map(|index| sign(index) * (0.05 + 0.9 * random.uniform()))
                .collect();
            x[7] = 1.0;
            let mut values: Vec<Vec<f64>> = vec![Vec::new(); x.len()];
            let mut power = 1.0;
            for _ in 0..count {
                let dithers: Vec<u32> = x
                    .iter()
                    .map(|_| (random.index(1 << 16) << 16) as u32)
                    .collect();
                let mut codes = vec![0; x.len()];
                let group = quantize_group_dithered(&x, &dithers, format, moment, &mut codes);
                let state = HostState {
                    codes,
                    scales: vec![group.scale],
                    exponents: vec![group.exponent],
                };
                if format.expand {
                    power = f64::from(group.exponent) / 8.0;
                }
                let back = dequantize_state(&state, format, moment);
                for (values, value) in values.iter_mut().zip(back) {
                    values.push(f64::from(value.abs()).powf(power));
                }
            }
            for (x, values) in x.iter().zip(&values) {
                let x = f64::from(x.abs()).powf(power);
                let low = values.iter().copied().fold(f64::MAX, f64::min);
                let high = values.iter().copied().fold(0.0, f64::max);
                let near = |value: f64, end: f64| (value - end).abs() <= 1e-5 * end;
                assert!(
                    values
                        .iter()
                        .all(|&value| near(value, low) || near(value, high)),
                    "{format:?}, {moment:?}: {x} becomes more than two numbers"
                );
                let mean = values.iter().sum::<f64>() / f64::from(count);
                // Five deviations of the mean; and a value that is a thousandth from one of the numbers, which lie up
                // to a quarter apart, may never have become the other one.
                let bound = (high - low) * 2.5 / f64::from(count).sqrt() + 1e-3 * x;
                assert!(
                    (mean - x).abs() <= bound,
                    "{format:?}, {moment:?}: {x} becomes {low} or {high}, in the mean {mean}"
                );
            }
        }
    }
}

/// The effect of rounding on AdamW in the long run: gradients that are noise of a fixed deviation for each element,
/// deviations spread over an order of magnitude, and a drop of all of them to a tenth half way, as in training. Beside
/// FP32's, the second moment and the size of the update after the drop.
#[test]
fn moments_follow_their_gradients() {
    let elements = 512;
    let steps = match std::env::var("KERNELS_DRIFT_STEPS") {
        Ok(steps) => steps.parse().expect("KERNELS_DRIFT_STEPS is a number"),
        Err(_) => 400,
    };
    println!("format beta_2 rounding: v, update, both by FP32's; rms error of the update");
    for beta_2 in [0.95, 0.999] {
        for format in formats() {
            for stochastic in [false, true] {
                let drift = Drift::run(elements, steps, beta_2, format, stochastic);
                println!("{format:?} {beta_2} {stochastic}: {drift:.3?}");
                // A moment that got stuck would be a hundred times too large after the drop. With expansion the mean of
                // powers is right, which leaves that of the numbers a little low.
                if stochastic && format.encoding != Encoding::Int8 {
                    assert!((drift.second - 1.0).abs() < 0.15, "{format:?}: {drift:?}");
                }
            }
        }
    }
}

/// Averages over the last quarter of a run and its elements.
#[derive(Debug)]
#[allow(dead_code, reason = "printed")]
struct Drift {
    /// The second moment over FP32's.
    second: f64,
    /// The mean magnitude of the update over FP32's.
    update: f64,
    /// The root mean square of the update's error over that of the update.
    error: f64,
}

impl Drift {
    fn run(
        elements: usize,
        steps: u32,
        beta_2: f32,
        format: StateFormat,
        stochastic: bool,
    ) -> Self {
        let mut random = Random::fresh();
        let key = fresh_key(&mut random);
        let hyperparameters = Hyperparameters {
            beta_2,
            ..HYPERPARAMETERS
        };
        let deviations: Vec<f32> = (0..elements)
            .map(|_| 1e-4 * random.normal().exp())
            .collect();
        let zeros = |format, moment| HostMoment::zeros(elements, format, moment);
        let full = (zeros(None, Moment::First), zeros(None, Moment::Second));
        let coded = (
            zeros(Some(format), Moment::First),
            zeros(Some(format), Moment::Second),
        );
        let mut runs = [(full, None), (coded, stochastic.then_some(key))];
        let (mut second, mut update, mut error) = ((0.0, 0.0), (0.0, 0.0), (0.0, 0.0));
        for t in 1..=steps {
            let size = if t > steps / 2 { 0.1 } else { 1.0 };
            let g: Vec<f32> = deviations
                .iter()
                .map(|deviation| size * deviation * random.normal())
                .collect();
            let step = Step::new(&hyperparameters, t).expect("betas below 1");
            let mut updates = [Vec::new(), Vec::new()];
            for (((m, v), key), update) in runs.iter_mut().zip(&mut updates) {
                *update = vec![0.0; elements];
                let dither = key.map(|key| StateDither { key, t, start: 0 });
                adamw(&step, update, &g, m.chunk(), v.chunk(), dither);
            }
            if t <= steps / 4 * 3 {
                continue;
            }
            let [full, coded] = [0, 1].map(|run: usize| runs[run].0.1.values(Moment::Second));
            for index in 0..elements {
                let ratio = f64::from(coded[index]) / f64::from(full[index]);
                second = (second.0 + ratio, second.1 + 1.0);
                let [full, coded] = [0, 1].map(|run: usize| f64::from(updates[run][index]));
                update = (update.0 + coded.abs(), update.1 + full.abs());
                error = (error.0 + (coded - full).powi(2), error.1 + full.powi(2));
            }
        }
        Self {
            second: second.0 / second.1,
            update: update.0 / update.1,
            error: (error.0 / error.1).sqrt(),
        }
    }
}

/// `mean` of roundings of `x` between its bf16 neighbours, as a z-score.
fn z_score(x: f32, roundings: &[f32]) -> f32 {
    let low = f32::from_bits(x.to_bits() & 0xffff_0000);
    let high = f32::from_bits((x.to_bits() & 0xffff_0000) + 0x1_0000);
    assert!(roundings.iter().all(|&y| y == low || y == high));
    let fraction = (x - low) / (high - low);
    let ups = roundings.iter().filter(|&&y| y == high).count() as f32;
    let count = roundings.len() as f32;
    (ups - count * fraction) / (count * fraction * (1.0 - fraction)).sqrt()
}

fn fresh_key(random: &mut Random) -> StochasticKey {
    StochasticKey {
        seed: random.index(1 << 20) as u64,
        stream: 5,
    }
}

#[test]
fn rounding_to_bf16_is_unbiased() {
    let mut random = Random::fresh();
    let key = fresh_key(&mut random);
    for x in [1.001f32, -0.3, 7.77e-5] {
        let values = vec![x; 1 << 16];
        let mut out = vec![bf16::ZERO; values.len()];
        round_to_bf16(&values, key, 1, 0, &mut out);
        let rounded: Vec<f32> = out.iter().map(|y| y.to_f32()).collect();
        let z = z_score(x, &rounded);
        assert!(z.abs() < 5.0, "{x} was rounded with z = {z}");
        let mut chunk = vec![bf16::ZERO; 100];
        round_to_bf16(&values[..100], key, 1, 400, &mut chunk);
        assert_eq!(chunk, out[400..500]);
        round_to_bf16(&values, key, 2, 0, &mut out);
        assert!(out.iter().zip(&rounded).any(|(a, b)| a.to_f32() != *b));
    }
    let mut out = [bf16::ZERO; 3];
    round_to_bf16(&[f32::NAN, f32::INFINITY, 0.0], key, 1, 0, &mut out);
    assert!(out[0].is_nan() && out[1] == bf16::INFINITY && out[2] == bf16::ZERO);
}

#[cfg(any(feature = "cuda", feature = "vulkan"))]
pub mod on_device {
    use cubecl_kernels::{
        adamw::{
            AdamWTensors, adamw as adamw_on_device, find_nonfinite, initial_clock, initial_flag,
            tick,
        },
        optimizer_state::{StateTensor, dequantize_state as dequantize_on_device, initial_state},
        rounding::Rounding,
    };

    use super::*;
    use crate::device::{
        Client, Tensor, TestRuntime, assert_same_floats, client, drawn, dtype, float_types, read,
        read_float, rounded, upload, upload_i32,
    };

    type Pair = (Option<StateFormat>, Option<StateFormat>);

    fn tensors(client: &Client, p: &[f32], pair: Pair) -> AdamWTensors<TestRuntime> {
        let state = |format, moment| initial_state(client, &[p.len()], format, moment);
        AdamWTensors {
            updated: None,
            parameter: upload(client, p, &[p.len()], dtype::<f32>()),
            gradient: upload(client, &vec![0.0; p.len()], &[p.len()], dtype::<f32>()),
            first: state(pair.0, Moment::First).expect("a group"),
            second: state(pair.1, Moment::Second).expect("a group"),
            rounding: Rounding::Nearest,
            state_rounding: Rounding::Nearest,
        }
    }

    /// A step of one tensor, none skipped.
    #[track_caller]
    fn step_on_device(client: &Client, tensors: &AdamWTensors<TestRuntime>, clock: &Tensor) {
        let list = std::slice::from_ref(tensors);
        adamw_on_device(client, list, clock, None, None, &HYPERPARAMETERS)
            .expect("tensors that fit");
    }

    fn download(client: &Client, state: &StateTensor<TestRuntime>) -> HostMoment {
        match state.format {
            None => HostMoment::Full(read(client, &state.values)),
            Some(format) => HostMoment::Compressed(
                HostState {
                    codes: read(client, &state.values),
                    scales: read(client, state.scales.as_ref().expect("scales")),
                    exponents: state
                        .exponents
                        .as_ref()
                        .map(|exponents| read(client, exponents))
                        .unwrap_or_default(),
                },
                format,
            ),
        }
    }

    /// The tensors that a step may change.
    pub fn changed(tensors: &AdamWTensors<TestRuntime>) -> impl Iterator<Item = &Tensor> {
        let changed = [
            Some(&tensors.parameter),
            Some(&tensors.first.values),
            tensors.first.scales.as_ref(),
            tensors.first.exponents.as_ref(),
            Some(&tensors.second.values),
            tensors.second.scales.as_ref(),
            tensors.second.exponents.as_ref(),
        ];
        changed.into_iter().flatten()
    }

    /// All bytes of them.
    fn bytes(client: &Client, tensors: &AdamWTensors<TestRuntime>) -> Vec<Vec<u8>> {
        let read = |tensor: &Tensor| client.read_one(tensor.handle.clone());
        changed(tensors)
            .map(|tensor| read(tensor).expect("a buffer").to_vec())
            .collect()
    }

    #[test]
    fn full_moments_are_adamw() {
        let (client, mut random) = (client(), Random::fresh());
        // Past 65,536 elements a tensor has a launch of its own; 70,001 has a tail.
        for n in [1, 3, 127, 129, 4097, 70_000, 70_001] {
            let p = parameters(&mut random, n);
            let mut exact = Exact::new(&p);
            let mut tensors = tensors(&client, &p, (None, None));
            let clock = initial_clock(&client);
            for _ in 0..5 {
                let g = gradients(&mut random, n);
                exact.step(&g, &HYPERPARAMETERS);
                tensors.gradient = upload(&client, &g, &[n], dtype::<f32>());
                tick(&client, &clock, None).expect("a clock");
                step_on_device(&client, &tensors, &clock);
                let what = |name| format!("{name} of {n} in step {}", exact.t);
                let (m, v) = (&tensors.first.values, &tensors.second.values);
                assert_close(&read_float(&client, m), &exact.m, 1e-3, &what("m"));
                assert_close(&read_float(&client, v), &exact.v, 1e-9, &what("v"));
                let p = read_float(&client, &tensors.parameter);
                assert_close(&p, &exact.p, 0.0, &what("p"));
            }
            assert_eq!(read::<i32>(&client, &clock), [5, 0]);
        }
    }

    /// The correction of the bias over a long run: 1 - beta^t from its series, from the exponential, and where they
    /// meet.
    #[test]
    fn late_steps_are_adamw() {
        let (client, mut random) = (client(), Random::fresh());
        let n = 200;
        for t in [1, 2, 4, 5, 49, 400, 500, 501, 10_000, 1_000_000] {
            // Parameters of the size of an update do not hide its error.
            let p: Vec<f32> = (0..n).map(|_| 1e-3 * random.normal()).collect();
            let g = gradients(&mut random, n);
            let mut exact = Exact::new(&p);
            exact.t = t - 1;
            exact.step(&g, &HYPERPARAMETERS);
            let mut tensors = tensors(&client, &p, (None, None));
            tensors.gradient = upload(&client, &g, &[n], dtype::<f32>());
            let clock = upload_i32(&client, &[t, 0], &[2]);
            step_on_device(&client, &tensors, &clock);
            let p = read_float(&client, &tensors.parameter);
            assert_close(&p, &exact.p, 1e-3, &format!("p in step {t}"));
        }
    }

    #[test]
    fn kernels_equal_the_reference_in_every_format() {
        let mut random = Random::fresh();
        let pairs = drawn(&mut random, pairs(), 3);
        kernels_equal_the_reference(&mut random, &pairs, &SIZES, None);
    }

    /// Cubes that fill tables take several tiles of a large tensor, here of 1024 elements.
    #[test]
    fn kernels_equal_the_reference_in_many_tiles() {
        let format = StateFormat::DYNAMIC_EXPONENT.with_group(4);
        let pairs = [(Some(format), Some(format))];
        kernels_equal_the_reference(&mut Random::fresh(), &pairs, &[1100 * 1024 + 5], None);
    }

    /// A cube of several tiles, each of 2048 elements, does the same as cubes of one tile: the tensor has more tiles
    /// than cubes, its halves have not.
    #[test]
    fn many_tiles_are_as_one() {
        let (client, mut random) = (client(), Random::fresh());
        let int8 = StateFormat::INT8;
        let dynamic = StateFormat::DYNAMIC_EXPONENT.expanded();
        let e4m3 = StateFormat::E4M3.expanded();
        // Moments that take turns in planes, that take turns across planes, and that do not.
        for pair in [
            (dynamic, e4m3),
            (dynamic.with_group(1024), dynamic.with_group(1024)),
            (int8, dynamic),
        ] {
            let pair = (Some(pair.0), Some(pair.1));
            let half = 300 * 2048;
            let p = parameters(&mut random, 2 * half);
            let gradients = [(); 2].map(|()| gradients(&mut random, 2 * half));
            let step = |range: std::ops::Range<usize>| {
                let mut tensors = tensors(&client, &p[range.clone()], pair);
                let clock = initial_clock(&client);
                for g in &gradients {
                    tensors.gradient =
                        upload(&client, &g[range.clone()], &[range.len()], dtype::<f32>());
                    tick(&client, &clock, None).expect("a clock");
                    step_on_device(&client, &tensors, &clock);
                }
                bytes(&client, &tensors)
            };
            let halves = step(0..half).into_iter().zip(step(half..2 * half));
            for (whole, (first, second)) in step(0..2 * half).into_iter().zip(halves) {
                assert!(whole == [first, second].concat(), "{pair:?}");
            }
        }
    }

    #[test]
    fn kernels_round_stochastically_as_the_reference() {
        let mut random = Random::fresh();
        let key = fresh_key(&mut random);
        let pairs = pairs();
        // Each encoding with and without expansion.
        let pairs = [&pairs[..1], &pairs[5..6], &pairs[15..21]].concat();
        let pairs = drawn(&mut random, pairs, 2);
        kernels_equal_the_reference(&mut random, &pairs, &SIZES, Some(key));
    }

    const SIZES: [usize; 6] = [1, 3, 127, 129, 4097, 4096];

    fn kernels_equal_the_reference(
        random: &mut Random,
        pairs: &[Pair],
        sizes: &[usize],
        key: Option<StochasticKey>,
    ) {
        let client = client();
        let (mut total, mut different, mut exponents, mut cancelled) = (0, 0, 0, 0);
        for &pair in pairs {
            for &n in sizes {
                let mut p = parameters(random, n);
                let mut tensors = tensors(&client, &p, pair);
                tensors.state_rounding = key.map_or(Rounding::Nearest, Rounding::Stochastic);
                let clock = initial_clock(&client);
                for t in 1..=3 {
                    let g = gradients(random, n);
                    let mut m = download(&client, &tensors.first);
                    let mut v = download(&client, &tensors.second);
                    let step = Step::new(&HYPERPARAMETERS, t).expect("betas below 1");
                    let dither = key.map(|key| StateDither { key, t, start: 0 });
                    adamw(&step, &mut p, &g, m.chunk(), v.chunk(), dither);
                    tensors.gradient = upload(&client, &g, &[n], dtype::<f32>());
                    tick(&client, &clock, None).expect("a clock");
                    step_on_device(&client, &tensors, &clock);
                    let what = format!("{pair:?}, {n}, step {t}");
                    let actual = read_float(&client, &tensors.parameter);
                    for (a, e) in actual.iter().zip(&p) {
                        assert!(
                            (a - e).abs() <= 1e-6 * e.abs(),
                            "{what}: {a} instead of {e}"
                        );
                    }
                    p = actual;
                    for (expected, state) in [(&m, &tensors.first), (&v, &tensors.second)] {
                        match (expected, download(&client, state)) {
                            (HostMoment::Full(expected), HostMoment::Full(actual)) => {
                                assert_same_floats(&actual, expected, &what);
                            }
                            (
                                HostMoment::Compressed(expected, format),
                                HostMoment::Compressed(actual, _),
                            ) if !format.expand => {
                                assert_same_floats(&actual.scales, &expected.scales, &what);
                                assert_eq!(actual.codes, expected.codes, "{what}");
                            }
                            (
                                HostMoment::Compressed(expected, format),
                                HostMoment::Compressed(actual, _),
                            ) => {
                                // The powers of the decompression differ in their last digits, and so may the
                                // exponents.
                                for (index, codes) in
                                    expected.codes.chunks(format.group).enumerate()
                                {
                                    let (a, e) = (actual.scales[index], expected.scales[index]);
                                    assert!(
                                        (a - e).abs() <= 2e-5 * e,
                                        "{what}: scale {a:e}, {e:e}"
                                    );
                                    let (a, e) =
                                        (actual.exponents[index], expected.exponents[index]);
                                    total += codes.len();
                                    if a != e {
                                        assert!(a.abs_diff(e) <= 1, "{what}: exponent {a}, {e}");
                                        exponents += 1;
                                        continue;
                                    }
                                    let start = index * format.group;
                                    let actual = &actual.codes[start..][..codes.len()];
                                    for (a, e) in actual.iter().zip(codes) {
                                        // A moment whose terms cancel to some 1e-7 of them is what one rounding
                                        // less, as of a fused multiply-add, leaves of it: the smallest of its group.
                                        let is_small = (a & 0x7f).max(e & 0x7f) < 16;
                                        let is_near = a.abs_diff(*e) <= 1;
                                        assert!(is_near || is_small, "{what}: code {a}, {e}");
                                        cancelled += usize::from(!is_near);
                                        different += usize::from(a != e);
                                    }
                                }
                            }
                            _ => unreachable!("one format"),
                        }
                    }
                }
            }
        }
        println!(
            "with expansion {different} of {total} codes differ, {cancelled} by more than 1, {exponents} exponents"
        );
        assert!(cancelled <= 1 + total / 200_000, "{cancelled} of {total}");
        assert!(total == 0 || (different * 200 < total && exponents * 2000 < total));
    }

    #[test]
    fn raised_flags_change_nothing() {
        let (client, mut random) = (client(), Random::fresh());
        let mut list = Vec::new();
        let mut pairs = drawn(&mut random, pairs(), 3);
        pairs.push((None, None));
        for (index, pair) in pairs.into_iter().enumerate() {
            let n = 100 + 97 * index;
            let mut tensors = tensors(&client, &parameters(&mut random, n), pair);
            let g = gradients(&mut random, n);
            tensors.gradient = upload(&client, &g, &[n], dtype::<f32>());
            list.push(tensors);
        }
        let (clock, flag) = (initial_clock(&client), initial_flag(&client));
        let step = |list: &[AdamWTensors<TestRuntime>]| {
            tick(&client, &clock, Some(&flag)).expect("a clock");
            adamw_on_device(&client, list, &clock, Some(&flag), None, &HYPERPARAMETERS)
                .expect("tensors that fit");
        };
        let search = |list: &[AdamWTensors<TestRuntime>]| {
            let gradients: Vec<Tensor> = list.iter().map(|t| t.gradient.clone()).collect();
            find_nonfinite(&client, &gradients, &flag).expect("gradients");
            read::<i32>(&client, &flag)[0]
        };
        let all = |list: &[AdamWTensors<TestRuntime>]| -> Vec<_> {
            list.iter().map(|tensors| bytes(&client, tensors)).collect()
        };
        assert_eq!(search(&list), 0);
        let before = all(&list);
        step(&list);
        let after = all(&list);
        assert!(before.iter().zip(&after).all(|(a, b)| a != b));
        assert_eq!(read::<i32>(&client, &clock), [1, 0]);

        let mut g = vec![0.0; list[3].first.len()];
        *g.last_mut().expect("elements") = f32::NEG_INFINITY;
        list[3].gradient = upload(&client, &g, &[g.len()], dtype::<f32>());
        assert_eq!(search(&list), 4);
        step(&list);
        assert!(all(&list) == after);
        assert_eq!(read::<i32>(&client, &clock), [1, 1]);
    }

    /// The new value of a parameter that stays as it is: what a step in place makes of it, to the bit, and the old one
    /// where a flag is raised.
    #[test]
    fn parameters_that_others_hold_stay() {
        let (client, mut random) = (client(), Random::fresh());
        let mut pairs = drawn(&mut random, pairs(), 3);
        pairs.push((None, None));
        for (index, pair) in pairs.into_iter().enumerate() {
            for float in [dtype::<f32>(), dtype::<bf16>()] {
                if !float_types(&client).contains(&float) {
                    continue;
                }
                let n = [5, 1000, 4099, 70_001][(index + random.index(2)) % 4];
                let (p, g) = (parameters(&mut random, n), gradients(&mut random, n));
                let make = |updated| {
                    let mut tensors = tensors(&client, &p, pair);
                    tensors.parameter = upload(&client, &p, &[n], float);
                    tensors.gradient = upload(&client, &g, &[n], dtype::<f32>());
                    tensors.rounding = Rounding::Stochastic(StochasticKey { seed: 7, stream: 3 });
                    tensors.updated = updated;
                    tensors
                };
                let (clock, flag) = (initial_clock(&client), initial_flag(&client));
                tick(&client, &clock, None).expect("a clock");
                let step = |tensors: &AdamWTensors<TestRuntime>| {
                    let list = std::slice::from_ref(tensors);
                    adamw_on_device(&client, list, &clock, Some(&flag), None, &HYPERPARAMETERS)
                        .expect("tensors that fit");
                };
                let unwritten = || upload(&client, &vec![1e30; n], &[n], float);
                let (in_place, moved) = (make(None), make(Some(unwritten())));
                let before = read_float(&client, &moved.parameter);
                step(&in_place);
                step(&moved);
                let what = format!("{pair:?}, {float}, {n}");
                let [stays, updated, expected] = [
                    &moved.parameter,
                    moved.updated.as_ref().expect("a tensor"),
                    &in_place.parameter,
                ]
                .map(|it| read_float(&client, it));
                assert_same_floats(&stays, &before, &what);
                assert_same_floats(&updated, &expected, &what);
                // Rounding to 16 bits may swallow the update of a few.
                assert!(updated != before || n < 1000, "{what}");
                assert_eq!(
                    bytes(&client, &moved)[1..],
                    bytes(&client, &in_place)[1..],
                    "moments, {what}"
                );

                let raised = upload_i32(&client, &[1], &[1]);
                let skipped = make(Some(unwritten()));
                let list = std::slice::from_ref(&skipped);
                adamw_on_device(&client, list, &clock, Some(&raised), None, &HYPERPARAMETERS)
                    .expect("tensors that fit");
                let kept = skipped.updated.as_ref().expect("a tensor");
                assert_same_floats(&read_float(&client, kept), &before, &what);
            }
        }
    }

    #[test]
    fn every_place_and_type_is_searched() {
        let (client, mut random) = (client(), Random::fresh());
        for float in drawn(&mut random, float_types(&client), 1) {
            for n in [1, 3, 4, 5000, 300_001, 300_000] {
                let bad = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][random.index(3)];
                let mut x = vec![1.0; n];
                x[random.index(n)] = bad;
                let good = upload(&client, &[60_000.0], &[1], float);
                let list: Vec<Tensor> = (0..19)
                    .map(|index| {
                        if index == 13 {
                            upload(&client, &x, &[n], float)
                        } else {
                            good.clone()
                        }
                    })
                    .collect();
                let flag = initial_flag(&client);
                find_nonfinite(&client, &list[..13], &flag).expect("gradients");
                assert_eq!(read::<i32>(&client, &flag), [0]);
                find_nonfinite(&client, &list, &flag).expect("gradients");
                assert_eq!(read::<i32>(&client, &flag), [14], "{float}, {n}");
            }
        }
    }

    #[test]
    fn nonfinite_gradients_are_not_hidden() {
        let (client, n) = (client(), 300);
        for pair in drawn(&mut Random::fresh(), pairs(), 3) {
            let mut tensors = tensors(&client, &vec![1.0; n], pair);
            let mut g = vec![1e-3; n];
            g[5] = f32::NAN;
            tensors.gradient = upload(&client, &g, &[n], dtype::<f32>());
            let clock = upload_i32(&client, &[1, 0], &[2]);
            step_on_device(&client, &tensors, &clock);
            let p = read_float(&client, &tensors.parameter);
            assert_eq!(p.iter().filter(|p| p.is_nan()).count(), 1);
            for state in [&tensors.first, &tensors.second] {
                let values = dequantize_on_device(&client, state).expect("a state");
                assert!(read_float(&client, &values)[5].is_nan());
            }
        }
    }

    /// A finite gradient whose square is infinite: the root of its second moment is infinite too, and the update 0.
    #[test]
    fn infinite_second_moments_stop_the_update() {
        let client = client();
        let pairs = drawn(&mut Random::fresh(), pairs().into_iter().step_by(5), 2);
        let cases = pairs.into_iter().map(|pair| (pair, 300));
        // Past 65,536 elements a tensor has a launch of its own.
        for (pair, n) in cases.chain([((None, None), 300), ((None, None), 70_000)]) {
            let mut p = vec![1.0; n];
            let mut tensors = tensors(&client, &p, pair);
            let mut g = vec![1e-3; n];
            g[5] = 1e20;
            tensors.gradient = upload(&client, &g, &[n], dtype::<f32>());
            let (mut m, mut v) = (
                HostMoment::zeros(n, pair.0, Moment::First),
                HostMoment::zeros(n, pair.1, Moment::Second),
            );
            let step = Step::new(&HYPERPARAMETERS, 1).expect("betas below 1");
            adamw(&step, &mut p, &g, m.chunk(), v.chunk(), None);
            let clock = upload_i32(&client, &[1, 0], &[2]);
            step_on_device(&client, &tensors, &clock);
            let actual = read_float(&client, &tensors.parameter);
            for (index, (a, e)) in actual.iter().zip(&p).enumerate() {
                assert!(
                    (a - e).abs() <= 1e-6 * e,
                    "{pair:?}[{index}]: {a} instead of {e}"
                );
            }
            assert!((actual[5] - (1.0 - 1e-4)).abs() < 1e-6, "only decay");
        }
    }

    #[test]
    fn half_gradients_and_parameters() {
        let (client, mut random) = (client(), Random::fresh());
        let pair = pairs()[5];
        let n = 1001;
        for float in drawn(&mut random, float_types(&client), 1) {
            for pair in [pair, (None, None)] {
                let mut p = parameters(&mut random, n);
                let g = rounded(&gradients(&mut random, n), float);
                let mut tensors = tensors(&client, &p, pair);
                tensors.gradient = upload(&client, &g, &[n], float);
                let (mut m, mut v) = (
                    HostMoment::zeros(n, pair.0, Moment::First),
                    HostMoment::zeros(n, pair.1, Moment::Second),
                );
                let step = Step::new(&HYPERPARAMETERS, 1).expect("betas below 1");
                adamw(&step, &mut p, &g, m.chunk(), v.chunk(), None);
                let clock = upload_i32(&client, &[1, 0], &[2]);
                step_on_device(&client, &tensors, &clock);
                for (a, e) in read_float(&client, &tensors.parameter).iter().zip(&p) {
                    assert!(
                        (a - e).abs() <= 1e-6 * e.abs(),
                        "{float}: {a} instead of {e}"
                    );
                }
            }
        }
        if !float_types(&client).contains(&dtype::<bf16>()) {
            return;
        }
        // One value, one gradient: the average of the roundings is the updated value.
        let (n, p) = (1 << 16, 1.0f32);
        let key = fresh_key(&mut random);
        let mut tensors = tensors(&client, &vec![p; n], pair);
        tensors.parameter = upload(&client, &vec![p; n], &[n], dtype::<bf16>());
        tensors.gradient = upload(&client, &vec![-0.5; n], &[n], dtype::<f32>());
        tensors.rounding = Rounding::Stochastic(key);
        let clock = upload_i32(&client, &[1, 0], &[2]);
        step_on_device(&client, &tensors, &clock);
        let step = Step::new(&HYPERPARAMETERS, 1).expect("betas below 1");
        let updated = step.update(p, -0.5, &mut 0.0, &mut 0.0);
        let z = z_score(updated, &read_float(&client, &tensors.parameter));
        assert!(z.abs() < 5.0, "{updated} was rounded with z = {z}");
    }

    #[test]
    fn wrong_tensors_are_refused() {
        let client = client();
        let clock = initial_clock(&client);
        let step = |tensors: &AdamWTensors<TestRuntime>, clock: &Tensor| {
            adamw_on_device(
                &client,
                std::slice::from_ref(tensors),
                clock,
                None,
                None,
                &HYPERPARAMETERS,
            )
        };
        let good = tensors(&client, &[1.0; 64], pairs()[0]);
        assert!(step(&good, &clock).is_ok());
        assert!(step(&good, &initial_flag(&client)).is_err());
        assert!(step(&tensors(&client, &[], pairs()[0]), &clock).is_ok());
        let mut short = good.clone();
        short.gradient = upload(&client, &[0.0; 60], &[60], dtype::<f32>());
        assert!(step(&short, &clock).is_err());
        let mut unscaled = good.clone();
        unscaled.first.scales = None;
        assert!(step(&unscaled, &clock).is_err());
        let format = |group| {
            Some(StateFormat {
                encoding: Encoding::E4M3,
                expand: false,
                group,
            })
        };
        let error = step(
            &tensors(&client, &[1.0; 64], (format(128), format(192))),
            &clock,
        );
        assert!(error.unwrap_err().to_string().contains("128 and 192"));
    }
}
