//! Attention whose output waits as it is beside compressed queries, keys and values: what waits, that the forward pass
//! is not computed again, and how near the gradients are to those of values that wait as they are.

use burn::{
    backend::Autodiff,
    nn::attention::{MhaInput, MultiHeadAttentionConfig},
    tensor::{
        Bool, DType, Tensor, TensorData, backend::AutodiffBackend, module::attention,
        ops::AttentionModuleOptions,
    },
};
use burn_quant_train::{
    QuantTrain,
    data::DataBackend,
    recipe::{
        ComputeDtype, MixedPrecision, Number,
        context::{ContextFormat, Contexts, Exact, Int4, Int8, Int10, KeptOutput},
    },
    saved::{ActivationReport, Recording, checkpoint, report::Form},
};
use half::bf16;
use quant_train_tests::{
    Rng,
    data::{cosine, floats, is_cuda, relative_error, same_bits, tensor},
    in_narrow, on_every_backend,
};

on_every_backend! {
    the_output_waits_as_it_is => waits;
    the_forward_pass_is_not_computed_again => is_not_computed_again;
    blocks_and_soft_caps_compute_it_again => is_computed_again;
    dropped_scores_are_computed_again => drops_scores;
    gradients_are_near_those_of_exact_contexts => is_near_exact;
}

const HEADS: usize = 2;
const FEATURES: usize = 64;

type Train<B, E, F> = QuantTrain<Autodiff<B>, Contexts<MixedPrecision<E>, F>>;

/// Q, K, V and the gradient of the output, `[tokens, heads * features]`.
struct Problem {
    tokens: usize,
    of_rows: [Vec<f32>; 4],
}

impl Problem {
    fn draw(rng: &mut Rng, tokens: usize) -> Self {
        let of_rows = [(); 4].map(|()| rng.normals_of_16_bits(tokens * HEADS * FEATURES));
        Self { tokens, of_rows }
    }

    /// The same, with so much added to the first of the features of all keys.
    fn with_common(mut self, mean: f32, features: usize) -> Self {
        for head in self.of_rows[1].chunks_mut(FEATURES) {
            for x in &mut head[..features] {
                *x = bf16::from_f32(*x + mean).to_f32();
            }
        }
        self
    }

    /// The gradients of Q, K and V, and what waited for them.
    fn solve<A: AutodiffBackend>(&self, setting: Setting) -> ([Vec<f32>; 3], ActivationReport) {
        let device = A::Device::default();
        let (tokens, width) = (self.tokens, HEADS * FEATURES);
        let of_rows = |data: &[f32]| tensor::<A, 2>(data, [tokens, width], &device);
        let [q, k, v] = [0, 1, 2].map(|index| of_rows(&self.of_rows[index]).require_grad());
        let weights = of_rows(&self.of_rows[3]);
        // A product's output waits compressed, and this one is its input.
        let identity = Tensor::<A, 2>::eye(width, &device);
        let recording = Recording::start();
        let of_heads = |x: Tensor<A, 2>| {
            let rows = x.matmul(identity.clone());
            rows.reshape([1, tokens, HEADS, FEATURES]).swap_dims(1, 2)
        };
        let operands = (
            of_heads(q.clone()),
            of_heads(k.clone()),
            of_heads(v.clone()),
        );
        let attend = |(q, k, v)| setting.attend::<A>(q, k, v);
        let output = match setting.in_block {
            true => checkpoint(attend, operands),
            false => attend(operands),
        };
        let rows = output.swap_dims(1, 2).reshape([tokens, width]);
        // Behind a product, so that no operand of attention is what a loss was computed from.
        let loss = (rows.matmul(identity).cast(DType::F32) * weights.cast(DType::F32)).sum();
        let saved = recording.report();
        let gradients = loss.backward();
        let of = |x: &Tensor<A, 2>| floats(&x.grad(&gradients).expect("a gradient"));
        ([of(&q), of(&k), of(&v)], saved)
    }
}

/// How attention is asked for.
#[derive(Debug, Clone, Copy, Default)]
struct Setting {
    softcap: Option<f64>,
    in_block: bool,
}

impl Setting {
    /// Causal attention.
    fn attend<A: AutodiffBackend>(
        self,
        q: Tensor<A, 4>,
        k: Tensor<A, 4>,
        v: Tensor<A, 4>,
    ) -> Tensor<A, 4> {
        let mask = mask(q.dims()[2], &q.device()).map(|mask| mask.unsqueeze());
        let options = AttentionModuleOptions {
            softcap: self.softcap,
            is_causal: true,
            ..Default::default()
        };
        attention(q, k, v, mask, None, options)
    }
}

