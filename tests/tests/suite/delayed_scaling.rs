//! Delayed scaling of FP8: histories of maxima over steps, runs and records, against a model of them on the host.

use burn::{
    backend::Autodiff,
    optim::{GradientsAccumulator, GradientsParams, Optimizer},
    record::{BinBytesRecorder, FullPrecisionSettings, Recorder},
    tensor::{Tensor, backend::AutodiffBackend},
};
use burn_quant_train::{
    QuantTrain,
    data::DataBackend,
    layer::{AmaxAlgorithm, DelayedScaling, SlotValues},
    optim::{LayerBackend, QuantAdamW, QuantAdamWConfig, QuantOptimizer},
    recipe::DelayedFp8,
};
use cubecl_kernels::{
    granularity::Granularity, number::Number, quantize::QuantizeSpec, reference, scale::MIN_ABSMAX,
    shape::MatrixShape,
};
use quant_train_tests::{
    Rng,
    data::{floats, same_bits, tensor},
    models::{One, Three},
    train::{attached, every_layer},
};

use crate::suite::conformance::Matrix;

quant_train_tests::on_every_backend! {
    histories_follow_the_maxima_of_steps => short_histories;
    products_take_the_scale_of_earlier_steps => saturation;
    a_first_step_is_right_at_any_magnitude => first_step;
    runs_of_a_step_have_one_maximum => microbatches;
    layers_of_one_input_have_equal_histories => shared_input;
    a_resumed_history_is_exact_and_may_change_its_length => resume;
}

type T<B> = QuantTrain<Autodiff<B>, DelayedFp8<f32>>;
type Optim<B> = QuantOptimizer<QuantAdamW<One<T<B>>, T<B>>, T<B>>;

const K: usize = 12;
const N: usize = 9;
const SLOTS: [&str; 3] = ["amax-x", "amax-w", "amax-dy"];

fn config(seed: u64, scaling: DelayedScaling) -> QuantAdamWConfig {
    every_layer(seed).with_scaling(scaling)
}

/// The values of the slots of the first layer.
fn values<B: LayerBackend, O>(optim: &QuantOptimizer<O, B>) -> SlotValues {
    optim.view().record().layers[0].slots.clone()
}

fn largest(values: &[f32]) -> f32 {
    match values.iter().all(|value| value.is_finite()) {
        true => values.iter().fold(0.0, |largest, x| largest.max(x.abs())),
        false => f32::NAN,
    }
}

/// The state of one matrix in [`DelayedScaling`].
struct Model {
    config: DelayedScaling,
    history: Vec<f32>,
    maximum: f32,
}

impl Model {
    fn new(config: DelayedScaling) -> Self {
        Self {
            config,
            history: Vec::new(),
            maximum: 0.0,
        }
    }

    /// Ends a step whose runs had these maxima.
    fn end_step(&mut self, runs: &[f32], step: u64) {
        let is_finite = runs.iter().all(|absmax| absmax.is_finite());
        let latest = runs.iter().copied().fold(0.0, f32::max);
        if !is_finite || latest < MIN_ABSMAX {
            return;
        }
        self.history.insert(0, latest);
        self.history.truncate(self.config.history);
        if self.maximum > 0.0 && !(step + 1).is_multiple_of(self.config.interval) {
            return;
        }
        let followed = match self.config.algorithm {
            AmaxAlgorithm::Max => self.history.iter().copied().fold(0.0, f32::max),
            AmaxAlgorithm::MostRecent => latest,
        };
        self.maximum = (followed * 2f32.powi(self.config.margin as i32)).min(f32::MAX);
    }

    #[track_caller]
    fn check(&self, values: &SlotValues, slot: &str, what: &str) {
        let known = |name: &str| values.get(name).cloned().unwrap_or_default();
        let maximum = match self.maximum > 0.0 {
            true => vec![self.maximum],
            false => Vec::new(),
        };
        assert_eq!(known(slot), maximum, "{what}: {slot}");
        let history = format!("{slot}.history");
        assert_eq!(known(&history), self.history, "{what}: {history}");
    }
}

/// A run of the layer; returns the gradients of its parameters.
fn run<B: DataBackend>(
    model: &One<T<B>>,
    x: &[f32],
    dy: &[f32],
) -> <T<B> as AutodiffBackend>::Gradients {
    let device = B::Device::default();
    let rows = x.len() / K;
    let x = tensor::<T<B>, 2>(x, [rows, K], &device).require_grad();
    let y = model.linear.forward(x);
    (y * tensor::<T<B>, 2>(dy, [rows, N], &device))
        .sum()
        .backward()
}

