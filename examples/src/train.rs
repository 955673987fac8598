//! One run: a recipe's backend, Burn's learner, a report.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use burn::grad_clipping::GradientClippingConfig;
use burn::lr_scheduler::composed::{ComposedLrScheduler, ComposedLrSchedulerConfig};
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::module::Module;
use burn::train::metric::LearningRateMetric;
use burn::train::{Learner, SupervisedTraining, TrainingStrategy};
use burn_quant_train::metric::OptimizerMetric;
use burn_quant_train::optim::LayerBackend;

use crate::args::{Args, Config, Recipe};
use crate::checkpoint::{Checkpoints, State};
use crate::data::{Text, Windows};
use crate::memory::{LiveBytes, optimizer_state, saved_activations};
use crate::metrics::{History, Loss, TokensPerSecond};
use crate::model::Decoder;
use crate::progress::{self, Lines};
use crate::report::{Measured, Report};
use crate::strategy::{StepByStep, Stop};

/// Steps between two readings of the fallback rate for the dashboard: each waits for the device.
const FALLBACK_RATE_EVERY: usize = 20;

/// What all runs of a process share.
pub struct Session<'a> {
    /// The command line.
    pub args: &'a Args,
    /// The runs' configuration.
    pub config: &'a Config,
    /// Where checkpoints go.
    pub out: &'a Path,
    /// Where checkpoints come from.
    pub resume: Option<&'a Path>,
    /// The text.
    pub text: &'a Text,
    /// Asks the runs to stop.
    pub stop: &'a Stop,
    /// Bytes live in the process's allocator.
    pub live_bytes: fn() -> u64,
    /// Names and losses of the runs before.
    pub before: Mutex<Vec<(String, History)>>,
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

/// Trains one recipe: the backend `B` is all that it takes.
///
/// # Errors
///
/// Checkpoints that cannot be read or written.
pub fn run<B: LayerBackend>(
    session: &Session<'_>,
    recipe: Recipe,
    device: &B::Device,
    live_bytes: LiveBytes<'_, B>,
) -> Result<Ended> {
    let Session { config, args, .. } = *session;
    B::seed(device, config.seed);

    // The model knows nothing of the recipe; the optimizer is AdamW that also looks after quantized layers.
    let model = config.model.init::<B>(device);
    model.materialize();
    let optim_config = config
        .optimizer
        .config()
        .with_beta_2(0.95)
        .with_weight_decay(0.1)
        .with_state_rounding(config.state_rounding.into())
        .with_grad_clipping(Some(GradientClippingConfig::Norm(1.0)));
    let optim = optim_config.init::<B, Decoder<B>>();
    let scheduler = scheduler(config)?;

    let from = session.resume.map(|dir| Checkpoints::new(dir, recipe));
    let (model, optim, scheduler, state) = match from.and_then(|it| it.newest().map(|at| (it, at)))
    {
        Some((checkpoints, step)) => {
            let state = checkpoints.load_state(step, recipe, config)?;
            let (model, optim, scheduler) =
                checkpoints.load(step, model, optim, scheduler, device)?;
            (model, optim, scheduler, state)
        }
        None => {
            let state = State {
                step: 0,
                losses: Vec::new(),
                recipe,
                config: config.clone(),
            };
            (model, optim, scheduler, state)
        }
    };
    let model = optim.attach(model);
    // They see the same layers and the same count after the learner has taken the optimizer.
    let layers = optim.view();
    let skipped_steps = optim.inner().skipped_steps_reader();
    let parameters = model.num_params();
    let first_step = state.step;
    ensure!(
        first_step <= config.steps,
        "the checkpoint of {recipe} is at step {first_step}, past --steps {}",
        config.steps
    );
    let checkpoints = Checkpoints::new(session.out, recipe);
    // What lies there is of another run, unless this run goes on where it lay.
    let in_place = session
        .resume
        .is_some_and(|it| same_folder(it, session.out));
    if first_step == 0 || !in_place {
        checkpoints.clear()?;
    }

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
    let history = History::new(state.losses.clone());
    let dashboard = progress::in_terminal() && !args.plain;
    println!(
        "{recipe}: {parameters} parameters, {} steps of {} tokens{}",
        steps,
        batch * sequence,
        match first_step {
            0 => String::new(),
            step => format!(", resumed at step {step}"),
        }
    );
    if args.layers {
        for layer in layers.layers() {
            println!("  {layer}");
        }
    }
    let before = session.before.lock().expect("no holder panics").clone();
    let renderer = if dashboard {
        progress::dashboard(session.stop.interrupter.clone())
    } else {
        Box::new(Lines {
            label: recipe.to_string(),
            history: history.clone(),
            before,
            tokens: batch * sequence,
            last: (first_step, Instant::now()),
        })
    };
    session
        .before
        .lock()
        .expect("no holder panics")
        .push((recipe.to_string(), history.clone()));

    let strategy = Arc::new(StepByStep::<B> {
        checkpoints,
        state,
        history: history.clone(),
        checkpoint_every: args
            .checkpoint_every
            .unwrap_or_else(|| (config.steps / 5).max(100)),
        stop_after: args.stop_after,
        stop: session.stop.clone(),
        dashboard,
        device: device.clone(),
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
    let training = match B::ROW.linear {
        Some(row) if row.fallback => training
            .metric_train_numeric(OptimizerMetric::fallback_rate(&optim, FALLBACK_RATE_EVERY)),
        _ => training,
    };
    // The dashboard closes when the result is dropped.
    drop(training.launch(Learner::new(model, optim, scheduler)));

    let outcome = strategy.outcome.lock().expect("training has ended").take();
    let outcome = outcome.context("training ended without a result")?;
    if let Some(failure) = outcome.failure {
        return Err(failure);
    }
    let Some(valid_loss) = outcome.valid_loss else {
        return Ok(Ended::Early {
            step: outcome.step,
            interrupted: outcome.interrupted,
        });
    };
    let losses = history.losses();
    let fallback_rates = layers.fallback_rates();
    let activation_bytes = saved_activations(&outcome.model, &probe, device, live_bytes);
    let optimizer_bytes = optimizer_state(
        outcome.model,
        optim_config.adamw::<B, Decoder<B>>(),
        &probe,
        device,
        live_bytes,
    );
    let measured = Measured {
        parameters,
        val_loss: valid_loss,
        tokens_per_s: outcome.tokens_per_second,
        activation_bytes,
        optimizer_bytes,
        skipped_steps: skipped_steps(),
        fallback_rates,
    };
    Ok(Ended::Complete(Box::new(Report::new(
        recipe, config, &losses, measured,
    ))))
}

fn same_folder(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// Linear warm-up over a twentieth of the run, cosine decay to a tenth.
fn scheduler(config: &Config) -> Result<ComposedLrScheduler> {
    let warm_up = (config.steps / 20).clamp(1, 500);
    ComposedLrSchedulerConfig::new()
        .linear(LinearLrSchedulerConfig::new(
            1.0 / (warm_up + 1) as f64,
            1.0,
            warm_up,
        ))
        .cosine(
            CosineAnnealingLrSchedulerConfig::new(config.lr, config.steps)
                .with_min_lr(config.lr / 10.0),
        )
        .init()
        .map_err(|error| anyhow!("the learning-rate schedule: {error}"))
}
