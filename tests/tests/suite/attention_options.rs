//! Attention with a window and dropout, and by the layers of Burn's `MultiHeadAttention`.

use burn::{
    backend::{Autodiff, Flex},
    nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig},
    tensor::{
        Bool, DType, Tensor, TensorData,
        backend::{AutodiffBackend, Backend},
    },
};
use burn_quant_train::{
    QuantTrain,
    attention::{AttentionConfig, MultiHeadInput, attention, multi_head_attention},
    data::DataBackend,
    recipe::{MixedPrecision, Recipe},
    saved::{Recording, checkpoint},
};
use half::{bf16, f16};
use quant_train_tests::{
    Rng,
    data::{assert_near, floats, is_cuda, repeated, tensor},
    models::with_weights_of,
    on_every_backend, supports,
};

use super::composed_attention::{has_kernels, saves};

on_every_backend! {
    windows_hide_keys_and_dropout_drops_probabilities => equals_the_formulas;
    dropout_is_for_training_and_new_for_each_call => drops_in_training;
    dropout_saves_no_scores => saves_no_scores;
    multi_head_attention_equals_burns => equals_burns_layer;
    multi_head_attention_drops_as_its_layer_says => drops_as_the_layer;
}

type Train<B, F> = QuantTrain<Autodiff<B>, MixedPrecision<F>>;

const BATCH: usize = 2;
const HEADS: usize = 4;
const FEATURES: usize = 16;
const VALUE_FEATURES: usize = 8;

/// The settings that a problem is drawn by.
#[derive(Debug, Clone)]
struct Kind {
    queries: usize,
    keys: usize,
    kv_heads: usize,
    config: AttentionConfig,
    is_masked: bool,
    is_biased: bool,
}

impl Kind {
    fn new(queries: usize, keys: usize, config: AttentionConfig) -> Self {
        Self {
            queries,
            keys,
            kv_heads: HEADS,
            config,
            is_masked: false,
            is_biased: false,
        }
    }

    fn scores(&self) -> [usize; 4] {
        [BATCH, HEADS, self.queries, self.keys]
    }

    /// By the definition: the last query has the last key.
    fn is_outside(&self, query: usize, key: usize) -> bool {
        let own = query as i64 + self.keys as i64 - self.queries as i64;
        let past = own - key as i64;
        let config = &self.config;
        let bound = |keys: usize| i64::try_from(keys).unwrap_or(i64::MAX);
        let bounds = [config.before, config.behind].map(|keys| keys.map(bound));
        bounds[0].is_some_and(|before| past > before)
            || bounds[1].is_some_and(|behind| -past > behind)
            || (config.causal && past < 0)
    }
}

fn kinds() -> Vec<Kind> {
    let config = AttentionConfig::new;
    vec![
        Kind::new(20, 20, config().with_causal(true).with_before(Some(3))),
        Kind::new(20, 20, config().with_causal(true).with_dropout(0.1)),
        Kind::new(9, 33, config().with_before(Some(0)).with_behind(Some(5))),
        // The first queries see nothing.
        Kind::new(33, 9, config().with_behind(Some(2)).with_dropout(0.5)),
        Kind::new(
            12,
            12,
            config().with_before(Some(usize::MAX)).with_dropout(0.7),
        ),
        Kind {
            kv_heads: 2,
            is_masked: true,
            is_biased: true,
            ..Kind::new(
                17,
                24,
                config()
                    .with_scale(Some(0.4))
                    .with_softcap(Some(2.0))
                    .with_before(Some(9))
                    .with_behind(Some(1))
                    .with_dropout(0.3),
            )
        },
        Kind {
            kv_heads: 1,
            is_masked: true,
            ..Kind::new(16, 16, config().with_behind(Some(4)).with_dropout(0.2))
        },
    ]
}

struct Problem {
    kind: Kind,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    mask: Option<Vec<bool>>,
    bias: Option<Vec<f32>>,
    weights: Vec<f32>,
}

