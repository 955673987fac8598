//! Step sizes and transforms of INT4 layers between steps (int4-hq-lss, Appendices A.3 to A.5).

use burn::{
    backend::Autodiff,
    optim::{GradientsParams, Optimizer},
    tensor::Tensor,
};
use burn_quant_train::{
    QuantTrain,
    data::DataBackend,
    layer::{HadamardChoice, LearnedSteps, SlotValues},
    optim::{QuantAdamW, QuantAdamWConfig, QuantOptimizer},
    recipe::{HadamardInt4, LsqInt4, SplitInt4},
};
use cubecl_kernels::{
    hadamard::{HadamardSize, HadamardTransform},
    quantize::learned_step::ResidualRows,
    reference::learned_step,
};
use quant_train_tests::{
    Rng,
    data::{floats, tensor},
    models::One,
    train::{attached, every_layer},
};

quant_train_tests::on_every_backend! {
    a_cold_step_size_follows_the_data => cold_start;
    a_step_size_moves_against_its_gradient => learning;
    a_step_size_that_says_nothing_stays => unmoved;
    a_restart_sets_the_step_size_anew => restart;
    a_record_forgets_what_a_restart_ended => restarted_record;
    a_weight_used_both_ways_is_transformed_for_each => transposed;
    outliers_get_a_larger_transform => choice;
    gradients_of_sampled_rows_are_unbiased => unbiased;
}

type Split<B> = QuantTrain<Autodiff<B>, SplitInt4<f32>>;
type Sampled<B> = QuantTrain<Autodiff<B>, HadamardInt4<f32>>;
type Optim<B> = QuantOptimizer<QuantAdamW<One<Split<B>>, Split<B>>, Split<B>>;
type Lsq<B> = QuantTrain<Autodiff<B>, LsqInt4<f32>>;

const K: usize = 64;
const N: usize = 48;
const ORDER: u32 = 3;
const RATE: f32 = 0.01;

fn config(seed: u64, steps: LearnedSteps) -> QuantAdamWConfig {
    let steps = LearnedSteps {
        learning_rate: RATE,
        hadamard: HadamardChoice::Order(ORDER),
        ..steps
    };
    every_layer(seed).with_steps(steps)
}

fn learned_from(cold_start: u64) -> LearnedSteps {
    LearnedSteps {
        cold_start,
        ..LearnedSteps::default()
    }
}

/// The values of the one layer's slots.
fn values<B: burn_quant_train::optim::LayerBackend, O>(optim: &QuantOptimizer<O, B>) -> SlotValues {
    optim.view().record().layers[0].slots.clone()
}

/// A training step on these inputs.
fn step_on<B: DataBackend>(
    optim: &mut Optim<B>,
    model: One<Split<B>>,
    x: &[f32],
    rate: f64,
) -> One<Split<B>> {
    let x = tensor::<Split<B>, 2>(x, [x.len() / K, K], &B::Device::default()).require_grad();
    let grads = model.linear.forward(x).square().sum().backward();
    let grads = GradientsParams::from_grads(grads, &model);
    optim.step(rate, model, grads)
}

fn close(got: f32, expected: f32, what: &str) {
    let error = (got / expected - 1.0).abs();
    assert!(error < 1e-5, "{what}: {got} instead of {expected}");
}

/// X whose channels are of different sizes.
fn inputs(rng: &mut Rng, rows: usize) -> Vec<f32> {
    let mut x = rng.normals(rows * K, 1.0);
    for (index, x) in x.iter_mut().enumerate() {
        *x *= 1.0 + (index % 7) as f32;
    }
    x
}

fn transforms() -> [HadamardTransform; 2] {
    let size = HadamardSize::new(ORDER).expect("a size");
    [
        HadamardTransform::of_columns(size),
        HadamardTransform::of_rows(size),
    ]
}

