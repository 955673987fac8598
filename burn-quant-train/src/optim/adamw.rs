//! AdamW with moments in 8 bits or FP32, one kernel a parameter.

use std::{
    collections::HashMap,
    iter,
    marker::PhantomData,
    sync::{Arc, Mutex},
};

use burn::{
    module::{AutodiffModule, ParamId},
    optim::{GradientsParams, LearningRate, MultiGradientsParams, Optimizer, adaptor::GradAdaptor},
    tensor::Tensor,
};
use burn_backend::{
    AutodiffBackend, FloatDType, TensorMetadata,
    ops::{FloatTensorOps, IntTensorOps},
    tensor::{Device, FloatTensor},
};

use super::{
    adamw_record::{AdamWRecord, ParameterRecord},
    backend::{LayerBackend, ParameterBackend},
    clocks::{Clock, Clocks},
    config::{QuantAdamWConfig, check_dtype},
    layers::LayerConfig,
    loss_scaling::{LossScaler, Scaling},
    moment_health::{MomentWatch, StepInputs},
    moments::Moments,
    parameters::{Base, PutBack, Take, Taken, clip_by_value},
    wrapper::QuantOptimizer,
};
use crate::{
    data::{
        DataBackend, StochasticKey,
        optimizer::{AdamWItem, AdamWUpdate, Hyperparameters},
    },
    device_failure, layer,
    lock::lock,
    warning::warn_once,
};

#[derive(Debug, Clone)]
struct State<B: DataBackend> {
    moments: HashMap<ParamId, Moments<B>>,
    /// The moments of a loaded record, until the parameter is stepped.
    restored: HashMap<ParamId, Arc<ParameterRecord>>,
    clocks: Clocks<B>,
    seed: Option<u64>,
}

/// AdamW with moments in any format. It implements Burn's `Optimizer`; inside a [`QuantOptimizer`] it also serves
/// quantized layers. Configured by [`QuantAdamWConfig`].
pub struct QuantAdamW<M, B: AutodiffBackend<InnerBackend: ParameterBackend>> {
    config: Arc<QuantAdamWConfig>,
    loss_scaling: Option<Scaling<B>>,
    state: State<Base<B>>,
    /// The clock of every step, which clones of the optimizer see.
    published: Arc<Mutex<Clock<Base<B>>>>,
    moment_watch: MomentWatch<Base<B>>,
    module: PhantomData<fn(M) -> M>,
}

impl<M, B: AutodiffBackend<InnerBackend: ParameterBackend>> Clone for QuantAdamW<M, B> {
    fn clone(&self) -> Self {
        Self {
            config: self.config.clone(),
            loss_scaling: self.loss_scaling.clone(),
            state: self.state.clone(),
            published: self.published.clone(),
            moment_watch: self.moment_watch.clone(),
            module: PhantomData,
        }
    }
}

impl QuantAdamWConfig {
    /// Makes the optimizer, which owns the state of the model's layers.
    ///
    /// # Panics
    ///
    /// If a setting is out of its range: one that [`adamw`](Self::adamw) names, or one of those of layers
    /// (see [`DelayThreshold::validate`](crate::layer::DelayThreshold::validate),
    /// [`LearnedSteps::validate`](crate::layer::LearnedSteps::validate) and
    /// [`DelayedScaling::validate`](crate::layer::DelayedScaling::validate)).
    pub fn init<B: LayerBackend, M: AutodiffModule<B>>(
        &self,
    ) -> QuantOptimizer<QuantAdamW<M, B>, B> {
        let config = LayerConfig {
            policy: self.policy.clone(),
            threshold: self.threshold,
            steps: self.steps.clone(),
            scaling: self.scaling,
            health: self.health.clone(),
            seed: self.seed,
        };
        if self.loss_scaling.is_none() && B::row().is_some_and(|row| row.compute == FloatDType::F16)
        {
            say_unscaled();
        }
        let adamw = self.adamw();
        let (scaler, moments) = (adamw.loss_scaler(), adamw.moment_watch.clone());
        QuantOptimizer::new(adamw, config)
            .with_loss_scaler(scaler)
            .with_moment_watch(moments)
    }

