//! Burn's own AdamW on one large parameter.

use anyhow::{Context, Result};
use burn::{
    backend::{Autodiff, Cuda, cuda::CudaDevice},
    module::{Module, Param},
    optim::{AdamWConfig, GradientsParams, Optimizer},
    tensor::{Tensor, TensorData, backend::Backend},
};

use super::HYPERPARAMETERS;
use crate::{gpu::Gpu, results::Spread, timing::Sampling};

/// A model of one parameter `[n]`.
#[derive(Module, Debug)]
struct Model<B: Backend> {
    weight: Param<Tensor<B, 1>>,
}

/// The time of a step on `n` FP32 parameters, with the gradients given and each step waited for.
///
/// Of steps that follow each other with nothing between, Burn's fusion can make one kernel, as no training loop lets
/// it.
pub fn measure(gpu: &Gpu, n: usize) -> Result<Spread> {
    let device = CudaDevice::default();
    let mut random = gpu.random();
    let mut tensor = |deviation| {
        let data = TensorData::new(random.tiled(n, deviation), [n]);
        Tensor::<Cuda, 1>::from_data(data, &device)
    };
    let weight = Param::from_tensor(Tensor::<Autodiff<Cuda>, 1>::from_inner(tensor(0.02)));
    let (id, gradient) = (weight.id, tensor(1e-3));
    let mut optimizer = AdamWConfig::new()
        .with_beta_1(HYPERPARAMETERS.beta_1)
        .with_beta_2(HYPERPARAMETERS.beta_2)
        .with_epsilon(HYPERPARAMETERS.epsilon)
        .with_weight_decay(HYPERPARAMETERS.weight_decay)
        .init();
    let mut model = Some(Model { weight });
    let sync = || <Cuda>::sync(&device).context("the GPU failed");
    let step = || {
        let mut gradients = GradientsParams::new();
        gradients.register::<Cuda, 1>(id, gradient.clone());
        // Moved in and out, so that the optimizer is the only owner of the weights, as in training.
        let stepped = model
            .take()
            .map(|model| optimizer.step(HYPERPARAMETERS.learning_rate, model, gradients));
        model = stepped;
        sync()
    };
    let times = Sampling::LONG.time(step, sync)?;
    gpu.client.memory_cleanup();
    Ok(times)
}
