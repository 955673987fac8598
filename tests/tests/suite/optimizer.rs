//! The optimizer: Burn's AdamW with the layers' state, in every way that Burn uses an optimizer.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex},
};

use burn::{
    backend::{Autodiff, Flex},
    data::{
        dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher},
        dataset::InMemDataset,
    },
    grad_clipping::GradientClippingConfig,
    lr_scheduler::{LrScheduler, cosine::CosineAnnealingLrSchedulerConfig},
    module::{AutodiffModule, Module},
    optim::{AdamConfig, AdamWConfig, GradientsParams, MuonConfig, Optimizer, SgdConfig},
    record::{FullPrecisionSettings, NamedMpkFileRecorder, Recorder},
    tensor::{
        Int, Tensor, TensorData,
        backend::{AutodiffBackend, Backend},
    },
    train::{
        ClassificationOutput, InferenceStep, Learner, SupervisedTraining, TrainOutput, TrainStep,
        metric::{LossMetric, MetricDefinition},
        renderer::{
            EvaluationName, EvaluationProgress, MetricState, MetricsRenderer,
            MetricsRendererEvaluation, MetricsRendererTraining, ProgressType, TrainingProgress,
        },
    },
};
use burn_quant_train::{
    QuantTrain,
    layer::{Decision, DelayThreshold, LayerPolicy, LayerRecord, LayersRecord, ThresholdFactor},
    optim::{LayerBackend, LayerConfig, QuantAdamWConfig, QuantOptimizer, metric::OptimizerMetric},
    recipe::{FallbackInt8, MixedPrecision},
};
use quant_train_tests::{
    Rng,
    data::{floats, same_bits, tensor},
    models::{CLASSES, Classifier, ConvNet, Encoder, MLP_INPUTS, Mlp, One, with_weights_of},
    seed,
    train::{
        Run, accumulated, attached, every_layer, parameters_of, samples, tail, train, train_with,
    },
};

type Burn = Autodiff<Flex>;
type Fallback = QuantTrain<Autodiff<Flex>, FallbackInt8<f32, 16>>;
type Mixed = QuantTrain<Autodiff<Flex>, MixedPrecision<f32>>;

fn layer_config(seed: u64) -> LayerConfig {
    LayerConfig {
        policy: LayerPolicy::all().min_elements(0),
        seed: Some(seed),
        ..LayerConfig::default()
    }
}

fn assert_same_run<A: Backend, B: Backend, M: Module<A>, N: Module<B>>(
    what: &str,
    burn: &Run<M>,
    ours: &Run<N>,
) {
    assert!(
        same_bits(&burn.losses, &ours.losses),
        "{what}: losses {:?} and {:?}",
        burn.losses,
        ours.losses
    );
    let (burn, ours) = (
        parameters_of::<A, M>(&burn.model),
        parameters_of::<B, N>(&ours.model),
    );
    for (index, (burn, ours)) in burn.iter().zip(&ours).enumerate() {
        assert!(same_bits(burn, ours), "{what}: parameter {index}");
    }
}

fn model<B: Backend, M: Classifier<B>>(seed: u64) -> M {
    with_weights_of(M::new(&Default::default()), seed)
}

/// With a policy that quantizes nothing and FP32 moments, every option gives the weights of Burn's AdamW, clipping and
/// schedule included.
#[test]
fn adamw_with_nothing_quantized_is_burns_adamw() {
    let seed = seed();
    let clippings = [
        None,
        Some(GradientClippingConfig::Norm(0.5)),
        Some(GradientClippingConfig::Value(0.01)),
    ];
    for clipping in clippings {
        let what = format!("seed {seed}, clipping {clipping:?}");
        let mut adamw = AdamWConfig::new()
            .with_beta_1(0.85)
            .with_beta_2(0.97)
            .with_epsilon(1e-7)
            .with_weight_decay(0.1)
            .with_grad_clipping(clipping.clone())
            .init::<Burn, Encoder<Burn>>();
        let mut ours = QuantAdamWConfig::new()
            .with_beta_1(0.85)
            .with_beta_2(0.97)
            .with_epsilon(1e-7)
            .with_weight_decay(0.1)
            .with_grad_clipping(clipping)
            .with_policy(LayerPolicy::all().skip("*"))
            .init::<Fallback, Encoder<Fallback>>();
        let batches = samples::<Burn, Encoder<Burn>>(seed, 6);
        let schedule = || {
            CosineAnnealingLrSchedulerConfig::new(1e-2, 6)
                .init()
                .expect("a schedule")
        };
        let (mut burns_lr, mut our_lr) = (schedule(), schedule());
        let burn = train_with(
            model::<Burn, Encoder<Burn>>(seed),
            &mut adamw,
            |_| burns_lr.step(),
            &batches,
        );
        let start = ours.attach(model::<Fallback, Encoder<Fallback>>(seed));
        assert!(
            ours.layers()
                .iter()
                .all(|layer| !layer.decision.is_quantized())
        );
        let run = train_with(start, &mut ours, |_| our_lr.step(), &batches);
        assert_same_run::<Burn, Fallback, _, _>(&what, &burn, &run);
    }
}

