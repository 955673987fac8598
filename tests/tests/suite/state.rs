//! State rides on tensors: nothing is hidden, shared by accident, or left behind.

use std::sync::Arc;

use burn::{
    backend::{Autodiff, Flex},
    module::Module,
    optim::{GradientsParams, Optimizer},
    tensor::{Tensor, TensorMetadata, TensorPrimitive, backend::AutodiffBackend},
};
use burn_quant_train::{
    QuantTrain,
    data::quantize::{Quantized, Scales},
    layer::{
        LayersRecord,
        tag::{self, CopyKey},
    },
    optim::{LayerBackend, OnNonfinite, QuantAdamW, QuantOptimizer},
    recipe::{BlockInt8, FallbackInt8, Rounding},
};
use quant_train_tests::{
    Rng,
    data::{floats, same_bits, tag_of, tensor},
    models::{Classifier, Encoder, Mlp, One, Three},
    seed,
    train::{attached, every_layer, samples, train},
};

type Fallback = QuantTrain<Autodiff<Flex>, FallbackInt8<f32, 16>>;
type Block = QuantTrain<Autodiff<Flex>, BlockInt8<f32, 16>>;

/// The only compressed copy that was rounded like this.
#[track_caller]
fn copy_of<B: LayerBackend, const D: usize>(
    tensor: &Tensor<B, D>,
    rounding: Rounding,
) -> Arc<Quantized<B::Base>> {
    let copies = tag_of(tensor).copies();
    let mut found = copies
        .into_iter()
        .filter(|(key, _)| key.rounding == rounding);
    match (found.next(), found.next()) {
        (Some((_, copy)), None) => copy,
        (first, second) => panic!(
            "expected one {rounding:?} copy, found {:?}",
            [first, second].map(|it| it.map(|(key, _): (CopyKey, _)| key))
        ),
    }
}

/// One value that is not finite turns its block, so these output rows, to NaN, and with them the loss; the others stay.
fn not_finite<B: LayerBackend>(value: f32) {
    let seed = seed();
    let device = B::Device::default();
    let (rows, inputs, outputs) = (53, 40, 24);
    let (bad_row, bad_col) = (20, 5);
    let (_optim, model) = attached::<B, _>(
        &every_layer(seed),
        One::new(inputs, outputs, true, &device),
        seed,
    );
    let mut x = Rng::new(seed).normals(rows * inputs, 1.0);
    let clean = floats(
        &model
            .linear
            .forward(tensor::<B, 2>(&x, [rows, inputs], &device)),
    );
    x[bad_row * inputs + bad_col] = value;
    let input = tensor::<B, 2>(&x, [rows, inputs], &device).require_grad();
    let y = model.linear.forward(input.clone());
    let loss = y.clone().mean();
    assert!(
        floats(&loss)[0].is_nan(),
        "seed {seed}: {value} in the input, loss {}",
        floats(&loss)[0]
    );
    for (row, (got, clean)) in floats(&y)
        .chunks(outputs)
        .zip(clean.chunks(outputs))
        .enumerate()
    {
        let affected = row / 16 == bad_row / 16;
        match affected {
            true => assert!(
                got.iter().all(|y| y.is_nan()),
                "seed {seed}: row {row} of the block with {value}: {got:?}"
            ),
            false => assert!(
                same_bits(got, clean),
                "seed {seed}: {value} in row {bad_row} changed row {row}"
            ),
        }
    }
    // The saved copy holds the NaN too: the gradient of the weights that the block met is NaN.
    let grads = y.sum().backward();
    let dw = floats(
        &model
            .linear
            .weight
            .grad(&grads)
            .expect("the weight is trained"),
    );
    for (row, dw) in dw.chunks(outputs).enumerate() {
        let affected = row / 16 == bad_col / 16;
        assert_eq!(
            dw.iter().all(|dw| dw.is_nan()),
            affected,
            "seed {seed}: dW row {row}: {dw:?}"
        );
    }
}

