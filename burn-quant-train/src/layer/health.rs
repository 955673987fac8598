//! The measurements of a model's layers, until they are asked for.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use burn_backend::{TensorMetadata, tensor::Device};

use super::{DelayThreshold, Now, SlotValues, policy::covers, slot::rate_of};
use crate::{
    data::{
        DataBackend,
        concat::{concat_floats, concat_ints},
        health::Findings,
        optimizer::{Moment, StateFormat},
        read::{floats, integers},
    },
    health::{HealthConfig, HealthReport, Label, LayerState, MatrixSums, moment_figures},
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
    /// See [`MatrixSums::new`].
    pub findings: Findings<B>,
}

/// The findings of a comparison of a moment with what it was rounded to.
pub(crate) struct MomentSample<B: DataBackend> {
    /// The module path of the layer.
    pub layer: String,
    pub moment: Moment,
    pub format: Option<StateFormat>,
    pub elements: u64,
    /// See [`moment_figures`].
    pub findings: Findings<B>,
}

/// Measures the layers of a model.
pub(crate) struct Watch<B: DataBackend> {
    config: HealthConfig,
    controller: DelayThreshold,
    /// The paths of the layers that keep state, in their order.
    with_state: Vec<String>,
    /// The places of all layers in module order.
    places: HashMap<String, u64>,
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
    moments: Vec<MomentSample<B>>,
}

impl<B: DataBackend> Present<B> {
    fn at(now: Now) -> Self {
        Self {
            now,
            runs: HashMap::new(),
            samples: Vec::new(),
            moments: Vec::new(),
        }
    }
}

#[derive(Default)]
struct Reports {
    unread: VecDeque<HealthReport>,
    last: Option<HealthReport>,
}

impl<B: DataBackend> Watch<B> {
    /// Measures the layers at these paths, quantized or not; `with_state` are those that keep state between
    /// steps.
    pub fn new(
        config: HealthConfig,
        controller: DelayThreshold,
        paths: &[&str],
        with_state: Vec<String>,
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
            with_state,
            places: paths.iter().map(|it| (*it).to_owned()).zip(0..).collect(),
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

    /// True if the layer at this path is measured in step number `step`, counted from 0.
    pub fn watches(&self, path: &str, step: u64) -> bool {
        // First, as every run of a layer asks.
        if !(self.is_due(step) && self.is_on.load(Ordering::Relaxed)) {
            return false;
        }
        let patterns = &self.config.layers;
        let is_named = patterns.is_empty() || patterns.iter().any(|pattern| covers(pattern, path));
        let place = self.places.get(path).copied().unwrap_or_default();
        let turns = self.config.turns;
        is_named && place % turns == (step / self.config.every) % turns
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

    /// Adds the findings on moments in the step that `now` is in, unless that is over or another clone of the optimizer
    /// has added its own.
    pub fn add_moments(&self, now: Now, samples: Vec<MomentSample<B>>) {
        let mut present = lock(&self.present);
        if present.now.time < now.time {
            *present = Present::at(now);
        }
        if present.now == now && present.moments.is_empty() {
            present.moments = samples;
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
        let ended = match present.now == now {
            true => std::mem::replace(&mut *present, Present::at(Now::default())),
            false => Present::at(now),
        };
        drop(present);
        let Present {
            samples, moments, ..
        } = ended;
        let of_matrices = samples.iter().map(|sample| &sample.findings);
        let of_moments = moments.iter().map(|sample| &sample.findings);
        let mut read = read(of_matrices.chain(of_moments).cloned().collect()).into_iter();
        let mut matrices: Vec<MatrixSums> = Vec::new();
        for (sample, (numbers, counts)) in samples.into_iter().zip(read.by_ref()) {
            let Sample {
                layer,
                matrix,
                elements,
                labels,
                findings: _,
            } = sample;
            let sums = MatrixSums::new(layer, matrix, elements, labels, &numbers, &counts);
            match matrices.iter_mut().find(|known| known.is_of(&sums)) {
                Some(known) => known.add(&sums),
                None => matrices.push(sums),
            }
        }
        let moments = moments.into_iter().zip(read);
        let moments = moments.map(|(sample, (numbers, counts))| {
            let MomentSample {
                layer,
                moment,
                format,
                elements,
                findings: _,
            } = sample;
            moment_figures(layer, moment, format, elements, &numbers, &counts)
        });
        let rate = rate_of(THRESHOLD);
        let layers = self.with_state.iter().zip(values).map(|(path, slots)| {
            let first = |name: &str| slots.get(name)?.first().copied();
            LayerState {
                layer: path.clone(),
                threshold: first(THRESHOLD),
                rate: first(&rate),
            }
        });
        let report = HealthReport {
            step: now.step + 1,
            turns: self.config.turns,
            matrices: matrices.into_iter().map(MatrixSums::figures).collect(),
            moments: moments.collect(),
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

/// The values of findings, in their order: all those of a device are read at once.
fn read<B: DataBackend>(findings: Vec<Findings<B>>) -> Vec<(Vec<f32>, Vec<u32>)> {
    let mut devices: Vec<(Device<B>, Vec<usize>)> = Vec::new();
    for (index, found) in findings.iter().enumerate() {
        let device = B::float_device(&found.numbers[0]);
        match devices.iter_mut().find(|(known, _)| *known == device) {
            Some((_, indices)) => indices.push(index),
            None => devices.push((device, vec![index])),
        }
    }
    let mut values = vec![(Vec::new(), Vec::new()); findings.len()];
    for (_, indices) in devices {
        let of_device = || indices.iter().map(|&index| &findings[index]);
        let numbers = of_device().flat_map(|found| found.numbers.iter().cloned());
        let numbers = floats::<B>(concat_floats::<B>(numbers.collect()));
        let counts = of_device().flat_map(|found| found.counts.iter().cloned());
        let counts = integers::<B>(concat_ints::<B>(counts.collect()));
        let mut numbers = numbers.into_iter();
        let mut counts = counts.into_iter().map(i32::cast_unsigned);
        for &index in &indices {
            let found = &findings[index];
            let of_numbers = found.numbers.iter().map(|it| it.shape().num_elements());
            let of_counts = found.counts.iter().map(|it| it.shape().num_elements());
            let [of_numbers, of_counts] = [of_numbers.sum(), of_counts.sum()];
            values[index] = (
                numbers.by_ref().take(of_numbers).collect(),
                counts.by_ref().take(of_counts).collect(),
            );
        }
    }
    values
}
