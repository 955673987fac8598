//! Products of two activations with learned step sizes (int4-hq-lss, Appendix A.1).

use burn::{
    backend::Autodiff,
    module::Module,
    nn::{Linear, LinearConfig},
    optim::{GradientsParams, Optimizer},
    tensor::{
        DType, FloatDType, Tensor, activation::softmax, backend::Backend, module,
        ops::AttentionModuleOptions,
    },
};
use burn_quant_train::{
    QuantTrain,
    data::DataBackend,
    layer::{HadamardChoice, LayerPolicy, LayerRecord},
    optim::{QuantAdamW, QuantAdamWConfig, QuantOptimizer},
    recipe::{FallbackInt8, HadamardInt4, LsqInt4, LuqInt4, Recipe, SplitInt4},
    saved::checkpoint,
};
use cubecl_kernels::{
    hadamard::{HadamardSize, HadamardTransform},
    quantize::learned_step::ResidualRows,
    reference::learned_step::{self, LearnedStepQuantized, StraightThrough},
};
use quant_train_tests::{
    Rng,
    data::{floats, tensor},
    train::{attached, every_layer},
};

quant_train_tests::on_every_backend! {
    products_and_gradients_are_those_of_the_definition => definition;
    sampled_gradients_are_unbiased => unbiased;
    attention_is_made_of_such_products => attention;
    a_block_changes_nothing => in_block;
    step_sizes_are_recorded => record;
}

type Train<B, R> = QuantTrain<Autodiff<B>, R>;
type Optim<B, R> = QuantOptimizer<QuantAdamW<Model<Train<B, R>>, Train<B, R>>, Train<B, R>>;

const FEATURES: usize = 12;

/// Behind its layer come the products.
#[derive(Module, Debug)]
struct Model<B: Backend> {
    value: Linear<B>,
}

impl<B: Backend> Model<B> {
    fn new() -> Self {
        Self {
            value: LinearConfig::new(FEATURES, FEATURES).init(&B::Device::default()),
        }
    }

    /// Runs the layer, on something else than what is multiplied then.
    fn run(&self) {
        self.value
            .forward(Tensor::<B, 2>::ones([3, FEATURES], &B::Device::default()));
    }
}

/// Products behind the layer are quantized, and learn their step sizes from the second step on.
fn config(seed: u64, order: u32) -> QuantAdamWConfig {
    let policy = LayerPolicy::all().min_elements(0).products("value");
    let mut config = every_layer(seed).with_policy(policy);
    config.steps.cold_start = 1;
    config.steps.hadamard = HadamardChoice::Order(order);
    config
}

fn layer<B: DataBackend, R: Recipe>(optim: &Optim<B, R>, path: &str) -> LayerRecord {
    let record = optim.view().record();
    let mut layers = record.layers.into_iter();
    layers.find(|layer| layer.path == path).expect("the layer")
}

fn slot(layer: &LayerRecord, name: &str) -> f32 {
    let [value] = layer.slots[name][..] else {
        panic!("{name}: one value");
    };
    value
}

/// A leaf is taken for a parameter.
fn activation<B: Backend, const D: usize>(leaf: &Tensor<B, D>) -> Tensor<B, D> {
    leaf.clone() * 1.0
}

/// `[2, 3, M, K]` times `[2, 3, K, N]`.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    m: usize,
    k: usize,
    n: usize,
}

const BATCH: usize = 6;

impl Sizes {
    fn left(self) -> [usize; 4] {
        [2, 3, self.m, self.k]
    }

    fn right(self) -> [usize; 4] {
        [2, 3, self.k, self.n]
    }

    fn product(self) -> [usize; 4] {
        [2, 3, self.m, self.n]
    }
}