#[test]
fn defaults_are_burns() {
    let seed = seed();
    let batches = samples::<Burn, ConvNet<Burn>>(seed, 4);
    let mut adamw = AdamWConfig::new().init::<Burn, ConvNet<Burn>>();
    let mut ours = QuantAdamWConfig::new().init::<Mixed, ConvNet<Mixed>>();
    let burn = train(
        model::<Burn, ConvNet<Burn>>(seed),
        &mut adamw,
        1e-2,
        &batches,
    );
    let run = train(
        model::<Mixed, ConvNet<Mixed>>(seed),
        &mut ours,
        1e-2,
        &batches,
    );
    assert_same_run::<Burn, Mixed, _, _>(&format!("seed {seed}"), &burn, &run);
}

#[test]
fn accumulated_gradients_step_as_burns_do() {
    let seed = seed();
    let batches = samples::<Burn, Mlp<Burn>>(seed, 9);
    let mut adamw = AdamWConfig::new().init::<Burn, Mlp<Burn>>();
    let mut ours = QuantAdamWConfig::new().init::<Mixed, Mlp<Mixed>>();
    let burn = accumulated(model::<Burn, Mlp<Burn>>(seed), &mut adamw, &batches);
    let run = accumulated(model::<Mixed, Mlp<Mixed>>(seed), &mut ours, &batches);
    assert_same_run::<Burn, Mixed, _, _>(&format!("seed {seed}"), &burn, &run);
    assert!(
        ours.layers_record().step == 3,
        "three optimizer steps of three micro-batches each"
    );
    // Quantized: the rate is over all micro-batches of the step, and the model learns.
    let mut quantized = every_layer(seed).init::<Fallback, Mlp<Fallback>>();
    let start = quantized.attach(model::<Fallback, Mlp<Fallback>>(seed));
    let run = accumulated(start, &mut quantized, &samples::<Burn, Mlp<Burn>>(seed, 90));
    assert!(
        tail(&run.losses, 6) < 0.8 * run.losses[0],
        "seed {seed}: {:?}",
        run.losses
    );
    assert_eq!(quantized.fallback_rates().len(), 2);
}

macro_rules! wraps {
    ($($test:ident: $config:expr, $lr:literal;)*) => { $(
        #[test]
        fn $test() {
            let seed = seed();
            let what = format!("seed {seed}, {}", stringify!($config));
            let batches = samples::<Burn, Mlp<Burn>>(seed, 40);
            let mut plain = $config.init::<Burn, Mlp<Burn>>();
            let burn = train(model::<Burn, Mlp<Burn>>(seed), &mut plain, $lr, &batches);
            let mut mixed = QuantOptimizer::new($config.init::<Mixed, Mlp<Mixed>>(), layer_config(seed));
            let run = train(model::<Mixed, Mlp<Mixed>>(seed), &mut mixed, $lr, &batches);
            assert_same_run::<Burn, Mixed, _, _>(&what, &burn, &run);

            let mut quantized = QuantOptimizer::new($config.init::<Fallback, Mlp<Fallback>>(), layer_config(seed));
            let start = quantized.attach(model::<Fallback, Mlp<Fallback>>(seed));
            let run = train(start, &mut quantized, $lr, &batches);
            assert_eq!(quantized.fallback_rates().len(), 2, "{what}: both layers ran quantized");
            let (ours, burns) = (tail(&run.losses, 5), tail(&burn.losses, 5));
            assert!(burns < 0.9 * burn.losses[0], "{what}: Burn's own run learns: {:?}", burn.losses);
            assert!((ours - burns).abs() < 0.1 * burn.losses[0], "{what}: ends at {ours}, Burn's at {burns}");
        }
    )* };
}

