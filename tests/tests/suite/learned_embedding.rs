//! Embeddings whose rows are rounded by a learned step size (int4-hq-lss, sections 3.1 and 5).

use burn::{
    backend::Autodiff,
    module::{Module, Param},
    nn::{Embedding, EmbeddingConfig, Linear, LinearConfig},
    optim::{GradientsParams, Optimizer},
    tensor::{Int, Tensor, TensorData, backend::Backend},
};
use burn_quant_train::{
    QuantTrain,
    data::DataBackend,
    layer::{Decision, LayerPolicy},
    optim::{LayerBackend, QuantAdamW, QuantAdamWConfig, QuantOptimizer},
    recipe::{HadamardInt4, LsqInt4, LuqInt4, SplitInt4},
    saved::checkpoint,
};
use cubecl_kernels::{
    hadamard::{HadamardSize, HadamardTransform},
    reference::learned_step,
};
use quant_train_tests::{
    Rng,
    data::{floats, tensor},
    train::{attached, every_layer},
};

quant_train_tests::on_every_backend! {
    rows_and_gradients_are_those_of_lsq => definition;
    rows_are_exact_where_nothing_is_trained => exact;
    a_table_of_products_is_looked_up_as_it_is => tied;
    a_block_changes_nothing => in_block;
}

type Optim<M, B> = QuantOptimizer<QuantAdamW<M, B>, B>;
type Lsq<B> = QuantTrain<Autodiff<B>, LsqInt4<f32>>;

const ROWS: usize = 50;
const COLS: usize = 37;
const AS_IT_IS: HadamardTransform = HadamardTransform::of_columns(HadamardSize::IDENTITY);

/// A table with outliers.
fn table(rng: &mut Rng) -> Vec<f32> {
    let mut values = rng.normals(ROWS * COLS, 0.02);
    for value in values.iter_mut().step_by(29) {
        *value *= 20.0;
    }
    values
}

/// More tokens than rows, so that some have the same one.
fn indices(rng: &mut Rng) -> Vec<usize> {
    (0..3 * 21).map(|_| rng.below(ROWS)).collect()
}

fn upload<B: Backend>(indices: &[usize]) -> Tensor<B, 2, Int> {
    let indices: Vec<i64> = indices.iter().map(|&index| index as i64).collect();
    Tensor::from_data(TensorData::new(indices, [3, 21]), &B::Device::default())
}

fn embedding<B: Backend>(table: &[f32]) -> Embedding<B> {
    let device = B::Device::default();
    let mut embedding = EmbeddingConfig::new(ROWS, COLS).init(&device);
    embedding.weight = Param::from_tensor(tensor(table, [ROWS, COLS], &device));
    embedding
}

/// Its layer learns its step size from the second step on.
fn config(seed: u64) -> QuantAdamWConfig {
    let mut config = every_layer(seed);
    config.steps.cold_start = 1;
    config
}

fn slot<B: LayerBackend, O>(optim: &QuantOptimizer<O, B>, name: &str) -> f32 {
    let record = optim.view().record();
    let values = &record.layers[0].slots[name];
    assert_eq!(values.len(), 1);
    values[0]
}

/// The table by its reference at a step size.
fn quantized(table: &[f32], step: f32) -> learned_step::LearnedStepQuantized {
    learned_step::quantize(table, [ROWS, COLS], AS_IT_IS, step)
}

