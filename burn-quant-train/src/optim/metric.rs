//! Metrics for the dashboard of Burn's `Learner`.

use std::sync::Arc;

use burn::{
    module::AutodiffModule,
    train::metric::{
        Metric, MetricAttributes, MetricMetadata, MetricName, Numeric, NumericAttributes,
        NumericEntry, SerializedEntry,
        state::{FormatOptions, NumericMetricState},
    },
};

use super::{adamw::QuantAdamW, backend::LayerBackend, wrapper::QuantOptimizer};
use crate::health::{CastHealth, MatrixHealth};

/// A number that the optimizer keeps on the device.
///
/// Reading it waits for the device, so it reads on every `every`-th update and repeats the value between.
#[derive(Clone)]
pub struct OptimizerMetric {
    name: MetricName,
    unit: Option<&'static str>,
    state: NumericMetricState,
    read: Arc<dyn Fn() -> f64 + Send + Sync>,
    every: usize,
    updates: usize,
    last: f64,
}

impl OptimizerMetric {
    /// The mean fallback rate over the quantized layers, in percent, in the last optimizer step. Give it the optimizer
    /// that goes to the `Learner`.
    ///
    /// # Panics
    ///
    /// If `every` is 0.
    pub fn fallback_rate<O, B>(optimizer: &QuantOptimizer<O, B>, every: usize) -> Self
    where
        B: LayerBackend,
    {
        let layers = optimizer.view();
        let mean = move || {
            let rates = layers.fallback_rates();
            let sum: f64 = rates.iter().map(|(_, rate)| f64::from(*rate)).sum();
            100.0 * sum / rates.len() as f64
        };
        Self::new("Fallback Rate", Some("%"), mean, every)
    }

    /// Steps that were skipped so far because a gradient held NaN or Inf; an epoch shows the mean of its readings. Give
    /// it the optimizer that goes to the `Learner`.
    ///
    /// # Panics
    ///
    /// If `every` is 0.
    pub fn skipped_steps<M, B>(
        optimizer: &QuantOptimizer<QuantAdamW<M, B>, B>,
        every: usize,
    ) -> Self
    where
        M: AutodiffModule<B> + 'static,
        B: LayerBackend,
    {
        let skipped = optimizer.inner().skipped_steps_reader();
        Self::new("Skipped Steps", None, move || skipped() as f64, every)
    }

    /// The scale of losses; NaN where they are not scaled. Give it the optimizer that goes to the `Learner`.
    ///
    /// # Panics
    ///
    /// If `every` is 0.
    pub fn loss_scale<M, B>(optimizer: &QuantOptimizer<QuantAdamW<M, B>, B>, every: usize) -> Self
    where
        M: AutodiffModule<B> + 'static,
        B: LayerBackend,
    {
        let scaler = optimizer.loss_scaler();
        let scale = move || scaler.read::<B>().map_or(f64::NAN, f64::from);
        Self::new("Loss Scale", None, scale, every)
    }

    /// The largest noise of an operand of any layer, in the last step that was measured: the squared error in percent
    /// of the squared values. Give it the optimizer that goes to the `Learner`, which measures by its
    /// [`HealthConfig`](crate::health::HealthConfig).
    pub fn worst_noise<O, B>(optimizer: &QuantOptimizer<O, B>) -> Self
    where
        B: LayerBackend,
    {
        Self::worst(optimizer, "Worst Noise", |cast| cast.noise)
    }

    /// The largest share of values of an operand of any layer that became 0, in percent, in the last step that was
    /// measured: as [`worst_noise`](Self::worst_noise).
    pub fn worst_underflow<O, B>(optimizer: &QuantOptimizer<O, B>) -> Self
    where
        B: LayerBackend,
    {
        Self::worst(optimizer, "Worst Underflow", |cast| Some(cast.underflow))
    }

    fn worst<O, B>(
        optimizer: &QuantOptimizer<O, B>,
        name: &str,
        figure: fn(&CastHealth) -> Option<f64>,
    ) -> Self
    where
        B: LayerBackend,
    {
        let layers = optimizer.view();
        let worst = move || {
            layers.with_last_health(|report| {
                let matrices = report.iter().flat_map(|report| &report.matrices);
                let figures = matrices.flat_map(MatrixHealth::running).filter_map(figure);
                100.0 * figures.fold(f64::NAN, f64::max)
            })
        };
        Self::new(name, Some("%"), worst, 1)
    }

    fn new(
        name: &str,
        unit: Option<&'static str>,
        read: impl Fn() -> f64 + Send + Sync + 'static,
        every: usize,
    ) -> Self {
        assert!(
            every > 0,
            "metric {name}: `every` counts updates between reads and must be at least 1"
        );
        Self {
            name: Arc::new(String::from(name)),
            unit,
            state: NumericMetricState::new(),
            read: Arc::new(read),
            every,
            updates: 0,
            last: f64::NAN,
        }
    }
}

impl Metric for OptimizerMetric {
    type Input = ();

    fn update(&mut self, _item: &(), _metadata: &MetricMetadata) -> SerializedEntry {
        if self.updates.is_multiple_of(self.every) {
            self.last = (self.read)();
        }
        self.updates += 1;
        // A mean over an epoch would stay NaN.
        if self.last.is_nan() {
            let none = NumericEntry::Value(self.last).serialize();
            return SerializedEntry::new(String::from("-"), none);
        }
        let format = FormatOptions::new(self.name());
        let format = match self.unit {
            Some(unit) => format.unit(unit).precision(1),
            None => format.precision(0),
        };
        self.state.update(self.last, 1, format)
    }

    fn clear(&mut self) {
        self.state.reset();
    }

    fn name(&self) -> MetricName {
        self.name.clone()
    }

    fn attributes(&self) -> MetricAttributes {
        NumericAttributes {
            unit: self.unit.map(String::from),
            higher_is_better: false,
        }
        .into()
    }
}

impl Numeric for OptimizerMetric {
    fn value(&self) -> NumericEntry {
        self.state.current_value()
    }

    fn running_value(&self) -> NumericEntry {
        self.state.running_value()
    }
}
