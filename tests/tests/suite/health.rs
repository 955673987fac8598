//! The figures of health, against what they are said to be.

use std::collections::BTreeSet;

use burn::{
    backend::Autodiff,
    optim::{GradientsAccumulator, GradientsParams, Optimizer},
    tensor::backend::AutodiffBackend,
};
use burn_quant_train::{
    QuantTrain,
    data::DataBackend,
    health::{CastHealth, HealthConfig, HealthReport, MatrixHealth, MomentHealth, ZEROS},
    optim::{Moment, QuantAdamWConfig, StateFormat},
    recipe::{
        BlockInt8, CurrentFp8, DelayedFp8, FallbackInt8, Granularity, LinearMatrix, LinearOperand,
        MixedPrecision, NAMES, Number, Recipe, Residual, Rounding, ScaleNumber, ScaleSource,
        Transform,
        context::{Contexts, Int10},
    },
};
use cubecl_kernels::{granularity, quantize::QuantizeSpec, reference, shape::MatrixShape};
use quant_train_tests::{
    Rng,
    data::{same_bits, tensor},
    models::{Classifier, Mlp, One},
    on_every_backend,
    train::{accumulated, attached, every_layer, parameters_of, samples, train},
};

on_every_backend! {
    figures_are_those_of_the_reference => figures;
    fallback_counts_with_the_layers_threshold => fallback;
    a_delayed_scale_saturates_what_has_grown => saturation;
    runs_of_a_step_add_up => runs;
    what_is_not_finite_is_said => not_finite;
    patterns_name_what_is_measured => patterns;
    layers_take_turns => turns;
    a_threshold_that_is_not_there_is_near_the_rate => what_if_fallback;
    compressed_contexts_keep_their_bits => contexts;
    measuring_can_be_switched_off => switched;
    moments_are_compared_with_what_they_would_be_in_fp32 => moments;
    moments_of_fp32_lose_nothing => full_moments;
    clones_that_step_side_by_side_report_moments_once => clones;
}

type T<B, R> = QuantTrain<Autodiff<B>, R>;

const SHAPE: [usize; 3] = [160, 144, 136];

/// X and dY of a layer, and its weight's seed.
struct Data {
    x: Vec<f32>,
    gradient: Vec<f32>,
    seed: u64,
}

impl Data {
    /// X with a few outliers.
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let [rows, k, n] = SHAPE;
        let mut x = rng.normals(rows * k, 1.0);
        for _ in 0..20 {
            let index = rng.below(x.len());
            x[index] *= 50.0;
        }
        x[0] = 0.0;
        Self {
            x,
            gradient: rng.normals(rows * n, 1e-6),
            seed,
        }
    }
}

/// Trains one layer for a step on each of these data, and gives what was measured.
fn measured<B: DataBackend, R: Recipe>(
    config: QuantAdamWConfig,
    data: &[Data],
) -> Vec<HealthReport> {
    let device = Default::default();
    let [rows, k, n] = SHAPE;
    let model = One::<T<B, R>>::new(k, n, true, &device);
    let (mut optim, mut model) = attached(&config, model, data[0].seed);
    for data in data {
        let x = tensor::<T<B, R>, 2>(&data.x, [rows, k], &device);
        let gradient = tensor::<T<B, R>, 2>(&data.gradient, [rows, n], &device);
        let loss = (model.linear.forward(x.require_grad()) * gradient).sum();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(0.0, model, gradients);
    }
    optim.take_health()
}

#[track_caller]
fn matrix(report: &HealthReport, matrix: LinearMatrix) -> &MatrixHealth {
    let found = report.matrices.iter().find(|it| it.matrix == matrix);
    found.unwrap_or_else(|| panic!("no {matrix} in {report:?}"))
}

/// Figures of a cast by their definitions, of values and what they became.
#[track_caller]
fn assert_figures(cast: &CastHealth, x: &[f32], y: &[f32], what: &str) {
    let found = (cast.noise, cast.cosine, cast.underflow);
    assert_defined_figures(found, x, y, what);
}