wraps! {
    wraps_sgd: SgdConfig::new(), 0.3;
    wraps_adam: AdamConfig::new(), 1e-2;
    wraps_muon: MuonConfig::new(), 2e-2;
}

/// The optimizer's record, through a real file.
fn through_a_file<O: Optimizer<M, B>, M: AutodiffModule<B>, B: AutodiffBackend>(
    optim: &O,
    fresh: O,
) -> O {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("optimizer");
    let recorder = NamedMpkFileRecorder::<FullPrecisionSettings>::default();
    Recorder::<B>::record(&recorder, optim.to_record(), path.clone())
        .expect("the record is written");
    let record: O::Record =
        Recorder::<B>::load(&recorder, path, &Default::default()).expect("the record is read");
    fresh.load_record(record)
}

fn model_through_a_file<B: Backend, M: Module<B>>(model: &M, fresh: M) -> M {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("model");
    let recorder = NamedMpkFileRecorder::<FullPrecisionSettings>::default();
    model
        .clone()
        .save_file(path.clone(), &recorder)
        .expect("the model is written");
    fresh
        .load_file(path, &recorder, &Default::default())
        .expect("the model is read")
}

fn same_records(a: &LayersRecord, b: &LayersRecord) -> bool {
    let bits = |record: &LayersRecord| -> Vec<_> {
        let layer = |layer: &LayerRecord| {
            let slots: Vec<(String, Vec<u32>)> = layer
                .slots
                .iter()
                .map(|(name, values)| (name.clone(), values.iter().map(|x| x.to_bits()).collect()))
                .collect();
            (layer.id, layer.path.clone(), slots)
        };
        record.layers.iter().map(layer).collect()
    };
    a.seed == b.seed && a.step == b.step && bits(a) == bits(b)
}

#[test]
fn a_resumed_run_goes_on_bit_for_bit() {
    let seed = seed();
    let (first, rest) = (7, 8);
    let batches = samples::<Fallback, Encoder<Fallback>>(seed, first + rest);
    let fresh = |seed| every_layer(seed).init::<Fallback, Encoder<Fallback>>();

    let mut optim = fresh(seed);
    // Clones have the same `ParamId`s.
    let initial = model::<Fallback, Encoder<Fallback>>(seed);
    let start = optim.attach(initial.clone());
    let whole = train(start, &mut optim, 5e-3, &batches);

    let mut before = fresh(seed);
    let start = before.attach(initial);
    let part = train(start, &mut before, 5e-3, &batches[..first]);
    assert!(
        same_bits(&part.losses, &whole.losses[..first]),
        "seed {seed}: two runs of one seed differ"
    );
    // Another seed and other weights: everything must come from the files.
    let mut after = through_a_file::<_, Encoder<Fallback>, Fallback>(&before, fresh(seed + 1));
    assert!(
        same_records(&before.layers_record(), &after.layers_record()),
        "seed {seed}: loaded, not attached yet"
    );
    let loaded = model_through_a_file(&part.model, model::<Fallback, Encoder<Fallback>>(seed + 1));
    let loaded = after.attach(loaded);
    assert!(
        same_records(&before.layers_record(), &after.layers_record()),
        "seed {seed}: attached"
    );
    assert_eq!(after.layers_record().step, first as u64);
    let resumed = train(loaded, &mut after, 5e-3, &batches[first..]);

    assert!(
        same_bits(&resumed.losses, &whole.losses[first..]),
        "seed {seed}: resumed {:?}, uninterrupted {:?}",
        resumed.losses,
        &whole.losses[first..]
    );
    let record = after.layers_record();
    assert!(
        same_records(&record, &optim.layers_record()),
        "seed {seed}: thresholds, rates and random stream: {record:?}, {:?}",
        optim.layers_record()
    );
    assert!(
        record
            .layers
            .iter()
            .any(|layer| layer.threshold() != Some(1.0)),
        "seed {seed}: thresholds moved: {record:?}"
    );
    let (a, b) = (
        parameters_of::<Fallback, _>(&resumed.model),
        parameters_of::<Fallback, _>(&whole.model),
    );
    assert!(
        a.iter().zip(&b).all(|(a, b)| same_bits(a, b)),
        "seed {seed}: weights at the end"
    );
}

