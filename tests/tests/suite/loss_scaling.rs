//! Dynamic loss scaling: the schedule in the optimizer, steps that do not depend on the scale, and FP16 gradients that
//! live by it.

use std::{
    any::Any,
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
};

use burn::{
    backend::{Autodiff, Flex},
    grad_clipping::GradientClippingConfig,
    module::{AutodiffModule, Module, ModuleMapper, Param, ParamId},
    nn::{Linear, LinearConfig},
    optim::{GradientsAccumulator, GradientsParams, Optimizer},
    record::{
        BinBytesRecorder, FullPrecisionSettings, NamedMpkBytesRecorder, PrecisionSettings, Record,
        Recorder,
    },
    tensor::{
        DType, Distribution, FloatDType, Tensor,
        activation::relu,
        backend::{AutodiffBackend, Backend},
        f16,
    },
};
use burn_quant_train::{
    QuantTrain,
    data::{
        DataBackend,
        optimizer::{LossScale, update_loss_scale as update_operation},
    },
    layer::SlotValues,
    optim::{
        AdamWRecord, LayerBackend, LossScaleRecord, LossScaler, LossScaling, OnNonfinite,
        QuantAdamW, QuantAdamWConfig, QuantOptimizer, QuantRecord,
    },
    recipe::{DelayedFp8, FallbackInt8, HadamardInt4, LsqInt4, MixedPrecision, Recipe},
};
use cubecl_kernels::reference::update_loss_scale;
use quant_train_tests::{
    Rng,
    data::{cosine, floats, same_bits, tensor},
    models::{Classifier, Mlp, Sample},
    on_every_backend, seed, supports,
    train::{attached, every_layer, gradients_of, parameters_of, samples},
};

use crate::suite::conformance::Matrix;

on_every_backend! {
    the_operation_follows_the_schedule => operation;
    the_optimizer_follows_the_schedule_and_resumes => schedule;
    an_overflow_changes_no_parameter_and_no_moment => overflow;
    the_scale_does_not_change_a_step => same_steps;
    the_scale_does_not_change_what_layers_keep => same_layers;
    clipping_and_accumulation_see_unscaled_gradients => clipped_and_accumulated;
    gradients_vanish_in_fp16_but_for_the_scale => vanishing;
    gradients_do_not_vanish_in_fp32 => alive_in_fp32;
}

type Quantized<B, R> = QuantTrain<Autodiff<B>, R>;
type Adam<B, M> = QuantOptimizer<QuantAdamW<M, B>, B>;

const LR: f64 = 1e-2;

/// Moves within a few steps.
const SHORT: LossScaling = LossScaling {
    initial: 1024.0,
    growth: 4.0,
    backoff: 0.125,
    growth_interval: 2,
    minimum: 16.0,
    maximum: 65_536.0,
};

/// A scale, and good steps, as the reference moves them.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Expected(f32, u32);

impl Expected {
    fn step(&mut self, good: bool) {
        update_loss_scale(&mut self.0, &mut self.1, good, &SHORT);
    }
}

fn operation<B: DataBackend>(seed: u64) {
    let (device, mut rng) = (B::Device::default(), Rng::new(seed));
    let mut expected = Expected(SHORT.initial, 0);
    let mut state = LossScale::<B>::new(expected.0, expected.1, &device);
    for step in 0..60 {
        let good = rng.below(4) > 0;
        let flag = i32::from(!good) * 3;
        let flag = B::int_from_data(vec![flag].as_slice().into(), &device);
        // Somebody else's share stays as it is.
        let shared = state.clone();
        state = update_operation::<B>(state, flag, &SHORT);
        assert_eq!(shared.read(), (expected.0, expected.1), "seed {seed}");
        expected.step(good);
        let (scale, good_steps) = state.clone().read();
        assert_eq!(Expected(scale, good_steps), expected, "seed {seed}, {step}");
        if step == 30 {
            state = LossScale::new(scale, good_steps, &device);
        }
    }
}

