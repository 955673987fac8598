//! Layers that threads, models, optimizers and records share.

use std::{collections::BTreeMap, sync::mpsc, time::Duration};

use burn::{
    backend::{Autodiff, Flex},
    module::{AutodiffModule, Module, Param},
    optim::{GradientsParams, Optimizer},
    record::{BinBytesRecorder, FullPrecisionSettings, Recorder},
    tensor::{Tensor, TensorPrimitive},
};
use burn_quant_train::{
    QuantTrain,
    layer::{LayersRecord, in_lane},
    optim::{AdamWRecord, LayerBackend, QuantRecord},
    recipe::{FallbackInt8, THRESHOLD},
};
use quant_train_tests::{
    Rng,
    data::{floats, same_bits, tensor},
    models::{Classifier, Mlp, One, Three},
    seed,
    train::{attached, every_layer, samples, train, transplant},
};
use rayon::prelude::*;

type T = QuantTrain<Autodiff<Flex>, FallbackInt8<f32, 16>>;

/// The path of the layer that a weight belongs to, and the seed of its optimizer.
fn layer_of(param: &Param<Tensor<T, 2>>) -> Option<(String, u64)> {
    let TensorPrimitive::Float(primitive) = param.val().into_primitive() else {
        panic!("a float tensor was expected");
    };
    let layer = T::tag(&primitive)?.layer()?;
    Some((layer.path().to_owned(), layer.bank().seed()))
}

fn named(path: &str, seed: u64) -> Option<(String, u64)> {
    Some((path.to_owned(), seed))
}

fn thresholds(record: &LayersRecord) -> Vec<Option<f32>> {
    record
        .layers
        .iter()
        .map(|layer| layer.threshold())
        .collect()
}

/// Burn's concatenation lets go of its inputs before it is in the graph, and takes its time with large ones. A step
/// before has taken the parameter out of the graph.
#[test]
fn backward_passes_of_other_threads_take_no_gradients() {
    const COUNT: usize = 1 << 21;
    let parameter = |count| Tensor::<T, 1>::ones([count], &Default::default()).require_grad();
    let steps = std::thread::spawn(move || {
        let x = parameter(COUNT);
        let gradient = || {
            let both = vec![x.clone().mul_scalar(2.0), x.clone().mul_scalar(3.0)];
            x.grad(&Tensor::cat(both, 0).sum().backward())
        };
        let is_right = |_| gradient().is_some_and(|it| it.equal_elem(5.0).all().into_scalar());
        (0..10).map(is_right).collect::<Vec<bool>>()
    });
    while !steps.is_finished() {
        parameter(1).mul_scalar(2.0).backward();
    }
    let found = steps.join().expect("ten steps");
    assert_eq!(found, [true; 10]);
}

/// A worker of the pool that waits for its kernel takes up another run of the layer. Both count their blocks.
#[test]
fn layers_run_in_tasks_of_a_pool() {
    const RUNS: u32 = 32;
    let seed = seed();
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let device = Default::default();
        // About half of all blocks exceed the first threshold.
        let x = Rng::new(seed).normals(512 * 512, 0.36);
        let record = |parallel: bool| {
            let model = One::<T>::new(512, 512, false, &device);
            let (mut optim, model) = attached::<T, _>(&every_layer(seed), model, seed);
            let run = |lane| {
                in_lane(lane, || {
                    let x = tensor::<T, 2>(&x, [512, 512], &Default::default());
                    floats(&model.linear.forward(x))
                })
            };
            let outputs: Vec<Vec<f32>> = match parallel {
                true => (0..RUNS).into_par_iter().map(run).collect(),
                false => (0..RUNS).map(run).collect(),
            };
            optim.step(1e-3, model.clone(), GradientsParams::new());
            (outputs, optim.layers_record().layers.remove(0).slots)
        };
        sender.send((record(true), record(false))).ok();
    });
    let (parallel, alone) = receiver
        .recv_timeout(Duration::from_secs(300))
        .unwrap_or_else(|_| panic!("seed {seed}: the tasks wait for each other"));
    assert!(parallel.0 == alone.0, "seed {seed}: outputs");
    assert_eq!(parallel.1, alone.1, "seed {seed}: thresholds and rates");
    let rate = alone.1["threshold.rate"][0];
    assert!(0.01 < rate && rate < 0.99, "seed {seed}: a rate of {rate}");
}

/// dW of a layer, where `between` runs on the same X before it.
fn gradient_after(seed: u64, between: impl Fn(&Three<T>, Tensor<T, 2>)) -> Vec<f32> {
    let device = Default::default();
    let (_optim, model) = attached::<T, _>(&every_layer(seed), Three::new(32, 16, &device), seed);
    let x = tensor::<T, 2>(&Rng::new(seed).normals(48 * 32, 1.0), [48, 32], &device);
    let q = model.q.forward(x.clone());
    between(&model, x.clone());
    let k = model.k.forward(x);
    floats(
        &model
            .k
            .weight
            .grad(&(q + k).sum().backward())
            .expect("tracked"),
    )
}