/// Thresholds belong to a weight's `ParamId`, not to a position; what a record does not know starts anew.
#[test]
fn thresholds_are_keyed_by_param_id() {
    let seed = seed();
    let mut optim = every_layer(seed).init::<Fallback, Mlp<Fallback>>();
    let start = optim.attach(model::<Fallback, Mlp<Fallback>>(seed));
    let run = train(
        start,
        &mut optim,
        1e-2,
        &samples::<Fallback, Mlp<Fallback>>(seed, 3),
    );
    let mut record = optim.to_record();
    assert_eq!(record.layers.layers.len(), 2);
    assert_eq!(record.layers.layers[0].id, run.model.up.weight.id.val());
    assert_eq!(record.layers.layers[0].path, "up");
    for (layer, threshold) in record.layers.layers.iter_mut().zip([0.125, 8.0]) {
        layer.slots.insert("threshold".into(), vec![threshold]);
    }
    record.layers.layers.swap(0, 1);

    let threshold = |optim: &QuantOptimizer<_, Fallback>, path: &str| {
        let layers = optim.layers_record().layers;
        layers
            .iter()
            .find(|layer| layer.path == path)
            .expect("the layer is known")
            .threshold()
            .expect("it has a threshold")
    };
    let fresh = || every_layer(seed).init::<Fallback, Mlp<Fallback>>();
    let swapped = fresh().load_record(record.clone());
    let _model = swapped.attach(run.model.clone());
    assert_eq!(
        (threshold(&swapped, "up"), threshold(&swapped, "down")),
        (0.125, 8.0)
    );

    record.layers.layers.retain(|layer| layer.path == "down");
    let partly = fresh().load_record(record.clone());
    let _model = partly.attach(run.model.clone());
    assert_eq!(
        (threshold(&partly, "up"), threshold(&partly, "down")),
        (1.0, 8.0)
    );

    record.layers.layers.clear();
    let unknown = fresh().load_record(record);
    let _model = unknown.attach(run.model);
    assert_eq!(
        (threshold(&unknown, "up"), threshold(&unknown, "down")),
        (1.0, 1.0)
    );
}

/// A record of a version that had no moves: the threshold stays, and its first move has the largest factor.
#[test]
fn records_without_moves_are_read() {
    let seed = seed();
    let mut optim = every_layer(seed).init::<Fallback, Mlp<Fallback>>();
    let start = optim.attach(model::<Fallback, Mlp<Fallback>>(seed));
    let batches = samples::<Fallback, Mlp<Fallback>>(seed, 9);
    let run = train(start, &mut optim, 1e-2, &batches[..8]);
    let mut record = optim.to_record();
    let moved = |record: &LayersRecord| {
        let layers = record.layers.iter();
        let moves = layers.filter_map(|layer| layer.slots.get("threshold.move"));
        moves.flatten().copied().collect::<Vec<f32>>()
    };
    let thresholds = |record: &LayersRecord| {
        let layers = record.layers.iter();
        layers
            .filter_map(|layer| layer.threshold())
            .collect::<Vec<f32>>()
    };
    assert!(!moved(&record.layers).is_empty(), "{record:?}");
    for layer in &mut record.layers.layers {
        layer.slots.remove("threshold.move");
        // So low that the next step moves it.
        layer.slots.insert("threshold".into(), vec![1e-6]);
    }
    let mut old = every_layer(seed)
        .init::<Fallback, Mlp<Fallback>>()
        .load_record(record);
    let attached = old.attach(run.model);
    assert_eq!(thresholds(&old.layers_record()), [1e-6; 2]);
    assert!(moved(&old.layers_record()).is_empty());
    train(attached, &mut old, 1e-2, &batches[8..]);
    let alpha = DelayThreshold::default().alpha;
    assert_eq!(moved(&old.layers_record()), [alpha - 1.0; 2]);
    assert_eq!(thresholds(&old.layers_record()), [1e-6 * alpha; 2]);
}

/// Settings that were written before factors could adapt are the paper's.
#[test]
fn settings_without_a_factor_are_those_of_the_paper() {
    let text = r#"{"initial": 1.0, "rate_min": 0.1, "rate_max": 0.3, "alpha": 1.3}"#;
    let settings: DelayThreshold = serde_json::from_str(text).expect("settings");
    assert_eq!(settings, DelayThreshold::paper());
    assert_ne!(settings, DelayThreshold::default());
    let text = serde_json::to_string(&DelayThreshold::default()).expect("JSON");
    let settings: DelayThreshold = serde_json::from_str(&text).expect("settings");
    assert_eq!(settings, DelayThreshold::default());
}