/// Multiplies the gradient of one parameter, the `index`-th, by infinity.
fn poisoned<B: AutodiffBackend, M: Module<B>>(
    model: &M,
    gradients: GradientsParams,
    index: usize,
) -> GradientsParams {
    struct Poison(GradientsParams, usize, usize);
    impl<B: AutodiffBackend> burn::module::ModuleVisitor<B> for Poison {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            if self.1 == self.2
                && let Some(gradient) = self.0.remove::<B::InnerBackend, D>(param.id)
            {
                let gradient = gradient + f32::INFINITY;
                self.0.register::<B::InnerBackend, D>(param.id, gradient);
            }
            self.2 += 1;
        }
    }
    let mut poison = Poison(gradients, index, 0);
    model.visit(&mut poison);
    poison.0
}

/// The gradients of a scaled loss, one of them infinite where the step is not to be `good`.
fn gradients<B: LayerBackend, M: AutodiffModule<B> + Classifier<B>>(
    model: &M,
    optim: &Adam<B, M>,
    sample: &Sample,
    good: bool,
) -> GradientsParams {
    let model = &forked::<B, M>(model);
    let loss = optim.scale(model.loss(sample));
    let gradients = GradientsParams::from_grads(loss.backward(), model);
    match good {
        true => gradients,
        false => poisoned::<B, M>(model, gradients, 1),
    }
}

/// The model with parameters that no backward pass has seen: of a leaf that several passes share, Burn's autodiff may
/// lose the gradient where another thread ends a pass of its own meanwhile.
fn forked<B: AutodiffBackend, M: Module<B>>(model: &M) -> M {
    model.clone().fork(&B::Device::default())
}

/// Trains on these batches, each with whether its gradients are finite.
fn train<B: LayerBackend, M: AutodiffModule<B> + Classifier<B>>(
    mut model: M,
    optim: &mut Adam<B, M>,
    steps: &[(Sample, bool)],
) -> M {
    for (sample, good) in steps {
        let gradients = gradients(&model, optim, sample, *good);
        model = optim.step(LR, model, gradients);
    }
    model
}

fn steps<B: Backend, M: Classifier<B>>(seed: u64, count: usize) -> Vec<(Sample, bool)> {
    let mut rng = Rng::new(seed);
    samples::<B, M>(seed, count)
        .into_iter()
        .map(|sample| (sample, rng.below(4) > 0))
        .collect()
}

fn scaled(config: QuantAdamWConfig) -> QuantAdamWConfig {
    config.with_loss_scaling(Some(SHORT))
}

fn fp8_moments(seed: u64) -> QuantAdamWConfig {
    QuantAdamWConfig {
        policy: every_layer(seed).policy,
        seed: Some(seed),
        ..QuantAdamWConfig::fp8().with_min_elements(0)
    }
}

fn schedule<B: DataBackend>(seed: u64) {
    type T<B> = Quantized<B, FallbackInt8<f32, 16>>;
    let device = B::Device::default();
    let config = scaled(fp8_moments(seed));
    let steps = steps::<T<B>, Mlp<T<B>>>(seed, 14);
    let (mut optim, mut model) = attached::<T<B>, _>(&config, Mlp::new(&device), seed);
    let mut expected = Expected(SHORT.initial, 0);
    let mut skipped = 0;
    let mut resumed = None;
    for (index, (sample, good)) in steps.iter().enumerate() {
        assert_eq!(optim.inner().loss_scale(), Some(expected.0));
        if index == 7 {
            resumed = Some((model.clone().into_record(), optim.to_record()));
        }
        let gradients = gradients(&model, &optim, sample, *good);
        model = optim.step(LR, model, gradients);
        expected.step(*good);
        skipped += u64::from(!good);
        let record = optim.to_record().optimizer;
        let scale = record.loss_scale.expect("a scale");
        assert_eq!(
            (Expected(scale.scale, scale.good_steps), record.skipped),
            (expected, skipped),
            "seed {seed}, step {index}"
        );
    }

    let (weights, record) = resumed.expect("half way");
    let bytes = BinBytesRecorder::<FullPrecisionSettings>::default();
    let written = Recorder::<T<B>>::record(&bytes, record, ()).expect("a record is written");
    let record: QuantRecord<AdamWRecord> =
        Recorder::<T<B>>::load(&bytes, written, &device).expect("a record is read");
    let resumed = config.init::<T<B>, Mlp<T<B>>>();
    // A scaler that was made before sees what is loaded.
    let scaler = resumed.loss_scaler();
    let mut resumed = resumed.load_record(record.clone());
    let scale = record.optimizer.loss_scale.expect("a scale").scale;
    assert_eq!(scaler.read::<T<B>>(), Some(scale), "seed {seed}");
    let other = resumed.attach(Mlp::new(&device).load_record(weights));
    let other = train(other, &mut resumed, &steps[7..]);
    assert_same(
        &format!("seed {seed}, resumed"),
        (&other, &resumed),
        (&model, &optim),
    );
}

