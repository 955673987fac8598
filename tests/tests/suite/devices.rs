//! Data parallel training: a model on one device and its fork on another share the state of their layers.

use burn::{
    backend::{Autodiff, Cuda, cuda::CudaDevice},
    module::Module,
    optim::{GradientsParams, MultiGradientsParams, Optimizer},
    tensor::backend::{Backend, DeviceOps},
};
use burn_quant_train::{
    QuantTrain, layer::LayersRecord, optim::QuantOptimizer, recipe::FallbackInt8,
};
use quant_train_tests::{
    data::{floats, same_bits},
    models::{Classifier, Mlp, Sample},
    seed,
    train::{attached, every_layer, samples},
};

type B = QuantTrain<Autodiff<Cuda>, FallbackInt8<f32, 16>>;

/// Thresholds and rates of both layers.
fn state_of(record: &LayersRecord) -> Vec<f32> {
    let layers = record.layers.iter();
    layers
        .flat_map(|layer| [layer.threshold(), layer.rate()])
        .flatten()
        .collect()
}

/// Takes a step on two batches, each on its device, and returns the losses before it.
fn step<O: Optimizer<Mlp<B>, B>>(
    optim: &mut QuantOptimizer<O, B>,
    model: Mlp<B>,
    batches: &[Sample],
    devices: [&CudaDevice; 2],
) -> (Mlp<B>, Vec<f32>) {
    let mut losses = Vec::new();
    let mut all = MultiGradientsParams::default();
    for (batch, device) in batches.iter().zip(devices) {
        let copy = model.clone().fork(device);
        let loss = copy.loss(batch);
        assert_eq!(&loss.device(), device);
        losses.extend(floats(&loss));
        let gradients = GradientsParams::from_grads(loss.backward(), &copy);
        all.grads.push((gradients, device.id()));
    }
    (optim.step_multi(1e-2, model, all), losses)
}

/// Two devices count together as one counts alone, and the sum moves the thresholds of both.
///
/// CubeCL moves tensors between devices on CUDA alone.
#[test]
#[ignore = "needs two CUDA devices: scripts/gpu run devices"]
fn a_fork_on_another_device_shares_the_layers() {
    let seed = seed();
    let [home, other] = &[0, 1].map(CudaDevice::new);
    <B as Backend>::seed(home, seed);
    let batches = samples::<B, Mlp<B>>(seed, 4);
    let run = |devices: [&CudaDevice; 2]| {
        let (mut optim, mut model) = attached::<B, _>(&every_layer(seed), Mlp::new(home), seed);
        let mut states = Vec::new();
        let mut losses = Vec::new();
        for batches in batches.chunks(2) {
            let (stepped, before) = step(&mut optim, model, batches, devices);
            model = stepped;
            losses.push(before);
            states.push(state_of(&optim.layers_record()));
        }
        let elsewhere = model.clone().fork(other);
        let after = [&model, &elsewhere].map(|model| floats(&model.loss(&batches[0])));
        (states, losses, after)
    };
    let (one, one_losses, _) = run([home, home]);
    let (two, two_losses, after) = run([home, other]);

    // Before the first step nothing was rounded at random: the numbers of both runs are the same.
    assert!(
        same_bits(&one_losses[0], &two_losses[0]),
        "seed {seed}: {one_losses:?} {two_losses:?}"
    );
    assert!(same_bits(&one[0], &two[0]), "seed {seed}: {one:?} {two:?}");
    assert!(
        one[0].iter().any(|&value| value != 1.0),
        "seed {seed}: thresholds moved, {one:?}"
    );
    // From the second step on the gradients differ by their random numbers, as those of two runs on one device do, and
    // no device is behind the other.
    assert!(
        one[1] != one[0] && two[1] != two[0],
        "seed {seed}: {one:?} {two:?}"
    );
    assert!(same_bits(&after[0], &after[1]), "seed {seed}: {after:?}");
}