/// Matrices `[rows, cols]` of a batch, transposed.
fn transposed<A: Copy>(values: &[A], rows: usize, cols: usize) -> Vec<A> {
    let matrices = values.chunks(rows * cols);
    let matrix = |it: &[A]| -> Vec<A> {
        let columns = (0..cols).flat_map(|col| (0..rows).map(move |row| row * cols + col));
        columns.map(|at| it[at]).collect()
    };
    matrices.flat_map(matrix).collect()
}

/// Blocks of a row, times the Hadamard matrix of their size.
fn transform(values: &mut [f64], block: usize) {
    for values in values.chunks_mut(block) {
        let mut half = 1;
        while half < block {
            for start in (0..block).step_by(2 * half) {
                for at in start..start + half {
                    let (a, b) = (values[at], values[at + half]);
                    values[at] = (a + b) / 2f64.sqrt();
                    values[at + half] = (a - b) / 2f64.sqrt();
                }
            }
            half *= 2;
        }
    }
}

/// An operand by its reference, `[rows, K]` of all matrices, and its step size.
struct Operand {
    quantized: LearnedStepQuantized,
    step: f64,
}

impl Operand {
    fn new(values: &[f32], k: usize, order: u32, step: f32) -> Self {
        let along = HadamardTransform::of_columns(HadamardSize::new(order).expect("a size"));
        let shape = [values.len() / k, k];
        Self {
            quantized: learned_step::quantize(values, shape, along, step),
            step: step.into(),
        }
    }

    fn code(&self, at: usize) -> f64 {
        self.step * f64::from(self.quantized.quantized.values[at])
    }

    /// Which elements were clamped, and how the others were rounded, as it waits for the backward pass: of so few rows
    /// all keep residuals.
    fn as_saved(&self) -> Vec<StraightThrough> {
        let all = ResidualRows::new(1, 0).expect("every row");
        let codes = &self.quantized.quantized;
        learned_step::saved(
            &codes.values,
            codes.shape.cols,
            &self.quantized.saturation(),
            &self.quantized.residuals(all),
            all,
        )
    }

    /// The gradients of the operand and of its step size, from that of what the codes stand for.
    fn backward(&self, gradient: &[f64], order: u32) -> (Vec<f64>, StepGradient) {
        let elements = self.as_saved();
        let pairs = || gradient.iter().zip(&elements);
        let mut passed: Vec<f64> = pairs()
            .map(|(gradient, element)| if element.passes { *gradient } else { 0.0 })
            .collect();
        transform(&mut passed, 1 << order);
        let terms = || pairs().map(|(gradient, element)| gradient * element.delta);
        let scale = 1.0 / (7.0 * gradient.len() as f64).sqrt();
        let of_step = StepGradient {
            value: scale * terms().sum::<f64>(),
            magnitude: scale * terms().map(f64::abs).sum::<f64>(),
        };
        (passed, of_step)
    }
}

/// The gradient of a step size, and the sum of the magnitudes of its terms.
#[derive(Debug, Clone, Copy)]
struct StepGradient {
    value: f64,
    magnitude: f64,
}

struct Reference {
    product: Vec<f64>,
    /// Of L, and of R transposed, each with that of its step size.
    gradients: [(Vec<f64>, StepGradient); 2],
}

/// Both passes by the equations, of L and R transposed.
fn reference([left, right]: [&Operand; 2], dt: &[f32], sizes: Sizes, order: u32) -> Reference {
    let Sizes { m, k, n } = sizes;
    let mut product = vec![0.0; BATCH * m * n];
    let mut of_left = vec![0.0; BATCH * m * k];
    let mut of_right = vec![0.0; BATCH * n * k];
    for at in 0..product.len() {
        let (row, batch) = (at / n, at / (m * n));
        let col = batch * n + at % n;
        for inner in 0..k {
            let (of_row, of_col) = (row * k + inner, col * k + inner);
            let (l, r, dt) = (left.code(of_row), right.code(of_col), f64::from(dt[at]));
            product[at] += l * r;
            of_left[of_row] += dt * r;
            of_right[of_col] += dt * l;
        }
    }
    Reference {
        product,
        gradients: [
            left.backward(&of_left, order),
            right.backward(&of_right, order),
        ],
    }
}