/// Feeds a layer with inputs whose blocks have a wide distribution of maxima, times `scale(step)`; returns its rates.
fn rates(
    threshold: DelayThreshold,
    seed: u64,
    steps: usize,
    scale: impl Fn(usize) -> f64,
) -> Vec<f32> {
    let device = Default::default();
    let (mut optim, mut model) = attached::<Fallback, _>(
        &every_layer(seed).with_threshold(threshold),
        One::new(256, 16, false, &device),
        seed,
    );
    let mut rng = Rng::new(seed);
    let mut rates = Vec::new();
    for step in 0..steps {
        let spread: Vec<f64> = (0..256).map(|_| scale(step) * rng.normal().exp()).collect();
        let x: Vec<f32> = (0..256 * 256)
            .map(|index| (spread[index / 256 / 16 * 16 + index % 256 / 16] * rng.normal()) as f32)
            .collect();
        let y = model
            .linear
            .forward(tensor::<Fallback, 2>(&x, [256, 256], &device));
        let grads = GradientsParams::from_grads(y.sum().backward(), &model);
        model = optim.step(0.0, model, grads);
        rates.push(optim.fallback_rates()[0].1);
    }
    rates
}

/// 1,000 = 1.3^26.3: 27 steps lead from a threshold 1,000x off into the range. The maxima of the 16 x 16 blocks of the
/// data are about 3, between whose 70% and 90% quantiles lies a factor of 2.
#[test]
fn the_controller_reaches_its_range_and_stays_there_while_the_scale_drifts() {
    let seed = seed();
    let inside = |rate: &f32| (0.1..=0.3).contains(rate);
    let drifts: [(&str, f64); 3] = [("up", 1.03), ("down", 0.97), ("not at all", 1.0)];
    let controllers = [DelayThreshold::paper(), DelayThreshold::default()];
    for (controller, (name, drift)) in controllers
        .into_iter()
        .flat_map(|controller| drifts.map(|drift| (controller, drift)))
    {
        for initial in [6.0 * 1000.0, 6.0 / 1000.0] {
            let threshold = DelayThreshold {
                initial,
                ..controller
            };
            // The scale stands still for 32 steps, then drifts.
            let rates = rates(threshold, seed, 75, |step| {
                drift.powi(step.saturating_sub(32) as i32)
            });
            let what = format!("seed {seed}, {threshold:?}, drifting {name}: {rates:?}");
            assert!(!inside(&rates[0]), "it starts outside: {what}");
            let arrival = rates
                .iter()
                .position(inside)
                .unwrap_or_else(|| panic!("never arrives: {what}"));
            assert!(
                arrival <= 29,
                "arrives after {arrival} steps, 27 lead there: {what}"
            );
            let outside: Vec<usize> = (arrival..rates.len())
                .filter(|&step| !inside(&rates[step]))
                .collect();
            // 256 fresh blocks a step: the rate itself is only known to 0.03, so one correction may fall short.
            assert!(
                outside.windows(3).all(|steps| steps[2] > steps[0] + 2),
                "three steps in a row outside ({outside:?}): {what}"
            );
            assert!(
                4 * outside.len() <= rates.len() - arrival,
                "too often outside ({outside:?}): {what}"
            );
        }
    }
}