fn definition<B: DataBackend>(seed: u64) {
    let (device, mut rng) = (B::Device::default(), Rng::new(seed));
    let table = table(&mut rng);
    let mut optim: Optim<Embedding<Lsq<B>>, Lsq<B>> = config(seed).init();
    let mut model = optim.attach(embedding::<Lsq<B>>(&table));
    assert_eq!(optim.layers()[0].decision, Decision::EmbeddingRows);
    let (mut before, mut first_before) = (None, 0.0);
    for step in 0..3 {
        let what = format!("seed {seed}, step {step}");
        let indices = indices(&mut rng);
        let dy = rng.normals(indices.len() * COLS, 1.0);
        let y = model.forward(upload(&indices));
        assert_eq!(y.dims(), [3, 21, COLS]);
        let rows = floats(&y);
        let dy_tensor = tensor::<Lsq<B>, 3>(&dy, [3, 21, COLS], &device);
        let gradients = (y * dy_tensor).sum().backward();
        let of_table = floats(&model.weight.val().grad(&gradients).expect("of the table"));
        let gradients = GradientsParams::from_grads(gradients, &model);
        // Weights stay: the step size alone is learned.
        model = optim.step(0.0, model, gradients);

        let after = slot(&optim, "step-w");
        let size = before.unwrap_or(after);
        let expected = quantized(&table, size);
        let elements = expected.exact();
        let mut gradient = vec![0f64; ROWS * COLS];
        let (mut of_step, mut terms) = (0f64, 0f64);
        for (token, &row) in indices.iter().enumerate() {
            for col in 0..COLS {
                let (from, at) = (token * COLS + col, row * COLS + col);
                let code = expected.quantized.values[at] as f32;
                assert_eq!(rows[from], code * size, "{what}: row {row}, column {col}");
                let (dy, element) = (f64::from(dy[from]), elements[at]);
                gradient[at] += if element.passes { dy } else { 0.0 };
                of_step += dy * element.delta;
                terms += (dy * element.delta).abs();
            }
        }
        assert!(elements.iter().any(|it| !it.passes), "{what}: none clamped");
        for (at, (got, expected)) in of_table.iter().zip(&gradient).enumerate() {
            let error = (f64::from(*got) - expected).abs();
            assert!(error < 1e-5, "{what}: {got} instead of {expected} at {at}");
        }
        if before.is_some() {
            // The first moment of Adam is that of the logarithm's gradient: a tenth of it, and of those before.
            let scale = 1.0 / (7.0 * (ROWS * COLS) as f64).sqrt() * f64::from(size);
            let first = f64::from(slot(&optim, "step-w.first"));
            let error = (first - 0.9 * first_before - 0.1 * of_step * scale).abs();
            assert!(error < 1e-5 * terms * scale, "{what}: {first}");
            assert_ne!(after, size, "{what}: the step size moves");
            first_before = first;
        } else {
            let cold = learned_step::cold_step(&table, [ROWS, COLS], AS_IT_IS, 1.0);
            assert!((after / cold - 1.0).abs() < 1e-5, "{what}: {after}, {cold}");
        }
        before = Some(after);
    }
}

#[derive(Module, Debug)]
struct Model<B: Backend> {
    embedding: Embedding<B>,
    head: Linear<B>,
}

impl<B: Backend> Model<B> {
    fn new(table: &[f32]) -> Self {
        Self {
            embedding: embedding(table),
            head: LinearConfig::new(COLS, 8).init(&B::Device::default()),
        }
    }
}

/// The rows at these indices, as they are.
fn rows_of(table: &[f32], indices: &[usize]) -> Vec<f32> {
    let rows = indices.iter().flat_map(|&row| &table[row * COLS..][..COLS]);
    rows.copied().collect()
}

