//! One run: a recipe's backend, Burn's learner, a report.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use anyhow::{Context, Result};
use burn::grad_clipping::GradientClippingConfig;
use burn::module::Module;
use burn::train::metric::LearningRateMetric;
use burn::train::{Learner, SupervisedTraining, TrainingStrategy};
use burn_quant_train::layer::LearnedSteps;
use burn_quant_train::optim::{
    LayerBackend, LayerReport, QuantAdamWConfig, metric::OptimizerMetric,
};
use burn_quant_train::recipe::SlotKind;
use burn_quant_train::saved::choose_context;

use crate::args::{Args, Checkpointing, Device, Evaluation, LossScaling};
use crate::checkpoint::{Checkpoints, Finished, State};
use crate::config::{Config, Run};
use crate::data::{Text, Windows};
use crate::health::{self, About, LayerMemory};
use crate::memory::{self, Gauges, optimizer_state, saved_activations};
use crate::metrics::{History, Loss, TokensPerSecond};
use crate::model::Decoder;
use crate::progress::{self, Lines};
use crate::rates::RateReadings;
use crate::report::{Measured, Report};
use crate::schedule::Schedule;
use crate::strategy::{ReadRates, StepByStep, Stop};

/// Steps between two readings of the optimizer's numbers for the dashboard: each waits for the device.
const READ_EVERY: usize = 20;

/// Steps between two readings of the fallback rates for the report.
fn rates_every(device: Device) -> usize {
    match device {
        Device::Cpu => 1,
        Device::Cuda | Device::Vulkan => READ_EVERY,
    }
}

/// All that the runs of a process share.
pub struct Session<'a> {
    /// The command line.
    pub args: &'a Args,
    /// Where checkpoints go.
    pub out: &'a Path,
    /// The text.
    pub text: &'a Text,
    /// Asks the runs to stop.
    pub stop: &'a Stop,
    /// The width of the longest name of a run.
    pub label_width: usize,
    /// Bytes live in the process's allocator.
    pub live_bytes: fn() -> u64,
    /// When the first run began.
    pub began: Instant,
    /// The losses of the runs before.
    pub before: Mutex<Vec<(Run, History)>>,
}

impl Session<'_> {
    /// Keeps the losses of a run, for the progress of those that follow.
    pub fn remember(&self, run: Run, history: History) {
        let mut before = self.before.lock().expect("no holder panics");
        before.push((run, history));
    }

    /// Progress in lines, with the losses of the runs before that have this run's seed.
    fn lines(&self, job: &Job, history: &History) -> Lines {
        let before = self.before.lock().expect("no holder panics");
        let of_this_seed = before.iter().filter(|(run, _)| run.seed == job.run.seed);
        Lines {
            label: format!("{:<width$}", job.label, width = self.label_width),
            history: history.clone(),
            before: of_this_seed
                .map(|(run, history)| (run.recipe.to_string(), history.clone()))
                .collect(),
            tokens: job.config.batch * job.config.sequence,
            last: (job.first_step(), Instant::now()),
        }
    }
}

/// A run that is to be trained.
pub struct Job {
    /// The run.
    pub run: Run,
    /// Its configuration.
    pub config: Config,
    /// Its name for people.
    pub label: String,
    /// Its position among several runs, for people, to stand before its name.
    pub position: String,
    /// Where its checkpoints go.
    pub checkpoints: Checkpoints,
    /// When it began: the first run of a program when that began.
    pub began: Instant,
    /// The checkpoint that it goes on from, its own or that of the run that it forks; none at the beginning.
    pub from: Option<(Checkpoints, State)>,
}

impl Job {
    /// Steps taken before.
    pub fn first_step(&self) -> usize {
        self.from.as_ref().map_or(0, |(_, state)| state.step)
    }

    /// Its name, model and length for people, and where it begins.
    fn headline(&self, parameters: usize) -> String {
        let Config {
            steps,
            batch,
            sequence,
            fork,
            ..
        } = self.config;
        let begins = match (self.first_step(), fork) {
            (0, _) => String::new(),
            (step, Some(fork)) if step == fork.step => {
                format!(", forked from {} at step {step}", fork.recipe)
            }
            (step, _) => format!(", resumed at step {step}"),
        };
        let tokens = batch * sequence;
        let (position, label) = (&self.position, &self.label);
        format!(
            "{position}{label}: {parameters} parameters, {steps} steps of {tokens} tokens{begins}"
        )
    }

    /// The readings of fallback rates that it goes on from.
    fn rates(&self) -> RateReadings {
        let at_the_fork = |step| self.config.fork.is_some_and(|fork| fork.step == step);
        match &self.from {
            Some((_, state)) if !at_the_fork(state.step) => state.rates.clone(),
            Some(_) | None => RateReadings::default(),
        }
    }
}