#[test]
fn bad_settings_are_refused_by_name() {
    let good = DelayThreshold::default();
    let cases = [
        (
            DelayThreshold {
                rate_min: 0.4,
                ..good
            },
            "range of fallback rates [0.4, 0.3]",
        ),
        (
            DelayThreshold {
                rate_min: -0.1,
                ..good
            },
            "range of fallback rates [-0.1, 0.3]",
        ),
        (
            DelayThreshold {
                rate_max: 1.5,
                ..good
            },
            "range of fallback rates [0.1, 1.5]",
        ),
        (
            DelayThreshold {
                rate_max: f32::NAN,
                ..good
            },
            "range of fallback rates [0.1, NaN]",
        ),
        (
            DelayThreshold { alpha: 1.0, ..good },
            "alpha must be finite and above 1, got 1",
        ),
        (
            DelayThreshold {
                alpha: f32::INFINITY,
                ..good
            },
            "alpha must be finite and above 1, got inf",
        ),
        (
            DelayThreshold {
                alpha: f32::NAN,
                ..good
            },
            "alpha must be finite and above 1, got NaN",
        ),
        (
            DelayThreshold {
                factor: ThresholdFactor::Adaptive { smallest: 1.0 },
                ..good
            },
            "smallest factor must be above 1 and at most alpha, 1.3, got 1",
        ),
        (
            DelayThreshold {
                factor: ThresholdFactor::Adaptive { smallest: 1.31 },
                ..good
            },
            "smallest factor must be above 1 and at most alpha, 1.3, got 1.31",
        ),
        (
            DelayThreshold {
                factor: ThresholdFactor::Adaptive { smallest: f32::NAN },
                ..good
            },
            "smallest factor must be above 1 and at most alpha, 1.3, got NaN",
        ),
        (
            DelayThreshold {
                initial: 0.0,
                ..good
            },
            "initial threshold must be positive and finite, got 0",
        ),
        (
            DelayThreshold {
                initial: f32::NAN,
                ..good
            },
            "initial threshold must be positive and finite, got NaN",
        ),
    ];
    for (threshold, message) in cases {
        let made = catch_unwind(AssertUnwindSafe(|| {
            let _ = QuantAdamWConfig::new()
                .with_threshold(threshold)
                .init::<Fallback, Mlp<Fallback>>();
        }));
        let panic = made.expect_err("refused");
        let text = panic.downcast_ref::<String>().expect("a message");
        assert!(
            text.contains(message),
            "{threshold:?}: {text:?} does not say {message:?}"
        );
    }
    let optim = QuantAdamWConfig::new().init::<Fallback, Mlp<Fallback>>();
    let zero = catch_unwind(AssertUnwindSafe(|| {
        OptimizerMetric::fallback_rate(&optim, 0)
    }));
    assert!(zero.is_err(), "a metric that never reads is refused");
}

#[test]
fn the_policy_decides_and_layers_prints_it() {
    let seed = seed();
    let policy = LayerPolicy::all()
        .only("encoder")
        .skip("*.self_attention*")
        .skip("layers.0")
        .skip("encoder.layers.0");
    let reports = |policy: LayerPolicy| {
        let optim = QuantAdamWConfig::new()
            .with_policy(policy)
            .init::<Fallback, Encoder<Fallback>>();
        assert!(
            optim.layers().is_empty(),
            "nothing is known before a model is attached"
        );
        let _model = optim.attach(model::<Fallback, Encoder<Fallback>>(seed));
        optim.layers()
    };
    let all = reports(LayerPolicy::all().min_elements(0));
    assert_eq!(
        all.len(),
        1 + 12 + 1,
        "an embedding, twelve layers, a head: {all:?}"
    );
    let decision = |reports: &[burn_quant_train::optim::LayerReport], path: &str| {
        let found = reports.iter().find(|report| report.path == path);
        found
            .unwrap_or_else(|| panic!("no {path} in {reports:?}"))
            .decision
            .clone()
    };
    assert_eq!(decision(&all, "embedding"), Decision::Embedding);
    assert_eq!(decision(&all, "head"), Decision::Quantized);

    let chosen = reports(policy.min_elements(0));
    assert_eq!(decision(&chosen, "head"), Decision::NotSelected);
    assert_eq!(
        decision(&chosen, "encoder.layers.1.pwff.linear_inner"),
        Decision::Quantized
    );
    assert!(matches!(
        decision(&chosen, "encoder.layers.0.pwff.linear_inner"),
        Decision::Skipped(_)
    ));
    let quantized = chosen
        .iter()
        .filter(|report| report.decision.is_quantized())
        .count();
    assert!(quantized >= 2, "{chosen:?}");

    let small = reports(LayerPolicy::all().min_elements(32 * 48));
    assert_eq!(decision(&small, "head"), Decision::Small(32 * 48));
    assert_eq!(
        decision(&small, "encoder.layers.0.pwff.linear_inner"),
        Decision::Quantized
    );
    let line = small
        .iter()
        .find(|report| report.path == "head")
        .expect("a head")
        .to_string();
    assert_eq!(line, "head [32, 4]: compute dtype: fewer than 1536 weights");
    // The default leaves everything here alone: too small.
    assert!(
        reports(LayerPolicy::default())
            .iter()
            .all(|report| !report.decision.is_quantized())
    );

    // A skipped layer computes as if there were no recipe; a quantized one does not.
    let batch = &samples::<Burn, Encoder<Burn>>(seed, 1)[0];
    let float = floats(&model::<Burn, Encoder<Burn>>(seed).logits(batch));
    let logits = |policy: LayerPolicy| {
        let optim = QuantAdamWConfig::new()
            .with_policy(policy)
            .init::<Fallback, Encoder<Fallback>>();
        floats(
            &optim
                .attach(model::<Fallback, Encoder<Fallback>>(seed))
                .logits(batch),
        )
    };
    assert!(
        same_bits(
            &float,
            &logits(LayerPolicy::all().min_elements(0).skip("*"))
        ),
        "seed {seed}"
    );
    assert!(
        !same_bits(
            &float,
            &logits(LayerPolicy::all().min_elements(0).only("head"))
        ),
        "seed {seed}"
    );
}