fn exact<B: DataBackend>(seed: u64) {
    let mut rng = Rng::new(seed);
    let (table, indices) = (table(&mut rng), indices(&mut rng));
    let expected = rows_of(&table, &indices);
    let look_up = |policy: LayerPolicy, trains: bool| {
        let optim: Optim<Model<Lsq<B>>, Lsq<B>> = config(seed).with_policy(policy).init();
        let model = optim.attach(Model::<Lsq<B>>::new(&table));
        let model = match trains {
            true => model,
            false => model.no_grad(),
        };
        floats(&model.embedding.forward(upload(&indices)))
    };
    let all = || LayerPolicy::all().min_elements(0);
    assert!(look_up(all(), true) != expected, "rounded");
    assert!(look_up(all(), false) == expected, "nothing is trained");
    assert!(
        look_up(all().skip("embedding"), true) == expected,
        "skipped"
    );
    assert!(look_up(LayerPolicy::all(), true) == expected, "small");

    let optim: Optim<Model<Lsq<B>>, Lsq<B>> = config(seed).init();
    let model = optim.attach(Model::<Lsq<B>>::new(&table));
    let rows = burn::module::AutodiffModule::valid(&model)
        .embedding
        .forward(upload(&indices));
    assert!(floats(&rows) == expected, "evaluation");
    let nothing = Tensor::<Lsq<B>, 2, Int>::zeros([0, 4], &B::Device::default());
    assert_eq!(model.embedding.forward(nothing).dims(), [0, 4, COLS]);
}

/// A table whose products are quantized, as that of a tied head.
fn tied<B: DataBackend>(seed: u64) {
    type Hadamard<B> = QuantTrain<Autodiff<B>, HadamardInt4<f32>>;
    let (device, mut rng) = (B::Device::default(), Rng::new(seed));
    let (table, indices) = (table(&mut rng), indices(&mut rng));
    let policy = LayerPolicy::all().min_elements(0).tied_embeddings();
    let optim: Optim<Embedding<Hadamard<B>>, Hadamard<B>> = config(seed).with_policy(policy).init();
    let model: Embedding<Hadamard<B>> = optim.attach(embedding(&table));
    assert_eq!(optim.layers()[0].decision, Decision::Quantized);
    let rows = model.forward(upload(&indices));
    assert!(floats(&rows) == rows_of(&table, &indices));
    let x = tensor::<Hadamard<B>, 2>(&rng.normals(9 * COLS, 1.0), [9, COLS], &device);
    let table = model.weight.val().transpose();
    let exact = x.clone().matmul(table.clone().detach());
    let product = x.matmul(table);
    assert!(floats(&product) != floats(&exact), "a product is quantized");
}

/// What runs twice rounds by the same step size, and moves it once.
fn in_block<B: DataBackend>(seed: u64) {
    let mut rng = Rng::new(seed);
    let values = table(&mut rng);
    let indices: Vec<_> = (0..3).map(|_| indices(&mut rng)).collect();
    let run = |blocks: bool| {
        let model = Model::<Lsq<B>>::new(&values);
        let (mut optim, mut model) = attached::<Lsq<B>, _>(&config(seed), model, seed);
        let mut seen = Vec::new();
        for indices in &indices {
            let tokens = upload::<Lsq<B>>(indices);
            let look_up = |tokens| model.embedding.forward(tokens).exp();
            let hidden = match blocks {
                true => checkpoint(look_up, tokens),
                false => look_up(tokens),
            };
            let loss = model.head.forward(hidden).square().mean();
            seen.push(floats(&loss)[0]);
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optim.step(1e-2, model, gradients);
            seen.push(slot(&optim, "step-w"));
        }
        seen
    };
    // A fused stream may fuse the second run in another way.
    for (with, without) in run(true).iter().zip(run(false)) {
        let error = (with / without - 1.0).abs();
        assert!(error < 1e-5, "seed {seed}: {with} and {without}");
    }
}

/// Recipes whose rows are rounded are those with learned step sizes.
#[test]
fn recipes_of_the_paper_round_rows() {
    use burn_quant_train::recipe::{NAMES, Recipe};
    let rounding: Vec<_> = NAMES
        .iter()
        .filter(|name| name.row().embedding.is_some())
        .map(|name| name.as_str())
        .collect();
    let expected = [
        HadamardInt4::<f32>::ROW.name,
        SplitInt4::<f32>::ROW.name,
        LsqInt4::<f32>::ROW.name,
        LuqInt4::<f32>::ROW.name,
    ];
    assert_eq!(rounding, expected);
}