#[test]
fn nan_turns_the_loss_nan() {
    not_finite::<Fallback>(f32::NAN);
    not_finite::<Block>(f32::NAN);
}

#[test]
fn infinity_turns_the_loss_nan() {
    not_finite::<Fallback>(f32::INFINITY);
    not_finite::<Block>(f32::NEG_INFINITY);
}

#[test]
fn nan_in_the_weight_or_the_gradient_is_seen() {
    let seed = seed();
    let device = Default::default();
    let config = every_layer(seed).with_on_nonfinite(OnNonfinite::Propagate);
    let model = One::new(20, 20, false, &device);
    let (mut optim, model) = attached::<Fallback, _>(&config, model, seed);
    let x = tensor::<Fallback, 2>(&Rng::new(seed).normals(20 * 20, 1.0), [20, 20], &device)
        .require_grad();
    let y = model.linear.forward(x.clone());
    let grads = (y * f32::NAN).sum().backward();
    assert!(
        floats(&x.grad(&grads).expect("tracked"))
            .iter()
            .all(|dx| dx.is_nan()),
        "dX of a NaN gradient"
    );
    let grads = GradientsParams::from_grads(grads, &model);
    let model = optim.step(0.1, model, grads);
    let y = model.linear.forward(x);
    assert!(
        floats(&y).iter().all(|y| y.is_nan()),
        "a NaN weight gives NaN outputs"
    );
}

#[test]
fn a_batch_of_nothing_works() {
    fn of_shape<const D: usize>(shape: [usize; D]) {
        let device = Default::default();
        let model = One::new(20, 12, true, &device);
        let (mut optim, mut model) = attached::<Fallback, _>(&every_layer(1), model, 1);
        let before = floats(&model.linear.weight.val());
        let x = Tensor::<Fallback, D>::zeros(shape, &device).require_grad();
        let y = model.linear.forward(x.clone());
        let mut expected = shape;
        expected[D - 1] = 12;
        assert_eq!(y.dims(), expected);
        let grads = y.sum().backward();
        if let Some(dx) = x.grad(&grads) {
            assert_eq!(dx.dims(), shape);
        }
        let grads = GradientsParams::from_grads(grads, &model);
        model = optim.step(0.0, model, grads);
        assert!(
            same_bits(&before, &floats(&model.linear.weight.val())),
            "nothing to learn from nothing"
        );
    }
    of_shape([0, 20]);
    of_shape([0, 3, 20]);
    of_shape([2, 0, 20]);
}

/// A batch of zeros: scale 0, so nothing is divided by zero.
#[test]
fn a_batch_of_zeros_works() {
    let seed = seed();
    let device = Default::default();
    let (_optim, model) =
        attached::<Fallback, _>(&every_layer(seed), One::new(20, 12, true, &device), seed);
    let x = Tensor::<Fallback, 2>::zeros([33, 20], &device).require_grad();
    let y = model.linear.forward(x.clone());
    let bias = floats(&model.linear.bias.as_ref().expect("a bias").val());
    assert_eq!(floats(&y), bias.repeat(33));
    let grads = (y * 0.0).sum().backward();
    assert!(
        floats(&x.grad(&grads).expect("tracked"))
            .iter()
            .all(|&dx| dx == 0.0)
    );
    assert!(
        floats(&model.linear.weight.grad(&grads).expect("tracked"))
            .iter()
            .all(|&dw| dw == 0.0)
    );
}

fn thresholds_of(record: &LayersRecord) -> Vec<f32> {
    record
        .layers
        .iter()
        .filter_map(|layer| layer.threshold())
        .collect()
}

/// The training of one layer on inputs of a scale.
struct Training {
    scale: f64,
    optim: QuantOptimizer<QuantAdamW<One<Fallback>, Fallback>, Fallback>,
    model: One<Fallback>,
    rng: Rng,
    losses: Vec<f32>,
}

impl Training {
    fn new(seed: u64, scale: f64) -> Self {
        let model = One::new(64, 16, false, &Default::default());
        let (optim, model) = attached::<Fallback, _>(&every_layer(seed), model, seed);
        Self {
            scale,
            optim,
            model,
            rng: Rng::new(seed),
            losses: Vec::new(),
        }
    }

