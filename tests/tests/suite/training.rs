//! Burn's own models train quantized; every shape of linear layer gets gradients near the float ones.

use burn::{
    backend::{Autodiff, Flex, autodiff::checkpoint::strategy::BalancedCheckpointing},
    module::{AutodiffModule, Module},
    nn::EmbeddingConfig,
    optim::GradientsParams,
    tensor::{Tensor, backend::AutodiffBackend},
};
use burn_quant_train::{
    QuantTrain,
    data::DataBackend,
    layer::LayerPolicy,
    optim::{LayerBackend, QuantAdamWConfig},
    recipe::{BlockInt8, FallbackInt8, MixedPrecision},
};
use half::bf16;
use quant_train_tests::{
    Rng,
    data::{cosine, floats, same_bits, tensor},
    models::{Classifier, ConvNet, Encoder, One, Tied, with_weights_of},
    on_every_backend, seed,
    train::{gradients_of, samples, tail, train},
};

type Training<R, B = Flex> = QuantTrain<Autodiff<B>, R>;

fn all_layers() -> QuantAdamWConfig {
    QuantAdamWConfig::new().with_policy(LayerPolicy::all().min_elements(0))
}

/// Losses of a run in which the recipe, if it quantizes at all, really quantized `quantized` layers.
fn losses<B, M>(seed: u64, steps: usize, quantized: usize) -> Vec<f32>
where
    B: LayerBackend,
    M: AutodiffModule<B> + Classifier<B>,
{
    let mut optim = all_layers().with_seed(Some(seed)).init::<B, M>();
    let model = with_weights_of(M::new(&Default::default()), seed);
    let model = optim.attach(model);
    let layers = optim.layers();
    let got = layers
        .iter()
        .filter(|layer| layer.decision.is_quantized())
        .count();
    let row = B::row().expect("a recipe");
    let expected = if row.linear.is_some() { quantized } else { 0 };
    assert_eq!(
        got, expected,
        "{}: quantized layers of {layers:?}",
        row.name
    );
    let run = train(model, &mut optim, 4e-3, &samples::<B, M>(seed, steps));
    if row.linear.is_some_and(|row| !row.slots.is_empty()) {
        assert_eq!(
            optim.fallback_rates().len(),
            quantized,
            "each quantized layer has run"
        );
    }
    run.losses
}

fn assert_learns(name: &str, seed: u64, losses: &[f32], baseline: &[f32]) {
    let (first, last, reference) = (losses[0], tail(losses, 10), tail(baseline, 10));
    println!("{name}: {first:.4} -> {last:.4}, mixed precision -> {reference:.4}");
    assert!(
        last < 0.5 * first,
        "{name}, seed {seed}: the loss went from {first} to {last} only"
    );
    assert!(
        (last - reference).abs() < 0.1 * first,
        "{name}, seed {seed}: ends at {last}, mixed precision at {reference}"
    );
    assert_ne!(
        losses[0], baseline[0],
        "{name}, seed {seed}: a quantized loss is not the float one"
    );
}

#[test]
fn the_encoder_trains_in_int8() {
    let seed = seed();
    // Two encoder layers of q, k, v, o and two feed-forward layers, and the head; the embedding is none of them.
    let (steps, layers) = (90, 2 * 6 + 1);
    let baseline = losses::<Training<MixedPrecision<f32>>, Encoder<_>>(seed, steps, layers);
    let block = losses::<Training<BlockInt8<f32, 16>>, Encoder<_>>(seed, steps, layers);
    assert_learns("encoder, block-int8", seed, &block, &baseline);
    let fallback = losses::<Training<FallbackInt8<f32, 16>>, Encoder<_>>(seed, steps, layers);
    assert_learns("encoder, fallback-int8", seed, &fallback, &baseline);
    let large_blocks = losses::<Training<FallbackInt8<f32>>, Encoder<_>>(seed, steps, layers);
    assert_learns(
        "encoder, fallback-int8 in blocks of 128",
        seed,
        &large_blocks,
        &baseline,
    );
}