#[test]
fn readers_of_one_input_keep_their_draws() {
    let seed = seed();
    let alone = gradient_after(seed, |_, _| ());
    let lane = gradient_after(seed, |model, x| {
        in_lane(1, || model.q.forward(x));
    });
    assert!(same_bits(&alone, &lane), "seed {seed}: another lane");
    let model = gradient_after(seed, |_, x| {
        let other = Three::new(32, 16, &Default::default());
        let (_optim, other) = attached::<T, _>(&every_layer(seed + 1), other, seed + 1);
        other.q.forward(x);
    });
    assert!(same_bits(&alone, &model), "seed {seed}: another model");
}

/// Outputs of five steps' passes, and the layers' slots, where each reader of an input has it as `to_reader` gives it.
fn five_steps(seed: u64, to_reader: impl Fn(&Tensor<T, 2>) -> Tensor<T, 2>) -> Steps {
    let device = Default::default();
    let model = Three::new(64, 32, &device);
    let (mut optim, model) = attached::<T, _>(&every_layer(seed), model, seed);
    let mut rng = Rng::new(seed);
    let mut outputs = Vec::new();
    for _ in 0..5 {
        // Two micro-batches.
        for _ in 0..2 {
            let x = tensor::<T, 2>(&rng.normals(96 * 64, 0.36), [96, 64], &device);
            let layers = [&model.q, &model.k, &model.v];
            outputs.push(layers.map(|layer| floats(&layer.forward(to_reader(&x)))));
        }
        optim.step(1e-3, model.clone(), GradientsParams::new());
    }
    let layers = optim.layers_record().layers;
    (
        outputs,
        layers.into_iter().map(|layer| layer.slots).collect(),
    )
}

type Steps = (Vec<[Vec<f32>; 3]>, Vec<BTreeMap<String, Vec<f32>>>);

/// An input is quantized with fallback once for all of its readers, and all of them count what fell back: outputs,
/// thresholds and rates are those of readers that each quantize it.
#[test]
fn readers_of_one_input_share_what_falls_back() {
    let seed = seed();
    let shared = five_steps(seed, Tensor::clone);
    let apart = five_steps(seed, |x| {
        tensor::<T, 2>(&floats(x), x.dims(), &Default::default())
    });
    assert!(shared.0 == apart.0, "seed {seed}: outputs");
    assert_eq!(shared.1, apart.1, "seed {seed}: thresholds and rates");
    for slots in &shared.1 {
        let (rate, threshold) = (slots["threshold.rate"][0], slots[THRESHOLD][0]);
        assert!(0.01 < rate && rate < 0.99, "seed {seed}: a rate of {rate}");
        assert_ne!(threshold, 1.0, "seed {seed}: it moved");
    }
}

#[test]
fn attaching_once_more_gives_a_validated_model_its_load_mapper_back() {
    let seed = seed();
    let device = Default::default();
    let (optim, model) = attached::<T, _>(&every_layer(seed), Mlp::<T>::new(&device), seed);
    let kept = model.clone();
    let model = optim.attach(model.valid().train::<T>());
    let model = transplant::<_, T, _, _>(&kept, model, &device);
    assert_eq!(layer_of(&model.up.weight), named("up", seed));
}

/// The last one attached has the layers, and load mappers do not pile up.
#[test]
fn two_optimizers_step_one_model() {
    let seed = seed();
    let device = Default::default();
    let (mut first, model) = attached::<T, _>(&every_layer(seed), Mlp::<T>::new(&device), seed);
    let mut second = every_layer(seed + 1).init::<T, Mlp<T>>();
    let mut model = second.attach(model);
    let batch = &samples::<T, Mlp<T>>(seed, 1)[0];
    // As many mappers, one in another, would end the stack.
    for _ in 0..6_000 {
        let mut gradients = model.loss(batch).backward();
        let of_up = GradientsParams::from_params(&mut gradients, &model, &[model.up.weight.id]);
        let rest = GradientsParams::from_grads(gradients, &model);
        model = first.step(1e-4, model, of_up);
        model = second.step(1e-4, model, rest);
    }
    assert_eq!(layer_of(&model.up.weight), named("up", seed + 1));
    let [idle, moved] = [&first, &second].map(|optim| thresholds(&optim.layers_record()));
    assert!(
        idle.iter().all(|it| *it == Some(1.0)) && moved.iter().all(|it| *it != Some(1.0)),
        "seed {seed}: {idle:?} {moved:?}"
    );
    // Without its owner a layer is free for the optimizer that steps.
    drop(second);
    let gradients = GradientsParams::from_grads(model.loss(batch).backward(), &model);
    let model = first.step(1e-4, model, gradients);
    let kept = model.clone();
    drop(model);
    assert_eq!(layer_of(&kept.down.weight), named("down", seed));
}