/// A matrix of any magnitude, sometimes of nothing, or with what is not finite.
fn matrix(rng: &mut Rng, count: usize) -> Vec<f32> {
    let magnitude = 10f64.powf(8.0 * rng.uniform() - 4.0);
    let mut matrix = rng.normals(count, magnitude);
    let place = rng.below(count);
    match rng.below(16) {
        0 => matrix.fill(0.0),
        1 => matrix.fill(-1e-38),
        2 => matrix[place] = f32::NAN,
        3 => matrix[place] = f32::INFINITY,
        4 => matrix[place] = f32::NEG_INFINITY,
        _ => {}
    }
    matrix
}

/// Steps of one to three runs; every step's record is that of the model.
fn follow<B: DataBackend>(seed: u64, scaling: DelayedScaling, steps: u64, looks: u64) {
    let mut rng = Rng::new(seed);
    let what = format!("seed {seed}: {scaling:?}");
    let (mut optim, mut model) = attached::<T<B>, _>(
        &config(seed, scaling),
        One::new(K, N, false, &B::Device::default()),
        seed,
    );
    let mut models = SLOTS.map(|_| Model::new(scaling));
    for step in 0..steps {
        let weight = largest(&floats(&model.linear.weight.val()));
        let mut maxima = SLOTS.map(|_| Vec::new());
        let mut accumulator = GradientsAccumulator::new();
        for _ in 0..1 + rng.below(3) {
            let (x, dy) = (matrix(&mut rng, 4 * K), matrix(&mut rng, 4 * N));
            let grads = run::<B>(&model, &x, &dy);
            accumulator.accumulate(&model, GradientsParams::from_grads(grads, &model));
            maxima[0].push(largest(&x));
            maxima[1].push(weight);
            maxima[2].push(largest(&dy));
        }
        model = optim.step(1e-3, model, accumulator.grads());
        for (model, maxima) in models.iter_mut().zip(&maxima) {
            model.end_step(maxima, step);
        }
        if step % looks == 0 || step + 1 == steps {
            let values = values(&optim);
            for (model, slot) in models.iter().zip(SLOTS) {
                model.check(&values, slot, &format!("{what}, step {step}"));
            }
        }
    }
}

fn short_histories<B: DataBackend>(seed: u64) {
    let settings = [
        (AmaxAlgorithm::Max, 0, 1, 5),
        (AmaxAlgorithm::MostRecent, 3, 1, 1),
        (AmaxAlgorithm::Max, 1, 4, 3),
        (AmaxAlgorithm::MostRecent, 0, 3, 6),
    ];
    for (algorithm, margin, interval, history) in Rng::new(seed).drawn(settings, 1) {
        let scaling = DelayedScaling {
            history,
            margin,
            algorithm,
            interval,
        };
        follow::<B>(seed, scaling, 24, 1);
    }
}

/// Longer than the history of the defaults.
#[cfg(feature = "flex")]
#[test]
fn long_histories() {
    for algorithm in [AmaxAlgorithm::Max, AmaxAlgorithm::MostRecent] {
        let scaling = DelayedScaling {
            algorithm,
            ..DelayedScaling::default()
        };
        follow::<burn::backend::Flex>(quant_train_tests::seed(), scaling, 1100, 37);
    }
}

/// The matrix as a layer sees it that has this maximum.
fn seen(x: &[f32], shape: [usize; 2], number: Number, maximum: f32) -> Matrix {
    let spec = QuantizeSpec::new(number, Granularity::Tensor);
    let of = MatrixShape::new(shape[0], shape[1]);
    let (quantized, _) = reference::quantize_delayed(x, of, &spec, maximum);
    Matrix::of(&reference::dequantize(&quantized), shape)
}

#[track_caller]
fn close(got: &[f32], expected: &Matrix, what: &str) {
    let error = expected.distance(got) / expected.norm();
    assert!(error < 5e-6, "{what}: differs by {error:e}");
}