/// How a run ended.
pub enum Ended {
    /// All steps taken.
    Complete(Box<Report>),
    /// Stopped after this step, with a checkpoint.
    Early {
        /// The step.
        step: usize,
        /// True if somebody asked, false if the command line did.
        interrupted: bool,
    },
}

/// AdamW with the settings that all runs share.
fn optimizer(config: &Config, args: &Args) -> QuantAdamWConfig {
    config
        .optimizer
        .config()
        .with_beta_2(0.95)
        .with_weight_decay(0.1)
        .with_state_rounding(config.state_rounding.into())
        .with_grad_clipping(Some(GradientClippingConfig::Norm(1.0)))
        .with_loss_scaling(config.loss_scaling.config())
        .with_health(health::config(args, config.steps, config.device))
        .with_policy(config.products.policy())
        .with_threshold(config.threshold.config())
        .with_steps(LearnedSteps {
            cold_start: config.cold_start,
            evaluation: config.evaluation == Evaluation::Quantized,
            ..LearnedSteps::default()
        })
}

/// The shapes that the layers' memory follows from.
fn layer_memory<B: LayerBackend>(layers: &[LayerReport]) -> Vec<LayerMemory> {
    let row = B::row().and_then(|row| row.linear);
    let layers = layers.iter().map(|layer| LayerMemory {
        layer: layer.path.clone(),
        shape: layer.shape,
        row: row.filter(|_| layer.decision.is_quantized()),
    });
    layers.collect()
}

