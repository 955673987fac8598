//! Any Burn optimizer with the state of quantized layers.

use std::sync::{Arc, Mutex};

use burn::{
    module::{AutodiffModule, Module},
    optim::{GradientsParams, LearningRate, MultiGradientsParams, Optimizer},
    tensor::Tensor,
};

use super::{
    adamw::QuantAdamW,
    attach::Attach,
    backend::LayerBackend,
    layers::{LayerConfig, LayerReport, Layers, LayersView, Shared, Survey, expected},
    loss_scaling::LossScaler,
    moment_health::MomentWatch,
    record::QuantRecord,
};
use crate::{
    data::{DataBackend, product::ProductKernels},
    device_failure,
    health::{HealthConfig, HealthReport},
    layer::LayersRecord,
    lock::lock,
};

/// Any Burn optimizer `O`, owning the state of the quantized layers of the model it steps.
///
/// It implements Burn's `Optimizer`, so a `Learner`, gradient clipping, gradient accumulation and learning-rate
/// schedulers work as they do with `O`.
///
/// # Attaching a model
///
/// A layer's state travels with its weight's tag. [`attach`](Self::attach) puts it there: it names the layers by module
/// path, applies the policy, and restores the state of a loaded record. `step` attaches a model that is not attached
/// yet. Until then nothing is quantized, and a warning says so once: call `attach` before the first forward pass.
///
/// From then on a weight keeps its layer, whatever Burn does to the module: see the table in the book, "Optimizer and
/// checkpoints".
///
/// Clones share the layers' state, and each holds the wrapped optimizer's. Use [`view`](Self::view) to look at the
/// layers only.
pub struct QuantOptimizer<O, B: LayerBackend> {
    inner: O,
    config: LayerConfig,
    shared: Arc<Mutex<Shared<B::Base>>>,
    /// That of the wrapped optimizer.
    loss_scaler: LossScaler,
    /// That of the wrapped optimizer, if it is an AdamW of ours.
    moment_watch: MomentWatch<B::Base>,
    /// Steps of the layers when this clone last stepped.
    seen: u64,
}

impl<O: Clone, B: LayerBackend> Clone for QuantOptimizer<O, B> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            config: self.config.clone(),
            shared: self.shared.clone(),
            loss_scaler: self.loss_scaler.clone(),
            moment_watch: self.moment_watch.clone(),
            seen: self.seen,
        }
    }
}

impl<O, B: LayerBackend> QuantOptimizer<O, B> {
    /// Wraps `inner`.
    ///
    /// # Panics
    ///
    /// If the settings of thresholds, learned steps, delayed scaling or health are out of range: see
    /// [`DelayThreshold::validate`](crate::layer::DelayThreshold::validate),
    /// [`LearnedSteps::validate`](crate::layer::LearnedSteps::validate),
    /// [`DelayedScaling::validate`](crate::layer::DelayedScaling::validate) and [`HealthConfig::validate`].
    pub fn new(inner: O, config: LayerConfig) -> Self {
        config.threshold.validate();
        config.steps.validate();
        config.scaling.validate();
        config.health.iter().for_each(HealthConfig::validate);
        device_failure::watch();
        Self {
            inner,
            config,
            shared: Arc::new(Mutex::new(Shared {
                layers: None,
                restored: None,
            })),
            loss_scaler: LossScaler::default(),
            moment_watch: MomentWatch::default(),
            seen: 0,
        }
    }

    /// Tells the layers of the scale that the wrapped optimizer gives to losses: what they learn from gradients is
    /// divided by it.
    pub(super) fn with_loss_scaler(self, loss_scaler: LossScaler) -> Self {
        Self {
            loss_scaler,
            ..self
        }
    }

    /// Lets the wrapped optimizer be asked for its moments.
    pub(super) fn with_moment_watch(self, moment_watch: MomentWatch<B::Base>) -> Self {
        Self {
            moment_watch,
            ..self
        }
    }

    /// The wrapped optimizer.
    pub fn inner(&self) -> &O {
        &self.inner
    }

    /// Puts the layers' state on the weights of `model`, with the values of a loaded record if there is one. Lazy
    /// parameters stay lazy.
    pub fn attach<M: Module<B>>(&self, model: M) -> M {
        let layers = self.adopt(&model);
        model.map(&mut Attach {
            layers: &layers,
            asked: true,
        })
    }

    /// Says which linear layers `model` has, and that their inputs have `rows` rows, those of a whole batch, such as
    /// batch times sequence: while a [`CompileAhead`](crate::CompileAhead) lives, the kernels of their products are then
    /// compiled before the first step comes to them. Without one, and on devices without kernels of CUDA source, it does
    /// nothing. Lazy parameters stay lazy: call it before they are drawn.
    pub fn compile_ahead<M: Module<B>>(&self, model: &M, rows: usize) {
        let mut survey = Survey::<B>::default();
        model.visit(&mut survey);
        let (Some(row), Some(device)) = (B::row(), survey.device()) else {
            return;
        };
        let layers = expected(&survey.weights, &row, &self.config.policy, rows);
        <<B::Base as DataBackend>::Kernels as ProductKernels>::expect_layers(&device, &layers);
    }

