//! Reports of what waits: by layer, each value once, and where a flow broke.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::{
    backend::Autodiff,
    module::Module,
    nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig},
    tensor::{
        DType, Tensor,
        activation::{gelu, tanh},
        backend::Backend,
    },
};
use burn_quant_train::{
    QuantTrain,
    data::DataBackend,
    recipe::{
        BlockInt8, CoatFp8, FallbackInt8, Flow, HadamardInt4, JetfireInt8, MixedPrecision, Number,
        Recipe,
        context::{Contexts, Int10},
    },
    saved::{
        ActivationReport, Recording, named,
        report::{Form, Saved, Total},
    },
};
use quant_train_tests::{
    Rng,
    data::tensor,
    on_every_backend,
    train::{attached, every_layer},
};

on_every_backend! {
    values_have_the_paths_of_layers => paths;
    operands_are_counted_once_as_their_outlines_say => operands;
    what_two_operators_of_a_flow_read_is_one_copy => shared;
    a_break_of_a_flow_shows => breaks;
}

type T<B, R> = QuantTrain<Autodiff<B>, R>;

const ROWS: usize = 64;
const WIDTH: usize = 128;

/// A norm, two layers that read it, a function between them and a third.
#[derive(Module, Debug)]
struct Block<B: Backend> {
    norm: LayerNorm<B>,
    gate: Linear<B>,
    up: Linear<B>,
    down: Linear<B>,
}

impl<B: Backend> Block<B> {
    fn new(device: &B::Device) -> Self {
        let linear = || {
            LinearConfig::new(WIDTH, WIDTH)
                .with_bias(false)
                .init(device)
        };
        Self {
            norm: LayerNormConfig::new(WIDTH).init(device),
            gate: linear(),
            up: linear(),
            down: linear(),
        }
    }

    fn forward(
        &self,
        x: Tensor<B, 2>,
        between: impl Fn(Tensor<B, 2>) -> Tensor<B, 2>,
    ) -> Tensor<B, 2> {
        let x = self.norm.forward(x);
        let inside = between(self.gate.forward(x.clone())) * self.up.forward(x);
        self.down.forward(inside)
    }
}

/// The values that wait for the backward pass of a block, and after it.
fn of_block<B: DataBackend, R: Recipe>(
    seed: u64,
    between: impl Fn(Tensor<T<B, R>, 2>) -> Tensor<T<B, R>, 2>,
) -> ActivationReport {
    let device = Default::default();
    let (_optimizer, block) = attached::<T<B, R>, _>(&every_layer(seed), Block::new(&device), seed);
    let values = Rng::new(seed).normals(ROWS * WIDTH, 1.0);
    let x = tensor::<T<B, R>, 2>(&values, [ROWS, WIDTH], &device).require_grad();
    let recording = Recording::start();
    let loss = block.forward(x, between).square().mean();
    let report = recording.report();
    drop(loss.backward());
    assert_eq!(recording.report().values, [], "seed {seed}");
    report
}

fn of_layer<'a>(report: &'a ActivationReport, layer: &str) -> Vec<&'a Saved> {
    let values = report.values.iter();
    values.filter(|value| value.layer == layer).collect()
}

fn paths<B: DataBackend>(seed: u64) {
    let report = of_block::<B, MixedPrecision<f32>>(seed, tanh);
    let operations = |layer: &str| -> Vec<_> {
        let values = of_layer(&report, layer);
        // A layer in the compute dtype is a product where ours replace Burn's.
        let name = |it| if it == "matmul" { "linear" } else { it };
        values.iter().map(|value| name(value.operation)).collect()
    };
    // Of the norm, which runs before it.
    assert!(
        operations("gate").iter().any(|it| *it != "linear"),
        "{report}"
    );
    // The output of `up`, and the product, which `down` reads.
    assert!(operations("up").contains(&"linear"), "{report}");
    assert!(operations("down").contains(&"float_mul"), "{report}");
    // Nothing runs after the last layer but the loss.
    assert!(
        !operations("after down").is_empty() || operations("down").contains(&"linear"),
        "{report}"
    );
    let known = ["gate", "up", "down", "after down"];
    for value in &report.values {
        assert!(
            known.contains(&value.layer.as_str()),
            "seed {seed}: {report}"
        );
        assert_eq!((value.form, value.format()), (Form::Exact, "f32".into()));
        assert_eq!(value.bytes, 4 * value.elements);
    }

    let by_layer = report.totals(|value| value.layer.clone());
    let sum = |of: fn(&Total) -> usize| by_layer.iter().map(|(_, it)| of(it)).sum::<usize>();
    let all = report.total();
    assert_eq!(sum(|it| it.bytes), all.bytes);
    assert_eq!(sum(|it| it.elements), all.elements);
    assert_eq!(sum(|it| it.bf16_bytes), all.bf16_bytes);
    assert_eq!(
        (all.bytes, all.values),
        (report.bytes(), report.values.len())
    );
    assert_eq!(all.bf16_bytes, all.bytes / 2, "FP32 takes twice of BF16");
    assert!(
        by_layer.is_sorted_by_key(|(_, it)| std::cmp::Reverse(it.bytes)),
        "{report}"
    );
    let table = report.to_string();
    assert!(
        table.contains("| down | float_mul | f32 | 1 | 8192 | 32.0 | 16.0 |"),
        "{table}"
    );
}

