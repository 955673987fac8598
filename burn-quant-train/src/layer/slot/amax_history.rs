//! Histories of largest magnitudes, by which delayed scaling quantizes.

use std::cell::OnceCell;

use burn_backend::{
    FloatDType, Scalar, Shape, TensorData, TensorMetadata, get_device_settings,
    tensor::{Device, FloatTensor},
};
use cubecl_kernels::{
    amax_history::{self, MAX_MARGIN},
    scale::MIN_ABSMAX,
};
use serde::{Deserialize, Serialize};

use super::{ScaledStep, SlotValues};
use crate::data::{
    DataBackend,
    amax_history::{AmaxHistory, advance_amax_history},
    concat::concat_floats,
    read::floats,
};

/// How the scale of a matrix follows from the largest magnitudes that it had in earlier steps (delayed scaling:
/// NVIDIA's TransformerEngine, whose defaults these are).
///
/// A step has one maximum for each matrix: that of all runs of the layer, on all devices. One that is not finite, or 0
/// or below 2^-100, is not kept: history and scale stay as they are. A matrix without a history is scaled by its own
/// maximum, so a first step saturates nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DelayedScaling {
    /// The number of steps whose maxima are kept.
    pub history: usize,
    /// The largest number stands for `2^margin` times the maximum: room for magnitudes that grow.
    pub margin: u32,
    /// Which of the maxima counts.
    pub algorithm: AmaxAlgorithm,
    /// The scale moves at each so many optimizer steps. A matrix that has no scale yet does not wait for it.
    pub interval: u64,
}

/// Which maximum of a history the scale follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum AmaxAlgorithm {
    /// The largest one.
    Max,
    /// That of the last step in which the layer ran.
    MostRecent,
}

impl Default for DelayedScaling {
    /// The largest of 1024 maxima, no margin, at every step.
    fn default() -> Self {
        Self {
            history: 1024,
            margin: 0,
            algorithm: AmaxAlgorithm::Max,
            interval: 1,
        }
    }
}

/// Runs of a layer in a step whose maxima are held one by one.
const MANY_RUNS: usize = 64;

impl DelayedScaling {
    /// Checks the settings.
    ///
    /// # Panics
    ///
    /// If the history or the interval is empty, or the margin above 64.
    pub fn validate(&self) {
        assert!(
            self.history > 0,
            "delayed scaling: a history of no steps; use one of at least 1 step, such as 1024"
        );
        assert!(
            self.interval > 0,
            "delayed scaling: an interval of no steps; use one of at least 1 step"
        );
        assert!(
            self.margin <= MAX_MARGIN,
            "delayed scaling: a margin of 2^{}; use an exponent from 0 to {MAX_MARGIN}, such as 0",
            self.margin
        );
    }

    /// The settings as kernels take them at the end of step number `step`.
    fn of_step(&self, step: u64) -> amax_history::DelayedScaling {
        amax_history::DelayedScaling {
            margin: self.margin,
            most_recent: self.algorithm == AmaxAlgorithm::MostRecent,
            due: (step + 1).is_multiple_of(self.interval),
        }
    }
}

/// The histories of all layers on one device.
#[derive(Debug, Clone)]
pub(in crate::layer) struct AmaxHistories<B: DataBackend> {
    state: AmaxHistory<B>,
    /// For each layer the maxima of its runs in the present step, FP32 `[1]`.
    now: Vec<Vec<FloatTensor<B>>>,
}

/// The name of the values beside a maximum that it follows.
fn history_of(slot: &str) -> String {
    format!("{slot}.history")
}

/// Checks the history in a record.
///
/// # Panics
///
/// If layer number `index` has a maximum that delayed scaling never keeps.
pub(super) fn complete(slot: &str, index: usize, layer: &SlotValues) {
    let history = history_of(slot);
    for (name, at_most) in [(slot, 1), (&history, usize::MAX)] {
        let values = layer.get(name).map_or(&[][..], Vec::as_slice);
        let is_kept = |value: &f32| (MIN_ABSMAX..=f32::MAX).contains(value);
        assert!(
            values.len() <= at_most && values.iter().all(is_kept),
            "layers: slot `{name}` of quantized layer {index} has {values:?} in the record, where largest magnitudes \
             belong, positive and finite; the record is damaged, load another one",
        );
    }
}

impl<B: DataBackend> AmaxHistories<B> {
    pub(super) fn new(
        slot: &str,
        layers: &[SlotValues],
        device: &Device<B>,
        config: &DelayedScaling,
    ) -> Self {
        let name = history_of(slot);
        let values_of = |layer: &SlotValues, name: &str, count: usize| {
            let mut values = layer.get(name).cloned().unwrap_or_default();
            values.resize(count, 0.0);
            values
        };
        let column = |name: &str, count: usize| -> FloatTensor<B> {
            let values = layers
                .iter()
                .flat_map(|layer| values_of(layer, name, count));
            let values = TensorData::new(values.collect::<Vec<_>>(), [layers.len(), count]);
            B::float_from_data(values, device)
        };
        let maxima = column(slot, 1);
        Self {
            state: AmaxHistory {
                maxima: B::float_reshape(maxima, Shape::new([layers.len()])),
                history: column(&name, config.history),
            },
            now: vec![Vec::new(); layers.len()],
        }
    }