/// Y, dX and dW of data that is larger or smaller than in earlier steps.
fn saturation<B: DataBackend>(seed: u64) {
    let (device, mut rng) = (B::Device::default(), Rng::new(seed));
    let (mut optim, mut model) = attached::<T<B>, _>(
        &config(seed, DelayedScaling::default()),
        One::new(K, N, false, &device),
        seed,
    );
    let rows = 20;
    for step in 0..4 {
        let what = format!("seed {seed}, step {step}");
        let values = values(&optim);
        let maxima = SLOTS.map(|slot| values.get(slot).map_or(0.0, |values| values[0]));
        assert_eq!(maxima[0] > 0.0, step > 0, "{what}: {maxima:?}");
        // The second step has smaller numbers, the third one exceeds both.
        let magnitude = [1.0, 0.01, 50.0, 2.0][step];
        let x = rng.normals(rows * K, magnitude);
        let dy = rng.normals(rows * N, 1e-3 * magnitude);
        let weight = floats(&model.linear.weight.val());
        let input = tensor::<T<B>, 2>(&x, [rows, K], &device).require_grad();
        let y = model.linear.forward(input.clone());
        let of_y = floats(&y);
        let grads = (y * tensor::<T<B>, 2>(&dy, [rows, N], &device))
            .sum()
            .backward();
        let of_x = seen(&x, [rows, K], Number::E4M3, maxima[0]);
        let of_w = seen(&weight, [K, N], Number::E4M3, maxima[1]);
        let of_dy = seen(&dy, [rows, N], Number::E5M2, maxima[2]);
        close(&of_y, &of_x.times(&of_w), &format!("{what}: Y"));
        let dx = floats(&input.grad(&grads).expect("dX"));
        close(&dx, &of_dy.times(&of_w.t()), &format!("{what}: dX"));
        let dw = floats(&model.linear.weight.grad(&grads).expect("dW"));
        close(&dw, &of_x.t().times(&of_dy), &format!("{what}: dW"));
        // Nothing becomes larger than what the scale has room for.
        if step == 2 {
            let cut = largest(&of_x.floats());
            assert!((cut / maxima[0] - 1.0).abs() < 1e-6, "{what}: {cut}");
            assert!(largest(&x) > 10.0 * cut, "{what}: nothing saturates");
        }
        let grads = GradientsParams::from_grads(grads, &model);
        model = optim.step(1e-2, model, grads);
    }
}

/// Without a history a scale of 1 would saturate large data and lose small gradients.
fn first_step<B: DataBackend>(seed: u64) {
    let (device, mut rng) = (B::Device::default(), Rng::new(seed));
    for (x_magnitude, dy_magnitude) in [(1e6, 1e-9), (1e-7, 1e8)] {
        let (_optim, model) = attached::<T<B>, _>(
            &config(seed, DelayedScaling::default()),
            One::new(K, N, false, &device),
            seed,
        );
        let rows = 30;
        let x = rng.normals(rows * K, x_magnitude);
        let dy = rng.normals(rows * N, dy_magnitude);
        let weight = floats(&model.linear.weight.val());
        let dw = floats(
            &model
                .linear
                .weight
                .grad(&run::<B>(&model, &x, &dy))
                .expect("dW"),
        );
        let exact = Matrix::of(&x, [rows, K])
            .t()
            .times(&Matrix::of(&dy, [rows, N]));
        let error = exact.distance(&dw) / exact.norm();
        // E5M2 has two bits of mantissa.
        assert!(error < 0.1, "seed {seed}: {error}, W {weight:?}");
    }
}

/// One run of four batches and four runs of one leave the same history, and one update.
fn microbatches<B: DataBackend>(seed: u64) {
    let device = B::Device::default();
    let mut rng = Rng::new(seed);
    let (x, dy) = (rng.normals(16 * K, 1.0), rng.normals(16 * N, 1.0));
    let history = |parts: usize| {
        let (mut optim, model) = attached::<T<B>, _>(
            &config(seed, DelayedScaling::default()),
            One::new(K, N, false, &device),
            seed,
        );
        let mut accumulator = GradientsAccumulator::new();
        for part in 0..parts {
            let of = |all: &[f32]| {
                let length = all.len() / parts;
                all[part * length..][..length].to_vec()
            };
            let grads = run::<B>(&model, &of(&x), &of(&dy));
            accumulator.accumulate(&model, GradientsParams::from_grads(grads, &model));
        }
        optim.step(1e-3, model, accumulator.grads());
        values(&optim)
    };
    let whole = history(1);
    assert_eq!(whole["amax-x.history"], [largest(&x)], "seed {seed}");
    assert_eq!(whole["amax-dy.history"], [largest(&dy)], "seed {seed}");
    assert_eq!(history(4), whole, "seed {seed}");
    // More runs than are held one by one.
    let many = {
        let (mut optim, model) = attached::<T<B>, _>(
            &config(seed, DelayedScaling::default()),
            One::new(K, N, false, &device),
            seed,
        );
        for run_of_many in 0..70 {
            let factor = if run_of_many == 3 { 1.0 } else { 0.5 };
            let x: Vec<f32> = x.iter().map(|x| x * factor).collect();
            run::<B>(&model, &x, &dy);
        }
        let grads = GradientsParams::from_grads(run::<B>(&model, &x[..K], &dy[..N]), &model);
        optim.step(1e-3, model, grads);
        values(&optim)
    };
    assert_eq!(many, whole, "seed {seed}");
}