    /// Makes the optimizer without layers, for `Autodiff` over any [`DataBackend`]: 8-bit moments for a model that is
    /// not quantized. Where losses are scaled, layers need an optimizer made by [`init`](Self::init), which tells them
    /// of the scale.
    ///
    /// # Panics
    ///
    /// The message names the setting, its value and the remedy.
    ///
    /// - If `beta_1` or `beta_2` is not in `[0, 1)`, or `epsilon` is not positive and finite.
    /// - If the weight decay, that or the learning rate of a parameter group, or the bound of gradients is negative or not
    ///   finite.
    /// - If a moment's group is not a multiple of 4 up to 2048, or the groups of the two moments are not a power of
    ///   two, at most 128, apart.
    /// - If losses are scaled and a setting of that is out of its range (see
    ///   [`LossScaling::check`](super::LossScaling::check)), or steps with gradients that are not finite are not
    ///   [skipped](super::OnNonfinite::Skip).
    pub fn adamw<B, M>(&self) -> QuantAdamW<M, B>
    where
        B: AutodiffBackend<InnerBackend: ParameterBackend>,
        M: AutodiffModule<B>,
    {
        self.validate();
        device_failure::watch();
        QuantAdamW {
            config: Arc::new(self.clone()),
            loss_scaling: self.loss_scaling.map(Scaling::new),
            state: State {
                moments: HashMap::new(),
                restored: HashMap::new(),
                clocks: Clocks::new([0, 0], iter::empty()),
                seed: None,
            },
            published: Arc::new(Mutex::new(Clock::Host([0, 0]))),
            moment_watch: MomentWatch::default(),
            module: PhantomData,
        }
    }
}

/// Warns once that FP16 gradients are not scaled.
fn say_unscaled() {
    warn_once!(
        "quant-train: the recipe computes in FP16, where gradients below 6e-8 are lost, and losses are not scaled. \
         Configure AdamW by `with_loss_scaling(Some(LossScaling::default()))` and write \
         `optim.scale(loss).backward()`."
    );
}

fn skipped<B: DataBackend>(clock: &Mutex<Clock<B>>) -> u64 {
    let [_, skipped] = lock(clock).read();
    skipped
}

/// Parameters that the kernels step in one call: of one device, one group and one clock.
struct Batch<B: DataBackend> {
    device: Device<B>,
    /// The index of its clock.
    clock: usize,
    hyperparameters: Hyperparameters,
    ids: Vec<ParamId>,
    items: Vec<AdamWItem<B>>,
}

