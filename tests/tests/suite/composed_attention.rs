//! Attention that a model composes of products and a softmax: found where it is that, else computed as it is.

#[cfg(feature = "flex")]
use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, NoCheckpointing};
use burn::{
    backend::{Autodiff, Flex},
    nn::{
        attention::{MhaInput, MultiHeadAttentionConfig},
        transformer::{
            TransformerDecoderConfig, TransformerDecoderInput, TransformerEncoderConfig,
            TransformerEncoderInput,
        },
    },
    tensor::{
        Bool, DType, Distribution, Tensor, TensorData,
        activation::softmax,
        backend::{AutodiffBackend, Backend},
        module,
    },
};
#[cfg(feature = "flex")]
use burn_quant_train::recipe::context::{Contexts, Int10};
use burn_quant_train::{
    QuantTrain,
    data::DataBackend,
    recipe::{MixedPrecision, Recipe},
    saved::{ActivationReport, Recording, checkpoint},
};
#[cfg(feature = "flex")]
use half::f16;
use quant_train_tests::{
    Rng,
    data::{assert_near, floats, is_cuda, same_bits, tensor},
    in_16_bits,
    models::with_weights_of,
    on_every_backend,
};

on_every_backend! {
    what_is_attention_and_what_is_not_equal_fp32 => equal_fp32;
    scores_of_attention_do_not_wait => saves_no_scores;
    a_query_that_sees_nothing_reads_zero => reads_zero;
    dropout_is_of_what_was_drawn => drops_what_was_drawn;
    burns_layers_are_served_as_they_are => serves_burns_layers;
    burns_layer_with_dropout_saves_no_scores => serves_dropout;
    with_fp32_nothing_is_composed => not_in_fp32;
}

const BATCH: usize = 2;
const HEADS: usize = 3;
const QUERIES: usize = 12;
const KEYS: usize = 20;
const FEATURES: usize = 16;

/// What a model may compute.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Case {
    Plain,
    /// By a factor, as many have it.
    Factor,
    TwoFactors,
    Masked,
    /// As `burn::nn::attention::MultiHeadAttention` has it.
    TwoMasks,
    Biased,
    BiasedFromTheLeft,
    InFp32,
    /// Q, K and V in FP32, as what turns or normalizes them may give it.
    WideInputs,
    /// Of the scores of attention, and of attention of them.
    WeightsToo,
    ScoresToo,
    Twice,
    DroppedScores,
    DroppedProbabilities,
    AlongTheQueries,
    FactorOfWhatIsMasked,
    MaskedByZero,
    TwoBiases,
    /// In FP32, which meets the scores in their dtype.
    WideBias,
    /// Added to scores in FP32, where it keeps its bits.
    WideBiasInFp32,
    ProbabilitiesInFp32,
    BiasThatIsNoBroadcast,
    DetachedQuery,
    DetachedAll,
    NoSoftmax,
    OtherValues,
    OneKeyHead,
}

impl Case {
    /// Those that one operation computes, if the device has kernels of every option.
    const ATTENTION: [Self; 10] = [
        Self::Plain,
        Self::Factor,
        Self::TwoFactors,
        Self::Masked,
        Self::TwoMasks,
        Self::Biased,
        Self::BiasedFromTheLeft,
        Self::WideBias,
        Self::InFp32,
        Self::WideInputs,
    ];

    /// The others, and weights or scores that are read besides.
    const OTHERS: [Self; 17] = [
        Self::WeightsToo,
        Self::ScoresToo,
        Self::Twice,
        Self::DroppedScores,
        Self::DroppedProbabilities,
        Self::AlongTheQueries,
        Self::FactorOfWhatIsMasked,
        Self::MaskedByZero,
        Self::TwoBiases,
        Self::WideBiasInFp32,
        Self::ProbabilitiesInFp32,
        Self::BiasThatIsNoBroadcast,
        Self::DetachedQuery,
        Self::DetachedAll,
        Self::NoSoftmax,
        Self::OtherValues,
        Self::OneKeyHead,
    ];

