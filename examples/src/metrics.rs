//! The reports of a step, as Burn metrics.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use burn::tensor::backend::Backend;
use burn::tensor::{ElementConversion, Tensor};
use burn::train::ItemLazy;
use burn::train::metric::state::{FormatOptions, NumericMetricState};
use burn::train::metric::{
    Adaptor, Metric, MetricAttributes, MetricMetadata, MetricName, Numeric, NumericAttributes,
    NumericEntry, SerializedEntry,
};

/// The result of a training or validation step, still on the device.
#[derive(Debug)]
pub struct StepOutput<B: Backend> {
    /// Mean loss, of shape `[1]`.
    pub loss: Tensor<B, 1>,
    /// Tokens that it is the mean of.
    pub tokens: usize,
}

/// The result of a step, read on the metrics' thread so that training need not wait.
#[derive(Clone, Copy, Debug)]
pub struct StepReport {
    /// Mean loss in nats per byte.
    pub loss: f64,
    /// Tokens that it is the mean of.
    pub tokens: usize,
}

impl<B: Backend> ItemLazy for StepOutput<B> {
    type ItemSync = StepReport;

    fn sync(self) -> StepReport {
        StepReport {
            loss: self.loss.into_scalar().elem(),
            tokens: self.tokens,
        }
    }
}

impl Adaptor<Self> for StepReport {
    fn adapt(&self) -> Self {
        *self
    }
}

/// The training losses of a run, step by step; clones share them.
#[derive(Clone, Debug, Default)]
pub struct History(Arc<Mutex<Vec<f64>>>);

impl History {
    /// A history that begins with the losses of an earlier part of the run.
    pub fn new(losses: Vec<f64>) -> Self {
        Self(Arc::new(Mutex::new(losses)))
    }

    /// The loss of a step, counted from 1.
    pub fn loss(&self, step: usize) -> Option<f64> {
        self.0
            .lock()
            .expect("no writer panics")
            .get(step - 1)
            .copied()
    }

    /// All losses up to now.
    pub fn losses(&self) -> Vec<f64> {
        self.0.lock().expect("no writer panics").clone()
    }

    /// The losses of the first `steps` steps, once the metrics' thread has read them all.
    pub fn wait_for(&self, steps: usize) -> Vec<f64> {
        // Missing losses mean that the metrics' thread died; then what there is has to do.
        let patience = Instant::now() + Duration::from_secs(60);
        loop {
            let losses = self.losses();
            if losses.len() >= steps || Instant::now() > patience {
                return losses;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn push(&self, loss: f64) {
        self.0.lock().expect("no writer panics").push(loss);
    }
}

/// The loss, with enough digits to see it move.
#[derive(Clone)]
pub struct Loss {
    name: MetricName,
    state: NumericMetricState,
    history: Option<History>,
}

impl Loss {
    /// A loss metric that also appends to `history`.
    pub fn new(history: Option<History>) -> Self {
        Self {
            name: Arc::new("Loss".into()),
            state: NumericMetricState::new(),
            history,
        }
    }
}

impl Metric for Loss {
    type Input = StepReport;

    fn name(&self) -> MetricName {
        self.name.clone()
    }

    fn attributes(&self) -> MetricAttributes {
        NumericAttributes {
            unit: None,
            higher_is_better: false,
        }
        .into()
    }

    fn update(&mut self, step: &StepReport, _metadata: &MetricMetadata) -> SerializedEntry {
        if let Some(history) = &self.history {
            history.push(step.loss);
        }
        let format = FormatOptions::new(self.name()).precision(4);
        self.state.update(step.loss, step.tokens, format)
    }

    fn clear(&mut self) {
        self.state.reset();
    }
}

impl Numeric for Loss {
    fn value(&self) -> NumericEntry {
        self.state.current_value()
    }

    fn running_value(&self) -> NumericEntry {
        self.state.running_value()
    }
}

/// Tokens per second, from one step to the next.
#[derive(Clone)]
pub struct TokensPerSecond {
    name: MetricName,
    state: NumericMetricState,
    last: Instant,
}

impl Default for TokensPerSecond {
    fn default() -> Self {
        Self {
            name: Arc::new("Tokens/s".into()),
            state: NumericMetricState::new(),
            last: Instant::now(),
        }
    }
}

impl Metric for TokensPerSecond {
    type Input = StepReport;

    fn name(&self) -> MetricName {
        self.name.clone()
    }

    fn attributes(&self) -> MetricAttributes {
        NumericAttributes::default().into()
    }

    fn update(&mut self, step: &StepReport, _metadata: &MetricMetadata) -> SerializedEntry {
        let seconds = self.last.elapsed().as_secs_f64().max(1e-9);
        self.last = Instant::now();
        let format = FormatOptions::new(self.name()).precision(0);
        self.state.update(step.tokens as f64 / seconds, 1, format)
    }

    fn clear(&mut self) {
        self.state.reset();
    }
}

impl Numeric for TokensPerSecond {
    fn value(&self) -> NumericEntry {
        self.state.current_value()
    }

    fn running_value(&self) -> NumericEntry {
        self.state.running_value()
    }
}
