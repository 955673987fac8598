//! Attention in training: one node by the backend's kernels where it has them, Burn's composition elsewhere.

use burn::{
    backend::{Autodiff, Flex},
    tensor::{
        Bool, DType, Distribution, Tensor, TensorData, backend::AutodiffBackend, backend::Backend,
        module::attention, ops::AttentionModuleOptions,
    },
};
use burn_quant_train::{
    QuantTrain,
    data::DataBackend,
    recipe::{
        ComputeDtype, MixedPrecision, Number, Recipe,
        context::{Contexts, Exact, ExactAttention, Int10},
    },
    saved::{ActivationReport, Recording, report::Form},
};
use half::{bf16, f16};
use quant_train_tests::{
    Rng,
    data::{float_product_error, floats, is_cuda, repeated, tensor},
    on_every_backend, supports,
};

on_every_backend! {
    attention_and_its_gradients_equal_those_of_fp32 => equals_fp32;
    untracked_operands_get_no_gradient => untracked;
    attention_saves_no_scores => saves_no_scores;
    contexts_compress_queries_keys_and_values => compresses;
    exact_attention_waits_as_it_is => keeps_attention;
    inference_shares_heads => shares_heads_in_inference;
    evaluation_gives_what_training_gives => evaluates_as_it_trains;
}

const BATCH: usize = 2;
const HEADS: usize = 4;
const FEATURES: usize = 16;
const VALUE_FEATURES: usize = 8;

/// The settings that a problem is drawn by.
#[derive(Debug, Clone, Copy)]
struct Kind {
    queries: usize,
    keys: usize,
    /// Heads of keys and values.
    kv_heads: usize,
    /// Heads beside one another in memory, as layers have them: `[batch, sequence, heads, features]`.
    in_rows: bool,
    options: AttentionModuleOptions,
    /// The dimensions of the scores that a mask has of its own.
    mask: Option<[bool; 4]>,
    bias: Option<[bool; 4]>,
}

impl Kind {
    fn plain(queries: usize, keys: usize) -> Self {
        Self {
            queries,
            keys,
            kv_heads: HEADS,
            in_rows: false,
            options: AttentionModuleOptions::default(),
            mask: None,
            bias: None,
        }
    }

    fn causal(queries: usize, keys: usize) -> Self {
        Self {
            options: AttentionModuleOptions {
                is_causal: true,
                ..Default::default()
            },
            ..Self::plain(queries, keys)
        }
    }

    fn own(&self, dims: [bool; 4]) -> [usize; 4] {
        let scores = [BATCH, HEADS, self.queries, self.keys];
        std::array::from_fn(|dim| if dims[dim] { scores[dim] } else { 1 })
    }
}