    fn step(&mut self) {
        let x = self.rng.normals(64 * 64, self.scale);
        let x = tensor::<Fallback, 2>(&x, [64, 64], &Default::default());
        let loss = self.model.linear.forward(x).powf_scalar(2.0).mean();
        self.losses.push(floats(&loss)[0]);
        let grads = GradientsParams::from_grads(loss.backward(), &self.model);
        self.model = self.optim.step(1e-3, self.model.clone(), grads);
    }

    fn thresholds(&self) -> Vec<f32> {
        thresholds_of(&self.optim.layers_record())
    }
}

#[test]
fn two_models_keep_their_own_thresholds() {
    let seed = seed();
    let both = || [0.01, 100.0].map(|scale| Training::new(seed, scale));
    let alone = both().map(|mut training| {
        (0..12).for_each(|_| training.step());
        training
    });
    let [small, large] = alone.each_ref().map(Training::thresholds);
    assert!(
        small[0] < 0.3 && large[0] > 3.0,
        "thresholds {small:?} and {large:?} after 12 steps from 1.0"
    );

    // The same two, step by step in turns.
    let mut in_turns = both();
    for _ in 0..12 {
        in_turns.iter_mut().for_each(Training::step);
    }
    for (together, alone) in in_turns.iter().zip(&alone) {
        let (ours, theirs) = (together.thresholds(), alone.thresholds());
        assert!(
            same_bits(&ours, &theirs),
            "seed {seed}: {ours:?}, alone {theirs:?}"
        );
        assert!(
            same_bits(&together.losses, &alone.losses),
            "seed {seed}: losses"
        );
    }
}

fn encoder_losses(seed: u64) -> Vec<f32> {
    let (mut optim, model) =
        attached::<Fallback, _>(&every_layer(seed), Encoder::new(&Default::default()), seed);
    train(
        model,
        &mut optim,
        3e-3,
        &samples::<Fallback, Encoder<Fallback>>(seed, 8),
    )
    .losses
}

#[test]
fn two_threads_train_at_once() {
    let seed = seed();
    let alone = [encoder_losses(seed), encoder_losses(seed + 1)];
    assert_ne!(alone[0], alone[1]);
    let threads = [seed, seed + 1].map(|seed| std::thread::spawn(move || encoder_losses(seed)));
    for (thread, alone) in threads.into_iter().zip(&alone) {
        let together = thread.join().expect("the thread trains");
        assert!(
            same_bits(&together, alone),
            "seed {seed}: {together:?}, alone {alone:?}"
        );
    }
}

/// Trains six steps; `travel` is applied to the model after the third.
fn losses_with(seed: u64, travel: impl Fn(Mlp<Fallback>) -> Mlp<Fallback>) -> (Vec<f32>, Vec<f32>) {
    let (mut optim, mut model) =
        attached::<Fallback, _>(&every_layer(seed), Mlp::new(&Default::default()), seed);
    let batches = samples::<Fallback, Mlp<Fallback>>(seed, 6);
    let mut losses = Vec::new();
    for half in batches.chunks(3) {
        let run = train(model, &mut optim, 1e-2, half);
        losses.extend(run.losses);
        let before = tag_of(&run.model.up.weight.val());
        model = travel(run.model);
        let after = tag_of(&model.up.weight.val());
        let (before, after) = (
            before.layer().expect("attached"),
            after.layer().expect("still attached"),
        );
        assert!(Arc::ptr_eq(before, after), "the layer went with its weight");
    }
    let thresholds = thresholds_of(&optim.layers_record());
    (losses, thresholds)
}