    fn output<B: Backend>(self, inputs: Inputs<B>) -> Tensor<B, 4> {
        let Inputs { q, k, v, bias } = inputs;
        let device = q.device();
        let dtype = q.dtype();
        let hidden = |shape: [usize; 4], is_hidden: fn(usize) -> bool| {
            let values = (0..shape.into_iter().product()).map(is_hidden).collect();
            Tensor::<B, 4, Bool>::from_data(TensorData::new::<bool, _>(values, shape), &device)
        };
        let of_keys = || hidden([BATCH, 1, 1, KEYS], |at| at % KEYS > 14);
        let of_all = || {
            let shape = [BATCH, HEADS, QUERIES, KEYS];
            hidden(shape, |at| at % KEYS > at / KEYS % QUERIES)
        };
        // Not trained, and the same on both backends.
        let factors = |scores: &Tensor<B, 4>| {
            let values =
                (0..scores.shape().num_elements()).map(|at| if at % 7 == 3 { 0.0 } else { 1.25 });
            let values: Vec<f32> = values.collect();
            tensor::<B, 4>(&values, scores.dims(), &device).cast(scores.dtype())
        };
        let scores = |q: Tensor<B, 4>, k: Tensor<B, 4>| q.matmul(k.transpose()) / 4.0;
        let attend = |scores: Tensor<B, 4>, v: Tensor<B, 4>| softmax(scores, 3).matmul(v);
        match self {
            Self::Plain => attend(scores(q, k), v),
            Self::Factor => attend(q.matmul(k.swap_dims(2, 3)) * 0.3, v),
            Self::TwoFactors => attend(scores(q, k) * 0.5, v),
            Self::Masked => attend(scores(q, k).mask_fill(of_all(), f32::NEG_INFINITY), v),
            Self::TwoMasks => {
                let scores = scores(q, k).mask_fill(of_keys(), -1e4);
                attend(scores.mask_fill(of_all(), -1e4), v)
            }
            Self::Biased => attend(scores(q, k) + bias, v),
            Self::BiasedFromTheLeft => attend((bias + scores(q, k)).mask_fill(of_keys(), -1e9), v),
            Self::InFp32 => {
                let probabilities = softmax(scores(q, k).cast(DType::F32), 3);
                probabilities.cast(dtype).matmul(v)
            }
            Self::WideInputs => {
                let [q, k, v] = [q, k, v].map(|x| x.cast(DType::F32));
                attend(scores(q, k).mask_fill(of_all(), f32::NEG_INFINITY), v)
            }
            Self::WeightsToo => {
                let weights = softmax(scores(q, k), 3);
                weights.clone().matmul(v) + weights.sum_dim(3).cast(dtype)
            }
            Self::ScoresToo => {
                let scores = scores(q, k);
                attend(scores.clone(), v) + scores.sum_dim(3).cast(dtype)
            }
            Self::Twice => {
                let weights = softmax(scores(q, k), 3);
                weights.clone().matmul(v.clone()) + weights.matmul(v * 0.5)
            }
            Self::DroppedScores => {
                let scores = scores(q, k);
                attend(scores.clone() * factors(&scores), v)
            }
            Self::DroppedProbabilities => {
                let weights = softmax(scores(q, k), 3);
                (weights.clone() * factors(&weights)).matmul(v)
            }
            Self::AlongTheQueries => softmax(scores(q, k), 2).matmul(v),
            Self::FactorOfWhatIsMasked => attend(scores(q, k).mask_fill(of_keys(), -1e4) * 1e-4, v),
            Self::MaskedByZero => attend(scores(q, k).mask_fill(of_keys(), 0.0), v),
            Self::TwoBiases => attend(scores(q, k) + bias.clone() + bias, v),
            Self::WideBias => attend(scores(q, k) + bias.cast(DType::F32) * 0.37, v),
            Self::WideBiasInFp32 => {
                let scores = scores(q, k).cast(DType::F32) + bias.cast(DType::F32) * 0.37;
                attend(scores, v)
            }
            Self::ProbabilitiesInFp32 => {
                let probabilities = softmax(scores(q, k), 3).cast(DType::F32);
                probabilities.clone().matmul(v.cast(DType::F32)) + probabilities.sum_dim(3)
            }
            Self::BiasThatIsNoBroadcast => {
                let [q, k] = [q, k].map(|x| x.narrow(1, 0, 1));
                attend(scores(q, k) + bias.repeat(&[1, HEADS, 1, 1]), v)
            }
            Self::DetachedQuery => attend(scores(q.clone().detach(), k), v) + q.sum_dim(3),
            Self::DetachedAll => attend(scores(q.clone().detach(), k.clone().detach()), v),
            Self::NoSoftmax => scores(q, k).matmul(v),
            Self::OtherValues => {
                let v = v.narrow(0, 0, 1).narrow(1, 0, 1);
                attend(scores(q, k), v.expand([BATCH, HEADS, KEYS, FEATURES]) * 2.0)
            }
            Self::OneKeyHead => attend(scores(q, k.narrow(1, 0, 1)), v),
        }
    }
}