/// That models and optimizers are the same to the bit, the scales aside.
#[track_caller]
fn assert_same<B: LayerBackend, M: AutodiffModule<B>>(
    what: &str,
    (a, a_optim): (&M, &Adam<B, M>),
    (b, b_optim): (&M, &Adam<B, M>),
) {
    let parameters = [a, b].map(parameters_of::<B, M>);
    for (index, (a, b)) in parameters[0].iter().zip(&parameters[1]).enumerate() {
        assert!(same_bits(a, b), "{what}: parameter {index}");
    }
    let [a, b] = [a_optim, b_optim].map(|optim| state_of(optim.to_record()));
    assert_eq!(a, b, "{what}: the optimizers' records");
}

/// All of a record but the scale: counts, moments in module order, and what layers learned.
type State = ([u64; 2], Vec<[Vec<f32>; 2]>, Vec<(String, SlotValues)>);

fn state_of(record: QuantRecord<AdamWRecord>) -> State {
    let optimizer = record.optimizer;
    let moments: BTreeMap<u64, _> = optimizer
        .parameters
        .iter()
        .map(|(id, record)| (ParamId::val(id), record.values()))
        .collect();
    let layers = record.layers.layers.into_iter();
    let layers = layers.map(|layer| {
        // The maxima of scaled gradients are scaled.
        let slots = layer.slots.into_iter();
        let slots = slots.filter(|(name, _)| !name.starts_with("amax-dy"));
        (layer.path, slots.collect())
    });
    let mut moments: Vec<_> = moments.into_values().collect();
    // Ids are drawn: models of other runs have others, in another order.
    moments.sort_by(|a, b| a.partial_cmp(b).expect("finite moments"));
    (
        [optimizer.steps, optimizer.skipped],
        moments,
        layers.collect(),
    )
}

fn overflow<B: DataBackend>(seed: u64) {
    type T<B> = Quantized<B, FallbackInt8<f32, 16>>;
    let device = B::Device::default();
    for config in [every_layer(seed), fp8_moments(seed)] {
        for clipping in [None, Some(GradientClippingConfig::Norm(1.0))] {
            let config = scaled(config.clone()).with_grad_clipping(clipping);
            let (mut optim, model) = attached::<T<B>, _>(&config, Mlp::new(&device), seed);
            let samples = samples::<T<B>, Mlp<T<B>>>(seed, 3);
            let good = (samples[0].clone(), true);
            let model = train(model, &mut optim, std::slice::from_ref(&good));
            let before = (
                parameters_of::<T<B>, _>(&model),
                optim.to_record().optimizer,
            );
            assert_eq!(before.1.loss_scale.map(|it| it.good_steps), Some(1));

            let model = train(model, &mut optim, &[(samples[1].clone(), false)]);
            let after = (
                parameters_of::<T<B>, _>(&model),
                optim.to_record().optimizer,
            );
            for (before, after) in before.0.iter().zip(&after.0) {
                assert!(same_bits(before, after), "seed {seed}: a parameter");
            }
            let expected = AdamWRecord {
                skipped: 1,
                loss_scale: Some(LossScaleRecord {
                    scale: 128.0,
                    good_steps: 0,
                }),
                ..before.1
            };
            assert!(after.1 == expected, "seed {seed}: {:?}", after.1.loss_scale);

            // The next one is taken, by the smaller scale.
            let model = train(model, &mut optim, &[good]);
            let moved = parameters_of::<T<B>, _>(&model);
            assert!(moved.iter().zip(&after.0).all(|(a, b)| !same_bits(a, b)));
            assert_eq!(optim.inner().skipped_steps(), 1);
        }
    }
}

