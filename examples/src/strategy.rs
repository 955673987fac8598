//! Step-exact training inside Burn's [`SupervisedTraining`](burn::train::SupervisedTraining).
//!
//! Burn's own strategy counts epochs: it checkpoints after one, and an interrupted epoch starts again. This one takes
//! the place that Burn gives to strategies and counts steps; learner, metrics, renderers and checkpoint files remain
//! Burn's.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use burn::data::dataloader::Progress;
use burn::module::AutodiffModule;
use burn::optim::Optimizer;
use burn::tensor::ElementConversion;
use burn::tensor::backend::AutodiffBackend;
use burn::train::{
    EventProcessorTraining, InferenceStep, Interrupter, Learner, LearnerEvent,
    SupervisedLearningStrategy, SupervisedTrainingEventProcessor, TrainLoader, TrainingComponents,
    TrainingItem, ValidLoader,
};

use crate::checkpoint::{Checkpoints, Components, State};
use crate::data::mix;
use crate::metrics::History;
use crate::model::{Decoder, InnerDecoder};
use crate::progress;
use crate::rates::RateReadings;

/// Asks a run to stop: Ctrl-C, or the dashboard.
#[derive(Clone, Default)]
pub struct Stop {
    /// Burn's handle, which the dashboard also uses, and resets.
    pub interrupter: Interrupter,
    /// Set by Ctrl-C, never reset.
    pub ctrl_c: Arc<AtomicBool>,
}

impl Stop {
    /// True once somebody asked.
    pub fn requested(&self) -> bool {
        self.ctrl_c.load(Ordering::Relaxed) || self.interrupter.should_stop()
    }
}

/// Reads path and fallback rate of every layer.
pub type ReadRates = Box<dyn Fn() -> Vec<(String, f32)> + Send + Sync>;

/// The work after each optimizer step.
pub type AfterStep = Box<dyn Fn() -> anyhow::Result<()> + Send + Sync>;

/// The outcome of training.
pub struct Outcome<B: AutodiffBackend> {
    /// The trained model.
    pub model: Decoder<B>,
    /// Steps taken in all, those before a resumption included.
    pub step: usize,
    /// True if somebody asked to stop before the end.
    pub interrupted: bool,
    /// Validation loss in nats per byte; none if the run stopped early.
    pub valid_loss: Option<f64>,
    /// Training speed without the first steps, checkpoints and validation.
    pub tokens_per_second: f64,
    /// The time from the run's beginning to the end of its first step; none of a run that had taken all before.
    pub first_step: Option<Duration>,
    /// The readings of fallback rates.
    pub rates: RateReadings,
    /// A file that could not be written ends the run.
    pub failure: Option<anyhow::Error>,
}

/// One pass over the train loader, a step at a time, with checkpoints between steps.
pub struct StepByStep<B: AutodiffBackend> {
    /// Where checkpoints go.
    pub checkpoints: Checkpoints,
    /// Their state; step, losses, readings and checksums are filled in.
    pub state: State,
    /// Losses, as the metrics' thread reads them.
    pub history: History,
    /// Reads the fallback rates, for recipes with fallback.
    pub read_rates: Option<ReadRates>,
    /// Steps between two readings.
    pub read_every: usize,
    /// Called after each optimizer step; an error ends the run.
    pub after_step: AfterStep,
    /// Steps between checkpoints.
    pub checkpoint_every: usize,
    /// Stop early after this step.
    pub stop_after: Option<usize>,
    /// Somebody asks to stop.
    pub stop: Stop,
    /// True if Burn's dashboard is drawn.
    pub dashboard: bool,
    /// Where to train.
    pub device: B::Device,
    /// The seed of a run whose model draws random numbers.
    pub draws: Option<u64>,
    /// When the run began.
    pub began: Instant,
    /// Filled in at the end.
    pub outcome: Mutex<Option<Outcome<B>>>,
}

impl<B: AutodiffBackend> StepByStep<B> {
    fn save<O: Optimizer<Decoder<B>, B> + 'static>(
        &self,
        learner: &Learner<Components<B, O>>,
        step: usize,
        rates: &RateReadings,
        components: &TrainingComponents<Components<B, O>>,
    ) -> anyhow::Result<()> {
        let mut losses = self.history.wait_for(step);
        losses.truncate(step);
        let state = State {
            step,
            losses,
            rates: rates.clone(),
            ..self.state.clone()
        };
        self.checkpoints
            .save(learner, state, &components.event_store)
    }
}