/// In the compute dtype.
struct Inputs<B: Backend> {
    q: Tensor<B, 4>,
    k: Tensor<B, 4>,
    v: Tensor<B, 4>,
    /// `[1, 1, queries, keys]`.
    bias: Tensor<B, 4>,
}

struct Solved {
    /// The output, and gradients of Q, K, V and the bias.
    parts: [Vec<f32>; 5],
    /// True if something of the size of the scores waits for the backward pass.
    saves_scores: bool,
}

/// For the loss `sum(weights * output)`. Inputs reach attention in another shape than their leaves: a leaf may be a
/// weight, which is not looked at.
fn solve<A: AutodiffBackend>(data: u64, dtype: DType, case: Case) -> Solved {
    let device = A::Device::default();
    let mut rng = Rng::new(data);
    let mut leaf = |shape: [usize; 4]| {
        let values = rng.normals_of_16_bits(shape.iter().product());
        let leaf = tensor::<A, 1>(&values, [values.len()], &device).require_grad();
        (leaf.clone(), leaf.reshape(shape).cast(dtype))
    };
    let (of_q, q) = leaf([BATCH, HEADS, QUERIES, FEATURES]);
    let (of_k, k) = leaf([BATCH, HEADS, KEYS, FEATURES]);
    let (of_v, v) = leaf([BATCH, HEADS, KEYS, FEATURES]);
    let (of_bias, bias) = leaf([1, 1, QUERIES, KEYS]);
    let (_, weights) = leaf([BATCH, HEADS, QUERIES, FEATURES]);
    let weights = weights.cast(DType::F32).detach();
    let recording = Recording::start();
    let output = case.output(Inputs { q, k, v, bias });
    let report = recording.report();
    let gradients = (output.clone().cast(DType::F32) * weights).sum().backward();
    let of = |leaf: Tensor<A, 1>| leaf.grad(&gradients).map_or(vec![], |it| floats(&it));
    Solved {
        parts: [floats(&output), of(of_q), of(of_k), of(of_v), of(of_bias)],
        saves_scores: saves(&report, BATCH * HEADS * QUERIES * KEYS),
    }
}

/// In whatever shape: no other value of these tests has as many elements.
pub(super) fn saves(report: &ActivationReport, elements: usize) -> bool {
    let mut values = report.values.iter();
    values.any(|value| value.elements == elements)
}

fn equal_fp32<B: DataBackend>(seed: u64) {
    fn check<B: DataBackend, R: Recipe>(dtype: DType, tolerance: f32, seed: u64) {
        let mut rng = Rng::new(seed);
        let cases = Case::ATTENTION.into_iter().chain(Case::OTHERS);
        for case in rng.drawn(cases, 5) {
            let data = rng.bits();
            let expected = solve::<Autodiff<Flex>>(data, DType::F32, case);
            let actual = solve::<QuantTrain<Autodiff<B>, R>>(data, dtype, case);
            let parts = ["output", "dQ", "dK", "dV", "dBias"].iter();
            for (part, (actual, expected)) in parts.zip(actual.parts.iter().zip(&expected.parts)) {
                let what = format!("seed {seed}, {case:?}, {dtype:?}: {part}");
                assert_near(&what, actual, expected, tolerance);
            }
        }
    }
    in_16_bits!(B, check(seed));
}