impl Problem {
    fn draw(rng: &mut Rng, kind: Kind) -> Self {
        let mut draw = |shape: [usize; 4]| rng.normals_of_16_bits(shape.iter().product());
        let Kind {
            queries,
            keys,
            kv_heads,
            ..
        } = kind;
        let of_scores = |is_there: bool| is_there.then(|| kind.scores());
        Self {
            q: draw([BATCH, HEADS, queries, FEATURES]),
            k: draw([BATCH, kv_heads, keys, FEATURES]),
            v: draw([BATCH, kv_heads, keys, VALUE_FEATURES]),
            mask: (of_scores(kind.is_masked))
                .map(|shape| draw(shape).iter().map(|&x| x > 0.7).collect()),
            bias: of_scores(kind.is_biased).map(&mut draw),
            weights: draw([BATCH, HEADS, queries, VALUE_FEATURES]),
            kind,
        }
    }

    fn mask<B: Backend>(&self, device: &B::Device) -> Option<Tensor<B, 4, Bool>> {
        self.mask.as_ref().map(|hidden| {
            Tensor::from_data(TensorData::new(hidden.clone(), self.kind.scores()), device)
        })
    }

    fn is_seen(&self, at: usize) -> bool {
        let Kind { queries, keys, .. } = self.kind;
        let is_masked = self.mask.as_ref().is_some_and(|mask| mask[at]);
        !is_masked && !self.kind.is_outside(at / keys % queries, at % keys)
    }

    /// `probabilities` that are 0 where they are dropped, and `Z` of each.
    fn factors(&self, probabilities: &[f32]) -> Vec<f32> {
        let kept = 1.0 / (1.0 - self.kind.config.dropout as f32);
        let factors = probabilities.iter().enumerate().map(|(at, &probability)| {
            let is_hidden = !self.is_seen(at);
            assert!(
                !is_hidden || probability == 0.0,
                "{at}: {probability} of what is hidden, {:?}",
                self.kind
            );
            if probability == 0.0 { 0.0 } else { kept }
        });
        factors.collect()
    }

    /// Output, and gradients of Q, K, V and the bias for the loss `sum(weights * output)`; and the probabilities,
    /// which `attend` reads from the unit matrix behind V.
    fn solve<A: AutodiffBackend>(
        &self,
        attend: impl Fn([Tensor<A, 4>; 3], Option<Tensor<A, 4>>) -> Tensor<A, 4>,
    ) -> (Vec<Vec<f32>>, Vec<f32>) {
        let device = A::Device::default();
        let Kind {
            queries,
            keys,
            kv_heads,
            ..
        } = self.kind;
        let inputs = [
            (&self.q, [BATCH, HEADS, queries, FEATURES]),
            (&self.k, [BATCH, kv_heads, keys, FEATURES]),
            (&self.v, [BATCH, kv_heads, keys, VALUE_FEATURES]),
        ]
        .map(|(data, shape)| tensor::<A, 4>(data, shape, &device).require_grad());
        // Kernels on matrix instructions take multiples of 8.
        let columns = keys.next_multiple_of(8);
        let unit = (0..BATCH * kv_heads * keys * columns)
            .map(|at| f32::from(u8::from(at / columns % keys == at % columns)))
            .collect::<Vec<f32>>();
        let unit = tensor::<A, 4>(&unit, [BATCH, kv_heads, keys, columns], &device);
        let bias = (self.bias.as_ref())
            .map(|bias| tensor::<A, 4>(bias, self.kind.scores(), &device).require_grad());
        let weights = [BATCH, HEADS, queries, VALUE_FEATURES];
        let weights = tensor::<A, 4>(&self.weights, weights, &device);
        let [q, k, v] = inputs.clone();
        let values = Tensor::cat(vec![v, unit], 3);
        let both = attend([q, k, values], bias.clone()).cast(DType::F32);
        let output = both.clone().narrow(3, 0, VALUE_FEATURES);
        let probabilities = both.narrow(3, VALUE_FEATURES, keys);
        let grads = (output.clone() * weights).sum().backward();
        let grad = |tensor: &Tensor<A, 4>| floats(&tensor.grad(&grads).expect("a gradient"));
        let mut all = vec![floats(&output)];
        all.extend(inputs.iter().chain(&bias).map(grad));
        (all, floats(&probabilities))
    }