fn assert_near(got: &[f32], expected: &[f64], what: &str) {
    let largest = expected.iter().fold(0f64, |most, it| most.max(it.abs()));
    assert!(largest > 0.0 && got.len() == expected.len(), "{what}");
    for (at, (got, expected)) in got.iter().zip(expected).enumerate() {
        let error = (f64::from(*got) - expected).abs();
        let tolerance = 1e-5 * largest;
        assert!(error < tolerance, "{what}: {got}, {expected} at {at}");
    }
}

fn definition<B: DataBackend>(seed: u64) {
    // Whole numbers that the recipe's quantizer of dT holds, whatever it draws: with a largest one of 7, of 98 = 7 * 14,
    // and of 98 in steps of 14, so that the low parts are zero and all high ones are kept.
    let sizes = |m, k, n| Sizes { m, k, n };
    by_definition::<B, LsqInt4<f32>>(seed, sizes(1, 13, 7), 0, (7, 1));
    by_definition::<B, SplitInt4<f32>>(seed, sizes(5, 12, 7), 2, (98, 1));
    by_definition::<B, HadamardInt4<f32>>(seed, sizes(5, 32, 6), 1, (98, 14));
}

fn by_definition<B: DataBackend, R: Recipe>(
    seed: u64,
    sizes: Sizes,
    order: u32,
    (largest, unit): (i32, i32),
) {
    let (device, mut rng) = (B::Device::default(), Rng::new(seed));
    let mut optim: Optim<B, R> = config(seed, order).init();
    let mut model = optim.attach(Model::new());
    let report = &optim.layers()[0];
    assert!(report.products, "{report}");
    // L and R of both products.
    let mut before = [[None; 2]; 2];
    for step in 0..3 {
        model.run();
        let mut loss = Tensor::<Train<B, R>, 1>::zeros([1], &device);
        let mut expected = Vec::new();
        for (product, before) in before.iter().enumerate() {
            let what = format!("{}, seed {seed}, step {step}, {product}", R::ROW.name);
            let mut outliers = rng.normals(BATCH * sizes.m * sizes.k, 1.0);
            outliers.iter_mut().step_by(31).for_each(|it| *it *= 20.0);
            let values = [outliers, rng.normals(BATCH * sizes.k * sizes.n, 0.3)];
            let left = tensor::<Train<B, R>, 4>(&values[0], sizes.left(), &device);
            let right = tensor::<Train<B, R>, 4>(&values[1], sizes.right(), &device);
            let [left, right] = [left, right].map(|it| it.require_grad());
            let t = activation(&left).matmul(activation(&right));
            let range = (2 * largest / unit + 1) as usize;
            let mut draw = || (rng.below(range) as i32 * unit - largest) as f32;
            let mut dt: Vec<f32> = (0..BATCH * sizes.m * sizes.n).map(|_| draw()).collect();
            // No row is zero, and one has the largest number.
            dt.iter_mut()
                .step_by(sizes.n)
                .for_each(|it| *it = largest as f32);
            let dt_tensor = tensor::<Train<B, R>, 4>(&dt, sizes.product(), &device);
            loss = loss + (t.clone() * dt_tensor).sum();
            expected.push((what, values, dt, left, right, floats(&t), *before));
        }
        // One more than the policy knows.
        let exact = tensor::<Train<B, R>, 3>(&[1.0, 0.3, 0.1, 0.7], [1, 2, 2], &device);
        let third = floats(&activation(&exact.clone().require_grad()).matmul(exact));
        assert!((third[0] - 1.03).abs() < 1e-3, "a third product: {third:?}");

        let gradients = loss.backward();
        let of_operands: Vec<_> = expected
            .iter()
            .map(|(.., left, right, _, _)| {
                [left, right].map(|it| floats(&it.grad(&gradients).expect("a gradient")))
            })
            .collect();
        let gradients = GradientsParams::from_grads(gradients, &model);
        model = optim.step(0.0, model, gradients);

        for (index, ((what, values, dt, .., t, earlier), got)) in
            expected.into_iter().zip(of_operands).enumerate()
        {
            let state = layer(&optim, &format!("value.products.{index}"));
            let names = ["step-x", "step-w"];
            let after = names.map(|name| slot(&state, name));
            let [left, right] = values;
            let operands = [left, transposed(&right, sizes.k, sizes.n)];
            let operands: Vec<_> = (0..2)
                .map(|it| {
                    let step = earlier[it].map_or(after[it], |(step, _)| step);
                    Operand::new(&operands[it], sizes.k, order, step)
                })
                .collect();
            let reference = reference([&operands[0], &operands[1]], &dt, sizes, order);
            assert_near(&t, &reference.product, &format!("{what}: T"));
            let [(of_left, ds_left), (of_right, ds_right)] = reference.gradients;
            assert_near(&got[0], &of_left, &format!("{what}: dL"));
            let of_right = transposed(&of_right, sizes.n, sizes.k);
            assert_near(&got[1], &of_right, &format!("{what}: dR"));
            for (it, ds) in [ds_left, ds_right].into_iter().enumerate() {
                let moment = match earlier[it] {
                    // The first moment of Adam is that of the logarithm's gradient.
                    Some((step, first)) => {
                        let step_of = f64::from(step);
                        let first = 0.9 * f64::from(first);
                        let expected = first + 0.1 * ds.value * step_of;
                        let got = slot(&state, &format!("{}.first", names[it]));
                        let error = (f64::from(got) - expected).abs();
                        let magnitude = first.abs() + 0.1 * ds.magnitude * step_of;
                        assert!(error < 1e-5 * magnitude, "{what}: {got}, {expected}");
                        assert_ne!(after[it], step, "{what}: the step size moves");
                        got
                    }
                    None => 0.0,
                };
                before[index][it] = Some((after[it], moment));
            }
        }
    }
}

