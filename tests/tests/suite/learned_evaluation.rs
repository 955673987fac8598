//! Evaluation by learned step sizes.

use burn::{
    backend::Autodiff,
    module::{AutodiffModule, Module, Param},
    nn::{Embedding, EmbeddingConfig, Linear, LinearConfig},
    optim::{GradientsParams, Optimizer},
    tensor::{Int, Tensor, TensorData, backend::Backend, module},
};
use burn_quant_train::{
    QuantTrain,
    data::DataBackend,
    layer::LayerPolicy,
    optim::{QuantAdamW, QuantAdamWConfig, QuantOptimizer},
    recipe::{HadamardInt4, LsqInt4, Recipe},
};
use cubecl_kernels::{
    hadamard::{HadamardSize, HadamardTransform},
    reference::learned_step,
};
use quant_train_tests::{
    Rng,
    data::{floats, tensor},
    train::{every_layer, parameters_of},
};

quant_train_tests::on_every_backend! {
    values_are_those_of_the_step_sizes => definition;
    it_is_exact_unless_it_is_asked_for => exact;
    it_leaves_training_alone => alone;
}

type Train<B, R> = QuantTrain<Autodiff<B>, R>;
type Optim<B, R> = QuantOptimizer<QuantAdamW<Model<Train<B, R>>, Train<B, R>>, Train<B, R>>;

const ROWS: usize = 20;
const INPUTS: usize = 24;
const OUTPUTS: usize = 10;
const TOKENS: [i64; 7] = [3, 19, 0, 3, 7, 11, 3];

#[derive(Module, Debug)]
struct Model<B: Backend> {
    embedding: Embedding<B>,
    linear: Linear<B>,
}

impl<B: Backend> Model<B> {
    fn new(rng: &mut Rng) -> Self {
        let device = B::Device::default();
        let mut draw = |shape: [usize; 2]| {
            let mut values = rng.normals(shape[0] * shape[1], 0.3);
            values.iter_mut().step_by(17).for_each(|it| *it *= 15.0);
            Param::from_tensor(tensor(&values, shape, &device))
        };
        let mut model = Self {
            embedding: EmbeddingConfig::new(ROWS, INPUTS).init(&device),
            linear: LinearConfig::new(INPUTS, OUTPUTS).init(&device),
        };
        model.embedding.weight = draw([ROWS, INPUTS]);
        model.linear.weight = draw([INPUTS, OUTPUTS]);
        let bias = tensor(&rng.normals(OUTPUTS, 0.1), [OUTPUTS], &device);
        model.linear.bias = Some(Param::from_tensor(bias));
        model
    }

    /// The rows of the tokens, and what the layer makes of them.
    fn forward(&self) -> [Tensor<B, 3>; 2] {
        let tokens = Tensor::<B, 2, Int>::from_data(
            TensorData::new(TOKENS.to_vec(), [1, TOKENS.len()]),
            &B::Device::default(),
        );
        let rows = self.embedding.forward(tokens);
        [rows.clone(), self.linear.forward(rows)]
    }
}

fn config(seed: u64, evaluation: bool) -> QuantAdamWConfig {
    let mut config = every_layer(seed);
    config.steps.cold_start = 1;
    config.steps.evaluation = evaluation;
    config
}

/// Takes a step.
fn trained<B: DataBackend, R: Recipe>(
    optim: &mut Optim<B, R>,
    model: Model<Train<B, R>>,
) -> Model<Train<B, R>> {
    let [_, y] = model.forward();
    let gradients = GradientsParams::from_grads(y.square().mean().backward(), &model);
    optim.step(1e-2, model, gradients)
}

fn assert_near(got: &[f32], expected: &[f32], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (got, expected) in got.iter().zip(expected) {
        let error = (got - expected).abs();
        assert!(
            error <= 1e-4 * expected.abs().max(1.0),
            "{what}: {got}, {expected}"
        );
    }
}

fn definition<B: DataBackend>(seed: u64) {
    by_definition::<B, LsqInt4<f32>>(seed);
    by_definition::<B, HadamardInt4<f32>>(seed);
}