/// True where Burn's function of attention with a mask and a bias keeps no scores: on other devices there is no kernel
/// for what a model composes either.
pub(super) fn has_kernels<A: AutodiffBackend>(dtype: DType) -> bool {
    let device = A::Device::default();
    let random = |shape: [usize; 4]| {
        let leaf = Tensor::<A, 4>::random(shape, Distribution::Default, &device).require_grad();
        (leaf * 2.0).cast(dtype)
    };
    let q = random([BATCH, HEADS, QUERIES, FEATURES]);
    let [k, v] = [(); 2].map(|()| random([BATCH, HEADS, KEYS, FEATURES]));
    let bias = random([1, 1, QUERIES, KEYS]);
    let hidden = Tensor::<A, 4, Bool>::full([1, 1, 1, KEYS], false, &device);
    let recording = Recording::start();
    let output = module::attention(q, k, v, Some(hidden), Some(bias), Default::default());
    let report = recording.report();
    output.sum().backward();
    let has_kernels = !saves(&report, BATCH * HEADS * QUERIES * KEYS);
    if !has_kernels {
        println!("skipped: no kernel of attention with every option");
    }
    has_kernels
}

fn saves_no_scores<B: DataBackend>(seed: u64) {
    fn check<B: DataBackend, R: Recipe>(dtype: DType, _tolerance: f32, seed: u64) {
        type T<B, R> = QuantTrain<Autodiff<B>, R>;
        let saves_scores = |case| solve::<T<B, R>>(seed, dtype, case).saves_scores;
        if has_kernels::<T<B, R>>(dtype) {
            for case in Rng::new(seed).drawn(Case::ATTENTION, 2) {
                assert!(!saves_scores(case), "seed {seed}, {case:?}, {dtype:?}");
            }
        }
        assert!(saves_scores(Case::DroppedScores), "seed {seed}, {dtype:?}");
    }
    in_16_bits!(B, check(seed));
}

/// Where a model drops.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Dropping {
    /// As `burn::nn::attention::MultiHeadAttention` does.
    Scores,
    ScoresInFp32,
    /// As most do.
    Probabilities,
    NarrowProbabilities,
    /// The same numbers of the scores of two attentions.
    ScoresOfTwo,
    /// The probabilities are read besides.
    WeightsToo,
    /// Not what kernels do.
    MaskedScores,
    WithoutTheFactor,
    Both,
}

impl Dropping {
    /// Those that one operation computes, if the device has kernels of every option.
    const SERVED: [Self; 5] = [
        Self::Scores,
        Self::ScoresInFp32,
        Self::Probabilities,
        Self::NarrowProbabilities,
        Self::ScoresOfTwo,
    ];
    /// The first is served, and its weights are computed besides.
    const OTHERS: [Self; 4] = [
        Self::WeightsToo,
        Self::MaskedScores,
        Self::WithoutTheFactor,
        Self::Both,
    ];