    /// By the formulas, in FP32, with `Z` as it was drawn.
    fn expected(&self, factors: &[f32]) -> Vec<Vec<f32>> {
        type A = Autodiff<Flex>;
        let device = Default::default();
        let kind = &self.kind;
        let hidden: Vec<bool> = (0..factors.len()).map(|at| !self.is_seen(at)).collect();
        let hidden = TensorData::new(hidden, kind.scores());
        let hidden = Tensor::<A, 4, Bool>::from_data(hidden, &device);
        let factors = tensor::<A, 4>(factors, kind.scores(), &device);
        let scale = kind.config.scale.unwrap_or(0.25);
        let (expected, _) = self.solve::<A>(|[q, k, v], bias| {
            let [k, v] = [k, v].map(|it| repeated(it, HEADS));
            let mut scores = q.matmul(k.transpose()) * scale;
            if let Some(cap) = kind.config.softcap {
                scores = (scores / cap).tanh() * cap;
            }
            if let Some(bias) = bias {
                scores = scores + bias;
            }
            let powers = scores.exp().mask_fill(hidden.clone(), 0.0);
            let sum = powers.clone().sum_dim(3);
            let nothing = sum.clone().equal_elem(0.0);
            let probabilities = powers / sum.mask_fill(nothing, 1.0);
            (probabilities * factors.clone()).matmul(v)
        });
        expected
    }
}

/// Relative to the largest element, as results are rounded to the compute dtype. In a block the backward pass runs
/// attention again, which has to drop what was dropped.
fn compare<A: AutodiffBackend>(problem: &Problem, in_block: bool, tolerance: f32, seed: u64) {
    let what = format!("seed {seed}, {}", std::any::type_name::<A>());
    let device = A::Device::default();
    let (actual, probabilities) = problem.solve::<A>(|[q, k, v], bias| {
        let layer = |q: Tensor<A, 4>| {
            let (q, mask) = (q * 1.0, problem.mask(&device));
            attention(q, k, v, mask, bias, &problem.kind.config) * 1.0
        };
        match in_block {
            true => checkpoint(layer, q),
            false => layer(q),
        }
    });
    let factors = problem.factors(&probabilities);
    let rate = problem.kind.config.dropout;
    let seen = (0..factors.len()).filter(|&at| problem.is_seen(at)).count();
    let kept = factors.iter().filter(|&&factor| factor > 0.0).count();
    let dropped = (seen - kept) as f64 / seen as f64;
    let deviation = (rate * (1.0 - rate) / seen as f64).sqrt();
    assert!(
        (dropped - rate).abs() <= 5.0 * deviation,
        "{what}: {dropped} of {seen} dropped instead of {rate}"
    );
    let expected = problem.expected(&factors);
    assert_eq!(actual.len(), expected.len());
    let names = ["output", "dQ", "dK", "dV", "dBias"];
    for ((name, actual), expected) in names.iter().zip(&actual).zip(&expected) {
        let what = format!("{what}, {:?}: {name}", problem.kind);
        assert!(expected.iter().any(|&x| x != 0.0), "{what}: all zeros");
        assert_near(&what, actual, expected, tolerance);
    }
}