/// A mask that hides nothing, `[1, 1, keys]`, where attention without one is computed without scores only on tensor cores.
fn mask<A: AutodiffBackend>(keys: usize, device: &A::Device) -> Option<Tensor<A, 3, Bool>> {
    let nothing = || TensorData::new(vec![false; keys], [1, 1, keys]);
    (!is_cuda::<A>()).then(|| Tensor::from_data(nothing(), device))
}

fn waits<B: DataBackend>(seed: u64) {
    fn check<B: DataBackend, E: ComputeDtype>(seed: u64) {
        let problem = Problem::draw(&mut Rng::new(seed), 128);
        let (_, saved) = problem.solve::<Train<B, E, KeptOutput<Int10>>>(Setting::default());
        let is_of_heads = |shape: &[usize]| {
            shape.contains(&FEATURES) && shape.iter().product::<usize>() == 128 * HEADS * FEATURES
        };
        let of_form = |form| {
            let values = saved.values.iter();
            values.filter(move |value| value.form == form && is_of_heads(&value.shape))
        };
        let compressed: Vec<_> = of_form(Form::Compressed(Number::Int10)).collect();
        assert_eq!(compressed.len(), 3, "seed {seed}: Q, K and V\n{saved}");
        // Ten bits an element, and a scale for 128.
        let elements = 128 * HEADS * FEATURES;
        let bytes: usize = compressed.iter().map(|value| value.bytes).sum();
        assert_eq!(bytes, 3 * (elements * 10 / 8 + elements / 128 * 4));
        let exact: Vec<_> = of_form(Form::Exact).collect();
        assert_eq!(exact.len(), 1, "seed {seed}: the output\n{saved}");
        assert_eq!(exact[0].bytes, elements * 2);
        let is_log_sum_exp = |shape: &[usize]| shape == [1, HEADS, 128];
        let sums = saved.values.iter();
        let sums = sums.filter(|it| it.operation == "attention" && is_log_sum_exp(&it.shape));
        assert_eq!(sums.count(), 1, "seed {seed}:\n{saved}");
    }
    in_narrow!(check::<B>(seed));
}

/// Probabilities of one function sum to 1, and then the gradients of V to that of the output. INT4 is so far off that
/// those of decoded scores over sums of exact ones do not.
fn is_not_computed_again<B: DataBackend>(seed: u64) {
    /// The sum of the gradients of V over that of the output.
    fn share<A: AutodiffBackend>(problem: &Problem) -> f64 {
        let ([_, _, of_values], _) = problem.solve::<A>(Setting::default());
        let sum = |x: &[f32]| x.iter().map(|x| f64::from(*x)).sum::<f64>();
        sum(&of_values) / sum(&problem.of_rows[3])
    }
    fn check<B: DataBackend, E: ComputeDtype>(seed: u64) {
        let mut problem = Problem::draw(&mut Rng::new(seed), 256);
        problem.of_rows[0].iter_mut().for_each(|x| *x *= 4.0);
        problem.of_rows[3].fill(1.0);
        let again = share::<Train<B, E, Int4>>(&problem);
        let kept = share::<Train<B, E, KeptOutput<Int4>>>(&problem);
        assert!((again - 1.0).abs() < 0.005, "seed {seed}: {again}");
        assert!((kept - 1.0).abs() > 0.02, "seed {seed}: {kept}");
    }
    in_narrow!(check::<B>(seed));
}

fn is_computed_again<B: DataBackend>(seed: u64) {
    fn check<B: DataBackend, E: ComputeDtype>(seed: u64) {
        let problem = Problem::draw(&mut Rng::new(seed), 96).with_common(3.0, 16);
        let in_block = Setting {
            in_block: true,
            ..Default::default()
        };
        let capped = Setting {
            softcap: Some(5.0),
            ..Default::default()
        };
        for setting in [in_block, capped] {
            let (kept, saved) = problem.solve::<Train<B, E, KeptOutput<Int8>>>(setting);
            let (again, without) = problem.solve::<Train<B, E, Int8>>(setting);
            assert_eq!(
                saved.to_string(),
                without.to_string(),
                "seed {seed}, {setting:?}"
            );
            for (kept, again) in kept.iter().zip(&again) {
                assert!(same_bits(kept, again), "seed {seed}, {setting:?}");
            }
        }
    }
    in_narrow!(check::<B>(seed));
}