impl<M, B> QuantAdamW<M, B>
where
    B: AutodiffBackend<InnerBackend: ParameterBackend>,
    M: AutodiffModule<B>,
{
    /// Steps that were skipped because a gradient held NaN or Inf, seen by all clones. Waits for the device.
    pub fn skipped_steps(&self) -> u64 {
        skipped(&self.published)
    }

    /// A function that reads [`skipped_steps`](Self::skipped_steps) without holding the moments, as a clone would.
    pub fn skipped_steps_reader(&self) -> impl Fn() -> u64 + Send + Sync + 'static {
        let published = self.published.clone();
        move || skipped(&published)
    }

    /// Multiplies losses by the scale of this optimizer and its clones; leaves them as they are without loss scaling.
    pub fn loss_scaler(&self) -> LossScaler {
        let scaling = self.loss_scaling.as_ref();
        scaling.map(Scaling::scaler).unwrap_or_default()
    }

    /// [`LossScaler::scale`].
    ///
    /// ```
    /// use burn::{backend::{Autodiff, Flex}, nn::{Linear, LinearConfig}, tensor::Tensor};
    /// use burn::optim::{GradientsParams, Optimizer};
    /// use burn_quant_train::optim::{LossScaling, QuantAdamWConfig};
    ///
    /// type Backend = Autodiff<Flex>;
    /// let config = QuantAdamWConfig::new().with_loss_scaling(Some(LossScaling::default()));
    /// let mut optim = config.adamw::<Backend, Linear<Backend>>();
    /// let model: Linear<Backend> = LinearConfig::new(4, 4).init(&Default::default());
    /// let loss = model.forward(Tensor::<Backend, 2>::ones([2, 4], &Default::default())).square().mean();
    /// let gradients = GradientsParams::from_grads(optim.scale(loss).backward(), &model);
    /// let model = optim.step(1e-3, model, gradients);
    /// assert_eq!(optim.loss_scale(), Some(65_536.0));
    /// # let _ = model;
    /// ```
    pub fn scale<const D: usize>(&self, loss: Tensor<B, D>) -> Tensor<B, D> {
        self.loss_scaler().scale(loss)
    }

    /// The scale of the next step; none without loss scaling. Waits for the device.
    pub fn loss_scale(&self) -> Option<f32> {
        self.loss_scaler().read::<B>()
    }

    fn stepped(&mut self, lr: LearningRate, module: M, grads: GradAdaptor) -> M {
        device_failure::check("QuantAdamW::step");
        let mut take = Take::<B>::new(grads);
        let module = module.map(&mut take);
        let taken = take.into_taken();
        if taken.is_empty() {
            return module;
        }
        let updated = self.update(lr, taken);
        module.map(&mut PutBack::<B> { updated })
    }

    /// Steps all parameters: those of one group, one device and one clock in one call.
    fn update(
        &mut self,
        lr: LearningRate,
        taken: Vec<Taken<Base<B>>>,
    ) -> HashMap<ParamId, FloatTensor<Base<B>>> {
        let home = Base::<B>::float_device(&taken[0].parameter);
        let loss_scale = self.loss_scaling.as_mut().map(|it| it.begin_step(&home));
        let scale = loss_scale.as_ref().map(|it| it.scale.clone());
        // The gradients before clipping, which may hide an infinity.
        let gradients = || {
            let gradients = taken.iter().map(|taken| taken.gradient.clone());
            gradients
                .map(|gradient| Base::<B>::float_to_device(gradient, &home))
                .collect()
        };
        let name = |index: usize| taken[index].place.name();
        let on_nonfinite = self.config.on_nonfinite;
        let nonfinite = on_nonfinite.find::<Base<B>>(gradients, &home, name);
        let stepping = taken.iter().map(|taken| taken.id).collect();
        let clocks = &mut self.state.clocks;
        clocks.tick(&stepping, &home, nonfinite.as_ref());

        let mut batches: Vec<Batch<Base<B>>> = Vec::new();
        for taken in taken {
            let device = Base::<B>::float_device(&taken.parameter);
            let hyperparameters = self.config.hyperparameters(lr, &taken.place.path);
            let clock = self.state.clocks.index_of(&taken.id);
            let (id, item) = self.item(taken, &device, scale.clone());
            let found = batches.iter().position(|batch| {
                batch.device == device
                    && batch.clock == clock
                    && batch.hyperparameters == hyperparameters
            });
            let index = found.unwrap_or_else(|| {
                batches.push(Batch {
                    device,
                    clock,
                    hyperparameters,
                    ids: Vec::new(),
                    items: Vec::new(),
                });
                batches.len() - 1
            });
            batches[index].ids.push(id);
            batches[index].items.push(item);
        }
        // Gradients clipped by value are unscaled already.
        let scale = scale.filter(|_| self.config.bound().is_none());
        let asked = self.moment_watch.asked();
        let mut updated = HashMap::new();
        for batch in batches {
            let Batch {
                device,
                clock,
                hyperparameters,
                ids,
                items,
            } = batch;
            let clock = self.state.clocks.on(clock, &device);
            let nonfinite = nonfinite
                .clone()
                .map(|flag| Base::<B>::int_to_device(flag, &device));
            let scale = scale
                .clone()
                .map(|scale| Base::<B>::float_to_device(scale, &device));
            let inputs = StepInputs {
                clock: &clock,
                nonfinite: nonfinite.as_ref(),
                loss_scale: scale.as_ref(),
                hyperparameters: &hyperparameters,
            };
            // Measured ones by themselves, so that copies of one are there at a time; the others together.
            let (measured, others): (Vec<_>, Vec<_>) = ids
                .into_iter()
                .zip(items)
                .partition(|(id, _)| asked.contains_key(id));
            let measured = measured.into_iter().map(|(id, item)| {
                let update = self.moment_watch.step(&asked[&id], item, &inputs);
                (id, update)
            });
            let mut updates: Vec<_> = measured.collect();
            if !others.is_empty() {
                let (ids, items): (Vec<_>, Vec<_>) = others.into_iter().unzip();
                updates.extend(ids.into_iter().zip(inputs.step(items)));
            }
            for (id, update) in updates {
                let AdamWUpdate {
                    parameter,
                    first,
                    second,
                } = update;
                self.state.moments.insert(id, Moments { first, second });
                updated.insert(id, parameter);
            }
        }
        if let (Some(scaling), Some(used), Some(nonfinite)) =
            (&mut self.loss_scaling, loss_scale, nonfinite)
        {
            scaling.end_step(used, nonfinite);
        }
        *lock(&self.published) = self.state.clocks.every_step().clone();
        updated
    }

    fn item(
        &mut self,
        taken: Taken<Base<B>>,
        device: &Device<Base<B>>,
        loss_scale: Option<FloatTensor<Base<B>>>,
    ) -> (ParamId, AdamWItem<Base<B>>) {
        let Taken {
            id,
            place,
            parameter,
            gradient,
        } = taken;
        let shape = parameter.shape();
        let name = place.name();
        check_dtype(&name, &parameter);
        let gradient = match self.config.bound() {
            Some(bound) => clip_by_value::<B>(bound, gradient, loss_scale),
            None => gradient,
        };
        let formats = self.config.formats(shape.num_elements());
        let state = &mut self.state;
        let restored = state
            .restored
            .remove(&id)
            .map(|record| Arc::unwrap_or_clone(record).upload::<Base<B>>(device));
        let moments = match state.moments.remove(&id).or(restored) {
            Some(moments) => {
                moments.check_shape(&name, &shape);
                moments.moved_to(device).converted(formats)
            }
            None => Moments::initial(&parameter, formats),
        };
        let seed = *state
            .seed
            .get_or_insert_with(|| self.config.seed.unwrap_or_else(layer::seed));
        let key = StochasticKey {
            seed,
            stream: PARAMETER_STREAMS | place.index,
        };
        let item = AdamWItem {
            parameter,
            gradient,
            first: moments.first,
            second: moments.second,
            key: Some(key),
            state_key: self.config.state_key(key),
        };
        (id, item)
    }
}