/// Trains with and without scaling, the scale moving up and down, and compares all that is left.
fn compare<B: LayerBackend>(seed: u64, config: &QuantAdamWConfig) {
    let device = B::Device::default();
    let steps = steps::<B, Mlp<B>>(seed, 9);
    let [(plain, plain_optim), (model, optim)] =
        [config.clone(), scaled(config.clone())].map(|config| {
            let (mut optim, model) = attached::<B, _>(&config, Mlp::new(&device), seed);
            let model = train(model, &mut optim, &steps);
            (model, optim)
        });
    let what = format!("seed {seed}, {:?}", B::row().map(|row| row.name));
    assert_same(&what, (&model, &optim), (&plain, &plain_optim));
    assert_eq!(plain_optim.inner().loss_scale(), None);
    assert_ne!(optim.inner().loss_scale(), None);
}

fn same_steps<B: DataBackend>(seed: u64) {
    for config in [every_layer(seed), fp8_moments(seed)] {
        compare::<Autodiff<B>>(seed, &config);
        compare::<Quantized<B, MixedPrecision<f32>>>(seed, &config);
        compare::<Quantized<B, FallbackInt8<f32, 16>>>(seed, &config);
    }
}

fn same_layers<B: DataBackend>(seed: u64) {
    fn check<B: DataBackend, R: Recipe>(seed: u64) {
        compare::<Quantized<B, R>>(seed, &every_layer(seed));
    }
    check::<B, LsqInt4<f32>>(seed);
    check::<B, HadamardInt4<f32>>(seed);
    check::<B, DelayedFp8<f32>>(seed);
}

fn clipped_and_accumulated<B: DataBackend>(seed: u64) {
    type T<B> = Quantized<B, FallbackInt8<f32, 16>>;
    let device = B::Device::default();
    let batches = samples::<T<B>, Mlp<T<B>>>(seed, 12);
    let run = |config: &QuantAdamWConfig| {
        let (mut optim, mut model) = attached::<T<B>, _>(config, Mlp::new(&device), seed);
        let mut accumulator = GradientsAccumulator::new();
        for batches in batches.chunks(3) {
            for sample in batches {
                let gradients = gradients(&model, &optim, sample, true);
                accumulator.accumulate(&model, gradients);
            }
            model = optim.step(LR, model, accumulator.grads());
        }
        (model, optim)
    };
    let free = parameters_of::<T<B>, _>(&run(&every_layer(seed)).0);
    for clipping in [
        None,
        Some(GradientClippingConfig::Norm(0.1)),
        Some(GradientClippingConfig::Value(0.01)),
    ] {
        let config = every_layer(seed).with_grad_clipping(clipping.clone());
        let (plain, plain_optim) = run(&config);
        let clips = parameters_of::<T<B>, _>(&plain)
            .iter()
            .zip(&free)
            .any(|(a, b)| !same_bits(a, b));
        assert_eq!(clips, clipping.is_some(), "seed {seed}: it clips");
        let (model, optim) = run(&scaled(config));
        let what = format!("seed {seed}, {clipping:?}");
        assert_same(&what, (&model, &optim), (&plain, &plain_optim));
    }
}

/// Two layers and the inputs of a regression.
#[derive(Module, Debug)]
struct Regression<B: Backend> {
    up: Linear<B>,
    down: Linear<B>,
}

/// Rows of the regression, and its features.
const NEAR: [usize; 2] = [512, 32];

