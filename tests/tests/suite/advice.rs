//! Faults that are planted in one layer of a stack are found, each first, in the layer where it is.

use burn::{
    backend::{Autodiff, Flex},
    module::Module,
    nn::{Linear, LinearConfig},
    optim::{GradientsParams, Optimizer},
    tensor::{Tensor, activation::relu, backend::Backend},
};
use burn_quant_train::{
    QuantTrain,
    health::{HealthConfig, HealthReport, LayerState},
    layer::{DelayThreshold, LayerPolicy},
    optim::advice::{Advice, Fault, Remedy, advise},
    recipe::{BlockInt8, CurrentFp8, FallbackInt8, Name, Recipe},
};
use quant_train_tests::{
    Rng,
    data::tensor,
    seed,
    train::{attached, every_layer},
};

type T<R> = QuantTrain<Autodiff<Flex>, R>;

const ROWS: usize = 1024;
const WIDTH: usize = 128;
/// The layer in which faults are planted.
const BAD: usize = 2;

#[derive(Module, Debug)]
struct Stack<B: Backend> {
    layers: Vec<Linear<B>>,
}

/// The damage to the input and to the output of the bad layer.
type Change<B> = fn(Tensor<B, 2>) -> Tensor<B, 2>;

fn same<B: Backend>(x: Tensor<B, 2>) -> Tensor<B, 2> {
    x
}

/// A column vector that multiplies rows.
fn of_rows<B: Backend>(factor: impl Fn(usize) -> f32, device: &B::Device) -> Tensor<B, 2> {
    let factors: Vec<f32> = (0..ROWS).map(factor).collect();
    tensor::<B, 2>(&factors, [ROWS, 1], device)
}

/// Trains a stack whose blocks of inputs have maxima of their own, so that thresholds between them exist.
fn advice<R: Recipe>(
    seed: u64,
    steps: usize,
    what_if: &[&str],
    before: Change<T<R>>,
    behind: Change<T<R>>,
) -> Advice {
    let device = Default::default();
    let linear = || {
        LinearConfig::new(WIDTH, WIDTH)
            .with_bias(false)
            .init(&device)
    };
    let model = Stack::<T<R>> {
        layers: (0..4).map(|_| linear()).collect(),
    };
    let names = what_if
        .iter()
        .map(|name| name.parse::<Name>().expect("a recipe"));
    let health = names.fold(
        HealthConfig::every((steps / 6).max(1) as u64),
        HealthConfig::what_if,
    );
    let config = every_layer(seed).with_health(Some(health));
    let (mut optim, mut model) = attached(&config, model, seed);
    let mut rng = Rng::new(seed);
    let mut reports = Vec::new();
    for _ in 0..steps {
        let x = rng.normals(ROWS * WIDTH, 1.0);
        let x = tensor::<T<R>, 2>(&x, [ROWS, WIDTH], &device);
        let mut x = x * of_rows(|row| 2f32.powi((row / 128) as i32), &device);
        for (index, layer) in model.layers.iter().enumerate() {
            x = match index {
                BAD => behind(layer.forward(before(x))),
                _ => layer.forward(x),
            };
        }
        let gradients = GradientsParams::from_grads(x.square().mean().backward(), &model);
        model = optim.step(1e-6, model, gradients);
        reports.extend(optim.take_health());
    }
    assert_eq!(reports.len(), 6.min(steps));
    advise(&reports)
}

#[track_caller]
fn assert_first(advice: &Advice, fault: Fault, layers: &[usize], seed: u64) {
    let first = advice.findings.first();
    let first = first.unwrap_or_else(|| panic!("seed {seed}: nothing was found"));
    let layers: Vec<_> = layers.iter().map(|it| format!("layers.{it}")).collect();
    assert!(
        first.fault == fault && layers.contains(&first.layer),
        "seed {seed}: {fault} in {layers:?} was planted, found was\n{advice}"
    );
}

/// A column 10,000 times as large as the others.
fn outliers<B: Backend>(x: Tensor<B, 2>) -> Tensor<B, 2> {
    let factors: Vec<f32> = (0..WIDTH)
        .map(|col| if col == 7 { 1e4 } else { 1.0 })
        .collect();
    let factors = tensor::<B, 2>(&factors, [1, WIDTH], &x.device());
    x * factors
}