#[test]
fn a_model_that_moves_keeps_its_state() {
    let seed = seed();
    let device = Default::default();
    let stays = losses_with(seed, |model| model);
    // `to_device` is an operation of the graph, after which Burn's parameters are no leaves and train no more: only
    // `fork` is for training. The state stays on the weights, and the loss is the same.
    let moved = losses_with(seed, |model| {
        let sample = &samples::<Fallback, Mlp<Fallback>>(seed + 1, 1)[0];
        let before = floats(&model.loss(sample));
        let moved = model.clone().to_device(&device);
        assert!(
            same_bits(&before, &floats(&moved.loss(sample))),
            "seed {seed}: the loss after to_device"
        );
        let (old, new) = (
            tag_of(&model.down.weight.val()),
            tag_of(&moved.down.weight.val()),
        );
        assert!(
            Arc::ptr_eq(
                old.layer().expect("attached"),
                new.layer().expect("attached")
            ),
            "to_device lost the layer"
        );
        model
    });
    let forked = losses_with(seed, |model| model.fork(&device));
    assert!(
        same_bits(&stays.0[..3], &moved.0[..3]),
        "seed {seed}: to_device"
    );
    assert!(
        same_bits(&stays.0, &forked.0) && same_bits(&stays.1, &forked.1),
        "seed {seed}: fork"
    );
    assert!(
        stays.1.iter().any(|&threshold| threshold != 1.0),
        "thresholds moved: {:?}",
        stays.1
    );
}

/// q, k and v save their input once: one copy, held by the tag and by the three contexts.
#[test]
fn an_input_of_three_layers_is_saved_once() {
    let seed = seed();
    let device = Default::default();
    let (_optim, model) =
        attached::<Fallback, _>(&every_layer(seed), Three::new(32, 16, &device), seed);
    let x = tensor::<Fallback, 2>(&Rng::new(seed).normals(48 * 32, 1.0), [48, 32], &device);
    let y = model.q.forward(x.clone()) + model.k.forward(x.clone()) * model.v.forward(x.clone());
    let saved = copy_of(&x, Rounding::Stochastic);
    assert_eq!(
        Arc::strong_count(&saved),
        5,
        "the tag, q, k, v, and this test"
    );
    drop(y.sum().backward());
    assert_eq!(
        Arc::strong_count(&saved),
        2,
        "the backward pass used the contexts up: the tag, and this test"
    );
    // A reshape that shows the same matrix keeps the copy; an operation that changes the value does not.
    let reshaped = x.clone().reshape([3, 16, 32]);
    assert!(
        Arc::ptr_eq(&saved, &copy_of(&reshaped, Rounding::Stochastic)),
        "the copy was lost"
    );
    let other = tag_of(&(x * 1.0));
    assert!(
        !Arc::ptr_eq(&tag_of(&reshaped), &other),
        "another value has another tag"
    );
}

/// A weight is quantized once for each value that it takes, so once an optimizer step, accumulation or not.
#[test]
fn a_weight_is_quantized_once_an_optimizer_step() {
    let seed = seed();
    let device = Default::default();
    let (mut optim, mut model) =
        attached::<Fallback, _>(&every_layer(seed), One::new(32, 16, false, &device), seed);
    let mut rng = Rng::new(seed);
    let mut copies = Vec::new();
    for _step in 0..3 {
        let mut accumulator = burn::optim::GradientsAccumulator::new();
        for micro_step in 0..4 {
            let x = tensor::<Fallback, 2>(&rng.normals(16 * 32, 1.0), [16, 32], &device);
            let grads = model.linear.forward(x).sum().backward();
            accumulator.accumulate(&model, GradientsParams::from_grads(grads, &model));
            let copy = copy_of(&model.linear.weight.val(), Rounding::Nearest);
            if micro_step == 0 {
                copies.push(copy);
            } else {
                assert!(
                    Arc::ptr_eq(&copies[copies.len() - 1], &copy),
                    "micro step {micro_step} quantized again"
                );
            }
        }
        model = optim.step(1e-2, model, accumulator.grads());
    }
    assert!(
        !Arc::ptr_eq(&copies[0], &copies[1]) && !Arc::ptr_eq(&copies[1], &copies[2]),
        "a new weight, a new copy"
    );
}