/// With the decorator in each dtype that the backend has, and without it.
fn equals_the_formulas<B: DataBackend>(seed: u64) {
    let mut rng = Rng::new(seed);
    for kind in rng.drawn(kinds(), 2) {
        let problem = Problem::draw(&mut rng, kind);
        compare::<Autodiff<B>>(&problem, false, fp32_tolerance::<B>(), seed);
        for in_block in [false, true] {
            compare::<Train<B, f32>>(&problem, in_block, fp32_tolerance::<B>(), seed);
            if supports::<B>(DType::F16) {
                compare::<Train<B, f16>>(&problem, in_block, 2e-2, seed);
            }
            if supports::<B>(DType::BF16) {
                compare::<Train<B, bf16>>(&problem, in_block, 8e-2, seed);
            }
        }
    }
}

const SEQUENCE: usize = 24;

/// Q, K and V of one head.
fn inputs<B: Backend>(rng: &mut Rng) -> [Tensor<B, 4>; 3] {
    [(); 3].map(|()| {
        let values = rng.normals(SEQUENCE * FEATURES, 1.0);
        tensor::<B, 4>(&values, [1, 1, SEQUENCE, FEATURES], &Default::default())
    })
}

fn dropped<B: Backend>([q, k, v]: [Tensor<B, 4>; 3], rate: f64) -> Vec<f32> {
    let config = AttentionConfig::new().with_dropout(rate);
    floats(&attention(q, k, v, None, None, &config))
}

fn drops_in_training<B: DataBackend>(seed: u64) {
    fn check<B: DataBackend, R: Recipe>(seed: u64) {
        let draw = || {
            let inputs = inputs::<QuantTrain<Autodiff<B>, R>>(&mut Rng::new(seed));
            dropped(inputs, 0.5)
        };
        let what = format!("seed {seed}, {}", R::ROW.name);
        let first = draw();
        // Tests beside this one may set the seed between two calls.
        let differs = (0..4).any(|_| draw() != first);
        assert!(differs, "{what}: each call has its own numbers");
        let [evaluated, whole] =
            [0.5, 0.0].map(|rate| dropped(inputs::<QuantTrain<B, R>>(&mut Rng::new(seed)), rate));
        assert_eq!(evaluated, whole, "{what}: nothing is dropped in evaluation");
    }
    check::<B, MixedPrecision<f32>>(seed);
    if supports::<B>(DType::F16) {
        check::<B, MixedPrecision<f16>>(seed);
    }
}

/// With kernels in 16 bits.
fn saves_no_scores<B: DataBackend>(seed: u64) {
    fn check<A: AutodiffBackend>(dtype: DType, seed: u64) {
        const { assert!(SEQUENCE != FEATURES) };
        if !has_kernels::<A>(dtype) {
            return;
        }
        let [q, k, v] = inputs::<A>(&mut Rng::new(seed)).map(Tensor::require_grad);
        let config = AttentionConfig::new()
            .with_before(Some(7))
            .with_dropout(0.5);
        let recording = Recording::start();
        let output = attention(q.mul_scalar(0.5), k.exp(), v.exp(), None, None, &config);
        let loss = output.sum();
        let report = recording.report();
        loss.backward();
        assert!(
            !saves(&report, SEQUENCE * SEQUENCE),
            "seed {seed}: scores wait"
        );
    }
    if supports::<B>(DType::F16) {
        check::<Train<B, f16>>(DType::F16, seed);
    } else if supports::<B>(DType::BF16) {
        check::<Train<B, bf16>>(DType::BF16, seed);
    }
}

const MODEL: usize = 32;