/// As Burn's data parallel training does it: each worker has a clone, and all step by the same gradients.
#[test]
fn clones_side_by_side_end_a_step_once() {
    let seed = seed();
    let device = Default::default();
    let (mut first, mut model) = attached::<T, _>(&every_layer(seed), Mlp::<T>::new(&device), seed);
    let mut second = first.clone();
    let mut fork = model.clone().fork(&device);
    for (step, batch) in samples::<T, Mlp<T>>(seed, 5).iter().enumerate() {
        let gradients =
            |model: &Mlp<T>| GradientsParams::from_grads(model.loss(batch).backward(), model);
        let both = [gradients(&model), gradients(&fork)];
        let [of_model, of_fork] = both;
        // Who is first does not matter.
        if step % 2 == 0 {
            model = first.step(1e-3, model, of_model);
            fork = second.step(1e-3, fork, of_fork);
        } else {
            fork = second.step(1e-3, fork, of_fork);
            model = first.step(1e-3, model, of_model);
        }
        assert_eq!(first.layers_record().step, step as u64 + 1, "seed {seed}");
    }
    // A clone that goes on alone steps each time.
    for step in 5..8 {
        let gradients = GradientsParams::from_grads(
            model.loss(&samples::<T, Mlp<T>>(seed, 1)[0]).backward(),
            &model,
        );
        model = first.step(1e-3, model, gradients);
        assert_eq!(second.layers_record().step, step + 1, "seed {seed}");
    }
}

#[test]
fn a_record_of_no_model_leaves_the_seed_alone() {
    let seed = seed();
    let fresh = || every_layer(seed).init::<T, Mlp<T>>();
    let optim = fresh().load_record(fresh().to_record());
    let _model = optim.attach(Mlp::<T>::new(&Default::default()));
    assert_eq!(optim.layers_record().seed, seed);
}

#[test]
fn a_record_of_the_present_step_starts_it_anew() {
    let seed = seed();
    let batches = samples::<T, Mlp<T>>(seed, 3);
    let run = |tried: bool| {
        let model = Mlp::<T>::new(&Default::default());
        let (optim, model) = attached::<T, _>(&every_layer(seed), model, seed);
        let (record, weights) = (optim.to_record(), model.clone().into_record());
        if tried {
            model.loss(&batches[0]).backward();
        }
        let mut optim = optim.load_record(record);
        train(model.load_record(weights), &mut optim, 1e-2, &batches).losses
    };
    let (plain, tried) = (run(false), run(true));
    assert!(
        same_bits(&plain, &tried),
        "seed {seed}: {plain:?} {tried:?}"
    );
}

#[test]
fn a_value_of_two_layers_belongs_to_neither() {
    let seed = seed();
    let device = Default::default();
    let (optim, mut model) =
        attached::<T, _>(&every_layer(seed), Three::new(16, 16, &device), seed);
    let q = model.q.weight.val().inner();
    let mixed = |k: Tensor<T, 2>| Tensor::from_inner(q.clone() * 0.1 + k.inner() * 0.9);
    model.k.weight = model.k.weight.map(|k| mixed(k).require_grad());
    assert_eq!(layer_of(&model.k.weight), None, "seed {seed}");
    assert_eq!(layer_of(&optim.attach(model).k.weight), named("k", seed));
}

#[test]
#[should_panic(expected = "load it with the build that wrote it")]
fn records_of_later_versions_are_refused() {
    let device = Default::default();
    let (optim, _model) = attached::<T, _>(&every_layer(1), Mlp::<T>::new(&device), 1);
    let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
    let load = |bytes| {
        let record: Result<QuantRecord<AdamWRecord>, _> =
            Recorder::<T>::load(&recorder, bytes, &device);
        record.expect("a record")
    };
    let mut bytes: Vec<u8> =
        Recorder::<T>::record(&recorder, optim.to_record(), ()).expect("recorded");
    load(bytes.clone());
    let version = 0x7175_616e_7400_0002u64;
    let orders = [version.to_le_bytes(), version.to_be_bytes()];
    let at = bytes
        .windows(8)
        .position(|it| orders.iter().any(|order| it == order));
    let at = at.expect("the version is in the record");
    let last = bytes[at..at + 8].iter_mut().find(|byte| **byte == 2);
    *last.expect("version 2") = 3;
    load(bytes);
}

#[test]
#[should_panic(expected = "where one positive finite threshold belongs")]
fn damaged_thresholds_are_refused() {
    let (optim, _model) = attached::<T, _>(&every_layer(1), Mlp::<T>::new(&Default::default()), 1);
    let mut record = optim.to_record();
    let bad = Rng::new(seed()).pick(&[f32::NAN, -3.0, 0.0, f32::INFINITY]);
    record.layers.layers[0]
        .slots
        .insert(THRESHOLD.into(), vec![bad]);
    let _ = optim.load_record(record);
}

#[test]
#[should_panic(expected = "where one finite move belongs")]
fn damaged_moves_of_thresholds_are_refused() {
    let (optim, _model) = attached::<T, _>(&every_layer(1), Mlp::<T>::new(&Default::default()), 1);
    let mut record = optim.to_record();
    let bad = Rng::new(seed()).pick(&[f32::NAN, f32::NEG_INFINITY, f32::INFINITY]);
    record.layers.layers[0]
        .slots
        .insert("threshold.move".into(), vec![bad]);
    let _ = optim.load_record(record);
}