#[test]
fn the_encoder_trains_in_int8_around_bf16() {
    let seed = seed();
    let (steps, layers) = (90, 2 * 6 + 1);
    let baseline = losses::<Training<MixedPrecision<f32>>, Encoder<_>>(seed, steps, layers);
    let mixed = losses::<Training<MixedPrecision<bf16>>, Encoder<_>>(seed, steps, layers);
    assert_learns("encoder, mixed-precision bf16", seed, &mixed, &baseline);
    let fallback = losses::<Training<FallbackInt8<bf16, 32>>, Encoder<_>>(seed, steps, layers);
    assert_learns("encoder, fallback-int8 bf16", seed, &fallback, &baseline);
}

#[test]
fn the_conv_net_trains_in_int8() {
    let seed = seed();
    let (steps, layers) = (80, 2);
    let baseline = losses::<Training<MixedPrecision<f32>>, ConvNet<_>>(seed, steps, layers);
    let block = losses::<Training<BlockInt8<f32, 16>>, ConvNet<_>>(seed, steps, layers);
    assert_learns("conv net, block-int8", seed, &block, &baseline);
    let fallback = losses::<Training<FallbackInt8<f32, 16>>, ConvNet<_>>(seed, steps, layers);
    assert_learns("conv net, fallback-int8", seed, &fallback, &baseline);
}

#[test]
fn balanced_checkpointing_changes_no_bit_of_a_quantized_run() {
    type Balanced = QuantTrain<Autodiff<Flex, BalancedCheckpointing>, FallbackInt8<f32, 16>>;
    let seed = seed();
    let kept = losses::<Training<FallbackInt8<f32, 16>>, Encoder<_>>(seed, 5, 13);
    let balanced = losses::<Balanced, Encoder<_>>(seed, 5, 13);
    assert!(
        same_bits(&kept, &balanced),
        "seed {seed}: {kept:?} and {balanced:?}"
    );
}

/// The sizes and options of a linear layer under test.
#[derive(Debug, Clone, Copy)]
struct Case {
    inputs: usize,
    outputs: usize,
    bias: bool,
    frozen: bool,
    track_input: bool,
}

const FULL: Case = Case {
    inputs: 37,
    outputs: 21,
    bias: true,
    frozen: false,
    track_input: true,
};

/// Output, gradient of the input, and gradients of the parameters of a layer with the weights of `seed`.
struct Outcome {
    y: Vec<f32>,
    dx: Option<Vec<f32>>,
    dw: Vec<Vec<f32>>,
}

/// Runs a layer forward and backward on an input of shape `shape`, the last dimension being its inputs.
fn layer<B: AutodiffBackend, const D: usize>(
    case: Case,
    shape: [usize; D],
    seed: u64,
    attach: impl FnOnce(One<B>) -> One<B>,
) -> Outcome {
    let device = B::Device::default();
    let mut rng = Rng::new(seed ^ 1);
    let mut model = with_weights_of(
        One::<B>::new(case.inputs, case.outputs, case.bias, &device),
        seed,
    );
    if case.frozen {
        model = model.no_grad();
    }
    let model = attach(model);
    let count: usize = shape.iter().product();
    let mut x = tensor::<B, D>(&rng.normals(count, 1.0), shape, &device);
    if case.track_input {
        x = x.require_grad();
    }
    let y = model.linear.forward(x.clone());
    let weights = rng.normals(count / case.inputs * case.outputs, 1.0);
    let loss = (y.clone() * tensor::<B, D>(&weights, y.dims(), &device)).sum();
    let grads = loss.backward();
    let dx = x.grad(&grads).map(|dx| {
        assert_eq!(dx.dims(), shape);
        floats(&dx)
    });
    let dw = gradients_of::<B, One<B>>(&model, &GradientsParams::from_grads(grads, &model));
    Outcome {
        y: floats(&y),
        dx,
        dw,
    }
}

fn near(what: &str, quantized: &[f32], float: &[f32]) {
    let similarity = cosine(quantized, float);
    assert!(
        similarity > 0.99,
        "{what}: cosine similarity {similarity} to the float gradient"
    );
    assert_ne!(quantized, float, "{what}: this was not quantized");
}