/// Trains one run: the backend `B` is all that its recipe takes.
///
/// # Errors
///
/// Checkpoints that cannot be read or written.
pub fn run<B: LayerBackend>(
    session: &Session<'_>,
    job: &Job,
    device: &B::Device,
    gauges: &Gauges<'_, B::Device>,
) -> Result<Ended> {
    let args = session.args;
    let Job { run, config, .. } = job;
    let first_step = job.first_step();
    if first_step < config.steps && args.stop_after.is_some_and(|it| first_step >= it) {
        return Ok(Ended::Early {
            step: first_step,
            interrupted: false,
        });
    }
    choose_context(Some(config.contexts.context()));
    // Memory that a run before this one took is not this one's.
    (gauges.give_back)(device);
    B::seed(device, config.seed);

    // The model knows nothing of the recipe; the optimizer is AdamW that also looks after quantized layers.
    let model = config.model.init::<B>(device);
    let optim_config = optimizer(config, args);
    let optim = optim_config.init::<B, Decoder<B>>();
    optim.compile_ahead(&model, config.batch * config.sequence);
    model.materialize();
    let schedule = Schedule::new(config.planned_steps(), first_step, config.lr)?;
    let ((model, optim, schedule), losses) = match &job.from {
        Some((checkpoints, state)) => {
            let loaded = checkpoints.load(state, config.seed, (model, optim, schedule), device)?;
            (loaded, state.losses.clone())
        }
        None => ((model, optim, schedule), Vec::new()),
    };
    let model = optim
        .attach(model)
        .with_loss_scaler(optim.loss_scaler())
        .with_checkpointing(config.checkpointing == Checkpointing::Layers)
        .with_attention(config.attention);
    // They see the same layers and the same count after the learner has taken the optimizer.
    let layers = optim.view();
    let skipped_steps = optim.inner().skipped_steps_reader();
    let parameters = model.num_params();
    let Config {
        batch,
        sequence,
        steps,
        ..
    } = *config;
    let train: Arc<[u8]> = session.text.train.as_slice().into();
    let valid: Arc<[u8]> = session.text.valid.as_slice().into();
    let train = Windows::<B>::train(
        train,
        config.seed,
        batch,
        sequence,
        first_step..steps,
        device,
    );
    let valid =
        Windows::<B::InnerBackend>::valid(valid, config.validation, batch, sequence, device);
    let probe = train.batch(0);
    let history = History::new(losses);
    let dashboard = progress::in_terminal() && !args.plain;
    println!("{}", job.headline(parameters));
    if args.layers {
        for layer in layers.layers() {
            println!("  {layer}");
        }
    }
    let renderer = match dashboard {
        true => progress::dashboard(session.stop.interrupter.clone()),
        false => Box::new(session.lines(job, &history)),
    };
    session.remember(*run, history.clone());

    let slots = B::row().and_then(|row| row.linear).map(|row| row.slots);
    let mut slots = slots.unwrap_or_default().iter();
    let has_thresholds = slots.any(|slot| slot.kind == SlotKind::DelayThreshold);
    let files = args
        .health
        .map(|_| health::Files::begin(job.checkpoints.folder(), first_step));
    let files = files.transpose()?;
    let strategy = Arc::new(StepByStep::<B> {
        checkpoints: job.checkpoints.clone(),
        state: State {
            step: first_step,
            recipe: run.recipe,
            config: config.clone(),
            sums: BTreeMap::new(),
            rates: job.rates(),
            losses: Vec::new(),
        },
        history: history.clone(),
        read_rates: has_thresholds.then(|| -> ReadRates {
            let layers = layers.clone();
            Box::new(move || layers.fallback_rates())
        }),
        read_every: rates_every(config.device),
        after_step: {
            let (files, layers) = (files.clone(), layers.clone());
            Box::new(move || match &files {
                Some(files) => files.add(&layers.take_health()),
                None => Ok(()),
            })
        },
        checkpoint_every: args
            .checkpoint_every
            .unwrap_or_else(|| (config.steps / 5).max(100)),
        stop_after: args.stop_after,
        stop: session.stop.clone(),
        dashboard,
        device: device.clone(),
        draws: (config.model.dropout > 0.0).then_some(config.seed),
        began: job.began,
        outcome: Mutex::default(),
    });
    let training = SupervisedTraining::new(session.out, Arc::new(train), Arc::new(valid))
        .metric_train_numeric(Loss::new(Some(history.clone())))
        .metric_valid_numeric(Loss::new(None))
        .metric_train_numeric(TokensPerSecond::default())
        .metric_train_numeric(LearningRateMetric::new())
        .with_metric_logger(progress::NoLog)
        .with_application_logger(None)
        .with_interrupter(session.stop.interrupter.clone())
        .with_training_strategy(TrainingStrategy::Custom(strategy.clone()))
        .renderer(progress::Boxed(renderer));
    let training = if has_thresholds {
        training.metric_train_numeric(OptimizerMetric::fallback_rate(&optim, READ_EVERY))
    } else {
        training
    };
    let training = match config.loss_scaling {
        LossScaling::On => {
            training.metric_train_numeric(OptimizerMetric::loss_scale(&optim, READ_EVERY))
        }
        LossScaling::Off => training,
    };
    let training = match args.health {
        Some(_) => training
            .metric_train_numeric(OptimizerMetric::worst_noise(&optim))
            .metric_train_numeric(OptimizerMetric::worst_underflow(&optim)),
        None => training,
    };
    // The dashboard closes when the result is dropped.
    drop(training.launch(Learner::new(model, optim, schedule)));

    let outcome = strategy.outcome.lock().expect("training has ended").take();
    let outcome = outcome.context("training ended without a result")?;
    if let Some(failure) = outcome.failure {
        return Err(failure);
    }
    let taken_bytes = (gauges.taken)(device);
    // The passes that follow are no training steps.
    layers.measure_health(false);
    let about_health = || -> Result<()> {
        let Some(files) = &files else {
            return Ok(());
        };
        let title = format!("{}, {} preset", job.label, config.preset);
        let about = About {
            title: &title,
            losses: &history.losses(),
            memory: &layer_memory::<B>(&layers.layers()),
        };
        print!("{}", files.finish(&about)?);
        Ok(())
    };
    let Some(valid_loss) = outcome.valid_loss else {
        about_health()?;
        return Ok(Ended::Early {
            step: outcome.step,
            interrupted: outcome.interrupted,
        });
    };
    let losses = history.losses();
    let fallback_rates = layers.fallback_rates();
    if args.memory {
        let title = format!("{}, {} preset", job.label, config.preset);
        let report = memory::report(&outcome.model, &probe);
        let flow = B::row().and_then(|row| row.flow);
        print!(
            "{}",
            memory::show(&title, &report, flow.as_ref(), job.checkpoints.folder())?
        );
    }
    let activation_bytes = saved_activations(&outcome.model, &probe, device, gauges.live);
    let optimizer_bytes = optimizer_state(
        outcome.model,
        // The probe's loss is not scaled, and a scale takes 8 bytes.
        optim_config
            .with_loss_scaling(None)
            .adamw::<B, Decoder<B>>(),
        &probe,
        device,
        gauges.live,
    );
    let measured = Measured {
        parameters,
        val_loss: valid_loss,
        tokens_per_s: outcome.tokens_per_second,
        first_step_s: outcome.first_step.map(|it| it.as_secs_f64()),
        activation_bytes,
        optimizer_bytes,
        taken_bytes,
        skipped_steps: skipped_steps(),
        fallback_rates,
        rates: outcome.rates,
    };
    let report = Report::new(run.recipe, config, &losses, measured);
    job.checkpoints.finish(&Finished {
        config: config.clone(),
        report: report.clone(),
        losses,
    })?;
    about_health()?;
    Ok(Ended::Complete(Box::new(report)))
}