/// Burn's layer and ours beside each other: masks that leave each query a key.
#[derive(Debug, Clone, Copy)]
struct Layer {
    /// As many as queries for self-attention.
    keys: usize,
    is_padded: bool,
    causal: Causal,
    is_quiet: bool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Causal {
    No,
    ByMask,
    ByPlace,
}

/// Of products one behind the other, which tensor cores of CUDA compute in TF32. In FP32 the gradients of scores that
/// cancel were 1.1e-4 apart at worst.
fn fp32_tolerance<B: DataBackend>() -> f32 {
    match is_cuda::<B>() {
        true => 5e-3,
        false => 5e-4,
    }
}

fn equals_burns_layer<B: DataBackend>(seed: u64) {
    let layer = |keys, is_padded, causal, is_quiet| Layer {
        keys,
        is_padded,
        causal,
        is_quiet,
    };
    let layers = [
        layer(12, false, Causal::No, false),
        layer(12, true, Causal::ByMask, false),
        layer(7, true, Causal::No, true),
        layer(12, false, Causal::ByPlace, true),
        layer(12, false, Causal::ByMask, true),
        layer(12, true, Causal::ByPlace, false),
    ];
    let mut rng = Rng::new(seed);
    for layer in rng.drawn(layers, 2) {
        let data = rng.bits();
        check_layer::<Autodiff<B>>(layer, data, fp32_tolerance::<B>(), seed);
        check_layer::<Train<B, f32>>(layer, data, fp32_tolerance::<B>(), seed);
        if supports::<B>(DType::F16) {
            check_layer::<Train<B, f16>>(layer, data, 2e-2, seed);
        }
    }
}

/// What a layer with dropout gives differs from call to call, and not in evaluation.
fn drops_as_the_layer<B: DataBackend>(seed: u64) {
    fn outputs<A: Backend>(seed: u64) -> [Vec<f32>; 2] {
        let device = A::Device::default();
        let layer = MultiHeadAttentionConfig::new(MODEL, HEADS).with_dropout(0.5);
        let layer = with_weights_of(layer.init::<A>(&device), seed);
        let x = Rng::new(seed).normals(BATCH * SEQUENCE * MODEL, 1.0);
        let x = tensor::<A, 3>(&x, [BATCH, SEQUENCE, MODEL], &device);
        let attend = || multi_head_attention(&layer, MultiHeadInput::self_attn(x.clone()));
        [(); 2].map(|()| floats(&attend()))
    }
    let differ = |[first, second]: [Vec<f32>; 2]| first != second;
    // Tests beside this one may set the seed between two calls.
    let drops = (0..4).any(|_| differ(outputs::<Train<B, f32>>(seed)));
    assert!(drops, "seed {seed}: nothing is dropped");
    let evaluated = outputs::<QuantTrain<B, MixedPrecision<f32>>>(seed);
    assert!(!differ(evaluated), "seed {seed}: dropped in evaluation");
}

/// Output and the gradient of the input, by Burn's own composition in FP32 and by ours.
fn check_layer<A: AutodiffBackend>(layer: Layer, data: u64, tolerance: f32, seed: u64) {
    let expected = of_layer::<Autodiff<Flex>>(layer, data, true);
    let actual = of_layer::<A>(layer, data, false);
    for (part, (actual, expected)) in ["output", "dx"].iter().zip(actual.iter().zip(&expected)) {
        let backend = std::any::type_name::<A>();
        let what = format!("seed {seed}, {backend}, {layer:?}: {part}");
        assert_near(&what, actual, expected, tolerance);
    }
}

fn of_layer<A: AutodiffBackend>(layer: Layer, data: u64, by_burn: bool) -> [Vec<f32>; 2] {
    const QUERIES: usize = 12;
    let device = A::Device::default();
    let mut rng = Rng::new(data);
    let mut draw = |shape: [usize; 3]| {
        tensor::<A, 3>(&rng.normals(shape.iter().product(), 1.0), shape, &device)
    };
    let Layer { keys, .. } = layer;
    let x = draw([BATCH, QUERIES, MODEL]).require_grad();
    let memory = match keys {
        QUERIES => x.clone(),
        _ => draw([BATCH, keys, MODEL]),
    };
    let weights = draw([BATCH, QUERIES, MODEL]);
    let mut linear = || draw([1, MODEL, MODEL]).reshape([MODEL, MODEL]) * 0.3;
    let mut module: MultiHeadAttention<A> = MultiHeadAttentionConfig::new(MODEL, HEADS)
        .with_dropout(0.0)
        .with_quiet_softmax(layer.is_quiet)
        .init(&device);
    for linear_of in [
        &mut module.query,
        &mut module.key,
        &mut module.value,
        &mut module.output,
    ] {
        let (weight, bias) = (linear(), linear().narrow(0, 0, 1).reshape([MODEL]));
        linear_of.weight = linear_of.weight.clone().map(|_| weight);
        linear_of.bias = linear_of.bias.clone().map(|old| old.map(|_| bias));
    }
    let is_padding = (0..BATCH * keys).map(|at| at % keys >= keys - 1 - at / keys);
    let pad = TensorData::new(is_padding.collect::<Vec<bool>>(), [BATCH, keys]);
    let pad = Tensor::<A, 2, Bool>::from_data(pad, &device);
    let hidden = (0..BATCH * QUERIES * keys).map(|at| at % keys > at / keys % QUERIES);
    let attn = TensorData::new(hidden.collect::<Vec<bool>>(), [BATCH, QUERIES, keys]);
    let attn = Tensor::<A, 3, Bool>::from_data(attn, &device);
    let output = if by_burn {
        let mut input = MhaInput::new(x.clone(), memory.clone(), memory);
        if layer.is_padded {
            input = input.mask_pad(pad);
        }
        if layer.causal != Causal::No {
            input = input.mask_attn(attn);
        }
        module.forward(input).context
    } else {
        let mut input = MultiHeadInput::new(x.clone(), memory.clone(), memory);
        if layer.is_padded {
            input = input.mask_pad(pad);
        }
        input = match layer.causal {
            Causal::No => input,
            Causal::ByMask => input.mask_attn(attn),
            Causal::ByPlace => input.causal(),
        };
        multi_head_attention(&module, input)
    };
    let grads = (output.clone().cast(DType::F32) * weights).sum().backward();
    let grad = x.grad(&grads).expect("the input is tracked");
    [floats(&output), floats(&grad)]
}

#[cfg(feature = "flex")]
mod bad_input {
    use super::*;