fn cold_start<B: DataBackend>(seed: u64) {
    let (device, mut rng) = (B::Device::default(), Rng::new(seed));
    let config = config(seed, learned_from(10));
    let (mut optim, mut model) =
        attached::<Split<B>, _>(&config, One::new(K, N, false, &device), seed);
    for step in 0..3 {
        let x = inputs(&mut rng, 20 + step);
        let [of_x, of_w] = transforms();
        let weight = floats(&model.linear.weight.val());
        let expected = [
            learned_step::cold_step(&x, [20 + step, K], of_x, 1.0),
            learned_step::cold_step(&weight, [K, N], of_w, 1.0),
        ];
        model = step_on(&mut optim, model, &x, 1e-2);
        let values = values(&optim);
        let what = format!("seed {seed}, step {step}");
        close(values["step-x"][0], expected[0], &what);
        close(values["step-w"][0], expected[1], &what);
        assert_eq!(values["hadamard"], [ORDER as f32], "{what}");
        assert!(
            !values.contains_key("step-x.first"),
            "{what}: nothing is learned yet"
        );
    }
}

/// The first step of Adam is as long as the learning rate, against the sign of the gradient, which that of the
/// surrogate's finite difference is.
fn learning<B: DataBackend>(seed: u64) {
    let (device, mut rng) = (B::Device::default(), Rng::new(seed));
    let rows = 40;
    let mut seen = 0;
    for trial in 0..6 {
        // The layer begins with the step size of its data, here with one that is too small or too large for what
        // follows.
        let config = config(seed + trial, learned_from(1));
        let (mut optim, mut model) =
            attached::<Split<B>, _>(&config, One::new(K, N, false, &device), seed + trial);
        let far = [0.6, 3.0][rng.below(2)];
        let first: Vec<f32> = inputs(&mut rng, rows).iter().map(|x| x * far).collect();
        let first = tensor::<Split<B>, 2>(&first, [rows, K], &device);
        let grads = model.linear.forward(first).sum().backward();
        model = optim.step(
            0.0,
            model.clone(),
            GradientsParams::from_grads(grads, &model),
        );
        let before = values(&optim);

        let (x, dy) = (inputs(&mut rng, rows), rng.normals(rows * N, 1.0));
        let weight = floats(&model.linear.weight.val());
        let input = tensor::<Split<B>, 2>(&x, [rows, K], &device).require_grad();
        let y = model.linear.forward(input);
        let grads = (y * tensor::<Split<B>, 2>(&dy, [rows, N], &device))
            .sum()
            .backward();
        let surrogate = Surrogate::new(
            &x,
            &weight,
            rows,
            [before["step-x"][0], before["step-w"][0]],
        );
        model = optim.step(
            0.0,
            model.clone(),
            GradientsParams::from_grads(grads, &model),
        );
        drop(model);
        let after = values(&optim);
        for (operand, slot) in ["step-x", "step-w"].into_iter().enumerate() {
            let (slope, size) = surrogate.slope(&dy, operand);
            // Where terms cancel, the rounding of dY may turn the sign.
            if slope.abs() < 0.02 * size {
                continue;
            }
            seen += 1;
            let expected = before[slot][0] * (-RATE * slope.signum() as f32).exp();
            close(
                after[slot][0],
                expected,
                &format!("seed {seed}, trial {trial}, {slot}"),
            );
            assert_eq!(after[&format!("{slot}.updates")], [1.0]);
        }
    }
    assert!(
        seen > 0,
        "seed {seed}: every gradient was too small to tell"
    );
}

/// Y as a function of both step sizes, with the remainders of rounding held fast (LSQ).
struct Surrogate {
    /// H X or H W, code and true where clamped.
    operands: [Vec<(f64, f64, bool)>; 2],
    steps: [f64; 2],
    rows: usize,
}

