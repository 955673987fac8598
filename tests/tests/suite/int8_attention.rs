//! Attention with INT8 products behind layers that a policy names: which has them, how near it is to exact attention, and
//! how near its gradients are.

use std::ops::Range;

use burn::{
    backend::Autodiff,
    module::Module,
    nn::{Linear, LinearConfig},
    tensor::{Tensor, activation::softmax, backend::Backend, module, ops::AttentionModuleOptions},
};
use burn_quant_train::{
    QuantTrain,
    data::DataBackend,
    layer::LayerPolicy,
    optim::{QuantAdamW, QuantOptimizer},
    recipe::{
        ComputeDtype, DelayedFp8, FallbackInt8, MixedPrecision, Recipe,
        context::{Contexts, ExactAttention, Int8, KeptOutput},
    },
    saved::checkpoint,
};
use quant_train_tests::{
    Rng,
    data::{floats, is_cuda, relative_error, same_bits, tensor},
    in_narrow, on_every_backend,
    train::every_layer,
};

on_every_backend! {
    a_policy_names_it => is_named;
    gradients_are_near_the_exact_ones => is_near_exact;
    what_keys_have_in_common_takes_no_codes => has_common_keys;
    contexts_go_with_it => waits;
    a_block_changes_nothing => in_block;
}

type Train<B, R> = QuantTrain<Autodiff<B>, R>;
type Optim<B, R> = QuantOptimizer<QuantAdamW<Model<Train<B, R>>, Train<B, R>>, Train<B, R>>;

const FEATURES: usize = 64;
const SHAPE: [usize; 4] = [2, 2, 300, FEATURES];

/// Behind the second layer comes attention.
#[derive(Module, Debug)]
struct Model<B: Backend> {
    query: Linear<B>,
    value: Linear<B>,
}

impl<B: Backend> Model<B> {
    fn new() -> Self {
        let linear = || LinearConfig::new(FEATURES, FEATURES).init(&B::Device::default());
        Self {
            query: linear(),
            value: linear(),
        }
    }

    /// Runs the layers, on something else than what attention reads.
    fn run(&self) {
        let x = Tensor::<B, 2>::ones([3, FEATURES], &B::Device::default());
        self.query.forward(x.clone());
        self.value.forward(x);
    }
}

/// How attention is asked for.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    /// By Burn's function.
    Function,
    /// As a model composes it.
    Composed,
    /// In a block that runs again.
    InBlock,
}

/// Q, K, V and the gradient of the output.
struct Problem {
    inputs: [Vec<f32>; 4],
}

/// The output, and the gradients of Q, K and V where there are some.
struct Solution {
    output: Vec<f32>,
    gradients: Vec<Vec<f32>>,
}

impl Problem {
    fn draw(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let inputs = [(); 4].map(|()| rng.normals_of_16_bits(SHAPE.iter().product()));
        Self { inputs }
    }

    /// `pattern`: whose products the policy names.
    fn solve<B: DataBackend, R: Recipe>(&self, pattern: &str, way: Way, trains: bool) -> Solution {
        let device = B::Device::default();
        let policy = LayerPolicy::all().min_elements(0).products(pattern);
        let optim: Optim<B, R> = every_layer(1).with_policy(policy).init();
        let model = optim.attach(Model::new());
        let linear = R::ROW.linear;
        for layer in optim.layers() {
            let has_it = linear.is_some_and(|row| row.has_int8_attention());
            assert_eq!(layer.int8_attention, has_it && layer.path == pattern);
        }
        let leaves: Vec<_> = (self.inputs.iter())
            .map(|x| tensor::<Train<B, R>, 4>(x, SHAPE, &device))
            .map(|x| if trains { x.require_grad() } else { x })
            .collect();
        model.run();
        // A leaf is taken for a parameter.
        let [q, k, v] = [0, 1, 2].map(|index| leaves[index].clone() * 1.0);
        let by_function = |(q, k, v)| {
            let options = AttentionModuleOptions::default();
            module::attention(q, k, v, None, None, options)
        };
        let output = match way {
            Way::Function => by_function((q, k, v)),
            Way::InBlock => checkpoint(by_function, (q, k, v)),
            Way::Composed => {
                let scores = q.matmul(k.swap_dims(2, 3)) / (FEATURES as f64).sqrt();
                softmax(scores, 3).matmul(v)
            }
        };
        let of_output = floats(&output);
        if !trains {
            return Solution {
                output: of_output,
                gradients: Vec::new(),
            };
        }
        let gradients = (output * leaves[3].clone()).sum().backward();
        let of = |x: &Tensor<Train<B, R>, 4>| floats(&x.grad(&gradients).expect("a gradient"));
        Solution {
            output: of_output,
            gradients: leaves[..3].iter().map(of).collect(),
        }
    }
}

/// How far INT8 products may be off: on CPUs not nothing, and elsewhere the device may have no kernel of them.
fn range<B: Backend>() -> Range<f64> {
    let least = match holds_scores::<B>() || is_cuda::<B>() {
        true => 0.0,
        false => 0.01,
    };
    least..0.03
}

/// True where attention of these problems has its scores in memory, so that no context is of attention alone.
fn holds_scores<B: Backend>() -> bool {
    B::name(&B::Device::default()).contains("wgpu")
}

