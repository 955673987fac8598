//! What the layers around an operator quantize as it is computed: the same bits as where somebody else reads it too. Of
//! SwiGLU, with gate and up that wait as they are, compressed, and as they flow; of RMSNorm and GELU in a flow.

use burn::{
    backend::Autodiff,
    module::Module,
    nn::{Linear, LinearConfig, RmsNorm, RmsNormConfig, SwiGlu, SwiGluConfig},
    optim::{GradientsParams, Optimizer},
    tensor::{
        DType,
        activation::{gelu, silu},
        backend::{AutodiffBackend, Backend},
    },
};
use burn_quant_train::{
    QuantTrain,
    data::DataBackend,
    recipe::{
        BlockInt8, CoatFp8, ComputeDtype, CurrentFp8, DelayedFp8, FallbackInt8, JetfireInt8,
        PerTensorInt8, Recipe, SwitchBackInt8,
        context::{Contexts, E4M3, Int8, Int10},
    },
    saved::{Recording, report::Form},
};
use half::{bf16, f16};
use quant_train_tests::{
    Rng,
    data::{floats, tensor},
    on_every_backend, supports,
    train::{attached, every_layer},
};

on_every_backend! {
    other_readers_change_nothing => readers;
    other_readers_of_a_flow_change_nothing => readers_of_flow;
    a_gate_of_two_outputs_stays_exact_for_the_second => shared_gate;
}

#[derive(Module, Debug)]
struct FeedForward<B: Backend> {
    gate: SwiGlu<B>,
    down: Linear<B>,
}

impl<B: Backend> FeedForward<B> {
    const HIDDEN: usize = 128;

    fn new(inside: usize, bias: bool, device: &B::Device) -> Self {
        let gate = SwiGluConfig::new(Self::HIDDEN, inside).with_bias(bias);
        Self {
            gate: gate.init(device),
            down: LinearConfig::new(inside, Self::HIDDEN).init(device),
        }
    }
}

/// Who reads what a layer would quantize as it is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reader {
    /// Nobody else.
    None,
    /// Somebody reads the output, before the layer behind it does.
    Output,
    /// The same, behind the layer.
    OutputLater,
    /// An operation more reads the gate, and adds zeros to its gradient.
    Gate,
    /// The same of what the gate lets through.
    Up,
}

/// Output and gradients of the third step: what the two before it left is in thresholds and histories.
fn run<B: DataBackend, R: Recipe>(
    seed: u64,
    dtype: DType,
    (inside, bias): (usize, bool),
    reader: Reader,
) -> Vec<Vec<f32>> {
    type Training<B, R> = QuantTrain<Autodiff<B>, R>;
    let device = Default::default();
    let model = FeedForward::new(inside, bias, &device);
    let (mut optim, mut model) = attached::<Training<B, R>, _>(&every_layer(seed), model, seed);
    let mut rng = Rng::new(seed);
    let mut found = vec![];
    for _ in 0..3 {
        let shape = [2, 64, FeedForward::<B>::HIDDEN];
        let values = rng.normals(shape.iter().product(), 2.0);
        let leaf = tensor::<Training<B, R>, 3>(&values, shape, &device).require_grad();
        let x = leaf.clone().cast(dtype);
        let recording = Recording::start();
        let gate = model.gate.linear_inner.forward(x.clone());
        let up = model.gate.linear_outer.forward(x);
        let read = match reader {
            Reader::None | Reader::Output | Reader::OutputLater => None,
            Reader::Gate => Some(gate.clone()),
            Reader::Up => Some(up.clone()),
        };
        let output = silu(gate) * up;
        if reader == Reader::Output {
            floats(&output);
        }
        let y = match reader {
            Reader::OutputLater => {
                let y = model.down.forward(output.clone());
                floats(&output);
                drop(output);
                y
            }
            _ => model.down.forward(output),
        };
        if R::row().context.is_some() {
            let saved = recording.report();
            let wait = saved.values.iter().filter(|value| {
                value.shape == [2, 64, inside] && matches!(value.form, Form::Compressed(_))
            });
            assert_eq!(wait.count(), 2, "gate and up:\n{saved}");
        }
        let mut loss = (y.clone().cast(DType::F32).square()).mean();
        if let Some(read) = read {
            loss = loss + (read * 0.0).cast(DType::F32).sum();
        }
        let gradients = loss.backward();
        found = vec![floats(&y), floats(&leaf.grad(&gradients).expect("of x"))];
        let gradients = GradientsParams::from_grads(gradients, &model);
        for linear in [
            &model.gate.linear_inner,
            &model.gate.linear_outer,
            &model.down,
        ] {
            let gradient = gradients
                .get::<<Training<B, R> as AutodiffBackend>::InnerBackend, 2>(linear.weight.id);
            found.push(floats(&gradient.expect("of a weight")));
        }
        model = optim.step(1e-3, model, gradients);
    }
    found
}