fn operands<B: DataBackend>(seed: u64) {
    fn check<B: DataBackend, R: Recipe>(seed: u64, number: Number) {
        let report = of_block::<B, R>(seed, tanh);
        let name = R::ROW.name;
        let row = R::ROW.linear.expect("a recipe that quantizes");
        let kept = row.kept(ROWS, [WIDTH, WIDTH]);
        let is_operand = |value: &&Saved| value.form == Form::Operand(number);
        let of_x: Vec<_> = report.values.iter().filter(is_operand).collect();
        let layers: Vec<_> = of_x.iter().map(|value| value.layer.as_str()).collect();
        // `gate` and `up` read one value.
        let expected: &[&str] = match kept.shares_input {
            true => &["gate", "down"],
            false => &["gate", "up", "down"],
        };
        assert_eq!(layers, expected, "seed {seed}: {name}\n{report}");
        for value in &of_x {
            assert_eq!(value.shape, [ROWS, WIDTH]);
            assert_eq!((value.dtype, value.operation), (DType::F32, "linear"));
            assert_eq!(value.bf16_bytes(), 2 * ROWS * WIDTH);
            // Residuals are planned for whole steps; not more are kept, and all numbers.
            let (bytes, planned) = (value.bytes, kept.input.expect("an operand"));
            let in_a_byte = if number == Number::Int4 { 2 } else { 1 };
            let numbers = ROWS * WIDTH / in_a_byte;
            assert!(
                (numbers..=planned).contains(&bytes),
                "{name}: {bytes} of {planned}"
            );
        }
        assert_eq!(report.weights.len(), 3, "seed {seed}: {name}\n{report}");
        for value in &report.weights {
            // A CPU holds one of two layouts.
            let fits = value.bytes <= kept.weight && 2 * value.bytes >= kept.weight;
            assert!(fits, "{name}: {} of {}", value.bytes, kept.weight);
        }
    }
    check::<B, BlockInt8<f32>>(seed, Number::Int8);
    check::<B, FallbackInt8<f32>>(seed, Number::Int8);
    check::<B, Contexts<FallbackInt8<f32>, Int10>>(seed, Number::Int8);
    check::<B, HadamardInt4<f32>>(seed, Number::Int4);
}

/// GELU and a norm read one value: one copy flows. A layer has its own, in the layout of its product.
fn shared<B: DataBackend>(seed: u64) {
    type Train<B> = T<B, JetfireInt8<f32>>;
    let device = Default::default();
    let (_optimizer, block) =
        attached::<Train<B>, _>(&every_layer(seed), Block::new(&device), seed);
    let values = Rng::new(seed).normals(ROWS * WIDTH, 1.0);
    let x = tensor::<Train<B>, 2>(&values, [ROWS, WIDTH], &device).require_grad();
    let recording = Recording::start();
    let read = block.gate.forward(x);
    let sum = gelu(read.clone()) + block.norm.forward(read.clone()) + block.up.forward(read);
    let report = recording.report();
    let found: Vec<_> = report
        .values
        .iter()
        .filter(|value| value.elements == ROWS * WIDTH)
        .map(|value| (value.layer.as_str(), value.operation, value.form))
        .collect();
    let expected = [
        ("gate", "linear", Form::Operand(Number::Int8)),
        ("up", "flow", Form::Compressed(Number::Int8)),
        ("up", "linear", Form::Operand(Number::Int8)),
    ];
    assert_eq!(found, expected, "seed {seed}:\n{report}");
    drop(sum.sum().backward());
    assert_eq!(recording.report().values, [], "seed {seed}");
}