impl<B, O> SupervisedLearningStrategy<Components<B, O>> for StepByStep<B>
where
    B: AutodiffBackend,
    O: Optimizer<Decoder<B>, B> + 'static,
{
    fn fit(
        &self,
        mut components: TrainingComponents<Components<B, O>>,
        mut learner: Learner<Components<B, O>>,
        train: TrainLoader<Components<B, O>>,
        valid: ValidLoader<Components<B, O>>,
        _epoch: usize,
    ) -> (
        Decoder<B>,
        SupervisedTrainingEventProcessor<Components<B, O>>,
    ) {
        let epoch = Progress::new(1, 1);
        let steps = train.num_items();
        let mut step = self.state.step;
        let mut clock = Clock::new(steps - step.min(steps));
        let mut rates = self.state.rates.clone();
        let mut failure = None;
        let mut interrupted = false;
        let mut first_step = None;

        if self.dashboard {
            progress::yield_to_training();
        }
        let mut batches = train.iter();
        while let Some(batch) = batches.next() {
            let tokens = batch.tokens();
            step += 1;
            learner.lr_step();
            if let Some(seed) = self.draws {
                // Burn's generators have no state that a checkpoint could hold: each step has numbers of its own.
                B::seed(&self.device, mix(mix(seed, 2), step as u64));
            }
            let output = learner.train_step(batch);
            learner.optimizer_step(output.grads);
            first_step.get_or_insert_with(|| {
                B::sync(&self.device).expect("the device works");
                self.began.elapsed()
            });
            failure = (self.after_step)().err();
            if let Some(read) = &self.read_rates
                && step.is_multiple_of(self.read_every)
            {
                rates.take(read());
            }
            components
                .event_processor
                .process_train(LearnerEvent::ProcessedItem(TrainingItem::new(
                    output.item,
                    batches.progress(),
                    epoch.clone(),
                    Some(step),
                    Some(learner.lr_current()),
                )));
            if self.dashboard {
                progress::keep_ctrl_c();
            }
            clock.step(tokens, || B::sync(&self.device).expect("the device works"));

            interrupted = self.stop.requested();
            let stopped = interrupted || self.stop_after.is_some_and(|it| step >= it);
            let saves = stopped || step.is_multiple_of(self.checkpoint_every) || step == steps;
            if saves && failure.is_none() {
                clock.pause(|| B::sync(&self.device).expect("the device works"));
                failure = self.save(&learner, step, &rates, &components).err();
                clock.go_on();
            }
            if stopped || failure.is_some() {
                break;
            }
        }
        let tokens_per_second =
            clock.tokens_per_second(|| B::sync(&self.device).expect("the device works"));
        components
            .event_processor
            .process_train(LearnerEvent::EndEpoch(1));

        let complete = step >= steps && failure.is_none();
        let valid_loss = complete.then(|| {
            let model: InnerDecoder<B> = learner.model().valid();
            let (mut sum, mut tokens) = (0.0, 0);
            let mut batches = valid.iter();
            let mut iteration = 0;
            while let Some(batch) = batches.next() {
                iteration += 1;
                let output = InferenceStep::step(&model, batch);
                sum += output.loss.clone().into_scalar().elem::<f64>() * output.tokens as f64;
                tokens += output.tokens;
                components
                    .event_processor
                    .process_valid(LearnerEvent::ProcessedItem(TrainingItem::new(
                        output,
                        batches.progress(),
                        epoch.clone(),
                        Some(iteration),
                        None,
                    )));
            }
            components
                .event_processor
                .process_valid(LearnerEvent::EndEpoch(1));
            sum / tokens as f64
        });

        let model = learner.model();
        *self.outcome.lock().expect("nobody else holds it") = Some(Outcome {
            model: model.clone(),
            step,
            interrupted: interrupted && !complete,
            valid_loss,
            tokens_per_second,
            first_step,
            rates,
            failure,
        });
        (model, components.event_processor)
    }
}

/// Measures training alone.
struct Clock {
    /// Steps that do not count: kernels are compiled and tuned in them.
    warm_up: usize,
    tokens: usize,
    time: Duration,
    since: Option<Instant>,
}

impl Clock {
    fn new(steps: usize) -> Self {
        Self {
            warm_up: (steps / 5).min(10),
            tokens: 0,
            time: Duration::ZERO,
            since: (steps < 5).then(Instant::now),
        }
    }

    fn step(&mut self, tokens: usize, sync: impl Fn()) {
        if self.warm_up > 0 {
            self.warm_up -= 1;
            if self.warm_up == 0 {
                sync();
                self.since = Some(Instant::now());
            }
        } else {
            self.tokens += tokens;
        }
    }

    fn pause(&mut self, sync: impl Fn()) {
        if let Some(since) = self.since.take() {
            sync();
            self.time += since.elapsed();
        }
    }

    fn go_on(&mut self) {
        if self.warm_up == 0 {
            self.since = Some(Instant::now());
        }
    }

    fn tokens_per_second(mut self, sync: impl Fn()) -> f64 {
        self.pause(sync);
        self.tokens as f64 / self.time.as_secs_f64().max(1e-9)
    }
}