/// Layers that read one X share its copy, and each has its maximum.
fn shared_input<B: DataBackend>(seed: u64) {
    let (device, mut rng) = (B::Device::default(), Rng::new(seed));
    let (mut optim, mut model) = attached::<T<B>, _>(
        &config(seed, DelayedScaling::default()),
        Three::new(K, N, &device),
        seed,
    );
    let mut expected = Vec::new();
    for step in 0..3 {
        let x = rng.normals(8 * K, 1.0);
        expected.insert(0, largest(&x));
        let x = tensor::<T<B>, 2>(&x, [8, K], &device).require_grad();
        // Another layer comes first in each step.
        let mut layers = [&model.q, &model.k, &model.v];
        layers.rotate_left(step);
        let sum = layers
            .map(|layer| layer.forward(x.clone()))
            .into_iter()
            .reduce(Tensor::add)
            .expect("three layers");
        let grads = GradientsParams::from_grads(sum.sum().backward(), &model);
        model = optim.step(1e-3, model, grads);
        for layer in optim.view().record().layers {
            assert_eq!(
                layer.slots["amax-x.history"], expected,
                "seed {seed}, step {step}: {}",
                layer.path
            );
        }
    }
}

/// A step on fresh data.
fn step_on<B: DataBackend>(optim: &mut Optim<B>, model: One<T<B>>, rng: &mut Rng) -> One<T<B>> {
    let magnitude = 10f64.powf(2.0 * rng.uniform());
    let (x, dy) = (rng.normals(6 * K, magnitude), rng.normals(6 * N, magnitude));
    let grads = GradientsParams::from_grads(run::<B>(&model, &x, &dy), &model);
    optim.step(1e-3, model, grads)
}

fn resume<B: DataBackend>(seed: u64) {
    let device = B::Device::default();
    let scaling = |history| DelayedScaling {
        history,
        interval: 2,
        ..DelayedScaling::default()
    };
    let mut rng = Rng::new(seed);
    let (mut optim, mut model) = attached::<T<B>, _>(
        &config(seed, scaling(5)),
        One::new(K, N, false, &device),
        seed,
    );
    for _ in 0..7 {
        model = step_on(&mut optim, model, &mut rng);
    }
    let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
    let bytes = Recorder::<T<B>>::record(&recorder, optim.to_record(), ()).expect("recorded");
    let (known, at_record) = (values(&optim), rng);
    assert_eq!(known["amax-x.history"].len(), 5);
    for length in [5, 2, 9] {
        let config = config(seed + 1, scaling(length));
        let (after, _) = attached::<T<B>, _>(&config, One::new(K, N, false, &device), seed);
        let record = Recorder::<T<B>>::load(&recorder, bytes.clone(), &device).expect("loaded");
        let mut after = after.load_record(record);
        let mut resumed = after.attach(model.clone());
        let mut rng = at_record.clone();
        let mut models = SLOTS.map(|slot| Model {
            config: scaling(length),
            history: known[&format!("{slot}.history")][..length.min(5)].to_vec(),
            maximum: known[slot][0],
        });
        for step in 7..11 {
            let mut of_data = rng.clone();
            let magnitude = 10f64.powf(2.0 * of_data.uniform());
            let x = largest(&of_data.normals(6 * K, magnitude));
            let dy = largest(&of_data.normals(6 * N, magnitude));
            let weight = largest(&floats(&resumed.linear.weight.val()));
            resumed = step_on(&mut after, resumed, &mut rng);
            let values = values(&after);
            for ((model, slot), absmax) in models.iter_mut().zip(SLOTS).zip([x, weight, dy]) {
                model.end_step(&[absmax], step);
                let what = format!("seed {seed}, length {length}, step {step}");
                model.check(&values, slot, &what);
            }
        }
        if length == 5 {
            let (mut uninterrupted, mut rng) = (model.clone(), at_record.clone());
            let mut optim = optim.clone();
            for _ in 7..11 {
                uninterrupted = step_on(&mut optim, uninterrupted, &mut rng);
            }
            let [ours, theirs] =
                [&resumed, &uninterrupted].map(|it| floats(&it.linear.weight.val()));
            assert!(same_bits(&ours, &theirs), "seed {seed}: weights");
            assert_eq!(values(&after), values(&optim), "seed {seed}");
        }
    }
}
