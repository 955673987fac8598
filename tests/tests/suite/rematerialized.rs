//! Linear layers that keep no copy of what can be made again of what waits: the output of a norm whose input waits
//! compressed, and that of attention which waits as it is.

use burn::{
    backend::Autodiff,
    module::Module,
    nn::{Linear, LinearConfig, RmsNorm, RmsNormConfig},
    optim::GradientsParams,
    tensor::{
        DType, Tensor,
        backend::{AutodiffBackend, Backend},
        module::attention,
        ops::AttentionModuleOptions,
    },
};
use burn_quant_train::{
    QuantTrain,
    data::DataBackend,
    recipe::{
        AttentionContext, BlockInt8, ComputeDtype, CurrentFp8, DelayedFp8, FallbackInt8, Recipe,
        context::{Contexts, ExactAttention, Int8, Int10, KeptOutput},
    },
    saved::{ActivationReport, Recording, checkpoint, report::Form},
};
use quant_train_tests::{
    Rng,
    data::{floats, is_cuda, relative_error, tensor},
    in_narrow, on_every_backend,
    train::{attached, every_layer},
};

on_every_backend! {
    what_can_be_made_again_waits_once => waits;
    gradients_are_near_those_of_copies => is_near;
    other_readers_change_nothing => has_readers;
    a_block_may_begin_with_a_norm => in_block;
}

const HIDDEN: usize = 128;
const HEADS: usize = 2;
const TOKENS: usize = 128;

#[derive(Module, Debug)]
struct Block<B: Backend> {
    before: Linear<B>,
    norm: RmsNorm<B>,
    operands: [Linear<B>; 3],
    output: Linear<B>,
}

impl<B: Backend> Block<B> {
    fn new(device: &B::Device) -> Self {
        let linear = || {
            LinearConfig::new(HIDDEN, HIDDEN)
                .with_bias(false)
                .init(device)
        };
        Self {
            before: linear(),
            norm: RmsNormConfig::new(HIDDEN).init(device),
            operands: [(); 3].map(|()| linear()),
            output: linear(),
        }
    }

    fn forward(&self, x: Tensor<B, 3>, kind: Kind) -> Tensor<B, 3> {
        let x = self.before.forward(x);
        match kind {
            Kind::Plain => self.behind(x, false),
            Kind::Read => self.behind(x, true),
            Kind::Block => checkpoint(|x| self.behind(x, false), x),
        }
    }

    /// The output of all but the first layer. `reads`: somebody reads what the norm and attention give, too.
    fn behind(&self, x: Tensor<B, 3>, reads: bool) -> Tensor<B, 3> {
        let normalized = self.norm.forward(x);
        if reads {
            floats(&normalized);
        }
        let [query, key, value] = self.operands.each_ref().map(|linear| {
            let heads = [1, TOKENS, HEADS, HIDDEN / HEADS];
            linear
                .forward(normalized.clone())
                .reshape(heads)
                .swap_dims(1, 2)
        });
        drop(normalized);
        let device = query.device();
        // Attention without a mask is computed without scores only on tensor cores.
        let mask = (!is_cuda::<B>()).then(|| Tensor::<B, 4>::zeros([1, 1, 1, TOKENS], &device));
        let mask = mask.map(|zeros| zeros.equal_elem(1.0));
        let heads = attention(
            query,
            key,
            value,
            mask,
            None,
            AttentionModuleOptions::default(),
        );
        let heads = heads.swap_dims(1, 2).reshape([1, TOKENS, HIDDEN]);
        if reads {
            floats(&heads);
        }
        self.output.forward(heads)
    }
}

/// How a block of layers runs.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Plain,
    /// Somebody reads what the norm and attention give, too.
    Read,
    /// From the norm on it runs again in the backward pass.
    Block,
}

/// The gradients of weights, and what waited for them.
fn run<B: DataBackend, R: Recipe>(
    seed: u64,
    dtype: DType,
    kind: Kind,
) -> (Vec<Vec<f32>>, ActivationReport) {
    type Training<B, R> = QuantTrain<Autodiff<B>, R>;
    type Inner<B, R> = <Training<B, R> as AutodiffBackend>::InnerBackend;
    let device = Default::default();
    let model = Block::new(&device);
    let (_, model) = attached::<Training<B, R>, _>(&every_layer(seed), model, seed);
    let shape = [1, TOKENS, HIDDEN];
    let values = Rng::new(seed).normals(TOKENS * HIDDEN, 2.0);
    let x = tensor::<Training<B, R>, 3>(&values, shape, &device).cast(dtype);
    let recording = Recording::start();
    let y = model.forward(x, kind);
    let loss = y.cast(DType::F32).square().mean();
    let saved = recording.report();
    let gradients = GradientsParams::from_grads(loss.backward(), &model);
    let linears = [&model.before, &model.output];
    let linears = linears.into_iter().chain(&model.operands);
    let of = linears.map(|linear| {
        let gradient = gradients.get::<Inner<B, R>, 2>(linear.weight.id);
        floats(&gradient.expect("of a weight"))
    });
    (of.collect(), saved)
}