    /// The output, and what `draw` gave for the shape and the dtype of a tensor.
    fn output<B: Backend>(
        self,
        [q, k, v]: [Tensor<B, 4>; 3],
        draw: impl Fn(&Tensor<B, 4>) -> Tensor<B, 4>,
    ) -> (Tensor<B, 4>, Tensor<B, 4>) {
        let dtype = q.dtype();
        let shape = [BATCH, HEADS, QUERIES, KEYS];
        let later = (0..shape.iter().product()).map(|at| at % KEYS > at / KEYS % QUERIES + 8);
        let later = TensorData::new(later.collect::<Vec<bool>>(), shape);
        let later = Tensor::<B, 4, Bool>::from_data(later, &q.device());
        let mask = |scores: Tensor<B, 4>| scores.mask_fill(later.clone(), -1e4);
        let whole = 1.0 / KEEP;
        let scores = q.matmul(k.transpose()) / 4.0;
        match self {
            Self::Scores => {
                let drawn = draw(&scores);
                let dropped = scores * drawn.clone() * whole;
                (softmax(mask(dropped), 3).matmul(v), drawn)
            }
            Self::ScoresInFp32 => {
                let scores = scores.cast(DType::F32);
                let drawn = draw(&scores);
                let weights = softmax(mask(drawn.clone() * scores * whole), 3);
                (weights.cast(dtype).matmul(v), drawn)
            }
            Self::Probabilities => {
                let weights = softmax(mask(scores), 3);
                let drawn = draw(&weights);
                ((weights * drawn.clone() * whole).matmul(v), drawn)
            }
            Self::NarrowProbabilities => {
                let weights = softmax(mask(scores), 3).cast(dtype);
                let drawn = draw(&weights);
                ((weights * drawn.clone() / KEEP).matmul(v), drawn)
            }
            Self::ScoresOfTwo => {
                let drawn = draw(&scores);
                let attend = |v| {
                    let dropped = scores.clone() * drawn.clone() * whole;
                    softmax(mask(dropped), 3).matmul(v)
                };
                (attend(v.clone()) + attend(v * 0.5), drawn)
            }
            Self::WeightsToo => {
                let weights = softmax(mask(scores), 3);
                let drawn = draw(&weights);
                let weights = weights * drawn.clone() * whole;
                let output = weights.clone().matmul(v);
                (output + weights.sum_dim(3).cast(dtype), drawn)
            }
            Self::MaskedScores => {
                let scores = mask(scores);
                let drawn = draw(&scores);
                (softmax(scores * drawn.clone() * whole, 3).matmul(v), drawn)
            }
            Self::WithoutTheFactor => {
                let weights = softmax(mask(scores), 3);
                let drawn = draw(&weights);
                ((weights * drawn.clone()).matmul(v), drawn)
            }
            Self::Both => {
                let drawn = draw(&scores);
                let weights = softmax(mask(scores * drawn.clone() * whole), 3);
                let dropped = weights * drawn.clone().cast(DType::F32) * whole;
                (dropped.matmul(v), drawn)
            }
        }
    }
}

/// The share that dropout leaves.
const KEEP: f64 = 0.7;

/// By numbers that are given, or drawn; and these.
fn solve_dropped<A: AutodiffBackend>(
    data: u64,
    dtype: DType,
    dropping: Dropping,
    given: Option<&[f32]>,
) -> (Solved, Vec<f32>) {
    let device = A::Device::default();
    let mut rng = Rng::new(data);
    let mut leaf = |sequence: usize| {
        let shape = [BATCH, HEADS, sequence, FEATURES];
        let values = rng.normals_of_16_bits(shape.iter().product());
        let leaf = tensor::<A, 1>(&values, [values.len()], &device).require_grad();
        (leaf.clone(), leaf.reshape(shape).cast(dtype))
    };
    let [(of_q, q), (of_k, k), (of_v, v)] = [QUERIES, KEYS, KEYS].map(&mut leaf);
    let weights = leaf(QUERIES).1.cast(DType::F32).detach();
    let recording = Recording::start();
    let (output, drawn) = dropping.output([q, k, v], |like| match given {
        Some(given) => tensor::<A, 4>(given, like.dims(), &device).cast(like.dtype()),
        None => like.random_like(Distribution::Bernoulli(KEEP)),
    });
    let report = recording.report();
    let gradients = (output.clone().cast(DType::F32) * weights).sum().backward();
    let of = |leaf: Tensor<A, 1>| leaf.grad(&gradients).map_or(vec![], |it| floats(&it));
    let solved = Solved {
        parts: [floats(&output), of(of_q), of(of_k), of(of_v), vec![]],
        saves_scores: saves(&report, BATCH * HEADS * QUERIES * KEYS),
    };
    (solved, floats(&drawn))
}

