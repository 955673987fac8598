//! A layer stays with its weight whatever Burn does to the module. A weight that no optimizer has named is not
//! quantized.

use std::sync::Arc;

use burn::{
    backend::{Autodiff, Flex},
    data::{
        dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher},
        dataset::InMemDataset,
    },
    lr_scheduler::constant::ConstantLr,
    module::{AutodiffModule, Module, ModuleMapper, Param},
    nn::{Linear, LinearConfig, LinearLayout},
    optim::{AdamWConfig, GradientsParams, Optimizer},
    record::{FullPrecisionSettings, NamedMpkFileRecorder},
    tensor::{
        Tensor, TensorPrimitive,
        backend::{AutodiffBackend, Backend},
        module::linear,
    },
    train::{
        InferenceStep, ItemLazy, Learner, SupervisedTraining, TrainOutput, TrainStep,
        metric::{Adaptor, LossInput},
    },
};
use burn_quant_train::{
    QuantTrain,
    layer::{LayerPolicy, in_lane},
    optim::{LayerBackend, QuantAdamWConfig},
    recipe::{FallbackInt8, Rounding},
};
use quant_train_tests::{
    Rng,
    data::{floats, same_bits, tensor},
    models::{Classifier, Mlp, One, with_weights_of},
    seed,
    train::{attached, every_layer, parameters_of, samples, train},
};

type T = QuantTrain<Autodiff<Flex>, FallbackInt8<f32, 16>>;

/// The path of the layer that a weight belongs to, and whether it is quantized.
fn layer_of(param: &Param<Tensor<T, 2>>) -> Option<(String, bool)> {
    let TensorPrimitive::Float(primitive) = param.val().into_primitive() else {
        panic!("a float tensor was expected");
    };
    let layer = T::tag(&primitive)?.layer()?.clone();
    Some((layer.path().to_owned(), layer.is_quantized()))
}

fn model(seed: u64) -> Mlp<T> {
    with_weights_of(Mlp::new(&Default::default()), seed)
}

#[track_caller]
fn assert_attached(what: &str, model: &Mlp<T>, quantized: bool) {
    for (param, path) in [(&model.up.weight, "up"), (&model.down.weight, "down")] {
        assert_eq!(
            layer_of(param),
            Some((path.to_owned(), quantized)),
            "{what}"
        );
    }
}

/// Clips every weight, as WGAN's critic needs it after each step.
struct Clip;

impl<A: AutodiffBackend> ModuleMapper<A> for Clip {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<A, D>>) -> Param<Tensor<A, D>> {
        let (id, tensor, mapper) = param.consume();
        let trained = tensor.is_require_grad();
        let mut tensor = Tensor::from_inner(tensor.inner().clamp(-0.3, 0.3));
        if trained {
            tensor = tensor.require_grad();
        }
        Param::from_mapped_value(id, tensor, mapper)
    }
}

/// Moves every weight towards those of another model, in module order.
struct Average(Vec<Vec<f32>>);

impl<A: AutodiffBackend> ModuleMapper<A> for Average {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<A, D>>) -> Param<Tensor<A, D>> {
        let other = self.0.remove(0);
        param.map(|mine| {
            let other = tensor::<A::InnerBackend, D>(&other, mine.dims(), &mine.device());
            Tensor::from_inner(mine.inner() * 0.9 + other * 0.1).require_grad()
        })
    }
}

/// Something that a training loop does to a model.
type Change = Box<dyn Fn(Mlp<T>) -> Mlp<T>>;

/// The changes that a training loop may make to a model between two steps.
fn changes(seed: u64) -> Vec<(&'static str, Change)> {
    let other = parameters_of::<T, _>(&model(seed + 1));
    let device = Default::default();
    vec![
        ("nothing", Box::new(|model| model)),
        ("clip", Box::new(|model: Mlp<T>| model.map(&mut Clip))),
        (
            "average",
            Box::new(move |model: Mlp<T>| model.map(&mut Average(other.clone()))),
        ),
        ("clone", Box::new(|model: Mlp<T>| model.clone())),
        ("fork", Box::new(move |model: Mlp<T>| model.fork(&device))),
        (
            "valid and train",
            Box::new(|model: Mlp<T>| model.valid().train::<T>()),
        ),
        (
            "load_record",
            Box::new(|model: Mlp<T>| {
                let record = model.clone().into_record();
                model.load_record(record)
            }),
        ),
        (
            "load_file",
            Box::new(|model: Mlp<T>| {
                let folder = tempfile::tempdir().expect("a temporary folder");
                let path = folder.path().join("model");
                let recorder = NamedMpkFileRecorder::<FullPrecisionSettings>::default();
                let saved = model.clone().save_file(path.clone(), &recorder);
                saved.expect("the model is written");
                let loaded = model.load_file(path, &recorder, &Default::default());
                loaded.expect("the model is read")
            }),
        ),
        (
            "a foreign optimizer",
            Box::new(move |model: Mlp<T>| {
                let mut adamw = AdamWConfig::new().init::<T, Mlp<T>>();
                let batch = samples::<T, Mlp<T>>(seed, 1);
                let gradients = model.loss(&batch[0]).backward();
                let gradients = GradientsParams::from_grads(gradients, &model);
                adamw.step(1e-3, model, gradients)
            }),
        ),
    ]
}