// Burn's own learner.

#[derive(Clone, Debug)]
struct Item {
    input: Vec<f32>,
    label: i32,
}

struct Collate;

impl<B: Backend> Batcher<B, Item, (Tensor<B, 2>, Tensor<B, 1, Int>)> for Collate {
    fn batch(&self, items: Vec<Item>, device: &B::Device) -> (Tensor<B, 2>, Tensor<B, 1, Int>) {
        let count = items.len();
        let inputs: Vec<f32> = items.iter().flat_map(|item| item.input.clone()).collect();
        let labels: Vec<i32> = items.iter().map(|item| item.label).collect();
        (
            tensor::<B, 2>(&inputs, [count, MLP_INPUTS], device),
            Tensor::from_data(TensorData::new(labels, [count]), device),
        )
    }
}

/// The learner wants a model that implements its traits.
#[derive(Module, Debug)]
struct Learned<B: Backend> {
    mlp: Mlp<B>,
}

impl<B: Backend> Learned<B> {
    fn classify(&self, (x, labels): (Tensor<B, 2>, Tensor<B, 1, Int>)) -> ClassificationOutput<B> {
        let logits = self
            .mlp
            .down
            .forward(burn::tensor::activation::relu(self.mlp.up.forward(x)));
        let loss = burn::nn::loss::CrossEntropyLossConfig::new()
            .init(&logits.device())
            .forward(logits.clone(), labels.clone());
        ClassificationOutput::new(loss, logits, labels)
    }
}

impl<B: AutodiffBackend> TrainStep for Learned<B> {
    type Input = (Tensor<B, 2>, Tensor<B, 1, Int>);
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Self::Input) -> TrainOutput<ClassificationOutput<B>> {
        let output = self.classify(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl<B: Backend> InferenceStep for Learned<B> {
    type Input = (Tensor<B, 2>, Tensor<B, 1, Int>);
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Self::Input) -> ClassificationOutput<B> {
        self.classify(batch)
    }
}

/// Notes the numbers that the learner shows.
#[derive(Clone, Default)]
struct Notes {
    definitions: Arc<Mutex<Vec<MetricDefinition>>>,
    values: Arc<Mutex<Vec<(String, f64)>>>,
}

impl MetricsRendererTraining for Notes {
    fn update_train(&mut self, state: MetricState) {
        if let MetricState::Numeric(entry, number) = state {
            let definitions = self.definitions.lock().expect("no holder panics");
            let name = definitions
                .iter()
                .find(|it| it.metric_id == entry.metric_id)
                .map(|it| it.name.clone());
            let mut values = self.values.lock().expect("no holder panics");
            values.push((name.unwrap_or_default(), number.current()));
        }
    }

    fn update_valid(&mut self, _state: MetricState) {}

    fn render_train(&mut self, _item: TrainingProgress, _indicators: Vec<ProgressType>) {}

    fn render_valid(&mut self, _item: TrainingProgress, _indicators: Vec<ProgressType>) {}
}

impl MetricsRendererEvaluation for Notes {
    fn update_test(&mut self, _name: EvaluationName, _state: MetricState) {}

    fn render_test(&mut self, _item: EvaluationProgress, _indicators: Vec<ProgressType>) {}
}

impl MetricsRenderer for Notes {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, definition: MetricDefinition) {
        self.definitions
            .lock()
            .expect("no holder panics")
            .push(definition);
    }
}

type Batch<B> = (Tensor<B, 2>, Tensor<B, 1, Int>);