fn is_named<B: DataBackend>(seed: u64) {
    fn check<B: DataBackend, E: ComputeDtype>(seed: u64) {
        let problem = Problem::draw(seed);
        let of_function = |pattern: &str, trains| {
            problem
                .solve::<B, FallbackInt8<E>>(pattern, Way::Function, trains)
                .output
        };
        let exact = of_function("nothing", true);
        let named = of_function("value", true);
        let off_by = relative_error(&named, &exact);
        assert!(range::<B>().contains(&off_by), "seed {seed}: {off_by}");
        // Another layer has run since.
        assert!(
            same_bits(&of_function("query", true), &exact),
            "seed {seed}"
        );
        let evaluations = ["value", "nothing"].map(|pattern| of_function(pattern, false));
        assert!(
            same_bits(&evaluations[0], &evaluations[1]),
            "seed {seed}: evaluation"
        );
        let composed = problem
            .solve::<B, FallbackInt8<E>>("value", Way::Composed, true)
            .output;
        let off_by = relative_error(&composed, &named);
        assert!(off_by < 1e-3, "seed {seed}: composed, {off_by}");
        let others = [
            Problem::solve::<B, MixedPrecision<E>>,
            Problem::solve::<B, DelayedFp8<E>>,
        ];
        for solve in others {
            let [named, unnamed] = ["value", "nothing"]
                .map(|pattern| solve(&problem, pattern, Way::Function, true).output);
            assert!(same_bits(&named, &unnamed), "seed {seed}: another recipe");
        }
    }
    in_narrow!(check::<B>(seed));
}

/// The figures of the book's page on attention; and of scores whose spread is four times as large, in which a code is
/// off by more.
fn is_near_exact<B: DataBackend>(seed: u64) {
    fn check<B: DataBackend, E: ComputeDtype>(seed: u64) {
        let mut problem = Problem::draw(seed);
        for (spread, most) in [(1.0, 0.02), (4.0, 0.06)] {
            problem.inputs[0].iter_mut().for_each(|x| *x *= spread);
            let [exact, named] = ["nothing", "value"]
                .map(|pattern| problem.solve::<B, FallbackInt8<E>>(pattern, Way::Function, true));
            let errors = errors(&named, &exact);
            let output = relative_error(&named.output, &exact.output);
            println!("spread {spread}: output {output}, gradients {errors:?}");
            let is_near = errors.iter().all(|&it| it < most);
            assert!(is_near, "seed {seed}, {spread}: {errors:?}");
        }
    }
    in_narrow!(check::<B>(seed));
}

/// The relative errors of gradients.
fn errors(actual: &Solution, exact: &Solution) -> Vec<f64> {
    let gradients = actual.gradients.iter().zip(&exact.gradients);
    gradients
        .map(|(actual, exact)| relative_error(actual, exact))
        .collect()
}

/// What waits compressed is read by products of floats, whatever the forward pass multiplied; what waits exactly, and an
/// output that is kept, are of INT8 products.
fn waits<B: DataBackend>(seed: u64) {
    fn check<B: DataBackend, E: ComputeDtype>(seed: u64) {
        type Of<E, F> = Contexts<FallbackInt8<E>, F>;
        let problem = Problem::draw(seed);
        let of = Problem::solve::<B, FallbackInt8<E>>;
        let exact = of(&problem, "nothing", Way::Function, true);
        let named = of(&problem, "value", Way::Function, true);
        let solve = |solve: Solve| solve(&problem, "value", Way::Function, true);
        let kept_exact = solve(Problem::solve::<B, Of<E, ExactAttention<Int8>>>);
        for (kept, named) in kept_exact.gradients.iter().zip(&named.gradients) {
            let is_same = holds_scores::<B>() || same_bits(kept, named);
            assert!(is_same, "seed {seed}: exact attention");
        }
        for of_contexts in [
            Problem::solve::<B, Of<E, Int8>>,
            Problem::solve::<B, Of<E, KeptOutput<Int8>>>,
        ] {
            let compressed = solve(of_contexts);
            // Where floats are multiplied, keys are rounded once more for an output that is kept.
            let off_by = relative_error(&compressed.output, &named.output);
            let most = if is_cuda::<B>() { 0.01 } else { 0.0 };
            assert!(off_by <= most, "seed {seed}: the output, {off_by}");
            let errors = errors(&compressed, &exact);
            let is_near = errors.iter().all(|&it| it < 0.03);
            assert!(is_near, "seed {seed}: {errors:?}");
        }
    }
    in_narrow!(check::<B>(seed));
}

/// [`Problem::solve`] of a recipe.
type Solve = fn(&Problem, &str, Way, bool) -> Solution;

/// A mean that is thirty times as large as what tells keys apart would leave them four codes.
fn has_common_keys<B: DataBackend>(seed: u64) {
    fn check<B: DataBackend, E: ComputeDtype>(seed: u64) {
        let mut problem = Problem::draw(seed);
        for key in problem.inputs[1].chunks_mut(FEATURES) {
            key[..16].iter_mut().for_each(|x| *x += 30.0);
        }
        // What 16 bits keep of such keys is known to both.
        let [exact, named] = ["nothing", "value"]
            .map(|pattern| problem.solve::<B, FallbackInt8<E>>(pattern, Way::Function, true));
        let off_by = relative_error(&named.output, &exact.output);
        assert!(off_by < 0.03, "seed {seed}: {off_by}");
    }
    in_narrow!(check::<B>(seed));
}

fn in_block<B: DataBackend>(seed: u64) {
    fn check<B: DataBackend, E: ComputeDtype>(seed: u64) {
        let problem = Problem::draw(seed);
        let [plain, block] = [Way::Function, Way::InBlock]
            .map(|way| problem.solve::<B, FallbackInt8<E>>("value", way, true));
        assert!(same_bits(&plain.output, &block.output), "seed {seed}");
        for (plain, block) in plain.gradients.iter().zip(&block.gradients) {
            assert!(same_bits(plain, block), "seed {seed}");
        }
    }
    in_narrow!(check::<B>(seed));
}