impl<M, B> Optimizer<M, B> for QuantAdamW<M, B>
where
    B: AutodiffBackend<InnerBackend: ParameterBackend>,
    M: AutodiffModule<B>,
{
    type Record = AdamWRecord;

    /// # Panics
    ///
    /// - If a device did not run an operation since the last step: where its memory has run out, CubeCL logs that and
    ///   goes on, with what was in memory before.
    /// - If a gradient holds NaN or Inf, with [`OnNonfinite::Error`](super::OnNonfinite::Error).
    /// - If a parameter is neither FP32 nor BF16.
    /// - If losses are to be scaled, and none was since the last step.
    /// - If a parameter has another shape than its moments, those of a loaded record.
    fn step(&mut self, lr: LearningRate, module: M, grads: GradientsParams) -> M {
        self.stepped(lr, module, grads.into())
    }

    /// # Panics
    ///
    /// - If a device did not run an operation since the last step: where its memory has run out, CubeCL logs that and
    ///   goes on, with what was in memory before.
    /// - If a gradient holds NaN or Inf, with [`OnNonfinite::Error`](super::OnNonfinite::Error).
    /// - If a parameter is neither FP32 nor BF16.
    /// - If losses are to be scaled, and none was since the last step.
    /// - If a parameter has another shape than its moments, those of a loaded record.
    fn step_multi(&mut self, lr: LearningRate, module: M, grads: MultiGradientsParams) -> M {
        self.stepped(lr, module, grads.into())
    }

    /// Waits for the device, to read the moments.
    ///
    /// # Panics
    ///
    /// As [`step`](Self::step), if a device did not run an operation.
    fn to_record(&self) -> AdamWRecord {
        let [steps, skipped] = self.state.clocks.every_step().read();
        let mut parameters = self.state.restored.clone();
        parameters.extend(self.state.moments.iter().map(|(id, moments)| {
            let record = ParameterRecord::read(moments.clone());
            (*id, Arc::new(record))
        }));
        let record = AdamWRecord {
            steps,
            skipped,
            seed: self.state.seed,
            parameters,
            loss_scale: self.loss_scaling.as_ref().map(Scaling::record),
            fewer_steps: self
                .state
                .clocks
                .taken()
                .filter(|(_, taken)| *taken != steps)
                .collect(),
        };
        // What was read waited for the device.
        device_failure::check("QuantAdamW::to_record");
        record
    }

    /// # Panics
    ///
    /// If the record counts more steps than INT32 holds.
    fn load_record(self, record: AdamWRecord) -> Self {
        let counts = [record.steps, record.skipped];
        let taken = record.parameters.keys().map(|id| (*id, record.taken(id)));
        let clocks = Clocks::new(counts, taken);
        *lock(&self.published) = clocks.every_step().clone();
        let loss_scaling = self.loss_scaling;
        Self {
            loss_scaling: loss_scaling.map(|it| it.restored(record.loss_scale)),
            state: State {
                moments: HashMap::new(),
                restored: record.parameters,
                clocks,
                seed: record.seed,
            },
            ..self
        }
    }
}

/// Marks the random streams of parameters; those of layers are hashes.
const PARAMETER_STREAMS: u64 = 1 << 63;
