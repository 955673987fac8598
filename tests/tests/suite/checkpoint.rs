//! Blocks that are computed again: the same gradients, the memory of what they read and give, and each run counted
//! once.

use burn::{
    backend::{Autodiff, Flex, autodiff::checkpoint::strategy::BalancedCheckpointing},
    module::{AutodiffModule, Module},
    nn::{
        DropoutConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig, Lstm, LstmConfig, RmsNorm,
        RmsNormConfig, SwiGlu, SwiGluConfig,
        transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput},
    },
    optim::{GradientsParams, Optimizer},
    tensor::{
        Tensor,
        activation::gelu,
        backend::{AutodiffBackend, Backend},
    },
};
use burn_quant_train::{
    QuantTrain,
    data::DataBackend,
    layer::LearnedSteps,
    optim::{LayerBackend, QuantAdamWConfig},
    recipe::{
        CoatFp8, FallbackInt8, HadamardInt4, LuqInt4, MixedPrecision, Recipe,
        context::{ContextFormat, Contexts, Int10},
    },
    saved::{
        ActivationReport, Recording, checkpoint,
        report::{Form, Saved},
    },
};
use quant_train_tests::{
    Rng,
    data::{cosine, float_product_error, floats, is_cuda, norm, same_bits, tensor},
    models::with_weights_of,
    on_every_backend, seed,
    train::{attached, every_layer, gradients_of, parameters_of},
};

on_every_backend! {
    gradients_are_those_without_blocks => gradients_are_the_same;
    what_a_block_makes_does_not_wait => little_waits;
    dropout_keeps_its_mask => keeps_its_mask;
    sums_of_pairs_do_not_wait => sums_of_pairs;
}

type Plain<B> = QuantTrain<Autodiff<B>, MixedPrecision<f32>>;

const SHAPE: [usize; 3] = [4, 64, 128];
const INPUT: usize = 4 * 64 * 128;

fn block_if<I, O>(is_block: bool, f: impl FnOnce(I) -> O, input: I) -> O {
    match is_block {
        true => checkpoint(f, input),
        false => f(input),
    }
}

/// The gradients of a module's parameters and, last, of its input, and what waited for them.
fn passes<B: AutodiffBackend, M: AutodiffModule<B>>(
    seed: u64,
    module: M,
    forward: impl Fn(&M, Tensor<B, 3>) -> Tensor<B, 3>,
) -> (Vec<Vec<f32>>, ActivationReport) {
    let device = Default::default();
    let module = with_weights_of(module, seed);
    let mut rng = Rng::new(seed);
    let x = tensor::<B, 3>(&rng.normals(INPUT, 1.0), SHAPE, &device).require_grad();
    let recording = Recording::start();
    let y = forward(&module, x.clone() * 1.5);
    let upstream = tensor(
        &rng.normals(y.shape().num_elements(), 1.0),
        y.dims(),
        &device,
    );
    let loss = (y * upstream).sum();
    let saved = recording.report();
    let gradients = loss.backward();
    let of_x = x.grad(&gradients).expect("a gradient of x");
    let of_module = GradientsParams::from_grads(gradients, &module);
    let mut all = gradients_of::<B, M>(&module, &of_module);
    all.push(floats(&of_x));
    let left = recording.report();
    assert_eq!(left.bytes(), 0, "left behind: {left}");
    (all, saved)
}

/// Layers with a residual connection, each a block or not.
#[derive(Module, Debug)]
struct Layers<B: Backend> {
    norms: Vec<RmsNorm<B>>,
    feeds: Vec<SwiGlu<B>>,
}

impl<B: Backend> Layers<B> {
    fn new(count: usize) -> Self {
        let device = Default::default();
        let norm = |_| RmsNormConfig::new(128).init(&device);
        let feed = |_| SwiGluConfig::new(128, 128).init(&device);
        Self {
            norms: (0..count).map(norm).collect(),
            feeds: (0..count).map(feed).collect(),
        }
    }

    fn forward(&self, mut x: Tensor<B, 3>, blocks: bool) -> Tensor<B, 3> {
        for (norm, feed) in self.norms.iter().zip(&self.feeds) {
            let layer = |x: Tensor<B, 3>| x.clone() + feed.forward(norm.forward(x));
            x = block_if(blocks, layer, x);
        }
        x
    }
}