/// The policy goes on to hold, and thresholds go on to move.
#[test]
fn a_weight_keeps_its_layer_whatever_happens_to_the_module() {
    let seed = seed();
    for (what, change) in changes(seed) {
        let (mut optim, mut quantized) =
            attached::<T, Mlp<T>>(&every_layer(seed), model(seed), seed);
        let batches = samples::<T, Mlp<T>>(seed, 4);
        for batch in &batches {
            quantized = train(quantized, &mut optim, 1e-2, std::slice::from_ref(batch)).model;
            quantized = change(quantized);
            assert_attached(what, &quantized, true);
        }
        let moved = optim.layers_record().layers;
        let moved = moved.iter().all(|layer| layer.threshold() != Some(1.0));
        assert!(moved, "seed {seed}, {what}: thresholds stand");

        // A layer that the policy leaves alone stays so: the bits are Burn's own.
        let policy = LayerPolicy::all().min_elements(0).skip("*");
        let optim = every_layer(seed).with_policy(policy).init::<T, Mlp<T>>();
        let changed = change(optim.attach(model(seed)));
        assert_attached(what, &changed, false);
        let plain = with_weights_of(Mlp::<Flex>::new(&Default::default()), seed);
        if matches!(
            what,
            "nothing" | "clone" | "fork" | "load_record" | "load_file"
        ) {
            let ours = floats(&changed.logits(&batches[0]));
            assert!(
                same_bits(&ours, &floats(&plain.logits(&batches[0]))),
                "{what}"
            );
        }
    }
}

/// Attaching draws nothing: with one seed the weights are those that the model's first use draws by itself.
#[test]
fn attaching_leaves_the_order_of_lazy_draws() {
    let seed = seed();
    let device = Default::default();
    // The second layer of the module is used first.
    let weights = |attach: bool| {
        T::seed(&device, seed);
        let model = Mlp::<T>::new(&device);
        let model = match attach {
            true => every_layer(seed).init::<T, Mlp<T>>().attach(model),
            false => model,
        };
        let down = floats(&model.down.weight.val());
        assert_eq!(layer_of(&model.down.weight).is_some(), attach);
        (down, floats(&model.up.weight.val()))
    };
    let (with, without) = (weights(true), weights(false));
    assert!(
        same_bits(&with.0, &without.0) && same_bits(&with.1, &without.1),
        "seed {seed}"
    );
}

/// A weight whose parameter turns it on its way from and to a file keeps both: its mapper and its layer.
#[test]
fn a_parameter_with_a_mapper_of_its_own_keeps_it() {
    let seed = seed();
    let device = Default::default();
    let config = LinearConfig::new(24, 40).with_layout(LinearLayout::Col);
    let source = with_weights_of(config.init::<T>(&device), seed);
    let x = tensor::<T, 2>(&Rng::new(seed).normals(24, 1.0), [1, 24], &device);
    let expected = floats(&source.forward(x.clone()));
    let record = || source.clone().into_record();
    for drawn in [false, true] {
        let optim = every_layer(seed).init::<T, Linear<T>>();
        let model = optim.attach(config.init::<T>(&device));
        if drawn {
            let _ = model.weight.val();
        }
        // Attached twice, as a step does after a weight lost its layer.
        let model = optim.attach(model);
        let model = model.load_record(record());
        assert_eq!(
            layer_of(&model.weight),
            Some((String::from("weight"), true))
        );
        let got = floats(&model.valid().forward(x.clone().inner()));
        assert!(
            same_bits(&got, &expected),
            "seed {seed}: {got:?}, {expected:?}"
        );
        let written = model.into_record().weight.val();
        assert_eq!(
            floats(&written),
            floats(&record().weight.val()),
            "seed {seed}"
        );
    }
}

