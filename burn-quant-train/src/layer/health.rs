//! The measurements of a model's layers, until they are asked for.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use burn_backend::{
    TensorMetadata,
    tensor::{Device, FloatTensor, IntTensor},
};

use super::{DelayThreshold, Now, SlotValues, policy::covers, slot::rate_of};
use crate::{
    data::{
        DataBackend,
        concat::{concat_floats, concat_ints},
        read::{floats, integers},
    },
    health::{HealthConfig, HealthReport, Label, LayerState, MatrixSums},
    lock::lock,
    recipe::{LinearMatrix, THRESHOLD},
    warning::warn,
};

/// Reports that wait for a reader; then the oldest goes.
const UNREAD: usize = 64;
/// Runs of a layer in a step that are measured: their samples wait on the device.
const RUNS: usize = 64;

/// The findings of a probe in a matrix, on its device.
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
    controller: DelayThreshold,
    /// The paths of the quantized layers, in their order.
    paths: Vec<String>,
    is_on: AtomicBool,
    present: Mutex<Present<B>>,
    reports: Mutex<Reports>,
}

/// The measurements of the present step.
struct Present<B: DataBackend> {
    now: Now,
    /// Runs of each matrix of each layer.
    runs: HashMap<(String, LinearMatrix), usize>,
    samples: Vec<Sample<B>>,
}

impl<B: DataBackend> Present<B> {
    fn at(now: Now) -> Self {
        Self {
            now,
            runs: HashMap::new(),
            samples: Vec::new(),
        }
    }
}

#[derive(Default)]
struct Reports {
    unread: VecDeque<HealthReport>,
    last: Option<HealthReport>,
}

impl<B: DataBackend> Watch<B> {
    /// Measures the layers at these paths, quantized or not; `quantized` are those that the recipe quantizes.
    pub fn new(
        config: HealthConfig,
        controller: DelayThreshold,
        paths: &[&str],
        quantized: Vec<String>,
    ) -> Self {
        for pattern in &config.layers {
            if !paths.iter().any(|path| covers(pattern, path)) {
                warn(&format!(
                    "quant-train: health is to measure the layers `{pattern}`, and the model has none; it has {}",
                    paths.join(", ")
                ));
            }
        }
        Self {
            config,
            controller,
            paths: quantized,
            is_on: AtomicBool::new(true),
            present: Mutex::new(Present::at(Now::default())),
            reports: Mutex::default(),
        }
    }

    pub fn config(&self) -> &HealthConfig {
        &self.config
    }

    /// Measures from now on, or does not.
    pub fn switch(&self, on: bool) {
        self.is_on.store(on, Ordering::Relaxed);
    }

    /// True if step number `step`, counted from 0, is measured.
    pub fn is_due(&self, step: u64) -> bool {
        (step + 1).is_multiple_of(self.config.every)
    }

    /// True if the layer at this path is measured now.
    pub fn watches(&self, path: &str) -> bool {
        let patterns = &self.config.layers;
        let is_named = patterns.is_empty() || patterns.iter().any(|pattern| covers(pattern, path));
        is_named && self.is_on.load(Ordering::Relaxed)
    }

    /// True if a run of a layer is to measure this matrix: the weight once a step, and as many runs as there is room
    /// for.
    pub fn claims(&self, now: Now, path: &str, matrix: LinearMatrix) -> bool {
        let mut present = lock(&self.present);
        if present.now != now {
            *present = Present::at(now);
        }
        let runs = present.runs.entry((path.to_owned(), matrix)).or_default();
        *runs += 1;
        *runs
            <= match matrix {
                LinearMatrix::W => 1,
                LinearMatrix::X | LinearMatrix::Gradient => RUNS,
            }
    }

    /// Adds a sample of a matrix that was claimed at this time, unless that is over.
    pub fn add(&self, now: Now, sample: Sample<B>) {
        let mut present = lock(&self.present);
        if present.now == now {
            present.samples.push(sample);
        }
    }

    /// Forgets the present step, and what was measured after step number `step`: a record of that is restored.
    pub fn restore(&self, step: u64) {
        *lock(&self.present) = Present::at(Now::default());
        let mut reports = lock(&self.reports);
        reports.unread.retain(|report| report.step <= step);
        reports.last = reports.last.take().filter(|report| report.step <= step);
    }

    /// Ends a measured step, which began at `now`, and after which layers have these values. Waits for the device.
    pub fn end_step(&self, now: Now, values: &[SlotValues]) {
        let mut present = lock(&self.present);
        let samples = match present.now == now {
            true => std::mem::replace(&mut *present, Present::at(Now::default())).samples,
            false => Vec::new(),
        };
        drop(present);
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
            step: now.step + 1,
            matrices: matrices.into_iter().map(MatrixSums::figures).collect(),
            layers: layers.collect(),
            controller: self.controller,
        };
        let mut reports = lock(&self.reports);
        if reports.unread.len() == UNREAD {
            reports.unread.pop_front();
        }
        reports.last = Some(report.clone());
        reports.unread.push_back(report);
    }

    /// Works on the last report, taken or not.
    pub fn with_last<A>(&self, work: impl FnOnce(Option<&HealthReport>) -> A) -> A {
        work(lock(&self.reports).last.as_ref())
    }

    /// The reports since they were last taken.
    pub fn take(&self) -> Vec<HealthReport> {
        lock(&self.reports).unread.drain(..).collect()
    }
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
        let numbers = floats::<B>(concat_floats::<B>(numbers.collect()));
        let counts = tensors.map(|sample| sample.counts.clone());
        let counts = integers::<B>(concat_ints::<B>(counts.collect()));
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