/// Noise, cosine and underflow by their definitions, of values and what they became.
#[track_caller]
fn assert_defined_figures(
    (noise, cosine, underflow): (Option<f64>, Option<f64>, f64),
    x: &[f32],
    y: &[f32],
    what: &str,
) {
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        let pairs = a.iter().zip(b);
        pairs.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    };
    let rest: Vec<f32> = x.iter().zip(y).map(|(x, y)| x - y).collect();
    let near = |found: Option<f64>, expected: f64| {
        let found = found.expect("finite values");
        assert!(
            (found - expected).abs() <= 1e-4 * expected.abs() + 1e-12,
            "{what}: {found} instead of {expected}"
        );
    };
    near(noise, dot(&rest, &rest) / dot(x, x));
    near(cosine, dot(x, y) / (dot(x, x) * dot(y, y)).sqrt());
    let underflown = x.iter().zip(y).filter(|(x, y)| **x != 0.0 && **y == 0.0);
    near(Some(underflow), underflown.count() as f64 / x.len() as f64);
}

fn transposed(x: &[f32], [rows, cols]: [usize; 2]) -> Vec<f32> {
    reference::transpose(x, MatrixShape::new(rows, cols))
}

/// All casts to nearest by the data alone, of every recipe, on a model that quantizes nothing.
fn figures<B: DataBackend>(seed: u64) {
    let [rows, k, n] = SHAPE;
    let data = Data::new(seed);
    let health = NAMES
        .iter()
        .fold(HealthConfig::every(1), |it, name| it.what_if(*name));
    let config = every_layer(seed).with_health(Some(health));
    let reports = measured::<B, MixedPrecision<f32>>(config, std::slice::from_ref(&data));
    let [report] = &reports[..] else {
        panic!("one step was measured: {reports:?}");
    };
    assert_eq!((report.step, report.layers.len()), (1, 0));
    let mut tested = 0;
    for (which, values, shape) in [
        (LinearMatrix::X, &data.x, [rows, k]),
        (LinearMatrix::Gradient, &data.gradient, [rows, n]),
    ] {
        let found = matrix(report, which);
        assert_eq!(found.layer, "linear");
        let absmax = reference::absmax(values.iter().copied());
        assert_eq!(found.absmax, Some(absmax));
        assert_eq!(found.elements as usize, values.len());
        let zeros = values.iter().filter(|x| **x == 0.0).count();
        assert_eq!(found.histogram[ZEROS] as usize, zeros);
        for name in NAMES {
            let Some(row) = name.row().linear else {
                continue;
            };
            for (operand, cast) in row.operands().filter(|(it, _)| it.matrix() == which) {
                let plain = cast.source == ScaleSource::Data
                    && cast.transform == Transform::Identity
                    && cast.rounding == Rounding::Nearest
                    && cast.residual == Residual::Never
                    && cast.scale == ScaleNumber::F32;
                let labels = found.casts.iter();
                let mut labels =
                    labels.filter(|it| it.recipe == name.as_str() && it.operand == operand);
                let Some(label) = labels.next().filter(|_| plain) else {
                    continue;
                };
                // The product sums along the columns of X and of dY in dX, along the rows in dW.
                let sums_columns = matches!(operand, LinearOperand::X | LinearOperand::Gradient);
                let (granularity, turn) = match cast.granularity {
                    Granularity::Block(side) => (granularity::Granularity::Block(side), false),
                    Granularity::Tensor => (granularity::Granularity::Tensor, false),
                    Granularity::Row => (granularity::Granularity::Token, !sums_columns),
                    Granularity::Group(size) => {
                        (granularity::Granularity::Group(size), !sums_columns)
                    }
                };
                let (of, [rows, cols]) = match turn {
                    true => (transposed(values, shape), [shape[1], shape[0]]),
                    false => (values.clone(), shape),
                };
                let spec = QuantizeSpec::new(cast.number, granularity);
                let quantized = reference::quantize(&of, MatrixShape::new(rows, cols), &spec);
                let became = reference::dequantize(&quantized);
                let what = format!("{name} {operand}, seed {seed}");
                assert_figures(label, &of, &became, &what);
                assert_eq!(label.saturation, 0.0, "{what}");
                let fold = |f: fn(f32, f32) -> f32| {
                    let scales = quantized.scales.iter().copied();
                    scales.reduce(f).expect("a scale")
                };
                assert_eq!(
                    label.scales,
                    Some([fold(f32::min), fold(f32::max)]),
                    "{what}"
                );
                tested += 1;
            }
        }
    }
    assert!(tested >= 8, "{tested} casts were compared");
}