impl Surrogate {
    fn new(x: &[f32], weight: &[f32], rows: usize, steps: [f32; 2]) -> Self {
        let [of_x, of_w] = transforms();
        let matrices = [
            learned_step::quantize(x, [rows, K], of_x, steps[0]),
            learned_step::quantize(weight, [K, N], of_w, steps[1]),
        ];
        let operands = [0, 1].map(|operand| {
            let matrix = &matrices[operand];
            let step = f64::from(steps[operand]);
            let elements = matrix.quantized.values.iter().zip(&matrix.quotients);
            elements
                .map(|(code, v)| (f64::from(*v) * step, f64::from(*code), v.abs() > 7.0))
                .collect()
        });
        Self {
            operands,
            steps: steps.map(f64::from),
            rows,
        }
    }

    /// The values of an operand at a step size.
    fn values(&self, operand: usize, step: f64) -> Vec<f64> {
        let at = self.steps[operand];
        let of = |&(h, code, clamped): &(f64, f64, bool)| match clamped {
            true => step * code,
            false => h + step * (code - h / at),
        };
        self.operands[operand].iter().map(of).collect()
    }

    /// Σ Y ∘ dY.
    fn loss(&self, dy: &[f32], steps: [f64; 2]) -> f64 {
        let [x, w] = [0, 1].map(|operand| self.values(operand, steps[operand]));
        let mut loss = 0.0;
        for row in 0..self.rows {
            for col in 0..N {
                let y: f64 = (0..K).map(|k| x[row * K + k] * w[k * N + col]).sum();
                loss += y * f64::from(dy[row * N + col]);
            }
        }
        loss
    }

    /// The finite difference by the step size of an operand, and the size of the terms that it sums up.
    fn slope(&self, dy: &[f32], operand: usize) -> (f64, f64) {
        let h = 1e-4 * self.steps[operand];
        let at = |by: f64| {
            let mut steps = self.steps;
            steps[operand] += by;
            self.loss(dy, steps)
        };
        let slope = (at(h) - at(-h)) / (2.0 * h);
        let norm = |values: &[f64]| values.iter().map(|it| it * it).sum::<f64>().sqrt();
        let delta: Vec<f64> = {
            let [low, high] = [-h, h].map(|by| self.values(operand, self.steps[operand] + by));
            let pairs = low.iter().zip(&high);
            pairs.map(|(low, high)| (high - low) / (2.0 * h)).collect()
        };
        let other = self.values(1 - operand, self.steps[1 - operand]);
        let dy: Vec<f64> = dy.iter().map(|it| f64::from(*it)).collect();
        let inner = (self.operands[operand].len() as f64).sqrt();
        (slope, norm(&delta) * norm(&other) * norm(&dy) / inner)
    }
}

/// Gradients that are zero or not finite leave a step size as it is.
fn unmoved<B: DataBackend>(seed: u64) {
    let (device, mut rng) = (B::Device::default(), Rng::new(seed));
    let config = config(seed, learned_from(1));
    let (mut optim, mut model) =
        attached::<Split<B>, _>(&config, One::new(K, N, false, &device), seed);
    let mut before = None;
    for (step, factor) in [1.0, 0.0, f32::NAN, f32::INFINITY, 1.0]
        .into_iter()
        .enumerate()
    {
        let x = tensor::<Split<B>, 2>(&inputs(&mut rng, 16), [16, K], &device).require_grad();
        let grads = model.linear.forward(x).mul_scalar(factor).sum().backward();
        model = optim.step(
            0.0,
            model.clone(),
            GradientsParams::from_grads(grads, &model),
        );
        let now = ["step-x", "step-w"].map(|slot| values(&optim)[slot][0]);
        let before = *before.get_or_insert(now);
        if step < 4 {
            assert_eq!(now, before, "seed {seed}: gradients of {factor}");
            continue;
        }
        // Nothing of the bad gradients is left.
        for (slot, (now, before)) in ["step-x", "step-w"]
            .into_iter()
            .zip(now.into_iter().zip(before))
        {
            let ratio = f64::from(now / before).ln().abs();
            assert!(
                (ratio / f64::from(RATE) - 1.0).abs() < 1e-3,
                "seed {seed}: {slot} by {ratio}"
            );
            assert_eq!(values(&optim)[&format!("{slot}.updates")], [1.0]);
        }
    }
}

