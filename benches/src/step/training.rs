//! Whole training steps of the model of `pretrain`: forward and backward pass, and AdamW.

use anyhow::{Context, Result, ensure};
use burn::{
    backend::Autodiff,
    module::{AutodiffModule, Module, ModuleMapper, Param},
    optim::{AdamWConfig, GradientsParams, Optimizer},
    tensor::{
        ElementConversion, FloatDType, Int, Tensor, TensorData,
        backend::{AutodiffBackend, Backend},
    },
};
use burn_quant_train::{QuantTrain, data::DataBackend, recipe::Recipe};
use examples::{
    args::{Checkpointing, Optimizer as Moments},
    data::Batch,
    memory::{LiveBytes, saved_activations},
    model::{Decoder, DecoderConfig, VOCABULARY},
};

use super::contender::Contender;
use crate::{random::Random, results::TrainingSpeed, timing::Sampling};

const LEARNING_RATE: f64 = 1e-3;

/// A backend that trains, and the optimizer that belongs to it.
pub trait Trainer: Contender {
    /// AdamW with these moments, or with those that the backend's own AdamW keeps.
    fn optimizer<M: AutodiffModule<Self>>(
        model: M,
        moments: Moments,
    ) -> (M, impl Optimizer<M, Self>);
}

impl<B: DataBackend> Trainer for Autodiff<B> {
    fn optimizer<M: AutodiffModule<Self>>(model: M, _: Moments) -> (M, impl Optimizer<M, Self>) {
        (model, AdamWConfig::new().init())
    }
}

impl<B: DataBackend, R: Recipe> Trainer for QuantTrain<Autodiff<B>, R> {
    fn optimizer<M: AutodiffModule<Self>>(
        model: M,
        moments: Moments,
    ) -> (M, impl Optimizer<M, Self>) {
        let optimizer = moments.config().init::<Self, M>();
        (optimizer.attach(model), optimizer)
    }
}

/// Gives every parameter a dtype.
struct Cast(FloatDType);

impl<B: Backend> ModuleMapper<B> for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        // A cast of a tracked tensor is no parameter any more, but a value computed from one.
        param.map(|tensor| tensor.cast(self.0).detach().require_grad())
    }
}

/// The counters that tell how much memory a training takes.
pub struct Gauges<'a, B: Backend> {
    /// Bytes of the tensors that live.
    pub live: LiveBytes<'a, B>,
    /// Bytes that this program has taken from the device; none where that cannot be told.
    pub taken: &'a dyn Fn() -> Result<Option<u64>>,
}

/// A model and how it is trained.
#[derive(Debug, Clone)]
pub struct Training {
    /// Its name in results.
    pub name: String,
    /// Its shape.
    pub model: DecoderConfig,
    /// Sequences in a batch.
    pub batch: usize,
    /// Tokens in a sequence.
    pub sequence: usize,
    /// Which parts of the model run again in the backward pass.
    pub checkpointing: Checkpointing,
    /// The moments of the recipes' AdamW.
    pub moments: Moments,
    /// Whether to tell the bytes that wait between the passes, which holds those of two forward passes at once.
    pub with_held: bool,
}