/// The running recipe's X is quantized with the threshold of its layer.
fn fallback<B: DataBackend>(seed: u64) {
    let [rows, k, _] = SHAPE;
    let data = Data::new(seed);
    let mut config = every_layer(seed).with_health(Some(HealthConfig::every(1)));
    for initial in [1e-3, 60.0, 1e6] {
        config.threshold.initial = initial;
        let reports = measured::<B, FallbackInt8<f32>>(config.clone(), std::slice::from_ref(&data));
        let found = matrix(&reports[0], LinearMatrix::X);
        let x = found
            .casts
            .iter()
            .find(|cast| cast.operand == LinearOperand::X);
        let shape = MatrixShape::new(rows, k);
        let quantized = reference::quantize_fallback(&data.x, shape, 128, initial);
        let became = reference::dequantize_fallback(&quantized);
        let became: Vec<_> = became.into_iter().map(|y| y as f32).collect();
        let what = format!("threshold {initial}, seed {seed}");
        assert_figures(x.expect("X is quantized"), &data.x, &became, &what);
        let [layer] = &reports[0].layers[..] else {
            panic!("one layer is quantized: {reports:?}");
        };
        let blocks = quantized.flags.len();
        let rate = quantized.flags.iter().filter(|flag| **flag).count() as f32 / blocks as f32;
        assert_eq!((layer.layer.as_str(), layer.rate), ("linear", Some(rate)));
    }
}

/// Values ten times larger than those that the scale is of saturate.
fn saturation<B: DataBackend>(seed: u64) {
    let small = Data::new(seed);
    let large = Data {
        x: small.x.iter().map(|x| 10.0 * x).collect(),
        gradient: small.gradient.clone(),
        seed,
    };
    let absmax = reference::absmax(small.x.iter().copied());
    let beyond = large.x.iter().filter(|x| x.abs() > absmax).count();
    let config = every_layer(seed).with_health(Some(HealthConfig::every(1)));
    let reports = measured::<B, DelayedFp8<f32>>(config.clone(), &[small, large]);
    let shares = reports.iter().map(|report| {
        let x = matrix(report, LinearMatrix::X).running().next();
        x.expect("X is quantized").saturation
    });
    let shares: Vec<_> = shares.collect();
    let [rows, k, _] = SHAPE;
    assert_eq!(
        shares,
        [0.0, beyond as f64 / (rows * k) as f64],
        "seed {seed}"
    );
    assert!(beyond > 0);
}