/// A module, and its gradients without blocks or with them.
type Case = (&'static str, Box<dyn Fn(bool) -> Vec<Vec<f32>>>);

/// Burn's modules as one block each, and layers as several.
fn cases<T: AutodiffBackend>(seed: u64) -> [Case; 5] {
    [
        (
            "TransformerEncoder",
            Box::new(move |blocks| {
                let config = TransformerEncoderConfig::new(128, 96, 4, 2).with_dropout(0.0);
                let forward = |encoder: &TransformerEncoder<T>, x| {
                    let forward = |x| encoder.forward(TransformerEncoderInput::new(x));
                    block_if(blocks, forward, x)
                };
                passes(seed, config.init(&Default::default()), forward).0
            }),
        ),
        (
            "layers",
            Box::new(move |blocks| {
                let forward = |layers: &Layers<T>, x| layers.forward(x, blocks);
                passes(seed, Layers::new(3), forward).0
            }),
        ),
        (
            "a block of blocks",
            Box::new(move |blocks| {
                let forward =
                    |layers: &Layers<T>, x| block_if(blocks, |x| layers.forward(x, blocks), x);
                passes(seed, Layers::new(2), forward).0
            }),
        ),
        (
            "LayerNorm, concatenation, GELU",
            Box::new(move |blocks| {
                let forward = |norm: &LayerNorm<T>, x: Tensor<T, 3>| {
                    let forward = |x: Tensor<T, 3>| {
                        let x = norm.forward(x);
                        let [left, right] =
                            [0..64, 64..128].map(|half| x.clone().narrow(2, half.start, 64));
                        gelu(Tensor::cat(vec![right.tanh(), left], 2)).swap_dims(1, 2)
                    };
                    block_if(blocks, forward, x)
                };
                let norm = LayerNormConfig::new(128).init(&Default::default());
                passes(seed, norm, forward).0
            }),
        ),
        (
            "Lstm",
            Box::new(move |blocks| {
                let lstm: Lstm<T> = LstmConfig::new(128, 16, true).init(&Default::default());
                passes(seed, lstm, |lstm, x| {
                    block_if(blocks, |x| lstm.forward(x, None).0, x)
                })
                .0
            }),
        ),
    ]
}

fn gradients_are_the_same<B: DataBackend>(seed: u64) {
    for (name, gradients) in Rng::new(seed).drawn(cases::<Plain<B>>(seed), 2) {
        let [without, with] = [false, true].map(gradients);
        // A fused stream may fuse the second run in another way.
        let error = f64::max(3e-5, float_product_error::<B>());
        let largest = without.iter().map(|it| norm(it)).fold(0.0, f64::max);
        for (index, (with, without)) in with.iter().zip(&without).enumerate() {
            let what = format!("seed {seed}: {name}, gradient {index}");
            // The bias of keys moves no probability: rounding is all that its gradient is.
            let vanishes = norm(without).max(norm(with)) < error * largest;
            assert!(
                vanishes || cosine(with, without) > 1.0 - error.powi(2),
                "{what}"
            );
        }
    }
}

#[cfg(feature = "flex")]
fn gradients_are_the_same_bits<T: AutodiffBackend>(seed: u64) {
    for (name, gradients) in cases::<T>(seed) {
        let [without, with] = [false, true].map(gradients);
        for (index, (with, without)) in with.iter().zip(&without).enumerate() {
            assert!(
                same_bits(with, without),
                "seed {seed}: {name}, gradient {index}"
            );
        }
    }
}

#[cfg(feature = "flex")]
#[test]
fn a_block_changes_no_bit() {
    gradients_are_the_same_bits::<Plain<Flex>>(seed());
}

#[cfg(feature = "flex")]
#[test]
fn a_block_changes_no_bit_beside_burns_checkpointing() {
    type Balanced = QuantTrain<Autodiff<Flex, BalancedCheckpointing>, MixedPrecision<f32>>;
    gradients_are_the_same_bits::<Balanced>(seed());
}

fn little_waits<B: DataBackend>(seed: u64) {
    const COUNT: usize = 4;
    let waiting = |blocks: bool| {
        let forward = move |layers: &Layers<Plain<B>>, x| layers.forward(x, blocks);
        passes(seed, Layers::new(COUNT), forward).1
    };
    let (without, with) = (waiting(false), waiting(true));
    // The input of each layer, and of the loss.
    let most = (COUNT + 3) * INPUT * size_of::<f32>();
    assert!(with.bytes() <= most, "seed {seed}: {with}");
    assert!(without.bytes() > 3 * most, "seed {seed}: {without}");
}

/// A number for each pair is not a number a row, which waits: rotary positions end with one.
fn sums_of_pairs<B: DataBackend>(seed: u64) {
    let squares = |x: Tensor<Plain<B>, 3>| {
        let sums = x.reshape([SHAPE[0], SHAPE[1], SHAPE[2] / 2, 2]).sum_dim(3);
        sums.clone() * sums
    };
    let gradient = |is_block: bool| {
        let values = Rng::new(seed).normals(INPUT, 1.0);
        let x: Tensor<Plain<B>, 3> = tensor(&values, SHAPE, &Default::default()).require_grad();
        let recording = Recording::start();
        let loss = block_if(is_block, squares, x.clone()).sum();
        let saved = recording.report();
        let gradients = loss.backward();
        let of_x = floats(&x.grad(&gradients).expect("a gradient of x"));
        let waits = |it: &&Saved| it.operation == "float_sum_dim" && it.form == Form::Exact;
        (of_x, saved.values.iter().filter(waits).count())
    };
    let ((expected, waiting), (found, waiting_in_block)) = (gradient(false), gradient(true));
    assert_eq!([waiting, waiting_in_block], [1, 0], "seed {seed}");
    assert_eq!(found, expected, "seed {seed}");
}

/// Dropped elements have gradient 0, and no others.
fn keeps_its_mask<B: DataBackend>(seed: u64) {
    let device = Default::default();
    let values = Rng::new(seed).normals(INPUT, 1.0);
    let x: Tensor<Plain<B>, 3> = tensor(&values, SHAPE, &device).require_grad();
    let recording = Recording::start();
    let dropout = DropoutConfig::new(0.4).init();
    let y = checkpoint(|x: Tensor<_, 3>| dropout.forward(x * 2.0) * 3.0, x.clone());
    let forward = floats(&y.clone().detach());
    let loss = y.sum();
    let saved = recording.report();
    assert!(
        saved.values.iter().any(|it| it.form == Form::Bits),
        "no mask of a bit an element: {saved}"
    );
    let gradients = loss.backward();
    let gradient = floats(&x.grad(&gradients).expect("a gradient"));
    let is_dropped = |x: &f32| *x == 0.0;
    let dropped = gradient.iter().filter(|x| is_dropped(x)).count() as f64;
    assert!((dropped / INPUT as f64 - 0.4).abs() < 0.05, "seed {seed}");
    for (index, (y, gradient)) in forward.iter().zip(&gradient).enumerate() {
        assert_eq!(
            is_dropped(y),
            is_dropped(gradient),
            "seed {seed}: element {index}"
        );
    }
}

/// Blocks under contexts read what these hold of their inputs: gradients are near the exact ones.
#[cfg(feature = "flex")]
#[test]
fn contexts_compress_what_blocks_read() {
    type Compressed<F> = QuantTrain<Autodiff<Flex>, Contexts<MixedPrecision<f32>, F>>;
    fn all<F: ContextFormat>(seed: u64, blocks: bool) -> (Vec<Vec<f32>>, ActivationReport) {
        let forward = move |layers: &Layers<Compressed<F>>, x| layers.forward(x, blocks);
        passes(seed, Layers::new(3), forward)
    }
    let seed = seed();
    let (exact, _) = all::<burn_quant_train::recipe::context::Exact>(seed, false);
    let ((compressed, without), (blocks, with)) =
        (all::<Int10>(seed, false), all::<Int10>(seed, true));
    assert!(2 * with.bytes() < without.bytes(), "{with}\n{without}");
    for (gradients, name) in [(compressed, "contexts"), (blocks, "blocks")] {
        for (index, (exact, gradient)) in exact.iter().zip(&gradients).enumerate() {
            let cosine = cosine(exact, gradient);
            assert!(cosine > 0.999, "seed {seed}: {name}, {index}: {cosine}");
        }
    }
}

/// Quantized operands, results of layers and operators of a flow are of the block too.
#[cfg(feature = "flex")]
#[test]
fn what_a_quantized_layer_makes_does_not_wait() {
    fn check<R: Recipe>(seed: u64) {
        type Train<R> = QuantTrain<Autodiff<Flex>, R>;
        let waiting = |blocks| {
            let (_, model) = attached(&every_layer(seed), Gated::<Train<R>>::new(), seed);
            let x = Rng::new(seed).normals(128 * 64, 1.0);
            let x = tensor::<Train<R>, 2>(&x, [128, 64], &Default::default()).require_grad();
            let recording = Recording::start();
            let loss = block_if(blocks, |x| model.forward(x), x * 2.0).mean();
            let report = recording.report();
            let _ = loss.backward();
            report
        };
        let (without, with) = (waiting(false), waiting(true));
        let what = format!("seed {seed}: {}", R::ROW.name);
        // The input of the block, and a few numbers a row.
        let most = 128 * (64 + 8) * size_of::<f32>();
        assert!(with.bytes() <= most, "{what}: {with}");
        assert!(without.bytes() > 2 * with.bytes(), "{what}: {without}");
    }
    let seed = seed();
    check::<FallbackInt8>(seed);
    check::<CoatFp8>(seed);
    check::<HadamardInt4>(seed);
}

/// As deep as Burn's autodiff follows a graph on the stack of a thread.
#[cfg(feature = "flex")]
#[test]
fn a_block_may_be_deep() {
    let leaf = || Tensor::<Plain<Flex>, 2>::ones([64, 64], &Default::default()).require_grad();
    let deep = |x: Tensor<Plain<Flex>, 2>| (0..8_000).fold(x, |x, _| x * 1.0).exp().log();
    drop(checkpoint(deep, leaf()));
    let x = leaf();
    let y = checkpoint(deep, x.clone());
    let gradient = x.grad(&y.sum().backward()).expect("a gradient");
    assert_eq!(floats(&gradient), vec![1.0; 64 * 64]);
}

#[cfg(feature = "flex")]
#[test]
fn a_panic_ends_a_block() {
    let device = Default::default();
    let x = Tensor::<Plain<Flex>, 2>::ones([64, 128], &device).require_grad();
    let y = x.clone();
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
        checkpoint(|x: Tensor<Plain<Flex>, 2>| x.reshape([1, 1]), y)
    }));
    assert!(panicked.is_err());
    let recording = Recording::start();
    let loss = (x.clone().exp() * x.clone()).sum();
    assert!(recording.report().bytes() > 0, "still in a block");
    let gradient = x.grad(&loss.backward()).expect("a gradient");
    assert_eq!(floats(&gradient), vec![2.0 * 1f32.exp(); 64 * 128]);
}