fn by_definition<B: DataBackend, R: Recipe>(seed: u64) {
    let mut rng = Rng::new(seed);
    let mut optim: Optim<B, R> = config(seed, true).init();
    let mut model = optim.attach(Model::new(&mut rng));
    for _ in 0..2 {
        model = trained::<B, R>(&mut optim, model);
    }
    let layers = optim.view().record().layers;
    let slot = |layer: usize, name: &str| layers[layer].slots[name][0];
    let size = layers[1].slots.get("hadamard").map_or(0.0, |it| it[0]);
    let size = HadamardSize::new(size as u32).expect("a size");
    let values = |values: &[f32], shape, transform, step| -> Vec<f32> {
        let codes = learned_step::quantize(values, shape, transform, step).quantized;
        codes
            .values
            .iter()
            .map(|&code| code as f32 * step)
            .collect()
    };
    let as_it_is = HadamardTransform::of_columns(HadamardSize::IDENTITY);
    let table = floats(&model.embedding.weight.val());
    let table = values(&table, [ROWS, INPUTS], as_it_is, slot(0, "step-w"));
    let rows: Vec<f32> = TOKENS
        .iter()
        .flat_map(|&token| table[token as usize * INPUTS..][..INPUTS].to_vec())
        .collect();
    let along_x = HadamardTransform::of_columns(size);
    let x = values(&rows, [TOKENS.len(), INPUTS], along_x, slot(1, "step-x"));
    let weight = floats(&model.linear.weight.val());
    let along_weight = HadamardTransform::of_rows(size);
    let weight = values(&weight, [INPUTS, OUTPUTS], along_weight, slot(1, "step-w"));
    let bias = model.linear.bias.as_ref().map(|bias| floats(&bias.val()));
    let bias = bias.expect("a bias");
    let mut y = Vec::new();
    for x in x.chunks(INPUTS) {
        for col in 0..OUTPUTS {
            let products = x
                .iter()
                .enumerate()
                .map(|(k, x)| x * weight[k * OUTPUTS + col]);
            y.push(products.sum::<f32>() + bias[col]);
        }
    }
    // Without autodiff, and on the training backend where nothing is trained.
    let [of_rows, of_y] = model.valid().forward();
    let [frozen_rows, frozen_y] = model.clone().no_grad().forward();
    // What is computed from a weight is none of the layer's.
    let twice = model.valid().linear.weight.val() * 2.0;
    let x = tensor::<QuantTrain<B, R>, 2>(&rows, [TOKENS.len(), INPUTS], &B::Device::default());
    let exact = floats(&x.clone().matmul(model.valid().linear.weight.val() * 1.0));
    let exact: Vec<f32> = exact.iter().map(|it| 2.0 * it).collect();
    assert_near(&floats(&x.matmul(twice)), &exact, "of a computed weight");
    // A bias that is trained alone has a backward pass.
    let mut frozen = model.clone().no_grad();
    frozen.linear.bias = model.linear.bias.clone();
    let [_, of_bias] = frozen.forward();
    let gradients = of_bias.sum().backward();
    let bias = frozen.linear.bias.as_ref().expect("a bias").val();
    let of_bias = floats(&bias.grad(&gradients).expect("of the bias"));
    assert_near(&of_bias, &[TOKENS.len() as f32; OUTPUTS], "of the bias");
    let name = R::ROW.name;
    assert_near(&floats(&of_rows), &rows, &format!("{name}: rows"));
    assert_near(&floats(&of_y), &y, &format!("{name}: Y"));
    assert_near(
        &floats(&frozen_rows),
        &rows,
        &format!("{name}: frozen rows"),
    );
    assert_near(&floats(&frozen_y), &y, &format!("{name}: frozen Y"));
}

fn exact<B: DataBackend>(seed: u64) {
    type R = LsqInt4<f32>;
    let run = |evaluation: bool, steps: usize, policy: LayerPolicy| {
        let mut rng = Rng::new(seed);
        let config = config(seed, evaluation).with_policy(policy);
        let mut optim: Optim<B, R> = config.init();
        let mut model = optim.attach(Model::new(&mut rng));
        for _ in 0..steps {
            model = trained::<B, R>(&mut optim, model);
        }
        let [rows, y] = model.valid().forward();
        let exact = {
            let rows = model.embedding.weight.val().inner().select(
                0,
                Tensor::from_data(
                    TensorData::new(TOKENS.to_vec(), [TOKENS.len()]),
                    &B::Device::default(),
                ),
            );
            let weight = model.linear.weight.val().inner();
            let bias = model.linear.bias.as_ref().expect("a bias").val().inner();
            // The same product of the values, which are no layer's any more.
            let [rows, weight] = [floats(&rows), floats(&weight)];
            let device = B::Device::default();
            let rows = tensor::<B, 3>(&rows, [1, TOKENS.len(), INPUTS], &device);
            let weight = tensor::<B, 2>(&weight, [INPUTS, OUTPUTS], &device);
            let bias = tensor::<B, 1>(&floats(&bias), [OUTPUTS], &device);
            [
                floats(&rows),
                floats(&module::linear(rows.clone(), weight, Some(bias))),
            ]
        };
        let distance = |one: &[f32], other: &[f32]| {
            let pairs = one.iter().zip(other);
            pairs.map(|(a, b)| (a - b).abs()).fold(0f32, f32::max)
        };
        [
            distance(&floats(&rows), &exact[0]),
            distance(&floats(&y), &exact[1]),
        ]
    };
    let all = || LayerPolicy::all().min_elements(0);
    let is_exact = |[rows, y]: [f32; 2]| rows == 0.0 && y < 1e-4;
    assert!(is_exact(run(false, 2, all())), "nobody asked");
    assert!(is_exact(run(true, 0, all())), "there are no step sizes");
    assert!(
        is_exact(run(true, 2, all().skip("*"))),
        "no layer is quantized"
    );
    let [rows, y] = run(true, 2, all());
    assert!(rows > 0.01 && y > 0.01, "quantized");
    let [rows, y] = run(true, 2, all().skip("embedding"));
    assert!(rows == 0.0 && y > 0.01, "the layer alone");
}

/// Evaluation between steps draws nothing, and moves nothing.
fn alone<B: DataBackend>(seed: u64) {
    type R = HadamardInt4<f32>;
    let run = |evaluates: bool| {
        let mut rng = Rng::new(seed);
        let mut optim: Optim<B, R> = config(seed, true).init();
        let mut model = optim.attach(Model::new(&mut rng));
        for _ in 0..3 {
            if evaluates {
                let _ = model.valid().forward();
                let _ = model.clone().no_grad().forward();
            }
            model = trained::<B, R>(&mut optim, model);
        }
        // Ids are of a model.
        let layers = optim.view().record().layers.into_iter();
        let slots: Vec<_> = layers.map(|layer| layer.slots).collect();
        (parameters_of(&model), slots)
    };
    assert!(run(true) == run(false), "the same weights and step sizes");
}