/// Three micro-batches of a step are one matrix, the weight is counted once.
fn runs<B: DataBackend>(seed: u64) {
    type R = CurrentFp8<f32>;
    let device = Default::default();
    let [rows, k, n] = SHAPE;
    let config = every_layer(seed).with_health(Some(HealthConfig::every(1)));
    let model = One::<T<B, R>>::new(k, n, false, &device);
    let (mut optim, model) = attached(&config, model, seed);
    let mut accumulator = GradientsAccumulator::new();
    let mut rng = Rng::new(seed);
    let (mut all, mut became) = (Vec::new(), Vec::new());
    let mut scales = Vec::new();
    for scale in [1e-3, 8.0, 1.0] {
        let x = rng.normals(rows * k, scale);
        let y = model
            .linear
            .forward(tensor::<T<B, R>, 2>(&x, [rows, k], &device));
        let gradients = GradientsParams::from_grads(y.sum().backward(), &model);
        accumulator.accumulate(&model, gradients);
        let spec = QuantizeSpec::new(Number::E4M3, granularity::Granularity::Tensor);
        let quantized = reference::quantize(&x, MatrixShape::new(rows, k), &spec);
        became.extend(reference::dequantize(&quantized));
        scales.extend(quantized.scales);
        all.extend(x);
    }
    optim.step(0.0, model, accumulator.grads());
    let reports = optim.take_health();
    let x = matrix(&reports[0], LinearMatrix::X);
    let (absmax, histogram) = reference::magnitudes(&all);
    let histogram: Vec<_> = histogram.into_iter().map(u64::from).collect();
    assert_eq!(
        (x.absmax, &x.histogram),
        (Some(absmax), &histogram),
        "seed {seed}"
    );
    assert_eq!(x.elements as usize, 3 * rows * k);
    let cast = x.casts.iter().find(|cast| cast.operand == LinearOperand::X);
    let cast = cast.expect("X is quantized");
    assert_figures(cast, &all, &became, &format!("three runs, seed {seed}"));
    scales.sort_by(f32::total_cmp);
    assert_eq!(cast.scales, Some([scales[0], scales[2]]), "seed {seed}");
    assert_eq!(
        matrix(&reports[0], LinearMatrix::W).elements as usize,
        k * n
    );
    assert!(optim.take_health().is_empty(), "reports are taken once");
}

fn not_finite<B: DataBackend>(seed: u64) {
    let mut data = Data::new(seed);
    data.x[5] = f32::NAN;
    let config = every_layer(seed).with_health(Some(HealthConfig::every(1)));
    let reports = measured::<B, BlockInt8<f32>>(config, &[data]);
    let x = matrix(&reports[0], LinearMatrix::X);
    assert!(x.is_not_finite());
    assert!(
        x.casts
            .iter()
            .all(|cast| cast.noise.is_none() && cast.scales.is_none())
    );
    let json = serde_json::to_string(&reports).expect("plain data");
    let again: Vec<HealthReport> = serde_json::from_str(&json).expect("what was written");
    assert_eq!(again, reports);
}

fn patterns<B: DataBackend>(seed: u64) {
    let data = || [Data::new(seed)];
    let config = every_layer(seed);
    let of = |pattern: &str| {
        config
            .clone()
            .with_health(Some(HealthConfig::every(1).layers(pattern)))
    };
    let reports = measured::<B, BlockInt8<f32>>(of("other"), &data());
    assert!(reports[0].matrices.is_empty());
    let reports = measured::<B, BlockInt8<f32>>(of("lin*"), &data());
    assert_eq!(reports[0].matrices.len(), 3);
    let rare = config.with_health(Some(HealthConfig::every(2)));
    assert!(measured::<B, BlockInt8<f32>>(rare, &data()).is_empty());
}