/// The gradients of a loss near its minimum, over many numbers, each of which has a gradient of about 9e-9; and what
/// the host says that they are.
fn near_the_minimum<B: LayerBackend>(
    seed: u64,
    config: &QuantAdamWConfig,
) -> (Vec<Vec<f32>>, Vec<Vec<f32>>) {
    let [rows, width] = NEAR;
    let (device, mut rng) = (B::Device::default(), Rng::new(seed));
    let linear = || {
        LinearConfig::new(width, width)
            .with_bias(false)
            .init(&device)
    };
    let model = Regression {
        up: linear(),
        down: linear(),
    };
    let (optim, model) = attached::<B, _>(config, model, seed);
    let x = rng.normals(rows * width, 1.0);
    let noise = rng.normals(rows * width, 7.5e-5);
    let weights = [&model.up, &model.down].map(|layer| floats(&layer.weight.val()));
    let expected = gradients_on_the_host(&x, [&weights[0], &weights[1]], &noise);

    let x = tensor::<B, 2>(&x, NEAR, &device);
    let noise = tensor::<B, 2>(&noise, NEAR, &device);
    let y = model
        .down
        .forward(relu(model.up.forward(x)))
        .cast(FloatDType::F32);
    let target = y.clone().detach() + noise.clone();
    let residual = y - target;
    let loss = optim.scale(residual.clone().square().mean());
    let gradients = GradientsParams::from_grads(loss.backward(), &model);
    let scale = optim.inner().loss_scale().unwrap_or(1.0);
    let mut gradients = gradients_of::<B, _>(&model, &gradients);
    gradients.iter_mut().flatten().for_each(|g| *g /= scale);

    // FP16's rounding of an output is as large as the noise. Read last: a read ends what is fused.
    let kept = cosine(&floats(&residual.detach()), &floats(&-noise));
    assert!(
        kept > 0.999,
        "seed {seed}: a residual in FP32 lost the noise, cosine {kept}"
    );
    (gradients, expected)
}

/// dW of both layers of a [`Regression`] in FP64, where the mean squared residual is that of `-noise`.
fn gradients_on_the_host(x: &[f32], weights: [&[f32]; 2], noise: &[f32]) -> Vec<Vec<f32>> {
    let [rows, width] = NEAR;
    let [x, noise] = [x, noise].map(|it| Matrix::of(it, NEAR));
    let [up, down] = weights.map(|it| Matrix::of(it, [width, width]));
    let passes = x.times(&up);
    let hidden = passes.zip(&passes, |it, _| it.max(0.0));
    let dy = noise.zip(&noise, |it, _| -2.0 * it / (rows * width) as f64);
    let masked = |gradient, passes| if passes > 0.0 { gradient } else { 0.0 };
    let d_up = dy.times(&down.t()).zip(&passes, masked);
    vec![x.t().times(&d_up).floats(), hidden.t().times(&dy).floats()]
}

fn zeros(gradients: &[Vec<f32>]) -> f64 {
    let all = gradients.iter().flatten();
    let zeros = all.clone().filter(|g| **g == 0.0).count();
    zeros as f64 / all.count() as f64
}

/// How many gradients are zero, and the cosine of each parameter's to the host's.
fn survivors<B: LayerBackend>(seed: u64, config: &QuantAdamWConfig) -> (f64, Vec<f64>) {
    let (found, expected) = near_the_minimum::<B>(seed, config);
    let pairs = found.iter().zip(&expected);
    let cosines: Vec<_> = pairs.map(|(a, b)| cosine(a, b)).collect();
    let zeros = zeros(&found);
    println!("seed {seed}: {zeros:.4} are zero, cosines with FP64's {cosines:.6?}");
    (zeros, cosines)
}

fn vanishing<B: DataBackend>(seed: u64) {
    if !supports::<B>(DType::F16) {
        return;
    }
    type Half<B> = Quantized<B, MixedPrecision<f16>>;
    let plain = QuantAdamWConfig::new();
    let (zeros, cosines) = survivors::<Half<B>>(seed, &plain);
    assert!(zeros > 0.4);
    assert!(!cosines.iter().all(|it| *it > 0.99));

    let scaled = plain.with_loss_scaling(Some(LossScaling::default()));
    all_survive(survivors::<Half<B>>(seed, &scaled));
}