fn flow_of<R: Recipe>() -> Flow {
    R::ROW.flow.expect("a flow")
}

fn breaks<B: DataBackend>(seed: u64) {
    fn check<B: DataBackend, R: Recipe>(seed: u64) {
        let flow = flow_of::<R>();
        let name = R::ROW.name;
        let of_function =
            |report: &ActivationReport, operation: &str| -> Vec<(String, [usize; 2])> {
                let breaks = report.breaks(&flow).into_iter();
                let of_it = breaks.filter(|(value, _)| value.operation == operation);
                of_it
                    .map(|(value, in_flow)| (value.layer.clone(), [value.bytes, in_flow]))
                    .collect()
            };
        let broken = of_block::<B, R>(seed, tanh);
        let exact = 4 * ROWS * WIDTH;
        assert_eq!(
            of_function(&broken, "float_tanh"),
            [(String::from("up"), [exact, flow.bytes([ROWS, WIDTH])])],
            "seed {seed}: {name}\n{broken}"
        );
        // The product saves both factors; with GELU one is the operator's.
        let whole = of_block::<B, R>(seed, gelu);
        assert_eq!(of_function(&whole, "float_tanh"), [], "{name}\n{whole}");
        let kept = whole.breaks(&flow);
        assert!(
            kept.iter().all(|(value, _)| value.operation != "flow"),
            "{name}\n{whole}"
        );
        assert!(
            whole.values.iter().any(|value| value.operation == "flow"),
            "{name}\n{whole}"
        );
        // The norm keeps two numbers a row, which no flow would round.
        assert!(
            kept.iter().all(|(value, _)| value.elements == ROWS * WIDTH),
            "{name}\n{whole}"
        );
    }
    check::<B, JetfireInt8<f32>>(seed);
    check::<B, CoatFp8<f32>>(seed);
}

#[cfg(feature = "flex")]
mod names {
    use burn::backend::Flex;

    use super::*;

    type Train = T<Flex, MixedPrecision<f32>>;

    fn x() -> Tensor<Train, 2> {
        Tensor::ones([ROWS, WIDTH], &Default::default()).require_grad()
    }

    /// The operations and layers of what waits. A hyperbolic tangent saves what it reads.
    fn listed(report: &ActivationReport) -> Vec<(&str, &str)> {
        let values = report.values.iter();
        values.map(|it| (it.operation, it.layer.as_str())).collect()
    }

    #[test]
    fn parts_without_layers_have_the_names_of_scopes() {
        let recording = Recording::start();
        let x = x();
        let y = named("encoder", || tanh(named("squash", || tanh(x))));
        let z = tanh(tanh(y));
        let report = recording.report();
        let expected = [
            ("float_ones", ""),
            ("float_tanh", "encoder.squash"),
            ("float_tanh", "encoder"),
            ("float_tanh", ""),
        ];
        assert_eq!(listed(&report), expected, "{report}");
        drop(z);
    }

    #[test]
    fn a_layer_goes_by_its_path_inside_of_a_name() {
        let device = Default::default();
        let (_optimizer, block) = attached::<Train, _>(&every_layer(1), Block::new(&device), 1);
        let recording = Recording::start();
        let x = x();
        let y = named("part", || tanh(block.up.forward(tanh(x))));
        let y = tanh(tanh(block.down.forward(y)));
        let report = recording.report();
        let expected = [
            ("float_ones", "up"),
            ("float_tanh", "part"),
            ("linear", "up"),
            ("float_tanh", "part"),
            ("linear", "down"),
            ("float_tanh", "after down"),
        ];
        assert_eq!(listed(&report), expected, "{report}");
        drop(y);
    }

    #[test]
    fn a_name_ends_with_a_panic_and_costs_nothing_without_a_recording() {
        assert_eq!(named("nothing", || 7), 7);
        let recording = Recording::start();
        let panics = || named("bad", || panic!("of a forward pass"));
        assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
        let y = tanh(tanh(x()));
        let report = recording.report();
        assert!(
            listed(&report).iter().all(|(_, layer)| layer.is_empty()),
            "{report}"
        );
        drop(y);
    }
}