fn restart<B: DataBackend>(seed: u64) {
    let (device, mut rng) = (B::Device::default(), Rng::new(seed));
    let steps = LearnedSteps {
        restarts: vec![3],
        ..learned_from(1)
    };
    let config = config(seed, steps);
    let (mut optim, mut model) =
        attached::<Split<B>, _>(&config, One::new(K, N, false, &device), seed);
    for step in 0..5 {
        let x = inputs(&mut rng, 16);
        let cold = learned_step::cold_step(&x, [16, K], transforms()[0], 1.0);
        model = step_on(&mut optim, model, &x, 1e-3);
        let values = values(&optim);
        let updates = values.get("step-x.updates").map_or(0.0, |it| it[0]);
        let expected = [0.0, 1.0, 2.0, 0.0, 1.0][step];
        assert_eq!(updates, expected, "seed {seed}, step {step}");
        if updates == 0.0 {
            close(
                values["step-x"][0],
                cold,
                &format!("seed {seed}, step {step}"),
            );
        }
    }
}

/// Moments of a loaded record do not come back after a restart.
fn restarted_record<B: DataBackend>(seed: u64) {
    let (device, mut rng) = (B::Device::default(), Rng::new(seed));
    let steps = LearnedSteps {
        restarts: vec![3],
        ..learned_from(1)
    };
    let config = config(seed, steps);
    let (mut optim, mut model) =
        attached::<Split<B>, _>(&config, One::new(K, N, false, &device), seed);
    for step in 0..4 {
        if step == 3 {
            assert_eq!(values(&optim)["step-x.updates"], [2.0], "seed {seed}");
            let record = optim.to_record();
            optim = config.init().load_record(record);
            model = optim.attach(model);
        }
        model = step_on(&mut optim, model, &inputs(&mut rng, 16), 1e-3);
    }
    let values = values(&optim);
    let names: Vec<_> = values.keys().collect();
    assert_eq!(names, ["hadamard", "step-w", "step-x"], "seed {seed}");
}

/// x W and then h Wᵀ of one weight, whose sides have transforms of different sizes.
fn transposed<B: DataBackend>(seed: u64) {
    let (device, mut rng) = (B::Device::default(), Rng::new(seed));
    let (rows, n) = (20, 36);
    let config = config(seed, learned_from(10));
    let (optim, model) = attached::<Split<B>, _>(&config, One::new(K, n, false, &device), seed);
    let weight = model.linear.weight.val();
    let x = tensor::<Split<B>, 2>(&inputs(&mut rng, rows), [rows, K], &device).require_grad();
    let h = x.matmul(weight.clone());
    let z = floats(&h.clone().matmul(weight.clone().transpose()));

    let values = values(&optim);
    let of = |order| HadamardTransform::of_columns(HadamardSize::new(order).expect("a size"));
    let h = learned_step::quantize(&floats(&h), [rows, n], of(2), values["step-x"][0]);
    let w = learned_step::quantize(&floats(&weight), [K, n], of(2), values["step-w"][0]);
    let [h, w] = [h, w].map(|it| cubecl_kernels::reference::dequantize(&it.quantized));
    let mut largest = 0.0f64;
    let mut error = 0.0f64;
    for (index, got) in z.iter().enumerate() {
        let (row, col) = (index / K, index % K);
        let terms = (0..n).map(|i| f64::from(h[row * n + i]) * f64::from(w[col * n + i]));
        let expected: f64 = terms.sum();
        largest = largest.max(expected.abs());
        error = error.max((f64::from(*got) - expected).abs());
    }
    assert!(
        error < 1e-5 * largest,
        "seed {seed}: {error:e} of {largest:e}"
    );
}