/// The copies of X that wait, of layers behind others.
fn copies(saved: &ActivationReport) -> usize {
    let copies = saved.values.iter();
    let is_copy = |form| matches!(form, Form::Operand(_));
    copies
        .filter(|it| is_copy(it.form) && it.layer != "before")
        .count()
}

/// True where RMSNorm is one operation: else its quotient waits to be computed again.
fn has_norm(saved: &ActivationReport) -> bool {
    saved.values.iter().any(|it| it.operation == "rms_norm")
}

fn waits<B: DataBackend>(seed: u64) {
    fn check<B: DataBackend, R: Recipe>(seed: u64, again: bool) {
        let dtype = R::row().compute.into();
        let (_, saved) = run::<B, R>(seed, dtype, Kind::Plain);
        let has_scores = saved
            .values
            .iter()
            .any(|it| it.shape == [1, HEADS, TOKENS, TOKENS]);
        let of_norm = usize::from(!(again && has_norm(&saved)));
        let keeps_output = R::row()
            .context
            .is_some_and(|it| it.attention != AttentionContext::Compressed);
        let of_heads = usize::from(!(again && keeps_output) || has_scores);
        assert_eq!(
            copies(&saved),
            of_norm + of_heads,
            "seed {seed}, {}:\n{saved}",
            R::row().name
        );
    }
    fn of<B: DataBackend, E: ComputeDtype>(seed: u64) {
        check::<B, Contexts<FallbackInt8<E>, ExactAttention<Int8>>>(seed, true);
        check::<B, Contexts<FallbackInt8<E>, KeptOutput<Int10>>>(seed, true);
        check::<B, Contexts<FallbackInt8<E>, Int8>>(seed, true);
        // A layer whose copy is the forward product's operand keeps it, and so does one with a history.
        check::<B, Contexts<CurrentFp8<E>, ExactAttention<Int8>>>(seed, false);
        check::<B, Contexts<DelayedFp8<E>, ExactAttention<Int8>>>(seed, false);
        check::<B, FallbackInt8<E>>(seed, false);
    }
    in_narrow!(of::<B>(seed));
}

fn is_near<B: DataBackend>(seed: u64) {
    fn check<B: DataBackend, R: Recipe>(seed: u64) {
        let dtype = R::row().compute.into();
        let (exact, _) = run::<B, R>(seed, dtype, Kind::Plain);
        let (int8, _) = run::<B, Contexts<R, ExactAttention<Int8>>>(seed, dtype, Kind::Plain);
        let (int10, _) = run::<B, Contexts<R, KeptOutput<Int10>>>(seed, dtype, Kind::Plain);
        for (index, exact) in exact.iter().enumerate() {
            let errors = [&int8, &int10].map(|it| relative_error(&it[index], exact));
            let what = format!(
                "seed {seed}, {}, gradient {index}: {errors:?}",
                R::row().name
            );
            println!("{what}");
            assert!(errors.iter().all(|&it| it < 0.04), "{what}");
        }
    }
    fn of<B: DataBackend, E: ComputeDtype>(seed: u64) {
        check::<B, FallbackInt8<E>>(seed);
        check::<B, BlockInt8<E>>(seed);
    }
    in_narrow!(of::<B>(seed));
}

fn has_readers<B: DataBackend>(seed: u64) {
    fn check<B: DataBackend, E: ComputeDtype>(seed: u64) {
        type R<E> = Contexts<FallbackInt8<E>, ExactAttention<Int8>>;
        let dtype = R::<E>::row().compute.into();
        let kinds = [Kind::Plain, Kind::Read];
        let [(alone, _), (read, _)] = kinds.map(|kind| run::<B, R<E>>(seed, dtype, kind));
        assert!(alone == read, "seed {seed}: other bits");
    }
    in_narrow!(check::<B>(seed));
}

fn in_block<B: DataBackend>(seed: u64) {
    fn check<B: DataBackend, E: ComputeDtype>(seed: u64) {
        type R<E> = Contexts<FallbackInt8<E>, ExactAttention<Int8>>;
        let dtype = R::<E>::row().compute.into();
        let (exact, _) = run::<B, FallbackInt8<E>>(seed, dtype, Kind::Plain);
        let (block, saved) = run::<B, R<E>>(seed, dtype, Kind::Block);
        assert_eq!(copies(&saved), 0, "seed {seed}:\n{saved}");
        for (index, (exact, block)) in exact.iter().zip(&block).enumerate() {
            // More than without a block, since what is made again is made of what waited compressed.
            let error = relative_error(block, exact);
            assert!(error < 0.06, "seed {seed}, gradient {index}: {error}");
        }
    }
    in_narrow!(check::<B>(seed));
}