    fn zeros<const D: usize>(shape: [usize; D]) -> Tensor<Train<Flex, f16>, D> {
        Tensor::zeros(shape, &Default::default())
    }

    fn attend(keys: [usize; 4], bias: Option<[usize; 4]>, config: AttentionConfig) {
        let query = zeros([2, 4, 6, 8]);
        let keys = zeros(keys);
        attention(query, keys.clone(), keys, None, bias.map(zeros), &config);
    }

    #[test]
    #[should_panic(expected = "attention: a dropout of 1 is not in [0, 1)")]
    fn a_dropout_of_everything() {
        attend([2, 4, 6, 8], None, AttentionConfig::new().with_dropout(1.0));
    }

    #[test]
    #[should_panic(expected = "attention: a dropout of NaN")]
    fn a_dropout_that_is_no_number() {
        let config = AttentionConfig::new().with_dropout(f64::NAN);
        attend([2, 4, 6, 8], None, config);
    }

    #[test]
    #[should_panic(expected = "attention: a soft cap of -1 is not positive")]
    fn a_negative_soft_cap() {
        let config = AttentionConfig::new().with_softcap(Some(-1.0));
        attend([2, 4, 6, 8], None, config);
    }

    #[test]
    #[should_panic(expected = "a number of key heads that divides that of query heads")]
    fn heads_that_do_not_divide() {
        attend([2, 3, 6, 8], None, AttentionConfig::new());
    }

    #[test]
    #[should_panic(expected = "is not broadcast to the scores [2, 4, 6, 6]")]
    fn a_bias_of_another_shape() {
        attend([2, 4, 6, 8], Some([2, 4, 6, 5]), AttentionConfig::new());
    }
}