/// Features of a few channels that are far larger than the others (figure 1): the chosen transform is larger than
/// without them, and INT4 is closer to the exact product than without a transform, by more the larger they are.
fn choice<B: DataBackend>(seed: u64) {
    let device = B::Device::default();
    let (rows, k) = (64, 256);
    let mut orders = Vec::new();
    for outlier in [1.0, 60.0] {
        let mut rng = Rng::new(seed);
        let mut x = rng.normals(rows * k, 1.0);
        for (index, x) in x.iter_mut().enumerate() {
            if index % k % 97 == 5 {
                *x *= outlier;
            }
        }
        let mut config = every_layer(seed);
        config.steps.hadamard = HadamardChoice::SmallestError;
        let (optim, model) =
            attached::<Sampled<B>, _>(&config, One::new(k, N, false, &device), seed);
        let weight = floats(&model.linear.weight.val());
        let input = tensor::<Sampled<B>, 2>(&x, [rows, k], &device).require_grad();
        let y = floats(&model.linear.forward(input));
        orders.push(values(&optim)["hadamard"][0]);

        let (_optim, plain) = attached::<Lsq<B>, _>(&config, One::new(k, N, false, &device), seed);
        assert_eq!(
            floats(&plain.linear.weight.val()),
            weight,
            "the weights of one seed"
        );
        let input = tensor::<Lsq<B>, 2>(&x, [rows, k], &device).require_grad();
        let of_lsq = floats(&plain.linear.forward(input));
        let error = |got: &[f32]| -> f64 {
            let exact = |index: usize| -> f64 {
                let (row, col) = (index / N, index % N);
                (0..k)
                    .map(|i| f64::from(x[row * k + i]) * f64::from(weight[i * N + col]))
                    .sum()
            };
            let errors = got.iter().enumerate();
            errors
                .map(|(index, y)| (f64::from(*y) - exact(index)).powi(2))
                .sum::<f64>()
                .sqrt()
        };
        if outlier > 1.0 {
            let (with, without) = (error(&y), error(&of_lsq));
            assert!(
                with < 0.7 * without,
                "seed {seed}: error {with}, without a transform {without}"
            );
        }
    }
    assert!(orders[0] < orders[1], "seed {seed}: k = {orders:?}");
    assert!(orders[1] >= 4.0, "seed {seed}: k = {orders:?}");
}

/// The mean over draws of both gradients is that of all rows.
fn unbiased<B: DataBackend>(seed: u64) {
    let device = B::Device::default();
    let (rows, draws) = (48, 300);
    let mut rng = Rng::new(seed);
    let x = inputs(&mut rng, rows);
    // Few rows matter.
    let dy: Vec<f32> = rng.normals(rows * N, 1.0);
    let scale: Vec<f32> = (0..rows)
        .map(|_| (1.5 * rng.normal()).exp() as f32)
        .collect();
    let dy: Vec<f32> = dy
        .iter()
        .enumerate()
        .map(|(i, dy)| dy * scale[i / N])
        .collect();
    let config = config(seed, learned_from(u64::MAX));
    let (_optim, model) = attached::<Sampled<B>, _>(&config, One::new(K, N, false, &device), seed);
    let mut sums = [vec![0.0; rows * K], vec![0.0; K * N]];
    let mut squares = sums.clone();
    for _ in 0..draws {
        let [dx, dw] = gradients::<Sampled<B>>(&model, &x, &dy, rows, &device);
        for (index, got) in [dx, dw].iter().enumerate() {
            for (place, value) in got.iter().enumerate() {
                sums[index][place] += f64::from(*value);
                squares[index][place] += f64::from(*value).powi(2);
            }
        }
    }
    let expected = expected(&x, &floats(&model.linear.weight.val()), &dy, rows);
    for (index, name) in ["dX", "dW"].into_iter().enumerate() {
        let draws = f64::from(draws);
        let mut deviations = Vec::new();
        for (place, expected) in expected[index].iter().enumerate() {
            let mean = sums[index][place] / draws;
            let variance = squares[index][place] / draws - mean * mean;
            if variance > 1e-9 * expected * expected {
                deviations.push((mean - expected).powi(2) / (variance / (draws - 1.0)));
            } else {
                // All draws gave this element: then it is right but for the rounding of dY.
                let error = (mean - expected).abs();
                assert!(
                    error <= 1e-3 * expected.abs(),
                    "seed {seed}: {name}: {mean}, {expected}"
                );
            }
        }
        // Squares of about standard normal numbers, not independent: rows share their draws. A row that was hardly ever
        // drawn, whose variance is then not known, has its share in the mean; one that all elements follow, in the
        // median. A bias is in both.
        let count = deviations.len();
        assert!(count > 100, "seed {seed}: {name} hardly varies");
        let mean = deviations.iter().sum::<f64>() / count as f64;
        deviations.sort_by(f64::total_cmp);
        let median = deviations[count / 2];
        assert!(
            mean.min(median) < 2.0,
            "seed {seed}: {name}: square deviations of {count} means: mean {mean}, median {median}"
        );
    }
}