fn compare_layer<Q: LayerBackend, F: AutodiffBackend, const D: usize>(
    case: Case,
    shape: [usize; D],
    seed: u64,
) {
    let recipe = Q::row().expect("a recipe").name;
    let what = format!("seed {seed}, {recipe}: {case:?} {shape:?}");
    let float = layer::<F, D>(case, shape, seed, |model| model);
    let quantized = layer::<Q, D>(case, shape, seed, |model| {
        let optim = all_layers().with_seed(Some(seed)).init::<Q, One<Q>>();
        let model = optim.attach(model);
        assert!(
            optim
                .layers()
                .iter()
                .all(|layer| layer.decision.is_quantized())
        );
        model
    });
    near(&format!("{what}: Y"), &quantized.y, &float.y);
    assert_eq!(quantized.dx.is_some(), case.track_input, "{what}: dX");
    if let (Some(quantized), Some(float)) = (&quantized.dx, &float.dx) {
        near(&format!("{what}: dX"), quantized, float);
    }
    let parameters = if case.frozen {
        0
    } else {
        1 + usize::from(case.bias)
    };
    assert_eq!(
        quantized.dw.len(),
        parameters,
        "{what}: gradients of parameters"
    );
    if !case.frozen {
        near(&format!("{what}: dW"), &quantized.dw[0], &float.dw[0]);
    }
    if let (Some(quantized), Some(float)) = (quantized.dw.get(1), float.dw.get(1)) {
        let similarity = cosine(quantized, float);
        // The bias's gradient is not quantized at all.
        assert!(
            similarity > 0.99999,
            "{what}: bias, cosine similarity {similarity}"
        );
    }
}

on_every_backend! {
    every_shape_of_linear_layer => shapes;
    a_matrix_product_with_a_tied_embedding => tied;
}

fn shapes<B: DataBackend>(seed: u64) {
    type Float<B> = Autodiff<B>;
    fn on<B: DataBackend, const D: usize>(case: Case, shape: [usize; D], seed: u64) {
        compare_layer::<QuantTrain<Autodiff<B>, FallbackInt8<f32, 16>>, Float<B>, D>(
            case, shape, seed,
        );
        compare_layer::<QuantTrain<Autodiff<B>, BlockInt8<f32, 32>>, Float<B>, D>(
            case, shape, seed,
        );
    }
    on::<B, 2>(FULL, [50, 37], seed);
    on::<B, 3>(FULL, [3, 17, 37], seed);
    on::<B, 4>(FULL, [2, 3, 5, 37], seed);
    on::<B, 1>(FULL, [37], seed);
    on::<B, 2>(
        Case {
            bias: false,
            ..FULL
        },
        [33, 37],
        seed,
    );
    on::<B, 2>(
        Case {
            bias: false,
            inputs: 1,
            outputs: 129,
            ..FULL
        },
        [65, 1],
        seed,
    );
    on::<B, 3>(
        Case {
            frozen: true,
            ..FULL
        },
        [4, 9, 37],
        seed,
    );
    on::<B, 2>(
        Case {
            track_input: false,
            ..FULL
        },
        [50, 37],
        seed,
    );
    on::<B, 4>(
        Case {
            track_input: false,
            bias: false,
            ..FULL
        },
        [2, 1, 7, 37],
        seed,
    );
}

/// Logits, gradient of the input and of the table, for `x Eᵀ` with x of rank 2 or 3.
fn tied_outcome<B: AutodiffBackend, const D: usize>(
    shape: [usize; D],
    seed: u64,
    attach: impl FnOnce(Tied<B>) -> Tied<B>,
) -> Outcome {
    let device = B::Device::default();
    let mut rng = Rng::new(seed ^ 2);
    let (vocabulary, width) = (45, shape[D - 1]);
    let model = Tied {
        embedding: EmbeddingConfig::new(vocabulary, width).init::<B>(&device),
    };
    let model = attach(with_weights_of(model, seed));
    let count: usize = shape.iter().product();
    let x = tensor::<B, D>(&rng.normals(count, 1.0), shape, &device).require_grad();
    let y = x
        .clone()
        .matmul(model.embedding.weight.val().transpose().unsqueeze::<D>());
    let weights = rng.normals(count / width * vocabulary, 1.0);
    let grads = (y.clone() * tensor::<B, D>(&weights, y.dims(), &device))
        .sum()
        .backward();
    let dx = x.grad(&grads).map(|dx| floats(&dx));
    let dw = gradients_of::<B, Tied<B>>(&model, &GradientsParams::from_grads(grads, &model));
    Outcome {
        y: floats(&y),
        dx,
        dw,
    }
}