/// The figures of `fallback-int8` lie between those of no block and of every block in fallback, with blocks that differ
/// little: the maximum of each is 5% above that of the one before, a little more than the steps in which a threshold is
/// looked for.
fn what_if_fallback<B: DataBackend>(seed: u64) {
    let device = Default::default();
    let [rows, k, n] = [1024, 256, 16];
    let health = HealthConfig::every(1).what_if("fallback-int8".parse().expect("a recipe"));
    let config = every_layer(seed).with_health(Some(health));
    let model = One::<T<B, MixedPrecision<f32>>>::new(k, n, false, &device);
    let (mut optim, model) = attached(&config, model, seed);
    let mut data = Rng::new(seed).normals(rows * k, 1.0);
    let corners = (0..rows)
        .step_by(128)
        .flat_map(|row| [row * k, row * k + 128]);
    for (block, corner) in (0..).zip(corners) {
        data[corner] = 6.0 * 1.05f32.powi(block);
    }
    let x = tensor::<T<B, MixedPrecision<f32>>, 2>(&data, [rows, k], &device);
    let loss = model.linear.forward(x).sum();
    let gradients = GradientsParams::from_grads(loss.backward(), &model);
    optim.step(0.0, model, gradients);
    let reports = optim.take_health();
    let cast = &matrix(&reports[0], LinearMatrix::X).casts[0];
    // The noise of each block falls to nothing where it falls back: 16 blocks, of which the 1 to 3 do that have most of
    // it.
    let shape = MatrixShape::new(rows, k);
    let noise = |threshold| {
        let quantized = reference::quantize_fallback(&data, shape, 128, threshold);
        let became = reference::dequantize_fallback(&quantized);
        let pairs = data.iter().map(|x| f64::from(*x)).zip(became);
        pairs.map(|(x, y)| (x - y) * (x - y)).sum::<f64>()
    };
    let signal: f64 = data.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
    let share = cast.noise.expect("finite values") * signal / noise(f32::MAX);
    assert!(
        (0.6..0.95).contains(&share),
        "seed {seed}: {share} of the noise without fallback"
    );
}

/// Inputs that wait compressed are read as the product read them, in two micro-batches.
fn contexts<B: DataBackend>(seed: u64) {
    type R = Contexts<FallbackInt8<f32>, Int10>;
    let run = |health: Option<HealthConfig>| {
        let config = every_layer(seed).with_health(health);
        let model = Mlp::<T<B, R>>::new(&Default::default());
        let (mut optim, model) = attached(&config, model, seed);
        let batches = samples::<T<B, R>, Mlp<T<B, R>>>(seed, 6);
        let run = accumulated(model, &mut optim, &batches);
        (
            run.losses,
            parameters_of(&run.model),
            optim.take_health().len(),
        )
    };
    let (plain, measured) = (run(None), run(Some(HealthConfig::every(1))));
    assert!(same_bits(&plain.0, &measured.0), "seed {seed}");
    for (plain, measured) in plain.1.iter().zip(&measured.1) {
        assert!(same_bits(plain, measured), "seed {seed}");
    }
    assert_eq!((plain.2, measured.2), (0, 2));
}

fn switched<B: DataBackend>(seed: u64) {
    type R = BlockInt8<f32>;
    let device = Default::default();
    let [rows, k, n] = SHAPE;
    let config = every_layer(seed).with_health(Some(HealthConfig::every(1)));
    let (mut optim, model) = attached(&config, One::<T<B, R>>::new(k, n, false, &device), seed);
    let loss = |scale| {
        let x = Rng::new(seed).normals(rows * k, scale);
        model
            .linear
            .forward(tensor::<T<B, R>, 2>(&x, [rows, k], &device))
            .sum()
    };
    optim.view().measure_health(false);
    drop(loss(1e6));
    optim.view().measure_health(true);
    let gradients = GradientsParams::from_grads(loss(1.0).backward(), &model);
    optim.step(0.0, model.clone(), gradients);
    let reports = optim.take_health();
    let x = matrix(&reports[0], LinearMatrix::X);
    assert_eq!(x.elements as usize, rows * k);
    assert!(x.absmax.is_some_and(|absmax| absmax < 100.0), "seed {seed}");
}

/// Trains one layer for three steps, each measured, and gives its reports and the gradients of its weight.
fn measured_moments<B: DataBackend>(
    config: QuantAdamWConfig,
    seed: u64,
) -> (Vec<HealthReport>, Vec<Vec<f32>>) {
    type R = MixedPrecision<f32>;
    let device = Default::default();
    let [rows, k, n] = SHAPE;
    let config = config.with_health(Some(HealthConfig::every(1)));
    let model = One::<T<B, R>>::new(k, n, true, &device);
    let (mut optim, mut model) = attached(&config, model, seed);
    let mut gradients_of_weight = Vec::new();
    for step in 0..3 {
        let data = Data::new(seed + step);
        let x = tensor::<T<B, R>, 2>(&data.x, [rows, k], &device);
        let gradient = tensor::<T<B, R>, 2>(&data.gradient, [rows, n], &device);
        let loss = (model.linear.forward(x) * gradient).sum();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let of_weight = gradients
            .get::<<T<B, R> as AutodiffBackend>::InnerBackend, 2>(model.linear.weight.id)
            .expect("the weight has a gradient");
        gradients_of_weight.push(of_weight.into_data().to_vec().expect("FP32"));
        model = optim.step(1e-3, model, gradients);
    }
    (optim.take_health(), gradients_of_weight)
}