fn gradients<B: burn::tensor::backend::AutodiffBackend>(
    model: &One<B>,
    x: &[f32],
    dy: &[f32],
    rows: usize,
    device: &B::Device,
) -> [Vec<f32>; 2] {
    let x = tensor::<B, 2>(x, [rows, K], device).require_grad();
    let y = model.linear.forward(x.clone());
    let grads = (y * Tensor::<B, 2>::from_data(
        burn::tensor::TensorData::new(dy.to_vec(), [rows, N]),
        device,
    ))
    .sum()
    .backward();
    let dw = model.linear.weight.grad(&grads).expect("dW");
    [floats(&x.grad(&grads).expect("dX")), floats(&dw)]
}

/// dX and dW of the exact dY, in float64.
fn expected(x: &[f32], weight: &[f32], dy: &[f32], rows: usize) -> [Vec<f64>; 2] {
    let [of_x, of_w] = transforms();
    let steps = [
        learned_step::cold_step(x, [rows, K], of_x, 1.0),
        learned_step::cold_step(weight, [K, N], of_w, 1.0),
    ];
    let x = learned_step::quantize(x, [rows, K], of_x, steps[0]);
    let w = learned_step::quantize(weight, [K, N], of_w, steps[1]);
    let z_x = cubecl_kernels::reference::dequantize(&x.quantized);
    let z_w = cubecl_kernels::reference::dequantize(&w.quantized);
    let mut of_z = [vec![0.0f32; rows * K], vec![0.0f32; K * N]];
    for k in 0..K {
        for row in 0..rows {
            let terms =
                (0..N).map(|col| f64::from(dy[row * N + col]) * f64::from(z_w[k * N + col]));
            of_z[0][row * K + k] = terms.sum::<f64>() as f32;
        }
        for col in 0..N {
            let terms =
                (0..rows).map(|row| f64::from(z_x[row * K + k]) * f64::from(dy[row * N + col]));
            of_z[1][k * N + col] = terms.sum::<f64>() as f32;
        }
    }
    let residuals = x.residuals(ResidualRows::ALL);
    let codes = &x.quantized.values;
    let saved = learned_step::saved(codes, K, &x.saturation(), &residuals, ResidualRows::ALL);
    let (dx, _) = learned_step::backward(&of_z[0], &saved, [rows, K], of_x);
    let (dw, _) = learned_step::backward(&of_z[1], &w.exact(), [K, N], of_w);
    [dx, dw].map(|it| it.into_iter().map(f64::from).collect())
}