/// Burn's layer drops scores, which then see a mean of keys: with dropout their probabilities are of one function.
fn drops_scores<B: DataBackend>(seed: u64) {
    /// The share of [`is_not_computed_again`], by the bias of V.
    fn share<A: AutodiffBackend>(seed: u64, dropout: f64) -> f64 {
        const TOKENS: usize = 128;
        let (device, width) = (A::Device::default(), HEADS * FEATURES);
        let config = MultiHeadAttentionConfig::new(width, HEADS).with_dropout(dropout);
        let layer = config.init::<A>(&device);
        let x = Rng::new(seed).normals(TOKENS * width, 4.0);
        let x = tensor::<A, 3>(&x, [1, TOKENS, width], &device);
        let input = MhaInput::self_attn(x);
        let input = match mask::<A>(TOKENS, &device) {
            Some(mask) => input.mask_attn(mask.expand([1, TOKENS, TOKENS])),
            None => input,
        };
        let loss = layer.forward(input).context.sum();
        let gradients = loss.backward();
        let bias = layer.value.bias.expect("a bias of V");
        let of_values = floats(&bias.grad(&gradients).expect("a gradient"));
        let of_output = floats(&layer.output.weight.val().sum_dim(1));
        let dot = |a: &[f32], b: &[f32]| -> f64 {
            let products = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
            products.sum()
        };
        dot(&of_values, &of_output) / (TOKENS as f64 * dot(&of_output, &of_output))
    }
    fn check<B: DataBackend, E: ComputeDtype>(seed: u64) {
        type Kept<B, E> = Train<B, E, KeptOutput<Int4>>;
        let dropped = share::<Kept<B, E>>(seed, 0.5);
        let kept = share::<Kept<B, E>>(seed, 0.0);
        assert!((dropped - 1.0).abs() < 0.005, "seed {seed}: {dropped}");
        assert!((kept - 1.0).abs() > 0.02, "seed {seed}: {kept}");
    }
    in_narrow!(check::<B>(seed));
}

/// Gradients of Q, K and V beside others: cosine and relative error.
fn errors(gradients: &[Vec<f32>; 3], exact: &[Vec<f32>; 3]) -> [[f64; 2]; 3] {
    std::array::from_fn(|index| {
        let (gradient, exact) = (&gradients[index], &exact[index]);
        [cosine(gradient, exact), relative_error(gradient, exact)]
    })
}

/// The figures of the book's page on memory, of keys without and with much in common, where the latter is what the row
/// sums of the scores' gradient are multiplied by.
fn is_near_exact<B: DataBackend>(seed: u64) {
    /// The relative errors of the gradients of Q, K and V.
    fn of<B: DataBackend, E: ComputeDtype, F: ContextFormat>(
        problem: &Problem,
        exact: &[Vec<f32>; 3],
        name: &str,
    ) -> [f64; 3] {
        let (gradients, _) = problem.solve::<Train<B, E, F>>(Setting::default());
        let errors = errors(&gradients, exact);
        let figures = errors.map(|[cosine, error]| format!("{cosine:.5} {error:.4}"));
        println!("{name:<20} {}", figures.join("   "));
        errors.map(|[_, error]| error)
    }
    fn check<B: DataBackend, E: ComputeDtype>(seed: u64) {
        let mut rng = Rng::new(seed);
        let commons = [(0.0, 0), (3.0, 16), (30.0, 4)];
        for (mean, features) in rng.drawn(commons, 1) {
            let problem = Problem::draw(&mut rng, 512).with_common(mean, features);
            let (exact, _) = problem.solve::<Train<B, E, Exact>>(Setting::default());
            let name = format!("{:?}", E::DTYPE);
            println!("{name}, keys plus {mean} in {features} of {FEATURES} features: dQ, dK, dV");
            let again = of::<B, E, Int8>(&problem, &exact, "INT8");
            let kept = of::<B, E, KeptOutput<Int8>>(&problem, &exact, "INT8, kept output");
            of::<B, E, Int10>(&problem, &exact, "INT10");
            let finer = of::<B, E, KeptOutput<Int10>>(&problem, &exact, "INT10, kept output");
            for index in 0..3 {
                let what = format!("seed {seed}, {mean}, gradient {index}");
                assert!(
                    kept[index] < 1.6 * again[index],
                    "{what}: {kept:?} {again:?}"
                );
                assert!(kept[index] < 0.03, "{what}: {kept:?}");
                // Of ten bits what is left is mostly the rounding of keys that are far from zero.
                assert!(finer[index] < 0.025, "{what}: {finer:?}");
            }
        }
    }
    in_narrow!(check::<B>(seed));
}