#[derive(Module, Debug)]
struct Shared<B: Backend> {
    first: Linear<B>,
    second: Linear<B>,
    own: Linear<B>,
}

#[test]
fn modules_that_share_a_weight_are_one_layer() {
    let seed = seed();
    let device = Default::default();
    let init = || {
        LinearConfig::new(16, 16)
            .with_bias(false)
            .init::<T>(&device)
    };
    let first = init();
    let model = Shared {
        second: first.clone(),
        first,
        own: init(),
    };
    let optim = every_layer(seed).init::<T, Shared<T>>();
    let model = optim.attach(model);
    let layers = optim.layers();
    assert_eq!(layers.len(), 2, "{layers:?}");
    assert_eq!((&*layers[0].path, &*layers[1].path), ("first", "own"));
    assert_eq!(layers[0].shared_by, ["second"]);
    assert_eq!(layers[0].to_string(), "first = second [16, 16]: quantized");
    assert_eq!(
        layer_of(&model.second.weight),
        layer_of(&model.first.weight)
    );

    // It is quantized only if it would be in every place.
    let config = every_layer(seed);
    let policy = LayerPolicy::all().min_elements(0).skip("second");
    let optim = config.with_policy(policy).init::<T, Shared<T>>();
    let _model = optim.attach(model);
    let decisions: Vec<bool> = optim
        .layers()
        .iter()
        .map(|it| it.decision.is_quantized())
        .collect();
    assert_eq!(decisions, [false, true]);
}

/// Neither a weight that no optimizer has named, nor an input whose gradient is asked for.
#[test]
fn what_no_optimizer_has_named_is_not_quantized() {
    let seed = seed();
    let device = Default::default();
    let mut rng = Rng::new(seed);
    let (x, w) = (rng.normals(40 * 200, 1.0), rng.normals(200 * 100, 1.0));
    let plain = tensor::<Flex, 2>(&x, [40, 200], &Default::default());
    let plain = floats(&plain.matmul(tensor::<Flex, 2>(&w, [200, 100], &Default::default())));
    let x = || tensor::<T, 2>(&x, [40, 200], &device).require_grad();
    let w = || tensor::<T, 2>(&w, [200, 100], &device).require_grad();
    assert!(
        same_bits(&floats(&x().matmul(w())), &plain),
        "seed {seed}: matmul"
    );
    assert!(
        same_bits(&floats(&linear(x(), w(), None)), &plain),
        "seed {seed}: linear"
    );
}

/// Training on one batch for ever: each step rounds X anew, so that the error of a draw does not become a bias.
#[test]
fn an_input_of_many_steps_is_rounded_anew_in_each() {
    let seed = seed();
    let device = Default::default();
    let (mut optim, mut model) =
        attached::<T, _>(&every_layer(seed), One::new(48, 16, false, &device), seed);
    let x = tensor::<T, 2>(&Rng::new(seed).normals(32 * 48, 1.0), [32, 48], &device);
    let saved = |x: &Tensor<T, 2>| {
        let TensorPrimitive::Float(primitive) = x.clone().into_primitive() else {
            panic!("a float tensor was expected");
        };
        let copies = T::tag(&primitive).expect("a tag").copies();
        let mut stochastic = copies
            .into_iter()
            .filter(|(key, _)| key.rounding == Rounding::Stochastic);
        let (_, copy) = stochastic.next().expect("a saved copy");
        assert!(stochastic.next().is_none(), "an older copy makes room");
        copy
    };
    let mut copies = Vec::new();
    for _ in 0..5 {
        let y = model.linear.forward(x.clone());
        copies.push(saved(&x));
        let gradients = GradientsParams::from_grads(y.sum().backward(), &model);
        model = optim.step(1e-3, model, gradients);
    }
    for (index, copy) in copies.iter().enumerate() {
        for other in &copies[..index] {
            assert!(
                !Arc::ptr_eq(copy, other),
                "seed {seed}: step {index} used an older copy"
            );
        }
    }
    // Within a step one copy serves.
    let _ = model.linear.forward(x.clone());
    let first = saved(&x);
    let _ = model.linear.forward(x.clone());
    assert!(Arc::ptr_eq(&first, &saved(&x)), "seed {seed}");
}