/// Every option, and what goes together.
fn kinds() -> Vec<Kind> {
    let softcap = AttentionModuleOptions {
        softcap: Some(1.5),
        ..Default::default()
    };
    let scale = |scale| AttentionModuleOptions {
        scale: Some(scale),
        ..Default::default()
    };
    let all = [true; 4];
    vec![
        Kind::causal(17, 17),
        Kind {
            in_rows: true,
            options: scale(0.5),
            ..Kind::plain(17, 17)
        },
        Kind {
            in_rows: true,
            ..Kind::causal(40, 40)
        },
        Kind {
            in_rows: true,
            ..Kind::plain(16, 24)
        },
        Kind::causal(5, 24),
        Kind::plain(33, 7),
        Kind {
            mask: Some(all),
            in_rows: true,
            ..Kind::causal(8, 12)
        },
        Kind {
            mask: Some([true, false, false, true]),
            ..Kind::plain(9, 70)
        },
        Kind {
            bias: Some(all),
            ..Kind::plain(9, 12)
        },
        Kind {
            bias: Some([false, true, true, true]),
            in_rows: true,
            ..Kind::causal(20, 20)
        },
        Kind {
            bias: Some([true, false, false, true]),
            ..Kind::causal(11, 19)
        },
        Kind {
            options: softcap,
            ..Kind::plain(12, 12)
        },
        Kind {
            options: scale(-0.3),
            ..Kind::plain(12, 12)
        },
        Kind {
            kv_heads: 2,
            ..Kind::causal(14, 14)
        },
        Kind {
            kv_heads: 1,
            in_rows: true,
            ..Kind::plain(7, 21)
        },
        Kind {
            kv_heads: 2,
            in_rows: true,
            mask: Some([false, true, true, true]),
            bias: Some([false, true, false, true]),
            options: AttentionModuleOptions {
                scale: Some(0.4),
                softcap: Some(2.0),
                is_causal: true,
            },
            ..Kind::plain(18, 31)
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
        Self {
            kind,
            q: draw([BATCH, HEADS, queries, FEATURES]),
            k: draw([BATCH, kv_heads, keys, FEATURES]),
            v: draw([BATCH, kv_heads, keys, VALUE_FEATURES]),
            mask: (kind.mask).map(|dims| draw(kind.own(dims)).iter().map(|&x| x > 0.5).collect()),
            bias: kind.bias.map(|dims| draw(kind.own(dims))),
            weights: draw([BATCH, HEADS, queries, VALUE_FEATURES]),
        }
    }

    /// Output, and gradients of Q, K, V and the bias for the loss `sum(weights * output)`. `repeats`: keys and values
    /// of shared heads are repeated first, for a backend that does not share heads.
    fn solve<A: AutodiffBackend>(&self, repeats: bool) -> Vec<Vec<f32>> {
        let device = A::Device::default();
        let Kind {
            queries,
            keys,
            kv_heads,
            in_rows,
            options,
            ..
        } = self.kind;
        let of_heads = |data: &[f32], [batch, heads, sequence, width]: [usize; 4]| match in_rows {
            false => tensor::<A, 4>(data, [batch, heads, sequence, width], &device),
            true => tensor::<A, 4>(data, [batch, sequence, heads, width], &device),
        };
        let heads = |tensor: &Tensor<A, 4>| match in_rows {
            false => tensor.clone(),
            true => tensor.clone().swap_dims(1, 2),
        };
        let [q, k, v] = [
            (&self.q, [BATCH, HEADS, queries, FEATURES]),
            (&self.k, [BATCH, kv_heads, keys, FEATURES]),
            (&self.v, [BATCH, kv_heads, keys, VALUE_FEATURES]),
        ]
        .map(|(data, shape)| of_heads(data, shape).require_grad());
        let mask = (self.mask.as_ref().zip(self.kind.mask)).map(|(hidden, dims)| {
            let data = TensorData::new(hidden.clone(), self.kind.own(dims));
            Tensor::<A, 4, Bool>::from_data(data, &device)
        });
        let bias = (self.bias.as_ref().zip(self.kind.bias))
            .map(|(bias, dims)| tensor::<A, 4>(bias, self.kind.own(dims), &device).require_grad());
        let of_keys = |tensor: &Tensor<A, 4>| match repeats {
            false => heads(tensor),
            true => repeated(heads(tensor), HEADS),
        };
        let output = attention(
            heads(&q),
            of_keys(&k),
            of_keys(&v),
            mask,
            bias.clone(),
            options,
        );
        let output = heads(&output);
        let weights = of_heads(&self.weights, [BATCH, HEADS, queries, VALUE_FEATURES]);
        let grads = (output.clone().cast(DType::F32) * weights).sum().backward();
        let grad = |tensor: &Tensor<A, 4>| floats(&tensor.grad(&grads).expect("a gradient"));
        let mut all = vec![floats(&output), grad(&q), grad(&k), grad(&v)];
        all.extend(bias.as_ref().map(grad));
        all
    }
}

/// Relative to the largest element, or to the size of the terms where all of it cancels: the scores and the output are
/// rounded to the compute dtype.
fn compare<B: DataBackend, R: Recipe>(problem: &Problem, tolerance: f32, seed: u64) {
    let expected = problem.solve::<Autodiff<Flex>>(true);
    let actual = problem.solve::<QuantTrain<Autodiff<B>, R>>(false);
    assert_eq!(actual.len(), expected.len());
    let names = ["output", "dQ", "dK", "dV", "dBias"];
    for ((name, actual), expected) in names.iter().zip(&actual).zip(&expected) {
        let largest = expected
            .iter()
            .fold(0.0f32, |largest, x| largest.max(x.abs()));
        assert!(largest > 0.0, "{name}: a reference that is not all zeros");
        assert_eq!(actual.len(), expected.len());
        for (index, (a, e)) in actual.iter().zip(expected).enumerate() {
            assert!(
                (a - e).abs() <= tolerance * largest,
                "seed {seed}, {}: {name}[{index}] {a} instead of {e}, {:?}",
                std::any::type_name::<R>(),
                problem.kind
            );
        }
    }
}

/// For FP16 and for BF16, true if the backend has the type.
fn has_16_bits<B: DataBackend>() -> [bool; 2] {
    [DType::F16, DType::BF16].map(supports::<B>)
}

fn equals_fp32<B: DataBackend>(seed: u64) {
    let mut rng = Rng::new(seed);
    let [half, brain] = has_16_bits::<B>();
    for kind in rng.drawn(kinds(), 2) {
        let problem = Problem::draw(&mut rng, kind);
        compare::<B, MixedPrecision<f32>>(&problem, 1e-3, seed);
        if half {
            compare::<B, MixedPrecision<f16>>(&problem, 1e-2, seed);
        }
        if brain {
            compare::<B, MixedPrecision<bf16>>(&problem, 8e-2, seed);
        }
    }
}

fn untracked<B: DataBackend>(seed: u64) {
    let [half, brain] = has_16_bits::<B>();
    untracked_in::<QuantTrain<Autodiff<B>, MixedPrecision<f32>>>(0.02, seed);
    if half {
        untracked_in::<QuantTrain<Autodiff<B>, MixedPrecision<f16>>>(0.02, seed);
    }
    if brain {
        untracked_in::<QuantTrain<Autodiff<B>, MixedPrecision<bf16>>>(0.1, seed);
    }
}

fn untracked_in<A: AutodiffBackend>(tolerance: f32, seed: u64) {
    let device = A::Device::default();
    let mut rng = Rng::new(seed);
    let mut draw = || tensor::<A, 4>(&rng.normals(64, 1.0), [1, 1, 4, 16], &device);
    let (q, k, v) = (draw(), draw(), draw().require_grad());
    let bias = Tensor::<A, 4>::zeros([1, 1, 1, 4], &device);
    let causal = Kind::causal(4, 4).options;
    let output = attention(
        q.clone(),
        k.clone(),
        v.clone(),
        None,
        Some(bias.clone()),
        causal,
    );
    let grads = output.sum().backward();
    assert!(q.grad(&grads).is_none() && k.grad(&grads).is_none() && bias.grad(&grads).is_none());
    // Each column of the probabilities sums over the queries to what its value gets.
    let grad = floats(&v.grad(&grads).expect("V is tracked"));
    let total: f32 = grad.iter().step_by(16).sum();
    assert!(
        (total - 4.0).abs() < tolerance,
        "seed {seed}, {}: {total}",
        std::any::type_name::<A>()
    );
}

/// The values that wait between the passes of attention on activations, with a mask of all keys and a soft cap; causal
/// instead where tensor cores compute that, and Burn's composition what is masked.
fn saved_by<A: AutodiffBackend>(seed: u64, sequence: usize) -> ActivationReport {
    let device = A::Device::default();
    A::seed(&device, seed);
    let draw = |shape: [usize; 4]| Tensor::<A, 4>::random(shape, Distribution::Default, &device);
    let [q, k, v] = [(); 3].map(|()| draw([1, 2, sequence, 32]).require_grad());
    let hidden = Tensor::<A, 4, Bool>::from_data(
        TensorData::new(vec![false; sequence], [1, 1, 1, sequence]),
        &device,
    );
    let has_tensor_cores = is_cuda::<A>();
    let options = AttentionModuleOptions {
        softcap: (!has_tensor_cores).then_some(5.0),
        is_causal: has_tensor_cores,
        ..Default::default()
    };
    let hidden = (!has_tensor_cores).then_some(hidden);
    let recording = Recording::start();
    // The input of attention is no parameter, and is not cheap to compute again.
    let [q, k, v] = [q, k, v].map(|x| x.matmul(draw([1, 1, 32, 32])));
    let output = attention(q, k, v, hidden, None, options);
    let loss = output.sum();
    let saved = recording.report();
    loss.backward();
    saved
}

fn saves_no_scores<B: DataBackend>(seed: u64) {
    let [half, brain] = has_16_bits::<B>();
    let of = |sequence| match (half, brain) {
        (true, _) => Some(saved_by::<QuantTrain<Autodiff<B>, MixedPrecision<f16>>>(
            seed, sequence,
        )),
        (_, true) => Some(saved_by::<QuantTrain<Autodiff<B>, MixedPrecision<bf16>>>(
            seed, sequence,
        )),
        // With FP32 attention is Burn's.
        (false, false) => None,
    };
    let (Some(short), Some(long)) = (of(96), of(384)) else {
        return;
    };
    // Values that do not grow with the sequence are factors that the test multiplies by.
    let bytes = |saved: &ActivationReport, sequence: usize| -> usize {
        let values = saved.values.iter();
        let of_sequence = values.filter(|value| value.shape.contains(&sequence));
        of_sequence.map(|value| value.bytes).sum()
    };
    let (of_short, of_long) = (bytes(&short, 96), bytes(&long, 384));
    assert!(
        of_short > 0 && of_long <= 4 * of_short,
        "four times the sequence, {of_short} and {of_long} bytes:\n{short}\n{long}"
    );
}

fn compresses<B: DataBackend>(seed: u64) {
    let saved = if supports::<B>(DType::F16) {
        saved_by::<QuantTrain<Autodiff<B>, Contexts<MixedPrecision<f16>, Int10>>>(seed, 128)
    } else if supports::<B>(DType::BF16) {
        saved_by::<QuantTrain<Autodiff<B>, Contexts<MixedPrecision<bf16>, Int10>>>(seed, 128)
    } else {
        return;
    };
    assert_eq!(compressed_operands(&saved), 3, "Q, K and V:\n{saved}");
    let large = saved
        .values
        .iter()
        .filter(|value| value.elements > 2 * 128 * 32);
    assert_eq!(large.count(), 0, "scores:\n{saved}");
}

/// How many of Q, K and V, of 128 positions, wait in INT10.
fn compressed_operands(saved: &ActivationReport) -> usize {
    let compressed = saved.values.iter().filter(|value| {
        value.form == Form::Compressed(Number::Int10) && value.shape == [1, 2, 128, 32]
    });
    compressed.count()
}

/// Nothing else of this model may be compressed.
fn keeps_attention<B: DataBackend>(seed: u64) {
    fn both<B: DataBackend, E: ComputeDtype>(seed: u64) -> [ActivationReport; 2] {
        type Of<B, E, F> = QuantTrain<Autodiff<B>, Contexts<MixedPrecision<E>, F>>;
        [
            saved_by::<Of<B, E, ExactAttention<Int10>>>(seed, 128),
            saved_by::<Of<B, E, Exact>>(seed, 128),
        ]
    }
    let [half, brain] = has_16_bits::<B>();
    let [saved, exact] = match (half, brain) {
        (true, _) => both::<B, f16>(seed),
        (_, true) => both::<B, bf16>(seed),
        (false, false) => return,
    };
    match exact.values.iter().any(|it| it.operation == "attention") {
        true => assert_eq!(saved.to_string(), exact.to_string(), "seed {seed}"),
        // Composed attention saves nothing but its operands, and those compressed.
        false => assert_eq!(compressed_operands(&saved), 3, "seed {seed}:\n{saved}"),
    }
}

/// Without autodiff, where Burn's kernels have as many heads of keys as of queries.
fn shares_heads_in_inference<B: DataBackend>(seed: u64) {
    let mut rng = Rng::new(seed);
    let shape = |heads| [BATCH, heads, 9, FEATURES];
    let draw = |rng: &mut Rng, heads| rng.normals(BATCH * heads * 9 * FEATURES, 1.0);
    let [q, k, v] = [HEADS, 2, 2].map(|heads| (draw(&mut rng, heads), shape(heads)));
    let expected = {
        let [q, k, v] =
            [&q, &k, &v].map(|(x, shape)| tensor::<Flex, 4>(x, *shape, &Default::default()));
        let options = AttentionModuleOptions::default();
        let [k, v] = [k, v].map(|it| repeated(it, HEADS));
        floats(&attention(q, k, v, None, None, options))
    };
    fn of<B: Backend>(inputs: [&(Vec<f32>, [usize; 4]); 3]) -> Vec<f32> {
        let [q, k, v] = inputs.map(|(x, shape)| tensor::<B, 4>(x, *shape, &Default::default()));
        floats(&attention(
            q,
            k,
            v,
            None,
            None,
            AttentionModuleOptions::default(),
        ))
    }
    let close = |actual: Vec<f32>, tolerance: f32| {
        assert_eq!(actual.len(), expected.len());
        for (a, e) in actual.iter().zip(&expected) {
            assert!(
                (a - e).abs() <= tolerance,
                "seed {seed}: {a} instead of {e}"
            );
        }
    };
    close(
        of::<QuantTrain<B, MixedPrecision<f32>>>([&q, &k, &v]),
        4.0 * f32::max(2.5e-4, float_product_error::<B>() as f32),
    );
    if supports::<B>(DType::F16) {
        close(of::<QuantTrain<B, MixedPrecision<f16>>>([&q, &k, &v]), 1e-2);
    }
}

/// By whichever kernels each takes.
fn evaluates_as_it_trains<B: DataBackend>(seed: u64) {
    fn of<A: Backend>(
        inputs: &[Vec<f32>; 3],
        tracked: impl Fn(Tensor<A, 4>) -> Tensor<A, 4>,
    ) -> Vec<f32> {
        let shape = [BATCH, HEADS, 70, FEATURES];
        let [q, k, v] =
            [0, 1, 2].map(|it| tracked(tensor(&inputs[it], shape, &Default::default())));
        let options = AttentionModuleOptions {
            is_causal: true,
            ..Default::default()
        };
        floats(&attention(q, k, v, None, None, options))
    }
    fn compare<B: DataBackend, R: Recipe>(seed: u64) {
        let mut rng = Rng::new(seed);
        let inputs = [(); 3].map(|()| rng.normals(BATCH * HEADS * 70 * FEATURES, 1.0));
        let training = of::<QuantTrain<Autodiff<B>, R>>(&inputs, |x| x.require_grad());
        let evaluation = of::<QuantTrain<B, R>>(&inputs, |x| x);
        for (a, b) in training.iter().zip(&evaluation) {
            assert!(
                (a - b).abs() < 2e-2,
                "seed {seed}, {}: {a} and {b}",
                R::ROW.name
            );
        }
        assert_eq!(training.len(), evaluation.len());
    }
    let [half, brain] = has_16_bits::<B>();
    if half {
        compare::<B, MixedPrecision<f16>>(seed);
    }
    if brain {
        compare::<B, MixedPrecision<bf16>>(seed);
    }
}
