//! What is measured of the layers of a model, until it is asked for.

use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard, PoisonError},
};

use burn_backend::{
    TensorMetadata,
    tensor::{Device, FloatTensor, IntTensor},
};

use super::{SlotValues, policy::covers, slot::rate_of};
use crate::{
    data::{
        DataBackend,
        read::{floats, integers},
    },
    health::{HealthConfig, HealthReport, Label, LayerState, MatrixSums},
    recipe::{LinearMatrix, THRESHOLD},
};

/// Reports that wait for a reader; then the oldest goes.
const UNREAD: usize = 64;

/// What a probe found of a matrix, on its device.
pub(crate) struct Sample<B: DataBackend> {
    /// The module path of the layer.
    pub layer: String,
    pub matrix: LinearMatrix,
    pub elements: u64,
    pub labels: Vec<Label>,
    /// FP32, and INT32 that are bits of U32: see [`MatrixSums::new`].
    pub numbers: FloatTensor<B>,
    pub counts: IntTensor<B>,
}

/// Measures the layers of a model.
pub(crate) struct Watch<B: DataBackend> {
    config: HealthConfig,
    /// The paths of the quantized layers, in their order.
    paths: Vec<String>,
    samples: Mutex<Vec<Sample<B>>>,
    reports: Mutex<VecDeque<HealthReport>>,
    last: Mutex<Option<HealthReport>>,
}

impl<B: DataBackend> Watch<B> {
    pub fn new(config: HealthConfig, paths: Vec<String>) -> Self {
        Self {
            config,
            paths,
            samples: Mutex::default(),
            reports: Mutex::default(),
            last: Mutex::default(),
        }
    }

    pub fn config(&self) -> &HealthConfig {
        &self.config
    }

    /// True if step number `step`, counted from 0, is measured.
    pub fn is_due(&self, step: u64) -> bool {
        (step + 1).is_multiple_of(self.config.every)
    }

    /// True if the layer at this path is measured.
    pub fn watches(&self, path: &str) -> bool {
        let patterns = &self.config.layers;
        patterns.is_empty() || patterns.iter().any(|pattern| covers(pattern, path))
    }

    /// True if this matrix of a layer has been measured in this step.
    pub fn has(&self, path: &str, matrix: LinearMatrix) -> bool {
        let is_it = |sample: &Sample<B>| sample.matrix == matrix && sample.layer == path;
        lock(&self.samples).iter().any(is_it)
    }

    pub fn add(&self, sample: Sample<B>) {
        lock(&self.samples).push(sample);
    }

    /// Forgets what was measured of a step that is given up.
    pub fn clear(&self) {
        lock(&self.samples).clear();
    }

    /// Ends a measured step, after which `step` were taken and layers have these values. Waits for the device.
    pub fn end_step(&self, step: u64, values: &[SlotValues]) {
        let samples = std::mem::take(&mut *lock(&self.samples));
        let mut matrices: Vec<MatrixSums> = Vec::new();
        for sums in read(samples) {
            match matrices.iter_mut().find(|known| known.is_of(&sums)) {
                Some(known) => known.add(&sums),
                None => matrices.push(sums),
            }
        }
        let rate = rate_of(THRESHOLD);
        let layers = self.paths.iter().zip(values).map(|(path, slots)| {
            let first = |name: &str| slots.get(name)?.first().copied();
            LayerState {
                layer: path.clone(),
                threshold: first(THRESHOLD),
                rate: first(&rate),
            }
        });
        let report = HealthReport {
            step,
            matrices: matrices.into_iter().map(MatrixSums::figures).collect(),
            layers: layers.collect(),
        };
        *lock(&self.last) = Some(report.clone());
        let mut reports = lock(&self.reports);
        if reports.len() == UNREAD {
            reports.pop_front();
        }
        reports.push_back(report);
    }

    /// The last report, taken or not.
    pub fn last(&self) -> Option<HealthReport> {
        lock(&self.last).clone()
    }

    /// The reports since they were last taken.
    pub fn take(&self) -> Vec<HealthReport> {
        lock(&self.reports).drain(..).collect()
    }
}

fn lock<A>(mutex: &Mutex<A>) -> MutexGuard<'_, A> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The values of samples, of all those of a device at once.
fn read<B: DataBackend>(samples: Vec<Sample<B>>) -> Vec<MatrixSums> {
    let mut devices: Vec<(Device<B>, Vec<Sample<B>>)> = Vec::new();
    for sample in samples {
        let device = B::float_device(&sample.numbers);
        match devices.iter_mut().find(|(known, _)| *known == device) {
            Some((_, samples)) => samples.push(sample),
            None => devices.push((device, vec![sample])),
        }
    }
    let of_devices = devices.into_iter().flat_map(|(_, samples)| {
        let tensors = samples.iter();
        let numbers = tensors.clone().map(|sample| sample.numbers.clone());
        let numbers = floats::<B>(B::float_cat(numbers.collect(), 0));
        let counts = tensors.map(|sample| sample.counts.clone());
        let counts = integers::<B>(B::int_cat(counts.collect(), 0));
        let mut numbers = numbers.into_iter();
        let mut counts = counts.into_iter().map(i32::cast_unsigned);
        let sums = samples.into_iter().map(move |sample| {
            let lengths = [sample.numbers.shape(), sample.counts.shape()];
            let [of_numbers, of_counts] = lengths.map(|shape| shape.num_elements());
            let numbers: Vec<_> = numbers.by_ref().take(of_numbers).collect();
            let counts: Vec<_> = counts.by_ref().take(of_counts).collect();
            MatrixSums::new(
                sample.layer,
                sample.matrix,
                sample.elements,
                sample.labels,
                &numbers,
                &counts,
            )
        });
        sums.collect::<Vec<_>>()
    });
    of_devices.collect()
}