fn compare<B: DataBackend, R: Recipe>(seed: u64, dtype: DType) {
    // Whole tiles of kernels, and none; with a bias, whose gradient is the sum of floats.
    let sizes = [(256, false), (136, false), (256, true)];
    for sizes in Rng::new(seed).drawn(sizes, 1) {
        let alone = run::<B, R>(seed, dtype, sizes, Reader::None);
        let readers = [
            Reader::Output,
            Reader::OutputLater,
            Reader::Gate,
            Reader::Up,
        ];
        // What a loss reads too stays exact, where it would wait compressed.
        let of_output = if R::row().context.is_some() { 2 } else { 4 };
        for &reader in &readers[..of_output] {
            let read = run::<B, R>(seed, dtype, sizes, reader);
            for (part, (alone, read)) in alone.iter().zip(&read).enumerate() {
                let recipe = R::row().name;
                let what = format!("seed {seed}: {recipe}, {dtype:?}, {sizes:?}, {reader:?}");
                assert!(alone.iter().all(|it| it.is_finite()), "{what}: {part}");
                assert!(alone == read, "{what}: {part} has other bits");
            }
        }
    }
}

fn readers<B: DataBackend>(seed: u64) {
    macro_rules! compare {
        ($float:ty, $dtype:expr) => {
            if supports::<B>($dtype) {
                compare::<B, FallbackInt8<$float>>(seed, $dtype);
                compare::<B, BlockInt8<$float>>(seed, $dtype);
                compare::<B, DelayedFp8<$float>>(seed, $dtype);
                compare::<B, CurrentFp8<$float>>(seed, $dtype);
                compare::<B, CoatFp8<$float>>(seed, $dtype);
                compare::<B, JetfireInt8<$float>>(seed, $dtype);
                compare::<B, PerTensorInt8<$float>>(seed, $dtype);
                compare::<B, SwitchBackInt8<$float>>(seed, $dtype);
                compare::<B, Contexts<FallbackInt8<$float>, Int8>>(seed, $dtype);
                compare::<B, Contexts<BlockInt8<$float>, Int10>>(seed, $dtype);
                compare::<B, Contexts<DelayedFp8<$float>, Int8>>(seed, $dtype);
                compare::<B, Contexts<DelayedFp8<$float>, E4M3<16>>>(seed, $dtype);
            }
        };
    }
    compare!(f16, DType::F16);
    compare!(bf16, DType::BF16);
}

/// RMSNorm, two layers that read it, GELU of what one of them gives, and a layer behind it.
#[derive(Module, Debug)]
struct Flowing<B: Backend> {
    norm: RmsNorm<B>,
    up: Linear<B>,
    beside: Linear<B>,
    down: Linear<B>,
}

/// Who reads what a layer would quantize as it is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FlowReader {
    /// Nobody else.
    None,
    /// Somebody reads the norm's output, before the layers behind it do.
    Norm,
    /// The same, behind them.
    NormLater,
    /// Somebody reads GELU's output, before the layer behind it does.
    Gelu,
    /// An operation more reads what GELU reads, and adds zeros to its gradient.
    Input,
}

