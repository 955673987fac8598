//! Metrics for the dashboard of Burn's `Learner`.

use std::sync::Arc;

use burn::train::metric::{
    Metric, MetricAttributes, MetricMetadata, MetricName, Numeric, NumericAttributes, NumericEntry,
    SerializedEntry,
    state::{FormatOptions, NumericMetricState},
};

use crate::optim::{LayerBackend, QuantOptimizer};

/// The mean fallback rate over the quantized layers, in percent, in the last optimizer step.
///
/// Reading it waits for the device, so it reads on every `every`-th update and repeats the value between.
pub struct FallbackRateMetric {
    name: MetricName,
    state: NumericMetricState,
    rates: Arc<dyn Fn() -> Vec<(String, f32)> + Send + Sync>,
    every: usize,
    updates: usize,
    last: f64,
}

impl FallbackRateMetric {
    /// Watches the layers of `optimizer`: give it a clone of the optimizer that goes to the `Learner`.
    ///
    /// # Panics
    ///
    /// If `every` is 0.
    pub fn new<O, B>(optimizer: &QuantOptimizer<O, B>, every: usize) -> Self
    where
        O: Clone + Send + Sync + 'static,
        B: LayerBackend,
    {
        assert!(
            every > 0,
            "FallbackRateMetric: `every` counts updates between reads and must be at least 1"
        );
        let optimizer = optimizer.clone();
        Self {
            name: Arc::new(String::from("Fallback Rate")),
            state: NumericMetricState::new(),
            rates: Arc::new(move || optimizer.fallback_rates()),
            every,
            updates: 0,
            last: f64::NAN,
        }
    }
}

impl Clone for FallbackRateMetric {
    fn clone(&self) -> Self {
        Self {
            name: self.name.clone(),
            state: self.state.clone(),
            rates: self.rates.clone(),
            every: self.every,
            updates: self.updates,
            last: self.last,
        }
    }
}

impl Metric for FallbackRateMetric {
    type Input = ();

    fn update(&mut self, _item: &(), _metadata: &MetricMetadata) -> SerializedEntry {
        if self.updates.is_multiple_of(self.every) {
            let rates = (self.rates)();
            let sum: f64 = rates.iter().map(|(_, rate)| f64::from(*rate)).sum();
            self.last = 100.0 * sum / rates.len() as f64;
        }
        self.updates += 1;
        let format = FormatOptions::new(self.name()).unit("%").precision(1);
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
            unit: Some(String::from("%")),
            higher_is_better: false,
        }
        .into()
    }
}

impl Numeric for FallbackRateMetric {
    fn value(&self) -> NumericEntry {
        self.state.current_value()
    }

    fn running_value(&self) -> NumericEntry {
        self.state.running_value()
    }
}
