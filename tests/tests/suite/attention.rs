//! Attention in training: one node with the softmax as a kernel where the backend has it, Burn's composition elsewhere.

use burn::{
    backend::{Autodiff, Flex},
    tensor::{
        Bool, DType, Tensor, TensorData, backend::AutodiffBackend, module::attention,
        ops::AttentionModuleOptions,
    },
};
use burn_quant_train::{
    QuantTrain,
    data::DataBackend,
    recipe::{MixedPrecision, Recipe},
};
use half::{bf16, f16};
use quant_train_tests::{
    Rng,
    data::{floats, tensor},
    on_every_backend, supports,
};

on_every_backend! {
    attention_and_its_gradients_equal_those_of_fp32 => equals_fp32;
    untracked_operands_get_no_gradient => untracked;
}

const BATCH: usize = 2;
const HEADS: usize = 3;
const FEATURES: usize = 16;

struct Problem {
    queries: usize,
    keys: usize,
    /// Heads beside one another in memory, as layers have them: `[batch, sequence, heads, features]`.
    in_rows: bool,
    options: AttentionModuleOptions,
    masked: bool,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    weights: Vec<f32>,
}

impl Problem {
    fn draw(
        rng: &mut Rng,
        [queries, keys]: [usize; 2],
        options: AttentionModuleOptions,
        masked: bool,
    ) -> Self {
        // Numbers that BF16 holds, and of this size FP16 too, so that both sides compute on the same ones.
        let mut draw = |sequence: usize| -> Vec<f32> {
            (0..BATCH * HEADS * sequence * FEATURES)
                .map(|_| bf16::from_f64(rng.normal()).to_f32())
                .collect()
        };
        Self {
            queries,
            keys,
            in_rows: false,
            options,
            masked,
            q: draw(queries),
            k: draw(keys),
            v: draw(keys),
            weights: draw(queries),
        }
    }

    /// Output, and gradients of Q, K and V for the loss `sum(weights * output)`.
    fn solve<A: AutodiffBackend>(&self) -> [Vec<f32>; 4] {
        let device = A::Device::default();
        let of_sequence = |data: &[f32], sequence| match self.in_rows {
            false => tensor::<A, 4>(data, [BATCH, HEADS, sequence, FEATURES], &device),
            true => tensor::<A, 4>(data, [BATCH, sequence, HEADS, FEATURES], &device),
        };
        let heads = |tensor: &Tensor<A, 4>| match self.in_rows {
            false => tensor.clone(),
            true => tensor.clone().swap_dims(1, 2),
        };
        let [q, k, v] = [
            (&self.q, self.queries),
            (&self.k, self.keys),
            (&self.v, self.keys),
        ]
        .map(|(data, sequence)| of_sequence(data, sequence).require_grad());
        let mask = self.masked.then(|| {
            // Hides the second key from everybody.
            let hidden: Vec<bool> = (0..BATCH * HEADS * self.queries * self.keys)
                .map(|index| index % self.keys == 1)
                .collect();
            Tensor::<A, 4, Bool>::from_data(
                TensorData::new(hidden, [BATCH, HEADS, self.queries, self.keys]),
                &device,
            )
        });
        let output = attention(heads(&q), heads(&k), heads(&v), mask, None, self.options);
        let output = heads(&output);
        let weights = of_sequence(&self.weights, self.queries);
        let grads = (output.clone().cast(DType::F32) * weights).sum().backward();
        let grad = |tensor: &Tensor<A, 4>| floats(&tensor.grad(&grads).expect("a gradient"));
        [floats(&output), grad(&q), grad(&k), grad(&v)]
    }
}

fn options(is_causal: bool, scale: Option<f64>) -> AttentionModuleOptions {
    AttentionModuleOptions {
        is_causal,
        scale,
        ..Default::default()
    }
}

/// Relative to the largest element: the scores and the output are rounded to the compute dtype.
fn compare<B: DataBackend, R: Recipe>(problem: &Problem, tolerance: f32, seed: u64) {
    let expected = problem.solve::<Autodiff<Flex>>();
    let actual = problem.solve::<QuantTrain<Autodiff<B>, R>>();
    let names = ["output", "dQ", "dK", "dV"];
    for ((name, actual), expected) in names.iter().zip(&actual).zip(&expected) {
        let largest = expected
            .iter()
            .fold(0.0f32, |largest, x| largest.max(x.abs()));
        assert!(largest > 0.0, "{name}: a reference that is not all zeros");
        assert_eq!(actual.len(), expected.len());
        for (index, (a, e)) in actual.iter().zip(expected).enumerate() {
            assert!(
                (a - e).abs() <= tolerance * largest,
                "seed {seed}, {}: {name}[{index}] {a} instead of {e}, queries {}, keys {}, in rows {}, {:?}",
                std::any::type_name::<R>(),
                problem.queries,
                problem.keys,
                problem.in_rows,
                problem.options
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
    for (shape, in_rows, options, masked) in [
        ([17, 17], false, options(true, None), false),
        ([17, 17], true, options(false, Some(0.5)), false),
        ([40, 40], true, options(true, None), false),
        ([16, 24], true, options(false, None), false),
        ([5, 24], false, options(true, None), false),
        ([33, 7], false, options(false, None), false),
        ([8, 12], true, options(true, None), true),
    ] {
        let problem = Problem {
            in_rows,
            ..Problem::draw(&mut rng, shape, options, masked)
        };
        if half {
            compare::<B, MixedPrecision<f16>>(&problem, 1e-2, seed);
        }
        if brain {
            compare::<B, MixedPrecision<bf16>>(&problem, 8e-2, seed);
        }
        if !half && !brain {
            compare::<B, MixedPrecision<f32>>(&problem, 1e-3, seed);
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
    let output = attention(
        q.clone(),
        k.clone(),
        v.clone(),
        None,
        None,
        options(true, None),
    );
    let grads = output.sum().backward();
    assert!(q.grad(&grads).is_none() && k.grad(&grads).is_none());
    // Each column of the probabilities sums over the queries to what its value gets.
    let grad = floats(&v.grad(&grads).expect("V is tracked"));
    let total: f32 = grad.iter().step_by(16).sum();
    assert!(
        (total - 4.0).abs() < tolerance,
        "seed {seed}, {}: {total}",
        std::any::type_name::<A>()
    );
}