impl Training {
    /// The time of a step, steps following each other without waiting, on random tokens, and the memory of it.
    ///
    /// # Errors
    ///
    /// The device failed, or the loss did not fall.
    ///
    /// # Panics
    ///
    /// If the device did not run an operation of a recipe, as where its memory runs out.
    pub fn time<B: Trainer>(
        &self,
        sampling: Sampling,
        parameters: FloatDType,
        random: &mut Random,
        device: &B::Device,
        memory: &Gauges<'_, B>,
    ) -> Result<TrainingSpeed> {
        let model = self.model.init::<B>(device).map(&mut Cast(parameters));
        let count = model.num_params();
        // For Burn alone a block is a call.
        let checkpointing = B::row().map_or(Checkpointing::None, |_| self.checkpointing);
        let model = model.with_checkpointing(checkpointing == Checkpointing::Layers);
        let (model, mut optimizer) = B::optimizer(model, self.moments);
        let batch = self.tokens::<B>(random, device);
        let mut step = |model: Decoder<B>| {
            let loss = model.loss(batch.clone());
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            (
                optimizer.step(LEARNING_RATE, model, gradients),
                loss.inner(),
            )
        };
        // Of training steps: Burn keeps what a loss saved until the next backward pass, here beside what a step saves.
        let (model, loss) = step(model);
        let before: f32 = loss.into_scalar().elem();
        let mut trained = Some(model);
        let times = sampling.time(
            || {
                let model = trained.take().context("a step failed before this one")?;
                trained = Some(step(model).0);
                Ok(())
            },
            || B::sync(device).context("the device failed"),
        )?;
        let peak_bytes = (memory.taken)()?;
        let (model, loss) = step(trained.context("the last step failed")?);
        let after: f32 = loss.into_scalar().elem();
        let activation_bytes = self.with_held.then(|| {
            let held = saved_activations(&model, &batch, device, memory.live);
            // Says whether memory ran out while that was measured.
            step(model);
            held
        });
        ensure!(after < before, "the loss went from {before} to {after}");
        let tokens = self.batch * self.sequence;
        Ok(TrainingSpeed {
            subject: B::subject(),
            model: self.name.clone(),
            parameters: count,
            batch: self.batch,
            sequence: self.sequence,
            step: times,
            tokens_per_s: 1e3 * tokens as f64 / times.median_ms,
            contexts: None,
            checkpointing,
            moments: B::row().map(|_| self.moments),
            activation_bytes,
            peak_bytes,
        })
    }

    fn tokens<B: AutodiffBackend>(&self, random: &mut Random, device: &B::Device) -> Batch<B> {
        let mut draw = || {
            let tokens: Vec<i32> = (0..self.batch * self.sequence)
                .map(|_| random.below(VOCABULARY) as i32)
                .collect();
            let data = TensorData::new(tokens, [self.batch, self.sequence]);
            Tensor::<B, 2, Int>::from_data(data, device)
        };
        Batch {
            inputs: draw(),
            targets: draw(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use burn::backend::Flex;
    use burn_quant_train::recipe::FallbackInt8;

    use super::*;
    use crate::results::Subject;

    #[test]
    fn burn_and_the_decorator_train() {
        const QUICK: Sampling = Sampling {
            samples: 1,
            sample: Duration::from_micros(1),
            warm_up: Duration::ZERO,
        };
        let training = Training {
            name: String::from("one layer"),
            model: DecoderConfig::new(128, 384, 2, 1, 16),
            batch: 2,
            sequence: 16,
            checkpointing: Checkpointing::Layers,
            moments: Moments::Fp8Adamw,
            with_held: true,
        };
        fn time<B: Trainer<Device: Default>>(training: &Training) -> TrainingSpeed {
            training
                .time::<B>(
                    QUICK,
                    FloatDType::F32,
                    &mut Random::new(3),
                    &Default::default(),
                    &Gauges {
                        live: &|_| 7,
                        taken: &|| Ok(Some(9)),
                    },
                )
                .unwrap()
        }
        let burn = time::<Autodiff<Flex>>(&training);
        let int8 = time::<QuantTrain<Autodiff<Flex>, FallbackInt8<f32>>>(&training);
        assert_eq!(
            [burn.subject, int8.subject],
            [Subject::Burn, Subject::recipe("fallback-int8")]
        );
        assert_eq!(
            [burn.checkpointing, int8.checkpointing],
            [Checkpointing::None, Checkpointing::Layers]
        );
        assert_eq!(
            [burn.moments, int8.moments],
            [None, Some(Moments::Fp8Adamw)]
        );
        assert_eq!(burn.parameters, int8.parameters);
        assert_eq!((burn.activation_bytes, burn.peak_bytes), (Some(0), Some(9)));
        let unheld = Training {
            with_held: false,
            ..training
        };
        assert_eq!(time::<Autodiff<Flex>>(&unheld).activation_bytes, None);
        assert!(burn.tokens_per_s > 0.0 && int8.step.median_ms > 0.0);
    }
}