/// Each step rounds what the moment of the step before, as it is stored, and the gradient make.
fn moments<B: DataBackend>(seed: u64) {
    let (beta_1, beta_2) = (0.9, 0.95);
    for formats in [
        [StateFormat::E4M3.expanded(), StateFormat::E5M2],
        [StateFormat::DYNAMIC_EXPONENT, StateFormat::INT8],
    ] {
        let [first, second] = formats;
        let config = every_layer(seed)
            .with_beta_1(beta_1)
            .with_beta_2(beta_2)
            .with_first(Some(first))
            .with_second(Some(second));
        let (reports, gradients) = measured_moments::<B>(config, seed);
        assert_eq!(reports.len(), 3);
        for (index, (moment, format, beta)) in [
            (Moment::First, first, beta_1),
            (Moment::Second, second, beta_2),
        ]
        .into_iter()
        .enumerate()
        {
            let mut stored = vec![0.0; gradients[0].len()];
            for (report, gradient) in reports.iter().zip(&gradients) {
                let [of_first, of_second] = &report.moments[..] else {
                    panic!("one weight is a layer's: {:?}", report.moments);
                };
                let found = [of_first, of_second][index];
                assert_eq!(
                    (found.layer.as_str(), found.moment, found.format),
                    ("linear", moment, Some(format))
                );
                let exact: Vec<f32> = stored
                    .iter()
                    .zip(gradient)
                    .map(|(stored, &gradient)| {
                        let term = match moment {
                            Moment::First => gradient,
                            Moment::Second => gradient * gradient,
                        };
                        beta * stored + (1.0 - beta) * term
                    })
                    .collect();
                let state = reference::optimizer_state::quantize_state(&exact, format, moment);
                stored = reference::optimizer_state::dequantize_state(&state, format, moment);
                let figures = (found.noise, found.cosine, found.underflow);
                let what = format!("{moment} in {format}, step {}, seed {seed}", report.step);
                assert_defined_figures(figures, &exact, &stored, &what);
                assert_magnitudes(found, &exact, &what);
            }
        }
    }
}

#[track_caller]
fn assert_magnitudes(found: &MomentHealth, exact: &[f32], what: &str) {
    assert_eq!(found.elements as usize, exact.len(), "{what}");
    assert_eq!(
        found.histogram.iter().sum::<u64>(),
        found.elements,
        "{what}"
    );
    let absmax = reference::absmax(exact.iter().copied());
    let of_found = found.absmax.expect("finite moments");
    assert!(
        (of_found - absmax).abs() <= 1e-5 * absmax,
        "{what}: {of_found} instead of {absmax}"
    );
}

fn clones<B: DataBackend>(seed: u64) {
    type R = BlockInt8<f32>;
    let device = Default::default();
    let [rows, k, n] = SHAPE;
    let format = Some(StateFormat::E4M3);
    let config = every_layer(seed)
        .with_first(format)
        .with_second(format)
        .with_health(Some(HealthConfig::every(1)));
    let (mut one, model) = attached(&config, One::<T<B, R>>::new(k, n, false, &device), seed);
    let mut other = one.clone();
    let gradients = |model: &One<T<B, R>>| {
        let x = Rng::new(seed).normals(rows * k, 1.0);
        let x = tensor::<T<B, R>, 2>(&x, [rows, k], &device);
        GradientsParams::from_grads(model.linear.forward(x).sum().backward(), model)
    };
    let mut copies = [model.clone(), model];
    for _ in 0..2 {
        let [left, right] = copies;
        let of_both = [gradients(&left), gradients(&right)];
        let [of_left, of_right] = of_both;
        copies = [
            one.step(1e-3, left, of_left),
            other.step(1e-3, right, of_right),
        ];
    }
    let reports = one.take_health();
    let found: Vec<_> = reports
        .iter()
        .map(|report| (report.step, report.moments.len()))
        .collect();
    assert_eq!(found, [(1, 2), (2, 2)], "seed {seed}");
}