fn drops_what_was_drawn<B: DataBackend>(seed: u64) {
    fn check<B: DataBackend, R: Recipe>(dtype: DType, tolerance: f32, seed: u64) {
        type T<B, R> = QuantTrain<Autodiff<B>, R>;
        let of_kernels = has_kernels::<T<B, R>>(dtype);
        let mut rng = Rng::new(seed);
        for dropping in rng.drawn(Dropping::SERVED.into_iter().chain(Dropping::OTHERS), 3) {
            let data = rng.bits();
            let what = format!("seed {seed}, {dropping:?}, {dtype:?}");
            let (actual, drawn) = solve_dropped::<T<B, R>>(data, dtype, dropping, None);
            let (expected, _) =
                solve_dropped::<Autodiff<Flex>>(data, DType::F32, dropping, Some(&drawn));
            for (part, (actual, expected)) in actual.parts.iter().zip(&expected.parts).enumerate() {
                assert_near(&format!("{what}: {part}"), actual, expected, tolerance);
            }
            assert!(drawn.iter().all(|&x| x == 0.0 || x == 1.0), "{what}");
            let (count, kept) = (drawn.len() as f64, drawn.iter().sum::<f32>() as f64);
            let deviation = (count * KEEP * (1.0 - KEEP)).sqrt();
            assert!(
                (kept - count * KEEP).abs() < 6.0 * deviation,
                "{what}: {kept} stay"
            );
            if Dropping::SERVED.contains(&dropping) && of_kernels {
                assert!(!actual.saves_scores, "{what}: scores wait");
            }
            if Dropping::OTHERS[1..].contains(&dropping) {
                assert!(actual.saves_scores, "{what}");
            }
        }
    }
    in_16_bits!(B, check(seed));
}

/// In training and in evaluation, and its gradients are numbers. One by one it would read the mean of all values.
fn reads_zero<B: DataBackend>(seed: u64) {
    fn output<A: Backend>(dtype: DType, seed: u64) -> (Tensor<A, 4>, Tensor<A, 4>) {
        let device = A::Device::default();
        let shape = [BATCH, HEADS, QUERIES, FEATURES];
        let x = Rng::new(seed).normals(shape.iter().product(), 1.0);
        let leaf = tensor::<A, 4>(&x, shape, &device).require_grad();
        let x = (leaf.clone() * 2.0).cast(dtype);
        let hidden = (0..QUERIES * QUERIES).map(|at| at / QUERIES == 3 || at % QUERIES == 5);
        let hidden = TensorData::new(hidden.collect::<Vec<bool>>(), [1, 1, QUERIES, QUERIES]);
        let hidden = Tensor::<A, 4, Bool>::from_data(hidden, &device);
        let scores = x
            .clone()
            .matmul(x.clone().transpose())
            .mask_fill(hidden, -1e4);
        (leaf, softmax(scores, 3).matmul(x))
    }
    fn check<B: DataBackend, R: Recipe>(dtype: DType, _tolerance: f32, seed: u64) {
        if !has_kernels::<QuantTrain<Autodiff<B>, R>>(dtype) {
            return;
        }
        let (leaf, trained) = output::<QuantTrain<Autodiff<B>, R>>(dtype, seed);
        let gradients = trained.clone().sum().backward();
        let gradient = floats(&leaf.grad(&gradients).expect("the leaf is tracked"));
        assert!(
            gradient.iter().all(|x| x.is_finite()),
            "seed {seed}, {dtype:?}"
        );
        let (_, evaluated) = output::<QuantTrain<B, R>>(dtype, seed);
        let [trained, evaluated] = [floats(&trained), floats(&evaluated)];
        for (at, x) in trained.iter().chain(&evaluated).enumerate() {
            let sees_nothing = at / FEATURES % QUERIES == 3;
            assert_eq!(
                *x == 0.0,
                sees_nothing,
                "seed {seed}, {dtype:?}: [{at}] {x}"
            );
        }
    }
    in_16_bits!(B, check(seed));
}

const MODEL: usize = 32;
const HEADS_OF_MODEL: usize = 2;
const SEQUENCE: usize = 20;
/// The sequence that a decoder reads beside its own.
const OF_MEMORY: usize = 14;