/// Two threads that share a model, each with a batch of its own: in lanes the gradients do not depend on who is first.
#[test]
fn lanes_make_threads_independent_of_their_order() {
    let seed = seed();
    let device = Default::default();
    let gradients = |order: [u32; 2]| {
        let (_optim, model) =
            attached::<T, _>(&every_layer(seed), One::new(48, 16, false, &device), seed);
        let mut of_lane = [Vec::new(), Vec::new()];
        for lane in order {
            of_lane[lane as usize] = std::thread::scope(|threads| {
                let model = &model;
                let worker = threads.spawn(move || {
                    in_lane(lane, || {
                        let mut rng = Rng::new(seed + u64::from(lane));
                        let x = rng.normals(32 * 48, 1.0);
                        let x = tensor::<T, 2>(&x, [32, 48], &Default::default());
                        let grads = model.linear.forward(x).sum().backward();
                        floats(&model.linear.weight.grad(&grads).expect("dW"))
                    })
                });
                worker.join().expect("the thread computes")
            });
        }
        of_lane
    };
    let (forth, back) = (gradients([0, 1]), gradients([1, 0]));
    for lane in 0..2 {
        assert!(
            same_bits(&forth[lane], &back[lane]),
            "seed {seed}, lane {lane}"
        );
    }
}

// Burn's own learner.

#[derive(Module, Debug)]
struct Learned<B: Backend> {
    mlp: Mlp<B>,
}

type Batch = quant_train_tests::models::Sample;

#[derive(Debug)]
struct Loss<A: Backend>(Tensor<A, 1>);

impl<A: Backend> ItemLazy for Loss<A> {
    type ItemSync = Loss<Flex>;

    fn sync(self) -> Loss<Flex> {
        Loss(Tensor::from_data(self.0.into_data(), &Default::default()))
    }
}

impl Adaptor<LossInput<Flex>> for Loss<Flex> {
    fn adapt(&self) -> LossInput<Flex> {
        LossInput::new(self.0.clone())
    }
}

impl TrainStep for Learned<T> {
    type Input = Batch;
    type Output = Loss<T>;

    fn step(&self, batch: Batch) -> TrainOutput<Loss<T>> {
        let loss = self.mlp.loss(&batch);
        TrainOutput::new(self, loss.clone().backward(), Loss(loss))
    }
}

impl InferenceStep for Learned<<T as AutodiffBackend>::InnerBackend> {
    type Input = Batch;
    type Output = Loss<<T as AutodiffBackend>::InnerBackend>;

    fn step(&self, batch: Batch) -> Self::Output {
        Loss(self.mlp.loss(&batch))
    }
}

struct Take;

impl<A: Backend> Batcher<A, Batch, Batch> for Take {
    fn batch(&self, mut items: Vec<Batch>, _device: &A::Device) -> Batch {
        items.pop().expect("batches of one")
    }
}

fn loader<A: Backend>(seed: u64) -> Arc<dyn DataLoader<A, Batch>> {
    let batches = samples::<Flex, Mlp<Flex>>(seed, 6);
    DataLoaderBuilder::new(Take)
        .batch_size(1)
        .build(InMemDataset::new(batches))
}

/// Trains up to an epoch in a folder with checkpoints, from the checkpoint of another epoch if there is one.
fn learn(seed: u64, folder: &std::path::Path, from: Option<usize>, epochs: usize) -> Vec<Vec<f32>> {
    // A resumed program makes model and optimizer anew, from other random numbers.
    let start = seed + from.unwrap_or(0) as u64;
    let config = QuantAdamWConfig::new()
        .with_policy(LayerPolicy::all().min_elements(0).skip("mlp.down"))
        .with_seed(Some(start));
    let optim = config.init::<T, Learned<T>>();
    let model = optim.attach(Learned { mlp: model(start) });
    let training = SupervisedTraining::new(folder, loader::<T>(seed), loader(seed))
        .with_file_checkpointer(NamedMpkFileRecorder::<FullPrecisionSettings>::default())
        .with_application_logger(None)
        .num_epochs(epochs)
        .renderer(quant_train_tests::train::Silent);
    let training = match from {
        Some(epoch) => training.checkpoint(epoch),
        None => training,
    };
    let result = training.launch(Learner::new(model, optim, ConstantLr::from(1e-2)));
    parameters_of::<<T as AutodiffBackend>::InnerBackend, _>(&result.model)
}

#[test]
fn a_resumed_learner_is_exact() {
    let seed = seed();
    let [whole, parts] = [(); 2].map(|()| tempfile::tempdir().expect("a temporary folder"));
    let uninterrupted = learn(seed, whole.path(), None, 3);
    learn(seed, parts.path(), None, 1);
    let resumed = learn(seed, parts.path(), Some(1), 3);
    for (index, (a, b)) in uninterrupted.iter().zip(&resumed).enumerate() {
        assert!(
            same_bits(a, b),
            "seed {seed}: parameter {index} of the resumed run"
        );
    }
}