fn alive_in_fp32<B: DataBackend>(seed: u64) {
    type Full<B> = Quantized<B, MixedPrecision<f32>>;
    all_survive(survivors::<Full<B>>(seed, &QuantAdamWConfig::new()));
}

#[track_caller]
fn all_survive((zeros, cosines): (f64, Vec<f64>)) {
    assert!(zeros < 0.01);
    assert!(cosines.iter().all(|it| *it > 0.999));
}

type T = Quantized<Flex, MixedPrecision<f32>>;

fn message(payload: Box<dyn Any + Send>) -> String {
    match payload.downcast::<String>() {
        Ok(text) => *text,
        Err(payload) => payload
            .downcast::<&str>()
            .map_or_else(|_| String::new(), |it| it.to_string()),
    }
}

#[track_caller]
fn refused<A>(f: impl FnOnce() -> A, what: &str) {
    let text = message(catch_unwind(AssertUnwindSafe(f)).err().expect("refused"));
    assert!(text.contains(what), "{text:?} does not say {what:?}");
}

#[test]
fn a_step_without_a_scaled_loss_is_refused() {
    let seed = seed();
    let (mut optim, model) = attached::<T, _>(
        &scaled(every_layer(seed)),
        Mlp::new(&Default::default()),
        seed,
    );
    let sample = &samples::<T, Mlp<T>>(seed, 1)[0];
    let forgetful = |optim: &mut Adam<T, _>, model: &Mlp<T>| {
        let model = &forked::<T, _>(model);
        let gradients = GradientsParams::from_grads(model.loss(sample).backward(), model);
        optim.step(LR, model.clone(), gradients)
    };
    let remedy = "optim.scale(loss).backward()";
    refused(|| forgetful(&mut optim.clone(), &model), remedy);
    let model = train(model, &mut optim, &[(sample.clone(), true)]);
    refused(|| forgetful(&mut optim.clone(), &model), remedy);
    let model = train(model, &mut optim, &[(sample.clone(), true)]);
    // The scaler of a clone, and one that was made before, serve as well.
    let model = forked::<T, _>(&model);
    let scaler = optim.clone().loss_scaler();
    let gradients =
        GradientsParams::from_grads(scaler.scale(model.loss(sample)).backward(), &model);
    let _ = optim.step(LR, model, gradients);
}

#[test]
fn a_scaler_of_another_backend_is_refused() {
    let optim = scaled(every_layer(1)).init::<T, Mlp<T>>();
    let loss = Tensor::<Autodiff<Flex>, 1>::ones([1], &Default::default());
    refused(|| optim.loss_scaler().scale(loss), "another backend");
}

#[test]
fn settings_that_contradict_each_other_are_refused() {
    for on_nonfinite in [OnNonfinite::Error, OnNonfinite::Propagate] {
        let config = scaled(QuantAdamWConfig::new()).with_on_nonfinite(on_nonfinite);
        refused(|| config.init::<T, Mlp<T>>(), "use OnNonfinite::Skip");
    }
    refused(|| scaled(QuantAdamWConfig::new()).simple(), "loss_scaling");
    let wrong = LossScaling {
        growth: 1.5,
        ..SHORT
    };
    let config = QuantAdamWConfig::new().with_loss_scaling(Some(wrong));
    refused(|| config.init::<T, Mlp<T>>(), "growth is 1.5");
}

#[test]
fn losses_of_any_dtype_and_rank_are_scaled() {
    let optim = scaled(QuantAdamWConfig::new()).init::<T, Mlp<T>>();
    let device = Default::default();
    for (dtype, expected) in [
        (FloatDType::F32, DType::F32),
        (FloatDType::BF16, DType::F32),
        (FloatDType::F16, DType::F32),
        (FloatDType::F64, DType::F64),
    ] {
        // In FP16 the product would be infinite.
        let loss = Tensor::<T, 2>::full([2, 3], 100.0, &device).cast(dtype);
        let scaled = optim.scale(loss);
        assert_eq!(scaled.dtype(), expected);
        assert_eq!(floats(&scaled), [102_400.0; 6]);
    }
    let loss = Tensor::<T, 1>::random([3], Distribution::Default, &device);
    let expected = floats(&loss);
    assert_eq!(floats(&LossScaler::default().scale(loss)), expected);
}