fn tied<B: DataBackend>(seed: u64) {
    fn on<B: DataBackend, const D: usize>(shape: [usize; D], seed: u64) {
        type Q<B> = QuantTrain<Autodiff<B>, FallbackInt8<f32, 16>>;
        let what = format!("seed {seed}: x {shape:?}");
        let float = tied_outcome::<Autodiff<B>, D>(shape, seed, |model| model);
        let with = |policy: LayerPolicy| {
            tied_outcome::<Q<B>, D>(shape, seed, |model| {
                let config = QuantAdamWConfig::new().with_policy(policy.min_elements(0));
                config.init::<Q<B>, Tied<Q<B>>>().attach(model)
            })
        };
        let quantized = with(LayerPolicy::all().tied_embeddings());
        near(&format!("{what}: logits"), &quantized.y, &float.y);
        near(
            &format!("{what}: dX"),
            quantized.dx.as_ref().expect("tracked"),
            float.dx.as_ref().expect("tracked"),
        );
        near(&format!("{what}: table"), &quantized.dw[0], &float.dw[0]);
        // By default an embedding's table is left alone. Where autotune is, products of ours replace Burn's, and round
        // otherwise.
        let default = with(LayerPolicy::all());
        let error = |y: &[f32]| {
            let squares =
                std::iter::zip(y, &float.y).map(|(y, exact)| f64::from(y - exact).powi(2));
            squares.sum::<f64>().sqrt()
        };
        let (of_default, of_quantized) = (error(&default.y), error(&quantized.y));
        let left_alone = if cfg!(feature = "autotune") {
            of_default < 0.2 * of_quantized
        } else {
            same_bits(&default.y, &float.y)
        };
        assert!(
            left_alone,
            "{what}: the default policy quantized an embedding: error {of_default} beside {of_quantized}"
        );
    }
    on::<B, 2>([39, 24], seed);
    on::<B, 3>([3, 13, 24], seed);
}

#[test]
fn validation_runs_unquantized() {
    type B = Training<FallbackInt8<f32, 16>>;
    let seed = seed();
    let device = Default::default();
    let optim = all_layers().init::<B, One<B>>();
    let model = optim.attach(with_weights_of(One::<B>::new(20, 30, true, &device), seed));
    let x = Rng::new(seed).normals(40 * 20, 1.0);
    let trained = floats(&model.linear.forward(tensor::<B, 2>(&x, [40, 20], &device)));
    let frozen = model.clone().no_grad();
    let frozen = floats(&frozen.linear.forward(tensor::<B, 2>(&x, [40, 20], &device)));
    type Inner = <B as AutodiffBackend>::InnerBackend;
    let valid = floats(
        &model
            .valid()
            .linear
            .forward(tensor::<Inner, 2>(&x, [40, 20], &device)),
    );
    let plain = with_weights_of(One::<Flex>::new(20, 30, true, &device), seed);
    let plain = floats(
        &plain
            .linear
            .forward(tensor::<Flex, 2>(&x, [40, 20], &device)),
    );
    assert!(
        same_bits(&valid, &plain),
        "seed {seed}: validation is not the inner backend's own"
    );
    assert!(
        same_bits(&frozen, &plain),
        "seed {seed}: a model of which nothing is trained is evaluated, on the training backend too"
    );
    assert_ne!(trained, plain, "seed {seed}: training is quantized");
    let _: Tensor<B, 2> = model.linear.weight.val();
}