/// A layer of Burn's that has attention in it.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Layers {
    Encoder,
    /// With attention to another sequence too.
    Decoder,
}

/// Output and gradient of the input, with both masks, and whether scores wait.
fn solve_layers<A: AutodiffBackend>(
    layers: Layers,
    in_block: bool,
    seed: u64,
) -> ([Vec<f32>; 2], bool) {
    let device = A::Device::default();
    let mut rng = Rng::new(seed);
    let mut draw = |sequence: usize| {
        let values = rng.normals(BATCH * sequence * MODEL, 1.0);
        tensor::<A, 3>(&values, [BATCH, sequence, MODEL], &device)
    };
    let (x, weights, memory) = (
        draw(SEQUENCE).require_grad(),
        draw(SEQUENCE),
        draw(OF_MEMORY),
    );
    let padding = |sequence: usize| {
        let pad: Vec<bool> = (0..BATCH * sequence).map(|at| at % sequence > 10).collect();
        Tensor::<A, 2, Bool>::from_data(TensorData::new(pad, [BATCH, sequence]), &device)
    };
    let later = (0..BATCH * SEQUENCE * SEQUENCE).map(|at| at % SEQUENCE > at / SEQUENCE % SEQUENCE);
    let later = TensorData::new(later.collect::<Vec<bool>>(), [BATCH, SEQUENCE, SEQUENCE]);
    let later = Tensor::<A, 3, Bool>::from_data(later, &device);
    let forward = |x: Tensor<A, 3>| match layers {
        Layers::Encoder => {
            let config = TransformerEncoderConfig::new(MODEL, 2 * MODEL, HEADS_OF_MODEL, 2);
            let encoder = config.with_dropout(0.0).init::<A>(&device);
            let input = TransformerEncoderInput::new(x)
                .mask_pad(padding(SEQUENCE))
                .mask_attn(later);
            with_weights_of(encoder, seed).forward(input)
        }
        Layers::Decoder => {
            let config = TransformerDecoderConfig::new(MODEL, 2 * MODEL, HEADS_OF_MODEL, 2);
            let decoder = config.with_dropout(0.0).init::<A>(&device);
            let input = TransformerDecoderInput::new(x, memory)
                .target_mask_pad(padding(SEQUENCE))
                .target_mask_attn(later)
                .memory_mask_pad(padding(OF_MEMORY));
            with_weights_of(decoder, seed).forward(input)
        }
    };
    let recording = Recording::start();
    let output = match in_block {
        true => checkpoint(forward, x.clone()),
        false => forward(x.clone()),
    };
    let report = recording.report();
    let gradients = (output.clone().cast(DType::F32) * weights).sum().backward();
    let of_x = floats(&x.grad(&gradients).expect("the input is tracked"));
    let saves_scores = [SEQUENCE, OF_MEMORY]
        .iter()
        .any(|&keys| saves(&report, BATCH * HEADS_OF_MODEL * SEQUENCE * keys));
    ([floats(&output), of_x], saves_scores)
}

fn serves_burns_layers<B: DataBackend>(seed: u64) {
    fn check<B: DataBackend, R: Recipe>(dtype: DType, tolerance: f32, seed: u64) {
        for layers in Rng::new(seed).drawn([Layers::Encoder, Layers::Decoder], 1) {
            let (expected, _) = solve_layers::<Autodiff<Flex>>(layers, false, seed);
            let (actual, saves_scores) =
                solve_layers::<QuantTrain<Autodiff<B>, R>>(layers, false, seed);
            for (part, (actual, expected)) in
                ["output", "dx"].iter().zip(actual.iter().zip(&expected))
            {
                let what = format!("seed {seed}, {layers:?}, {dtype:?}: {part}");
                assert_near(&what, actual, expected, tolerance);
            }
            let of_kernels = !saves_scores || !has_kernels::<QuantTrain<Autodiff<B>, R>>(dtype);
            assert!(
                of_kernels,
                "seed {seed}, {layers:?}, {dtype:?}: scores wait"
            );
        }
    }
    in_16_bits!(B, check(seed));
}