/// A model that computes its gradients itself, as a `Learner` wants it.
#[derive(Module, Debug)]
struct Learning<B: Backend> {
    mlp: Mlp<B>,
    #[module(skip)]
    scaler: LossScaler,
}

#[test]
fn a_model_holds_a_scaler_through_records_and_devices() {
    let device = Default::default();
    let optim = scaled(QuantAdamWConfig::new()).init::<T, Learning<T>>();
    let model = |scaler| Learning::<T> {
        mlp: Mlp::new(&device),
        scaler,
    };
    let recorder = NamedMpkBytesRecorder::<FullPrecisionSettings>::new();
    // A file of a model without one is read, too.
    let bytes = Recorder::<T>::record(&recorder, model(LossScaler::default()).into_record(), ());
    let record = recorder
        .load(bytes.expect("written"), &device)
        .expect("read");
    let loaded = model(optim.loss_scaler()).load_record(record).fork(&device);
    struct Same;
    impl<B: Backend> ModuleMapper<B> for Same {}
    let loaded = loaded.map(&mut Same);
    let scale = |scaler: &LossScaler| scaler.read::<T>();
    assert_eq!(scale(&loaded.scaler), Some(SHORT.initial));
    assert_eq!(scale(&loaded.valid().scaler), Some(SHORT.initial));
}

#[test]
fn a_record_without_a_scale_begins_at_the_first() {
    let seed = seed();
    let device = Default::default();
    let (mut plain, model) = attached::<T, _>(&every_layer(seed), Mlp::new(&device), seed);
    let steps = steps::<T, Mlp<T>>(seed, 4);
    let model = train(model, &mut plain, &steps[..2]);
    let record = plain.to_record();
    assert_eq!(record.optimizer.loss_scale, None);
    let mut optim = scaled(every_layer(seed))
        .init::<T, Mlp<T>>()
        .load_record(record);
    assert_eq!(optim.inner().loss_scale(), Some(SHORT.initial));
    let model = optim.attach(model);
    let resumed = train(model.clone(), &mut optim, &steps[2..]);
    let model = train(plain.attach(model), &mut plain, &steps[2..]);
    assert_same(
        &format!("seed {seed}"),
        (&resumed, &optim),
        (&model, &plain),
    );
    // And back: who does not scale drops the scale. One out of the range of the configuration comes to its end.
    let mut record = optim.to_record();
    assert_eq!(
        every_layer(seed)
            .init::<T, Mlp<T>>()
            .load_record(record.clone())
            .to_record()
            .optimizer
            .loss_scale,
        None
    );
    record.optimizer.loss_scale = Some(LossScaleRecord {
        scale: 2f32.powi(40),
        good_steps: 1,
    });
    let loaded = scaled(every_layer(seed))
        .init::<T, Mlp<T>>()
        .load_record(record);
    assert_eq!(loaded.inner().loss_scale(), Some(SHORT.maximum));
}

#[test]
fn a_damaged_scale_is_refused() {
    type Full = FullPrecisionSettings;
    fn through<S: PrecisionSettings>(record: AdamWRecord) -> AdamWRecord {
        let item = Record::<Flex>::into_item::<S>(record);
        Record::<Flex>::from_item::<S>(item, &Default::default())
    }
    let with = |scale, good_steps| AdamWRecord {
        loss_scale: Some(LossScaleRecord { scale, good_steps }),
        ..AdamWRecord::default()
    };
    for (scale, good_steps) in [(65_536.0, 0), (f32::MIN_POSITIVE, i32::MAX as u32)] {
        let record = with(scale, good_steps);
        assert_eq!(through::<Full>(record.clone()), record);
    }
    for (scale, good_steps) in [
        (0.0, 0),
        (-2.0, 0),
        (3.0, 0),
        (f32::NAN, 0),
        (f32::INFINITY, 0),
        (2.0, u32::MAX),
    ] {
        refused(
            || through::<Full>(with(scale, good_steps)),
            "the file is damaged",
        );
    }
}