#[test]
fn outliers_are_found_and_left_out() {
    let seed = seed();
    let advice = advice::<BlockInt8<f32>>(seed, 2, &["mixed-precision"], outliers, same);
    assert_first(&advice, Fault::Outliers, &[BAD], seed);
    assert_eq!(advice.findings[0].remedy, Remedy::Skip);
    let policy = advice.policy(LayerPolicy::all());
    assert!(!policy.decide("layers.2", [512, 512]).is_quantized());
    assert!(policy.decide("layers.0", [512, 512]).is_quantized());
    assert!(
        advice.to_string().contains(".skip(\"layers.2\")"),
        "{advice}"
    );
}

#[test]
fn a_recipe_that_takes_outliers_is_named() {
    let seed = seed();
    let advice = advice::<BlockInt8<f32>>(seed, 2, &["rowwise-fp8", "block-fp8"], outliers, same);
    assert_first(&advice, Fault::Outliers, &[BAD], seed);
    let remedy = &advice.findings[0].remedy;
    assert!(
        matches!(remedy, Remedy::Recipe { recipe, .. } if recipe.ends_with("fp8")),
        "seed {seed}: {advice}"
    );
}

/// The same value, of whose gradient most rows are 10^12 times smaller than the others.
fn vanishing<B: Backend>(y: Tensor<B, 2>) -> Tensor<B, 2> {
    let device = y.device();
    let factors = of_rows(
        |row| if row.is_multiple_of(8) { 1.0 } else { 1e-12 },
        &device,
    );
    let rest = (y.clone() * (-factors.clone() + 1.0)).detach();
    y * factors + rest
}

#[test]
fn a_gradient_that_underflows_is_found() {
    let seed = seed();
    let advice = advice::<CurrentFp8<f32>>(seed, 2, &[], same, vanishing);
    let [fault, other] = [Fault::Underflow, Fault::Outliers];
    let first = &advice.findings[0];
    assert!(
        [fault, other].contains(&first.fault)
            && first.operand.is_some_and(|it| it.to_string() == "dY"),
        "seed {seed}: {advice}"
    );
    // The gradient goes on to the layers before.
    assert_first(&advice, first.fault, &[0, 1, BAD], seed);
    assert!(
        first.figure.contains("% of the values become 0"),
        "{advice}"
    );
}

#[test]
fn a_dead_layer_is_found() {
    let seed = seed();
    let advice = advice::<BlockInt8<f32>>(seed, 2, &[], same, |y| relu(y.add_scalar(-1e9)));
    assert_first(&advice, Fault::Dead, &[BAD, BAD + 1], seed);
}

#[test]
fn what_is_not_finite_is_found() {
    let seed = seed();
    let advice = advice::<BlockInt8<f32>>(seed, 2, &[], |x| x.log(), same);
    assert_first(&advice, Fault::NotFinite, &[0, 1, BAD, BAD + 1], seed);
}

/// All magnitudes are 100; the gradient is that of the identity.
fn flat<B: Backend>(x: Tensor<B, 2>) -> Tensor<B, 2> {
    let rest = (x.clone().sign() * 100.0 - x.clone()).detach();
    x + rest
}

#[test]
fn a_threshold_that_cannot_settle_is_found() {
    let seed = seed();
    // All blocks have the same maximum.
    let advice = advice::<FallbackInt8<f32>>(seed, 72, &[], flat, same);
    // The output of the layer is flat too.
    assert_first(&advice, Fault::Unsettled, &[BAD, BAD + 1], seed);
}

#[test]
fn a_healthy_stack_has_nothing_that_stands_out() {
    let seed = seed();
    let advice = advice::<FallbackInt8<f32>>(seed, 72, &[], same, same);
    assert!(advice.findings.is_empty(), "seed {seed}: {advice}");
    assert_eq!(advice.to_string(), "nothing stands out");
    assert_eq!(advise(&[]).findings, []);
}

/// Rates are judged by the range of the controller that runs.
#[test]
fn another_range_is_another_verdict() {
    let state = |rate| LayerState {
        layer: String::from("it"),
        threshold: Some(1.0),
        rate: Some(rate),
    };
    let advice = |rate, controller| {
        let report = |step| HealthReport {
            step,
            turns: 1,
            matrices: Vec::new(),
            moments: Vec::new(),
            layers: vec![state(rate)],
            controller,
        };
        advise(&[1, 2, 3, 4].map(report)).findings.len()
    };
    let high = DelayThreshold {
        rate_min: 0.3,
        rate_max: 0.5,
        ..DelayThreshold::default()
    };
    let found =
        [0.2, 0.4].map(|rate| (advice(rate, DelayThreshold::default()), advice(rate, high)));
    assert_eq!(found, [(0, 1), (1, 0)]);
}