/// Without the decorator and without autodiff it is a call.
#[cfg(feature = "flex")]
#[test]
fn serves_every_backend() {
    let values = |x: Tensor<Autodiff<Flex>, 1>| floats(&checkpoint(|x| x * 2.0, x));
    assert_eq!(values(Tensor::from([1.0, 2.0])), [2.0, 4.0]);
    let plain: Tensor<QuantTrain<Flex, MixedPrecision<f32>>, 1> = Tensor::from([1.0, 2.0]);
    assert_eq!(floats(&checkpoint(|x| x * 2.0, plain)), [2.0, 4.0]);
}

/// Layers of which two share their input, wide enough that activations are no small values.
#[derive(Module, Debug)]
struct Gated<B: Backend> {
    norm: LayerNorm<B>,
    up: Linear<B>,
    gate: Linear<B>,
    down: Linear<B>,
}

impl<B: Backend> Gated<B> {
    fn new() -> Self {
        let device = Default::default();
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(&device);
        Self {
            norm: LayerNormConfig::new(64).init(&device),
            up: linear(64, 96),
            gate: linear(64, 96),
            down: linear(96, 64),
        }
    }

    /// One layer runs twice.
    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        let normal = self.norm.forward(x.clone());
        let up = gelu(self.up.forward(normal.clone()));
        let gate = self.gate.forward(normal.clone() * 3.0) + self.gate.forward(normal);
        x + self.down.forward(up * gate)
    }
}