/// The mean of many draws is the gradient without a quantized dT.
fn unbiased<B: DataBackend>(seed: u64) {
    const DRAWS: usize = 200;
    type R = HadamardInt4<f32>;
    let (device, mut rng) = (B::Device::default(), Rng::new(seed));
    let sizes = Sizes { m: 9, k: 8, n: 5 };
    let optim: Optim<B, R> = config(seed, 1).init();
    let model = optim.attach(Model::new());
    let values = [
        rng.normals(BATCH * sizes.m * sizes.k, 1.0),
        rng.normals(BATCH * sizes.k * sizes.n, 1.0),
    ];
    // Few rows have most of it.
    let mut dt = rng.normals(BATCH * sizes.m * sizes.n, 1.0);
    for (row, values) in dt.chunks_mut(sizes.n).enumerate() {
        let factor = (-(row as f32 % 7.0)).exp();
        values.iter_mut().for_each(|it| *it *= factor);
    }
    let directions = [
        rng.normals(values[0].len(), 1.0),
        rng.normals(values[1].len(), 1.0),
    ];
    let dot = |it: usize, gradient: &[f64]| -> f64 {
        let pairs = gradient.iter().zip(&directions[it]);
        pairs.map(|(a, b)| a * f64::from(*b)).sum()
    };
    let mut draws = [Vec::new(), Vec::new()];
    for _ in 0..DRAWS {
        model.run();
        let left = tensor::<Train<B, R>, 4>(&values[0], sizes.left(), &device);
        let right = tensor::<Train<B, R>, 4>(&values[1], sizes.right(), &device);
        let [left, right] = [left, right].map(|it| it.require_grad());
        let t = activation(&left).matmul(activation(&right));
        let dt = tensor::<Train<B, R>, 4>(&dt, sizes.product(), &device);
        let gradients = (t * dt).sum().backward();
        for (it, operand) in [left, right].iter().enumerate() {
            let gradient = floats(&operand.grad(&gradients).expect("a gradient"));
            let gradient: Vec<f64> = gradient.into_iter().map(f64::from).collect();
            draws[it].push(dot(it, &gradient));
        }
    }
    let state = layer(&optim, "value.products.0");
    let right = transposed(&values[1], sizes.k, sizes.n);
    let left = Operand::new(&values[0], sizes.k, 1, slot(&state, "step-x"));
    let right = Operand::new(&right, sizes.k, 1, slot(&state, "step-w"));
    let reference = reference([&left, &right], &dt, sizes, 1);
    let [(of_left, _), (of_right, _)] = reference.gradients;
    let expected = [of_left, transposed(&of_right, sizes.n, sizes.k)];
    for (it, draws) in draws.iter().enumerate() {
        let count = draws.len() as f64;
        let mean = draws.iter().sum::<f64>() / count;
        let variance = draws.iter().map(|it| (it - mean).powi(2)).sum::<f64>() / (count - 1.0);
        assert!(variance > 0.0, "rows are drawn");
        let z = (mean - dot(it, &expected[it])) / (variance / count).sqrt();
        assert!(z.abs() < 5.0, "seed {seed}, operand {it}: z {z}");
    }
}