/// Output and gradients of the second step.
fn run_flow<B: DataBackend, R: Recipe>(
    seed: u64,
    dtype: DType,
    (inside, bias): (usize, bool),
    reader: FlowReader,
) -> Vec<Vec<f32>> {
    type Training<B, R> = QuantTrain<Autodiff<B>, R>;
    const HIDDEN: usize = 128;
    let device = Default::default();
    let layer = |from, to, bias| LinearConfig::new(from, to).with_bias(bias).init(&device);
    let model = Flowing {
        norm: RmsNormConfig::new(HIDDEN).init(&device),
        up: layer(HIDDEN, inside, bias),
        beside: layer(HIDDEN, inside, bias),
        down: layer(inside, HIDDEN, true),
    };
    let (mut optim, mut model) = attached::<Training<B, R>, _>(&every_layer(seed), model, seed);
    let mut rng = Rng::new(seed);
    let mut found = vec![];
    for _ in 0..2 {
        let shape = [2, 64, HIDDEN];
        let values = rng.normals(shape.iter().product(), 2.0);
        let leaf = tensor::<Training<B, R>, 3>(&values, shape, &device).require_grad();
        let normal = model.norm.forward(leaf.clone().cast(dtype));
        if reader == FlowReader::Norm {
            floats(&normal);
        }
        let up = model.up.forward(normal.clone());
        let beside = model.beside.forward(normal.clone());
        if reader == FlowReader::NormLater {
            floats(&normal);
        }
        let output = gelu(up.clone());
        if reader == FlowReader::Gelu {
            floats(&output);
        }
        let y = model.down.forward(output);
        let mut loss = y.clone().cast(DType::F32).square().mean();
        loss = loss + beside.cast(DType::F32).square().mean();
        if reader == FlowReader::Input {
            loss = loss + (up * 0.0).cast(DType::F32).sum();
        }
        let gradients = loss.backward();
        found = vec![floats(&y), floats(&leaf.grad(&gradients).expect("of x"))];
        let gradients = GradientsParams::from_grads(gradients, &model);
        for linear in [&model.up, &model.beside, &model.down] {
            let gradient = gradients
                .get::<<Training<B, R> as AutodiffBackend>::InnerBackend, 2>(linear.weight.id);
            found.push(floats(&gradient.expect("of a weight")));
        }
        model = optim.step(1e-3, model, gradients);
    }
    found
}

fn readers_of_flow<B: DataBackend>(seed: u64) {
    fn compare<B: DataBackend, R: Recipe>(seed: u64, dtype: DType) {
        // Whole tiles of kernels, and none; with a bias, whose gradient is the sum of floats.
        let sizes = [(256, false), (136, false), (256, true)];
        for sizes in Rng::new(seed).drawn(sizes, 1) {
            let alone = run_flow::<B, R>(seed, dtype, sizes, FlowReader::None);
            for reader in [
                FlowReader::Norm,
                FlowReader::NormLater,
                FlowReader::Gelu,
                FlowReader::Input,
            ] {
                let read = run_flow::<B, R>(seed, dtype, sizes, reader);
                for (part, (alone, read)) in alone.iter().zip(&read).enumerate() {
                    let recipe = R::row().name;
                    let what = format!("seed {seed}: {recipe}, {dtype:?}, {sizes:?}, {reader:?}");
                    assert!(alone.iter().all(|it| it.is_finite()), "{what}: {part}");
                    assert!(alone == read, "{what}: {part} has other bits");
                }
            }
        }
    }
    macro_rules! compare {
        ($float:ty, $dtype:expr) => {
            if supports::<B>($dtype) {
                compare::<B, CoatFp8<$float>>(seed, $dtype);
                compare::<B, CoatFp8<$float, 32>>(seed, $dtype);
                compare::<B, JetfireInt8<$float>>(seed, $dtype);
            }
        };
    }
    compare!(f32, DType::F32);
    compare!(f16, DType::F16);
    compare!(bf16, DType::BF16);
}

/// Two outputs with one gate, each read by a layer of its own, with the second one computed before the first is read or
/// not: the gate is compressed behind both.
fn shared_gate<B: DataBackend>(seed: u64) {
    fn outputs<B: DataBackend, E: ComputeDtype>(seed: u64, dtype: DType, early: bool) -> Vec<f32> {
        type Training<B, E> = QuantTrain<Autodiff<B>, Contexts<FallbackInt8<E>, Int8>>;
        let device = Default::default();
        let model = FeedForward::new(256, false, &device);
        let (_, model) = attached::<Training<B, E>, _>(&every_layer(seed), model, seed);
        let shape = [2, 64, FeedForward::<B>::HIDDEN];
        let values = Rng::new(seed).normals(shape.iter().product(), 2.0);
        let leaf = tensor::<Training<B, E>, 3>(&values, shape, &device).require_grad();
        let x = leaf.cast(dtype);
        let gate = model.gate.linear_inner.forward(x.clone());
        let up = model.gate.linear_outer.forward(x);
        let first = silu(gate.clone()) * up.clone();
        let second = silu(gate) * up;
        if early {
            floats(&second);
        }
        let first = model.down.forward(first);
        // Begins with what waits to be compressed.
        let second = model.down.forward(second);
        floats(&(first + second))
    }
    fn check<B: DataBackend, E: ComputeDtype>(seed: u64, dtype: DType) {
        let [late, early] = [false, true].map(|early| outputs::<B, E>(seed, dtype, early));
        assert!(late == early, "seed {seed}, {dtype:?}: other bits");
    }
    if supports::<B>(DType::F16) {
        check::<B, f16>(seed, DType::F16);
    }
    if supports::<B>(DType::BF16) {
        check::<B, bf16>(seed, DType::BF16);
    }
}