/// The model that some steps of training leave.
struct Trained {
    losses: Vec<f32>,
    /// Of the last step.
    gradients: Vec<Vec<f32>>,
    weights: Vec<Vec<f32>>,
}

fn trained<B: LayerBackend + AutodiffBackend>(
    config: &QuantAdamWConfig,
    seed: u64,
    steps: usize,
    blocks: bool,
) -> Trained {
    let device = Default::default();
    let (mut optimizer, mut model) = attached(config, Gated::<B>::new(), seed);
    let mut rng = Rng::new(seed);
    let (mut losses, mut of_step) = (Vec::new(), Vec::new());
    for _ in 0..steps {
        let mut matrix = || tensor::<B, 2>(&rng.normals(96 * 64, 1.0), [96, 64], &device);
        let (x, target) = (matrix(), matrix());
        let y = block_if(blocks, |x| model.forward(x), x * 2.0);
        let loss = (y - target).square().mean();
        losses.extend(floats(&loss));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        of_step = gradients_of::<B, _>(&model, &gradients);
        model = optimizer.step(1e-2, model, gradients);
    }
    Trained {
        losses,
        gradients: of_step,
        weights: parameters_of(&model),
    }
}

fn changes_nothing<B: DataBackend, R: Recipe>(seed: u64, config: &QuantAdamWConfig) {
    let what = |part: &str, index: usize| format!("seed {seed}: {}, {part} {index}", R::ROW.name);
    let train = |steps| {
        [false, true]
            .map(|blocks| trained::<QuantTrain<Autodiff<B>, R>>(config, seed, steps, blocks))
    };
    if is_cuda::<B>() {
        // There a fused second run may give other last bits, which quantization can make other numbers of, and each
        // step starts from what the last one left.
        let [without, with] = train(1);
        let off = match R::ROW.linear {
            None => float_product_error::<B>().powi(2),
            Some(_) => 0.05,
        };
        for (index, (a, b)) in without.gradients.iter().zip(&with.gradients).enumerate() {
            assert!(
                cosine(a, b) > 1.0 - off,
                "{}: {}",
                what("gradient", index),
                cosine(a, b)
            );
        }
        return;
    }
    let [without, with] = train(4);
    assert!(
        same_bits(&without.losses, &with.losses),
        "{}",
        what("loss", 0)
    );
    for (part, without, with) in [
        ("gradient", without.gradients, with.gradients),
        ("weight", without.weights, with.weights),
    ] {
        for (index, (a, b)) in without.iter().zip(&with).enumerate() {
            assert!(same_bits(a, b), "{}", what(part, index));
        }
    }
}