    /// The magnitudes that become the largest number, FP32 `[layers]`; 0 where there is none.
    pub fn maxima(&self) -> FloatTensor<B> {
        self.state.maxima.clone()
    }

    /// Takes the maximum of a run, FP32 `[1]`.
    pub fn note(&mut self, layer: usize, absmax: FloatTensor<B>) {
        let maxima = &mut self.now[layer];
        maxima.push(absmax);
        // Forward passes that no step follows do not pile up.
        if maxima.len() >= MANY_RUNS {
            let maxima = std::mem::take(maxima);
            self.now[layer].push(largest_of::<B>(maxima));
        }
    }

    /// Waits for the device.
    pub(super) fn read(&self, slot: &str, layers: &mut [SlotValues]) {
        let AmaxHistory { maxima, history } = &self.state;
        let length = history.shape()[1];
        let [maxima, histories] = [maxima, history].map(|it| floats::<B>(it.clone()));
        let kept = |values: &[f32]| -> Vec<f32> {
            let kept = values.iter().copied();
            kept.take_while(|value| *value > 0.0).collect()
        };
        for (index, layer) in layers.iter_mut().enumerate() {
            for (name, values) in [
                (slot.to_owned(), kept(&maxima[index..=index])),
                (
                    history_of(slot),
                    kept(&histories[index * length..][..length]),
                ),
            ] {
                match values.is_empty() {
                    true => layer.remove(&name),
                    false => layer.insert(name, values),
                };
            }
        }
    }

    /// Ends step number `step`: adds the largest maximum of all runs, on this device and on others, to the histories,
    /// and lets the scales follow.
    pub(super) fn advance(
        mut self,
        others: impl Iterator<Item = Self>,
        device: &Device<B>,
        config: &DelayedScaling,
        step: u64,
    ) -> Self {
        for other in others {
            for (mine, theirs) in self.now.iter_mut().zip(other.now) {
                mine.extend(theirs.into_iter().map(|it| B::float_to_device(it, device)));
            }
        }
        if let Some(runs) = self.of_step(device) {
            let scaling = config.of_step(step);
            self.state = advance_amax_history::<B>(self.state, runs, scaling);
        }
        self
    }

    /// The maxima of each layer's runs, FP32 `[layers, runs]`: 0 where a layer ran less often than another. `None` if
    /// none ran.
    fn of_step(&mut self, device: &Device<B>) -> Option<FloatTensor<B>> {
        let layers = self.now.len();
        let runs = self
            .now
            .iter()
            .map(Vec::len)
            .max()
            .filter(|runs| *runs > 0)?;
        let zero = OnceCell::new();
        let mut all = Vec::with_capacity(layers * runs);
        for maxima in &mut self.now {
            let missing = runs - maxima.len();
            all.append(maxima);
            all.extend((0..missing).map(|_| {
                let zeros = || B::float_zeros(Shape::new([1]), device, FloatDType::F32);
                zero.get_or_init(zeros).clone()
            }));
        }
        let shape = Shape::new([layers, runs]);
        Some(B::float_reshape(concat_floats::<B>(all), shape))
    }

    /// The maxima as they are under the next step's loss scale: those of gradients move with it. One that would leave
    /// the range of what is kept stays.
    pub(super) fn rescaled(self, scaled: &ScaledStep<B>, device: &Device<B>) -> Self {
        let bools = get_device_settings::<B>(device).bool_dtype;
        let on = |scale: &FloatTensor<B>| B::float_to_device(scale.clone(), device);
        let factor = B::float_div(on(&scaled.next), on(&scaled.used));
        let moved = |maxima: FloatTensor<B>, factor: FloatTensor<B>| {
            let moved = B::float_mul(maxima.clone(), factor);
            let large = B::float_greater_equal_elem(moved.clone(), Scalar::from(MIN_ABSMAX), bools);
            let finite = B::float_lower_equal_elem(moved.clone(), Scalar::from(f32::MAX), bools);
            B::float_mask_where(maxima, B::bool_and(large, finite), moved)
        };
        let AmaxHistory { maxima, history } = self.state;
        let state = AmaxHistory {
            maxima: moved(maxima, factor.clone()),
            history: moved(history, B::float_reshape(factor, Shape::new([1, 1]))),
        };
        Self {
            state,
            now: self.now,
        }
    }

    /// The same on another device, before the runs of a step.
    pub(super) fn to_device(&self, device: &Device<B>) -> Self {
        let moved = |tensor: &FloatTensor<B>| B::float_to_device(tensor.clone(), device);
        Self {
            state: AmaxHistory {
                maxima: moved(&self.state.maxima),
                history: moved(&self.state.history),
            },
            now: vec![Vec::new(); self.now.len()],
        }
    }
}

/// The largest of these numbers, FP32 `[1]` each: infinite where one is not finite.
fn largest_of<B: DataBackend>(numbers: Vec<FloatTensor<B>>) -> FloatTensor<B> {
    let row = concat_floats::<B>(numbers);
    // NaN is not larger than any number.
    let bools = get_device_settings::<B>(&B::float_device(&row)).bool_dtype;
    let finite = B::float_lower_equal_elem(row.clone(), Scalar::from(f32::MAX), bools);
    let row = B::float_mask_fill(row, B::bool_not(finite), Scalar::from(f32::INFINITY));
    B::float_max_dim(row, 0)
}