fn attention<B: DataBackend>(seed: u64) {
    of_attention::<B, HadamardInt4<f32>>(seed, true);
    if quant_train_tests::supports::<B>(DType::BF16) {
        of_attention::<B, LuqInt4>(seed, true);
    }
    // Without step sizes the policy has nothing to quantize by.
    of_attention::<B, FallbackInt8<f32>>(seed, false);
}

/// Burn's attention is quantized, unless nothing is trained, and is what a model composes.
fn of_attention<B: DataBackend, R: Recipe>(seed: u64, learns: bool) {
    let (device, mut rng) = (B::Device::default(), Rng::new(seed));
    let shape = [2, 3, 10, 8];
    let values: Vec<_> = (0..3).map(|_| rng.normals(2 * 3 * 10 * 8, 1.0)).collect();
    let run = |products: bool, trains: bool, composes: bool| {
        let mut config = config(seed, 2);
        if !products {
            config.policy = LayerPolicy::all().min_elements(0);
        }
        let optim: Optim<B, R> = config.init();
        let model = optim.attach(Model::new());
        assert_eq!(optim.layers()[0].products, products && learns);
        model.run();
        let input = |it: usize| {
            let input = tensor::<Train<B, R>, 4>(&values[it], shape, &device);
            if trains {
                activation(&input.require_grad())
            } else {
                input
            }
        };
        let [query, key, value] = [input(0), input(1), input(2)];
        floats(&match composes {
            true => {
                let scores = query.matmul(key.swap_dims(2, 3)) / 8f64.sqrt();
                let probabilities = softmax(scores, 3);
                probabilities.matmul(value)
            }
            false => {
                let options = AttentionModuleOptions::default();
                module::attention(query, key, value, None, None, options)
            }
        })
    };
    // Of two that are rounded elsewhere some codes are others.
    let distance = |one: &[f32], other: &[f32]| {
        let squares = one.iter().zip(other).map(|(a, b)| (a - b).powi(2));
        (squares.sum::<f32>() / one.len() as f32).sqrt()
    };
    let name = R::ROW.name;
    let [quantized, exact] = [true, false].map(|products| run(products, true, false));
    let off_by = distance(&quantized, &exact);
    let range = if learns { 0.02..0.4 } else { 0.0..1e-6 };
    assert!(range.contains(&off_by), "{name}: off by {off_by}");
    let composed = distance(&run(true, true, true), &quantized);
    let rounding = match R::ROW.compute {
        FloatDType::F32 => 1e-4,
        _ => 0.5 * off_by,
    };
    assert!(composed < rounding, "{name}: composed, off by {composed}");
    for composes in [false, true] {
        let untrained = distance(&run(true, false, composes), &run(false, false, composes));
        assert_eq!(untrained, 0.0, "{name}: nothing is trained");
    }
}

