//! A training loop that notes everything, and model surgery.

use burn::{
    lr_scheduler::{LrScheduler, noam::NoamLrSchedulerConfig},
    module::{AutodiffModule, Module, ModuleVisitor, Param},
    optim::{GradientsAccumulator, GradientsParams, Optimizer},
    record::{BinBytesRecorder, FullPrecisionSettings, Recorder},
    tensor::{
        Tensor,
        backend::{AutodiffBackend, Backend},
    },
    train::{
        metric::MetricDefinition,
        renderer::{
            EvaluationName, EvaluationProgress, MetricState, MetricsRenderer,
            MetricsRendererEvaluation, MetricsRendererTraining, ProgressType, TrainingProgress,
        },
    },
};
use burn_quant_train::{
    layer::{LayerPolicy, LearnedSteps},
    optim::{LayerBackend, QuantAdamW, QuantAdamWConfig, QuantOptimizer},
};

use crate::{
    Rng,
    data::floats,
    models::{Classifier, Sample, with_weights_of},
};

/// A renderer of Burn's learner that shows nothing.
#[derive(Clone, Copy)]
pub struct Silent;

impl MetricsRendererTraining for Silent {
    fn update_train(&mut self, _state: MetricState) {}

    fn update_valid(&mut self, _state: MetricState) {}

    fn render_train(&mut self, _item: TrainingProgress, _indicators: Vec<ProgressType>) {}

    fn render_valid(&mut self, _item: TrainingProgress, _indicators: Vec<ProgressType>) {}
}

impl MetricsRendererEvaluation for Silent {
    fn update_test(&mut self, _name: EvaluationName, _state: MetricState) {}

    fn render_test(&mut self, _item: EvaluationProgress, _indicators: Vec<ProgressType>) {}
}

impl MetricsRenderer for Silent {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, _definition: MetricDefinition) {}
}

/// The outcome of a training run.
#[derive(Debug)]
pub struct Run<M> {
    /// The trained model.
    pub model: M,
    /// The loss of each step.
    pub losses: Vec<f32>,
    /// For each step, the gradient of each parameter, in module order.
    pub gradients: Vec<Vec<Vec<f32>>>,
}

/// AdamW for a model of which every linear layer is quantized, however small, and learns its step sizes after two
/// steps.
pub fn every_layer(seed: u64) -> QuantAdamWConfig {
    QuantAdamWConfig::new()
        .with_policy(LayerPolicy::all().min_elements(0))
        .with_steps(LearnedSteps {
            cold_start: 2,
            ..LearnedSteps::default()
        })
        .with_seed(Some(seed))
}

/// An optimizer and a model attached to it, whose weights follow from `seed`.
pub fn attached<B: LayerBackend, M: AutodiffModule<B>>(
    config: &QuantAdamWConfig,
    model: M,
    seed: u64,
) -> (QuantOptimizer<QuantAdamW<M, B>, B>, M) {
    let optimizer = config.init();
    let model = optimizer.attach(with_weights_of(model, seed));
    (optimizer, model)
}

/// The batches of a run.
pub fn samples<B: Backend, M: Classifier<B>>(seed: u64, steps: usize) -> Vec<Sample> {
    let mut rng = Rng::new(seed ^ 0x5eed);
    (0..steps).map(|_| M::sample(&mut rng)).collect()
}

/// Trains on these batches.
pub fn train<B, M, O>(model: M, optimizer: &mut O, lr: f64, samples: &[Sample]) -> Run<M>
where
    B: AutodiffBackend,
    M: AutodiffModule<B> + Classifier<B>,
    O: Optimizer<M, B>,
{
    train_with(model, optimizer, |_| lr, samples)
}

/// Trains on these batches, with a learning rate for each step.
pub fn train_with<B, M, O>(
    mut model: M,
    optimizer: &mut O,
    mut lr: impl FnMut(usize) -> f64,
    samples: &[Sample],
) -> Run<M>
where
    B: AutodiffBackend,
    M: AutodiffModule<B> + Classifier<B>,
    O: Optimizer<M, B>,
{
    let mut losses = Vec::new();
    let mut all = Vec::new();
    for (step, sample) in samples.iter().enumerate() {
        let loss = model.loss(sample);
        losses.push(floats(&loss)[0]);
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        all.push(gradients_of::<B, M>(&model, &gradients));
        model = optimizer.step(lr(step), model, gradients);
    }
    Run {
        model,
        losses,
        gradients: all,
    }
}

/// Trains along a schedule, stepping once in three batches; notes no gradients.
pub fn accumulated<B, M, O>(mut model: M, optim: &mut O, batches: &[Sample]) -> Run<M>
where
    B: AutodiffBackend,
    M: AutodiffModule<B> + Classifier<B>,
    O: Optimizer<M, B>,
{
    let mut losses = Vec::new();
    let mut schedule = NoamLrSchedulerConfig::new(1.0)
        .with_warmup_steps(3)
        .init()
        .expect("a schedule");
    let mut accumulator = GradientsAccumulator::new();
    for micro_batches in batches.chunks(3) {
        for sample in micro_batches {
            let loss = model.loss(sample);
            losses.push(floats(&loss)[0]);
            accumulator.accumulate(&model, GradientsParams::from_grads(loss.backward(), &model));
        }
        model = optim.step(schedule.step(), model, accumulator.grads());
    }
    Run {
        model,
        losses,
        gradients: Vec::new(),
    }
}

/// The gradient of each parameter of `model` that has one, in module order.
pub fn gradients_of<B: AutodiffBackend, M: Module<B>>(
    model: &M,
    gradients: &GradientsParams,
) -> Vec<Vec<f32>> {
    struct Collect<'a>(&'a GradientsParams, Vec<Vec<f32>>);
    impl<B: AutodiffBackend> ModuleVisitor<B> for Collect<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            if let Some(gradient) = self.0.get::<B::InnerBackend, D>(param.id) {
                self.1.push(floats(&gradient));
            }
        }
    }
    let mut collect = Collect(gradients, Vec::new());
    model.visit(&mut collect);
    collect.1
}

/// All float parameters of a model, in module order.
pub fn parameters_of<B: Backend, M: Module<B>>(model: &M) -> Vec<Vec<f32>> {
    struct Collect(Vec<Vec<f32>>);
    impl<B: Backend> ModuleVisitor<B> for Collect {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.0.push(floats(&param.val()));
        }
    }
    let mut collect = Collect(Vec::new());
    model.visit(&mut collect);
    collect.0
}

/// `to` with the weights of `from`, which may live on another backend, by way of a record.
pub fn transplant<A: Backend, B: Backend, M: Module<A>, N: Module<B>>(
    from: &M,
    to: N,
    device: &B::Device,
) -> N {
    let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
    let bytes = Recorder::<A>::record(&recorder, from.clone().into_record(), ())
        .expect("a model is recorded");
    let record = Recorder::<B>::load(&recorder, bytes, device).expect("a model's record is loaded");
    to.load_record(record)
}

/// The mean of the last `count` losses.
pub fn tail(losses: &[f32], count: usize) -> f32 {
    losses[losses.len() - count..].iter().sum::<f32>() / count as f32
}