/// Burn's layer as it is made: it drops a tenth of the scores, and nothing else.
fn serves_dropout<B: DataBackend>(seed: u64) {
    fn check<B: DataBackend, R: Recipe>(dtype: DType, _tolerance: f32, seed: u64) {
        type T<B, R> = QuantTrain<Autodiff<B>, R>;
        let device = Default::default();
        let layer = MultiHeadAttentionConfig::new(MODEL, HEADS_OF_MODEL).init::<T<B, R>>(&device);
        let layer = with_weights_of(layer, seed);
        let x = Rng::new(seed).normals(BATCH * SEQUENCE * MODEL, 1.0);
        let x = tensor::<T<B, R>, 3>(&x, [BATCH, SEQUENCE, MODEL], &device).require_grad();
        let recording = Recording::start();
        let [first, second] =
            [(); 2].map(|()| layer.forward(MhaInput::self_attn(x.clone())).context);
        let report = recording.report();
        drop(recording);
        let gradients = (first.clone() * second.clone()).sum().backward();
        let of_x = floats(&x.grad(&gradients).expect("the input is tracked"));
        let what = format!("seed {seed}, {dtype:?}");
        assert!(of_x.iter().all(|x| x.is_finite()), "{what}");
        // Tests beside this one may set the seed between two calls.
        let again = || floats(&layer.forward(MhaInput::self_attn(x.clone())).context);
        let differ = floats(&first) != floats(&second) || (0..3).any(|_| again() != again());
        assert!(differ, "{what}: calls drop the same, or nothing");
        if has_kernels::<T<B, R>>(dtype) {
            let scores = BATCH * HEADS_OF_MODEL * SEQUENCE * SEQUENCE;
            assert!(!saves(&report, scores), "{what}: scores wait");
        }
    }
    in_16_bits!(B, check(seed));
}

/// What else happens to a model: its layers run again, by blocks and by Burn's strategy, and its values wait compressed.
#[cfg(feature = "flex")]
#[test]
fn layers_that_run_again_and_wait_compressed() {
    type Of<R, S> = QuantTrain<Autodiff<Flex, S>, R>;
    type Half = MixedPrecision<f16>;
    let seed = quant_train_tests::seed();
    for layers in [Layers::Encoder, Layers::Decoder] {
        let (expected, _) = solve_layers::<Of<Half, NoCheckpointing>>(layers, false, seed);
        let (in_blocks, _) = solve_layers::<Of<Half, NoCheckpointing>>(layers, true, seed);
        let (balanced, _) = solve_layers::<Of<Half, BalancedCheckpointing>>(layers, false, seed);
        let (compressed, saves_scores) =
            solve_layers::<Of<Contexts<Half, Int10>, NoCheckpointing>>(layers, false, seed);
        assert!(!saves_scores, "seed {seed}, {layers:?}: scores wait");
        for part in 0..2 {
            let expected = &expected[part];
            let what = format!("seed {seed}, {layers:?}, {part}");
            assert!(same_bits(&in_blocks[part], expected), "{what}: in blocks");
            assert!(same_bits(&balanced[part], expected), "{what}: balanced");
            assert_near(&what, &compressed[part], expected, 5e-2);
        }
    }
}

/// Bits are Burn's; on CUDA numbers are near: what comes before and behind attention decides which operations are fused.
fn not_in_fp32<B: DataBackend>(seed: u64) {
    for case in [Case::Masked, Case::TwoMasks] {
        let burns = solve::<Autodiff<B>>(seed, DType::F32, case);
        let ours = solve::<QuantTrain<Autodiff<B>, MixedPrecision<f32>>>(seed, DType::F32, case);
        for (ours, burns) in ours.parts.iter().zip(&burns.parts) {
            let what = format!("seed {seed}, {case:?}");
            match is_cuda::<B>() {
                true => assert_near(&what, ours, burns, 1e-3),
                false => assert!(same_bits(ours, burns), "{what}"),
            }
        }
        assert!(ours.saves_scores, "seed {seed}, {case:?}");
    }
}