/// What runs twice rounds by the same step sizes and numbers, and moves them once.
fn in_block<B: DataBackend>(seed: u64) {
    type R = HadamardInt4<f32>;
    let (device, mut rng) = (B::Device::default(), Rng::new(seed));
    let inputs: Vec<_> = (0..3).map(|_| rng.normals(2 * 6 * FEATURES, 1.0)).collect();
    let run = |blocks: bool| {
        let model = Model::<Train<B, R>>::new();
        let (mut optim, mut model) = attached::<Train<B, R>, _>(&config(seed, 2), model, seed);
        let mut seen = Vec::new();
        for input in &inputs {
            let x = tensor::<Train<B, R>, 3>(input, [2, 6, FEATURES], &device).require_grad();
            let mix = |x: Tensor<Train<B, R>, 3>| {
                let value = model.value.forward(x);
                let scores = value.clone().matmul(value.clone().swap_dims(1, 2));
                scores.matmul(value).sin()
            };
            let mixed = match blocks {
                true => checkpoint(mix, x.clone()),
                false => mix(x.clone()),
            };
            let loss = mixed.square().mean();
            seen.push(floats(&loss)[0]);
            let gradients = loss.backward();
            seen.extend(floats(&x.grad(&gradients).expect("of x")));
            let gradients = GradientsParams::from_grads(gradients, &model);
            model = optim.step(1e-2, model, gradients);
            for product in ["value.products.0", "value.products.1"] {
                let state = layer::<B, R>(&optim, product);
                seen.extend(["step-x", "step-w"].map(|name| slot(&state, name)));
            }
        }
        seen
    };
    // A fused stream may fuse the second run in another way.
    for (with, without) in run(true).iter().zip(run(false)) {
        let error = (with - without).abs();
        assert!(
            error <= 1e-5 * without.abs().max(1e-2),
            "seed {seed}: {with} and {without}"
        );
    }
}

/// A resumed run has the step sizes of its record, and other layers have theirs with and without products.
fn record<B: DataBackend>(seed: u64) {
    type R = SplitInt4<f32>;
    let (device, mut rng) = (B::Device::default(), Rng::new(seed));
    let left = tensor::<Train<B, R>, 3>(&rng.normals(4 * 6 * 8, 1.0), [4, 6, 8], &device);
    let mut optim: Optim<B, R> = config(seed, 2).init();
    let mut model = optim.attach(Model::new());
    for _ in 0..2 {
        model.run();
        let left = activation(&left.clone().require_grad());
        let right = left.clone().swap_dims(1, 2);
        let gradients = left.matmul(right).sum().backward();
        let gradients = GradientsParams::from_grads(gradients, &model);
        model = optim.step(0.0, model, gradients);
    }
    let saved = optim.view().record();
    let of_product = layer(&optim, "value.products.0");
    assert_eq!(of_product.id, LayerRecord::NO_WEIGHT);
    assert!(slot(&of_product, "step-x") != 1.0 && slot(&of_product, "step-x.updates") == 1.0);
    let other: Optim<B, R> = config(seed + 1, 2).init();
    let other = other.load_record(optim.to_record());
    other.attach(model.clone());
    assert_eq!(other.view().record(), saved);

    let mut without = config(seed, 2);
    without.policy = LayerPolicy::all().min_elements(0);
    let without: Optim<B, R> = without.init();
    let without = without.load_record(optim.to_record());
    without.attach(model);
    let layers = without.view().record().layers;
    assert_eq!(layers, saved.layers[..1]);
}