/// A context holds no float copy of the input. The input's own memory is freed while the graph lives.
#[test]
fn saved_contexts_are_int8() {
    let seed = seed();
    let device = Default::default();
    let (_optim, model) =
        attached::<Fallback, _>(&every_layer(seed), One::new(32, 16, false, &device), seed);
    let x = tensor::<Fallback, 2>(&Rng::new(seed).normals(48 * 32, 1.0), [48, 32], &device);
    let y = model.linear.forward(x.clone());
    let saved = copy_of(&x, Rounding::Stochastic);
    let values = saved
        .values
        .as_ref()
        .or(saved.transposed.as_ref())
        .expect("a copy of the values");
    assert_eq!(values.dtype(), burn::tensor::DType::I8);
    let Scales::F32(scales) = &saved.scales else {
        panic!("scales of {:?}", saved.format.scale);
    };
    assert_eq!(
        scales.shape().num_elements(),
        3 * 2,
        "one for 16 x 16 values"
    );
    drop(y);
}

const CHILD: &str = "QUANT_TRAIN_MEMORY_CHILD";

/// Runs by itself in a child process, where no other test moves memory or tags.
///
/// Resident memory may grow by 4 MiB from step 100 to step 2,000: allocators keep some pages back, a leak of one 32 x
/// 16 FP32 matrix a step alone would be 3.9 MB, and each step makes some forty tensors.
#[test]
fn two_thousand_steps_leave_nothing_behind() {
    if std::env::var_os(CHILD).is_none() {
        let name = std::thread::current()
            .name()
            .expect("tests run in named threads")
            .to_owned();
        let child = std::process::Command::new(std::env::current_exe().expect("this binary"))
            .args(["--exact", &name, "--nocapture", "--test-threads", "1"])
            .env(CHILD, "1")
            .output()
            .expect("the child runs");
        let (out, err) = (
            String::from_utf8_lossy(&child.stdout),
            String::from_utf8_lossy(&child.stderr),
        );
        assert!(child.status.success(), "{out}\n{err}");
        assert!(
            out.contains("live tags"),
            "the child ran this test: {out}\n{err}"
        );
        return;
    }
    let seed = seed();
    let (mut optim, mut model) =
        attached::<Fallback, _>(&every_layer(seed), Mlp::new(&Default::default()), seed);
    let mut measure = |count: usize, model: Mlp<Fallback>| {
        let mut model = model;
        let mut rng = Rng::new(seed);
        for _ in 0..count {
            let loss = model.loss(&Mlp::<Fallback>::sample(&mut rng));
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optim.step(1e-3, model, grads);
        }
        model
    };
    model = measure(100, model);
    let before = (tag::live(), resident());
    model = measure(1900, model);
    let after = (tag::live(), resident());
    println!(
        "live tags {} -> {}, resident KiB {:?} -> {:?}",
        before.0, after.0, before.1, after.1
    );
    assert_eq!(
        before.0, after.0,
        "seed {seed}: live tags after 100 and after 2,000 steps"
    );
    if let (Some(before), Some(after)) = (before.1, after.1) {
        assert!(
            after <= before + 4 * 1024,
            "seed {seed}: resident memory went from {before} to {after} KiB"
        );
    }
    drop((model, optim));
    assert_eq!(tag::live(), 0, "seed {seed}: tags outlive the model");
}

/// Resident memory in KiB, on Linux.
fn resident() -> Option<usize> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: usize = statm.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * 4)
}

#[test]
fn the_inner_model_carries_no_state() {
    use burn::module::AutodiffModule;
    type Inner = <Fallback as AutodiffBackend>::InnerBackend;
    let device = Default::default();
    let (_optim, model) =
        attached::<Fallback, _>(&every_layer(1), One::new(32, 16, false, &device), 1);
    let valid: One<Inner> = model.valid();
    let TensorPrimitive::Float(primitive) = valid.linear.weight.val().into_primitive() else {
        panic!("a float tensor was expected");
    };
    assert!(primitive.tag().layer().is_none());
}