fn full_moments<B: DataBackend>(seed: u64) {
    let (reports, _) = measured_moments::<B>(every_layer(seed), seed);
    let counts: Vec<_> = reports.iter().map(|report| report.moments.len()).collect();
    assert_eq!(counts, [2, 2, 2]);
    for moment in reports.iter().flat_map(|report| &report.moments) {
        assert_eq!((moment.format, moment.underflow), (None, 0.0));
        assert_eq!(moment.noise, Some(0.0), "seed {seed}: {moment:?}");
    }
}

fn turns<B: DataBackend>(seed: u64) {
    type R = BlockInt8<f32>;
    let health = HealthConfig::every(2).in_turns(2);
    let config = every_layer(seed).with_health(Some(health));
    let (mut optim, model) = attached(&config, Mlp::<T<B, R>>::new(&Default::default()), seed);
    let batches = samples::<T<B, R>, Mlp<T<B, R>>>(seed, 9);
    train(model, &mut optim, 1e-2, &batches);
    let reports = optim.take_health();
    let steps: Vec<_> = reports.iter().map(|report| report.step).collect();
    assert_eq!(steps, [2, 4, 6, 8]);
    let layers = |report: &HealthReport| -> BTreeSet<String> {
        let of_matrices = report.matrices.iter().map(|it| it.layer.clone());
        let of_moments = report.moments.iter().map(|it| it.layer.clone());
        of_matrices.chain(of_moments).collect()
    };
    let [one, other, one_again, other_again] = [0, 1, 2, 3].map(|index| layers(&reports[index]));
    assert_eq!((&one, &other), (&one_again, &other_again));
    assert!(one.is_disjoint(&other) && !one.is_empty() && !other.is_empty());

    // The last two have all layers, with the figures of the later one's own.
    let latest = HealthReport::latest(&reports).expect("there are reports");
    assert_eq!(layers(&latest), &one | &other);
    assert_eq!(latest.step, 8);
    let count = |report: &HealthReport| (report.matrices.len(), report.moments.len());
    let [of_one, of_other] = [&reports[2], &reports[3]].map(count);
    assert_eq!(
        count(&latest),
        (of_one.0 + of_other.0, of_one.1 + of_other.1)
    );
    assert!(
        reports[3]
            .matrices
            .iter()
            .all(|it| latest.matrices.contains(it))
    );
    assert!(
        reports[2]
            .matrices
            .iter()
            .all(|it| latest.matrices.contains(it))
    );
    assert_eq!(HealthReport::latest(&[]), None);
}

#[cfg(feature = "flex")]
#[test]
#[should_panic(expected = "health: layers have 0 turns")]
fn a_layer_has_a_turn() {
    type B = T<burn::backend::Flex, BlockInt8<f32>>;
    let health = HealthConfig::every(1).in_turns(0);
    let config = QuantAdamWConfig::new().with_health(Some(health));
    let _ = config.init::<B, One<B>>();
}

#[cfg(feature = "flex")]
#[test]
#[should_panic(expected = "health: measures every 0 steps")]
fn steps_are_counted_from_one() {
    type B = T<burn::backend::Flex, BlockInt8<f32>>;
    let config = QuantAdamWConfig::new().with_health(Some(HealthConfig::every(0)));
    let _ = config.init::<B, One<B>>();
}