    /// The layers' state without the moments.
    ///
    /// It is for a metric, or for a look at the layers when a `Learner` has taken the optimizer.
    pub fn view(&self) -> LayersView<B::Base> {
        LayersView {
            shared: self.shared.clone(),
        }
    }

    /// [`LayersView::layers`].
    pub fn layers(&self) -> Vec<LayerReport> {
        self.view().layers()
    }

    /// [`LayersView::fallback_rates`].
    pub fn fallback_rates(&self) -> Vec<(String, f32)> {
        self.view().fallback_rates()
    }

    /// [`LayersView::take_health`].
    pub fn take_health(&self) -> Vec<HealthReport> {
        self.view().take_health()
    }

    /// [`LayersView::record`].
    pub fn layers_record(&self) -> LayersRecord {
        self.view().record()
    }

    /// The layers of `model`: the known ones if its weights have the same paths and shapes, else new ones with the
    /// values known for each weight.
    fn adopt<M: Module<B>>(&self, model: &M) -> Arc<Layers<B::Base>> {
        let mut survey = Survey::<B>::default();
        model.visit(&mut survey);
        let mut shared = lock(&self.shared);
        let layers = match shared.layers.take() {
            Some(known) if known.are_of(&survey.weights) => known,
            known => {
                let renamed = known.as_ref().and_then(|it| it.with_ids(&survey.weights));
                Arc::new(renamed.unwrap_or_else(|| {
                    let restored = shared.restored.take();
                    let record = restored.or_else(|| known.map(|layers| layers.record()));
                    let row = B::row();
                    Layers::new(survey.weights, row.as_ref(), &self.config, record.as_ref())
                }))
            }
        };
        shared.layers = Some(layers.clone());
        layers
    }

    fn stepped<M: AutodiffModule<B>>(&mut self, model: M, step: impl FnOnce(&mut O, M) -> M) -> M {
        device_failure::check("QuantOptimizer::step");
        let layers = self.adopt(&model);
        let measured = layers.measured_now(self.seen);
        let asked = measured.map(|(now, paths)| (now, self.moment_watch.ask(paths)));
        let model = step(&mut self.inner, model).map(&mut Attach {
            layers: &layers,
            asked: false,
        });
        if let Some((now, asked)) = asked {
            layers.add_moments(now, asked.answer());
        }
        let scaled = self.loss_scaler.take_step::<B>();
        self.seen = layers.end_step(self.seen, scaled.as_ref());
        model
    }
}

impl<M: AutodiffModule<B>, B: LayerBackend> QuantOptimizer<QuantAdamW<M, B>, B> {
    /// [`QuantAdamW::scale`].
    pub fn scale<const D: usize>(&self, loss: Tensor<B, D>) -> Tensor<B, D> {
        self.inner.scale(loss)
    }

    /// [`QuantAdamW::loss_scaler`].
    pub fn loss_scaler(&self) -> LossScaler {
        self.inner.loss_scaler()
    }
}

impl<O, M, B> Optimizer<M, B> for QuantOptimizer<O, B>
where
    O: Optimizer<M, B>,
    M: AutodiffModule<B>,
    B: LayerBackend,
{
    type Record = QuantRecord<O::Record>;

    /// # Panics
    ///
    /// If a device did not run an operation since the last step: where its memory has run out, CubeCL logs that and goes
    /// on, with what was in memory before.
    fn step(&mut self, lr: LearningRate, module: M, grads: GradientsParams) -> M {
        self.stepped(module, |inner, module| inner.step(lr, module, grads))
    }

    fn step_multi(&mut self, lr: LearningRate, module: M, grads: MultiGradientsParams) -> M {
        self.stepped(module, |inner, module| inner.step_multi(lr, module, grads))
    }

    /// Waits for the device, to read the layers' state.
    ///
    /// # Panics
    ///
    /// If a device did not run an operation since the last step.
    fn to_record(&self) -> Self::Record {
        let record = QuantRecord {
            optimizer: self.inner.to_record(),
            layers: self.layers_record(),
        };
        // What was read waited for the device.
        device_failure::check("QuantOptimizer::to_record");
        record
    }

    /// All clones share the loaded state of the layers, also those made before, such as a metric's. So do the weights
    /// of an attached model, whether the model is loaded before or after.
    fn load_record(self, record: Self::Record) -> Self {
        let mut shared = lock(&self.shared);
        // Written before a model was attached, a record knows neither layers nor their seed.
        let is_blank = record.layers == LayersRecord::default();
        let seen = record.layers.step;
        match &shared.layers {
            _ if is_blank => {}
            Some(layers) => layers.restore(&record.layers),
            None => shared.restored = Some(record.layers),
        }
        drop(shared);
        Self {
            inner: self.inner.load_record(record.optimizer),
            config: self.config,
            shared: self.shared,
            loss_scaler: self.loss_scaler,
            moment_watch: self.moment_watch,
            seen,
        }
    }
}