fn loader<B: Backend>(seed: u64, batches: usize) -> Arc<dyn DataLoader<B, Batch<B>>> {
    let items = samples::<Flex, Mlp<Flex>>(seed, batches)
        .into_iter()
        .flat_map(|sample| {
            let inputs: Vec<Vec<f32>> = sample
                .inputs
                .chunks(MLP_INPUTS)
                .map(<[f32]>::to_vec)
                .collect();
            inputs
                .into_iter()
                .zip(sample.labels)
                .map(|(input, label)| Item { input, label })
        })
        .collect();
    DataLoaderBuilder::new(Collate)
        .batch_size(16)
        .build(InMemDataset::new(items))
}

#[test]
fn burns_learner_trains_and_shows_the_fallback_rate() {
    let seed = seed();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let optim = every_layer(seed).init::<Fallback, Learned<Fallback>>();
    let start = Learned {
        mlp: model::<Fallback, Mlp<Fallback>>(seed),
    };
    let start = optim.attach(start);
    assert_eq!(start.mlp.down.weight.dims(), [32, CLASSES]);
    let layers = optim.view();
    let notes = Notes::default();
    let training = SupervisedTraining::new(
        folder.path(),
        loader::<Fallback>(seed, 40),
        loader::<<Fallback as AutodiffBackend>::InnerBackend>(seed + 1, 4),
    )
    .metric_train_numeric(OptimizerMetric::fallback_rate(&optim, 2))
    .metric_train_numeric(LossMetric::new())
    .with_file_checkpointer(NamedMpkFileRecorder::<FullPrecisionSettings>::default())
    .with_application_logger(None)
    .num_epochs(1)
    .renderer(notes.clone());
    let scheduler = CosineAnnealingLrSchedulerConfig::new(2e-2, 40)
        .init()
        .expect("a schedule");
    let result = training.launch(Learner::new(start, optim, scheduler));
    drop(result);

    assert_eq!(
        layers.record().step,
        40,
        "seed {seed}: optimizer steps of one epoch"
    );
    let rates = layers.fallback_rates();
    assert_eq!(rates.len(), 2, "seed {seed}: {rates:?}");
    let values = notes.values.lock().expect("no holder panics").clone();
    let of = |name: &str| -> Vec<f64> {
        values
            .iter()
            .filter(|(metric, _)| metric == name)
            .map(|(_, value)| *value)
            .collect()
    };
    let shown = of("Fallback Rate");
    assert!(
        !shown.is_empty(),
        "seed {seed}: the metric was shown: {values:?}"
    );
    let numbers: Vec<f64> = shown
        .iter()
        .copied()
        .filter(|rate| !rate.is_nan())
        .collect();
    assert!(
        !numbers.is_empty() && numbers.iter().all(|rate| (0.0..=100.0).contains(rate)),
        "seed {seed}: {shown:?}"
    );
    let losses = of("Loss");
    assert!(losses.len() > 10, "seed {seed}: {values:?}");
    let (first, last) = (
        losses[0],
        losses[losses.len() - 5..].iter().sum::<f64>() / 5.0,
    );
    assert!(
        last < 0.8 * first,
        "seed {seed}: the loss went from {first} to {last}"
    );
    let saved = folder.path().join("checkpoint/optim-1.mpk");
    assert!(saved.is_file(), "the learner wrote {}", saved.display());
}

/// Whoever only looks at the layers does not hold the wrapped optimizer's states.
#[test]
fn views_and_metrics_do_not_clone_the_optimizer() {
    struct Heavy;
    impl Clone for Heavy {
        fn clone(&self) -> Self {
            panic!("a clone holds the moments");
        }
    }
    let seed = seed();
    let optim = QuantOptimizer::<Heavy, Fallback>::new(Heavy, layer_config(seed));
    let (view, _metric) = (optim.view(), OptimizerMetric::fallback_rate(&optim, 1));
    let _model = optim.attach(model::<Fallback, Mlp<Fallback>>(seed));
    assert_eq!(view.layers(), optim.layers());
    assert_eq!(view.layers().len(), 2, "seed {seed}");
    assert_eq!(view.record(), optim.layers_record());
}

#[test]
fn the_row_of_a_backend_is_its_recipes() {
    let row = Fallback::row().expect("a recipe");
    assert_eq!(row.name, "fallback-int8");
    assert!(row.linear.is_some_and(|row| row.slots.len() == 1));
    assert!(Mixed::row().expect("a recipe").linear.is_none());
    assert!(Burn::row().is_none());
}
