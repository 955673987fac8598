//! Slots: named state of layers, on a device, and how it moves at a step.

use std::collections::BTreeMap;

use burn_backend::{
    IntDType, TensorMetadata,
    tensor::{Device, FloatTensor, IntTensor},
};

use crate::{
    data::{
        DataBackend,
        read::floats,
        threshold::{DelayThreshold, Thresholds, delay_threshold},
    },
    recipe::{Slot, SlotKind},
};

/// The values of one layer's slots, in host memory, by name. A name may have a suffix, as `threshold.rate` has.
pub type SlotValues = BTreeMap<String, Vec<f32>>;

/// How slots move, for all layers of a model.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Controllers {
    /// The controller of thresholds.
    pub threshold: DelayThreshold,
}

/// The state of one slot of all layers, on one device.
#[derive(Debug, Clone)]
pub(super) enum SlotState<B: DataBackend> {
    Threshold {
        state: Thresholds<B>,
        /// True while a run counts on from the counters.
        lent: bool,
        /// Blocks that other runs counted meanwhile.
        aside: Option<IntTensor<B>>,
    },
}

/// The part of a threshold slot that a run of a layer takes.
pub(super) struct Lent<B: DataBackend> {
    pub thresholds: FloatTensor<B>,
    pub counts: IntTensor<B>,
    /// True if the counters go on from the slot's, false if from zero.
    pub all: bool,
}

/// The name of the value beside a threshold that holds the fallback rate of the last step.
pub(super) fn rate_of(slot: &str) -> String {
    format!("{slot}.rate")
}

/// Gives a layer that has no value for a slot the one that it starts with.
///
/// # Panics
///
/// If layer number `index` has a value that no controller gives.
pub(super) fn complete(
    slot: &Slot,
    controllers: &Controllers,
    index: usize,
    layer: &mut SlotValues,
) {
    match slot.kind {
        SlotKind::DelayThreshold => {
            let values = layer.entry(slot.name.to_owned()).or_default();
            if values.is_empty() {
                values.push(controllers.threshold.initial);
            }
            assert!(
                matches!(values[..], [value] if value > 0.0 && value.is_finite()),
                "layers: slot `{}` of quantized layer {index} has {values:?} in the record, where one positive finite \
                 threshold belongs; the record is damaged, load another one",
                slot.name
            );
        }
    }
}

impl<B: DataBackend> SlotState<B> {
    /// Uploads the slot of layers with these [complete] values.
    pub fn new(slot: &Slot, layers: &[SlotValues], device: &Device<B>) -> Self {
        match slot.kind {
            SlotKind::DelayThreshold => {
                let column = |name: &str| -> Vec<f32> {
                    let value = |layer: &SlotValues| layer.get(name)?.first().copied();
                    let values = layers.iter().map(value);
                    values.map(|value| value.unwrap_or(f32::NAN)).collect()
                };
                let (thresholds, rates) = (column(slot.name), column(&rate_of(slot.name)));
                Self::threshold(Thresholds::new(&thresholds, &rates, device))
            }
        }
    }

    fn threshold(state: Thresholds<B>) -> Self {
        Self::Threshold {
            state,
            lent: false,
            aside: None,
        }
    }

    /// Thresholds and counters for a run of a layer.
    pub fn lend(&mut self) -> Lent<B> {
        match self {
            Self::Threshold { state, lent, .. } => {
                let all = !std::mem::replace(lent, true);
                let counts = match all {
                    true => state.counts.clone(),
                    false => {
                        let device = B::int_device(&state.counts);
                        B::int_zeros(state.counts.shape(), &device, IntDType::I32)
                    }
                };
                Lent {
                    thresholds: state.thresholds.clone(),
                    counts,
                    all,
                }
            }
        }
    }

    /// Takes the counters of a run; `all`: they went on from the slot's.
    pub fn take_back(&mut self, counts: IntTensor<B>, all: bool) {
        match self {
            Self::Threshold { state, lent, .. } if all => {
                state.counts = counts;
                *lent = false;
            }
            Self::Threshold { aside, .. } => {
                *aside = Some(match aside.take() {
                    None => counts,
                    Some(others) => B::int_add(others, counts),
                });
            }
        }
    }

    /// Writes the slot to the values of layers. Waits for the device.
    pub fn read(&self, slot: &Slot, layers: &mut [SlotValues]) {
        match self {
            Self::Threshold { state, .. } => {
                let thresholds = floats::<B>(state.thresholds.clone());
                let rates = floats::<B>(state.rates.clone());
                for ((layer, threshold), rate) in layers.iter_mut().zip(thresholds).zip(rates) {
                    layer.insert(slot.name.to_owned(), vec![threshold]);
                    // Text formats have no NaN.
                    if !rate.is_nan() {
                        layer.insert(rate_of(slot.name), vec![rate]);
                    }
                }
            }
        }
    }

    /// Ends a step: moves the slot by the counts of all devices, on the first of them, and copies it to the others.
    pub fn advance(mut devices: Vec<(Device<B>, Self)>, controllers: &Controllers) -> Vec<Self> {
        let others = devices.split_off(devices.len().min(1));
        let Some((device, first)) = devices.pop() else {
            return Vec::new();
        };
        match first {
            Self::Threshold {
                mut state, aside, ..
            } => {
                let aside = aside.into_iter();
                let of_others = others.iter().flat_map(|(_, other)| match other {
                    Self::Threshold { state, aside, .. } => {
                        let counts = [Some(&state.counts), aside.as_ref()].into_iter().flatten();
                        counts.map(|counts| B::int_to_device(counts.clone(), &device))
                    }
                });
                for counts in aside.chain(of_others) {
                    state.counts = B::int_add(state.counts, counts);
                }
                let moved = delay_threshold(state, &controllers.threshold);
                let copies = others.into_iter().map(|(device, _)| {
                    let counts = moved.counts.shape();
                    Self::threshold(Thresholds {
                        thresholds: B::float_to_device(moved.thresholds.clone(), &device),
                        counts: B::int_zeros(counts, &device, IntDType::I32),
                        rates: B::float_to_device(moved.rates.clone(), &device),
                    })
                });
                let copies: Vec<_> = copies.collect();
                std::iter::once(Self::threshold(moved))
                    .chain(copies)
                    .collect()
            }
        }
    }
}