/// Without a cold start the first run of a layer sets its step size, and the next one learns.
#[cfg(feature = "flex")]
#[test]
fn step_sizes_without_a_cold_start_are_set_once() {
    let seed = seed();
    let config = every_layer(seed).with_steps(LearnedSteps {
        cold_start: 0,
        ..LearnedSteps::default()
    });
    changes_nothing::<Flex, HadamardInt4>(seed, &config);
    changes_nothing::<Flex, LuqInt4>(seed, &config);
}

/// Layers that share an input, and operators between them, by every recipe.
mod recipes {
    /// Makes a module of tests for each recipe, of one with each backend of this build.
    macro_rules! for_each_recipe {
        (() $($recipe:ident)*) => { $(
            #[allow(non_snake_case)]
            mod $recipe {
                quant_train_tests::on_every_backend! {
                    a_block_changes_nothing => no_change;
                }

                fn no_change<B: burn_quant_train::data::DataBackend>(seed: u64) {
                    type R = burn_quant_train::recipe::$recipe<f32>;
                    let config = quant_train_tests::train::every_layer(seed);
                    quant_train_tests::data::if_drawn::<R>(|| {
                        super::super::changes_nothing::<B, R>(seed, &config);
                    });
                }
            }
        )* };
    }

    burn_quant_train::every_recipe!(for_each_recipe());
}
