//! Slots: named state of layers, for each device that runs them, and how it moves at a step.

mod accumulator;
mod amax_history;
mod hadamard;
mod step_size;
mod threshold;

use std::collections::BTreeMap;

use burn_backend::tensor::{Device, FloatTensor};

use crate::{
    data::{DataBackend, threshold::DelayThreshold},
    recipe::{Slot, SlotKind},
};

pub(super) use amax_history::AmaxHistories;
pub use amax_history::{AmaxAlgorithm, DelayedScaling};
pub(super) use hadamard::HadamardSizes;
pub(super) use step_size::StepSizes;
pub use step_size::{HadamardChoice, LearnedSteps};
pub(super) use threshold::{ThresholdSlot, rate_of};

/// The values of one layer's slots, in host memory, by name. A name may have a suffix, as `threshold.rate` has.
pub type SlotValues = BTreeMap<String, Vec<f32>>;

/// How slots move, for all layers of a model.
#[derive(Debug, Clone, Default)]
pub(crate) struct Controllers {
    /// The controller of thresholds.
    pub threshold: DelayThreshold,
    /// The controller of step sizes.
    pub steps: LearnedSteps,
    /// How scales follow histories of maxima.
    pub scaling: DelayedScaling,
    /// The slot of the history of maxima of dY; an empty name where there is none.
    pub gradient_history: &'static str,
}

/// The scales of losses around an optimizer step, FP32 `[1]`. Gradients, dY among them, are multiplied by the scale of
/// their step.
#[derive(Debug, Clone)]
pub(crate) struct ScaledStep<B: DataBackend> {
    /// That of the step.
    pub used: FloatTensor<B>,
    /// That of the next one.
    pub next: FloatTensor<B>,
}

/// The state of one slot of all layers, on one device.
#[derive(Debug, Clone)]
pub(super) enum SlotState<B: DataBackend> {
    Threshold(ThresholdSlot<B>),
    StepSize(StepSizes<B>),
    AmaxHistory(AmaxHistories<B>),
    HadamardSize(HadamardSizes),
}

/// Gives a layer that has no value for a slot the one that it starts with, if there is one.
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
            threshold::complete(slot.name, &controllers.threshold, index, layer);
        }
        SlotKind::StepSize => step_size::complete(slot.name, index, layer),
        SlotKind::AmaxHistory => amax_history::complete(slot.name, index, layer),
        SlotKind::HadamardSize => hadamard::complete(slot.name, index, layer),
    }
}

/// A kind of state, as one of those that a slot can hold.
pub(super) trait OfSlot<B: DataBackend>: Sized {
    /// Names what it holds.
    const WHAT: &'static str;

    /// That of a slot, if it holds this kind.
    fn of(slot: &mut SlotState<B>) -> Option<&mut Self>;

    /// The same, taken out.
    fn take(slot: SlotState<B>) -> Option<Self>;
}

macro_rules! of_slot {
    ($($variant:ident: $state:ty = $what:literal,)*) => { $(
        impl<B: DataBackend> OfSlot<B> for $state {
            const WHAT: &'static str = $what;

            fn of(slot: &mut SlotState<B>) -> Option<&mut Self> {
                let SlotState::$variant(state) = slot else {
                    return None;
                };
                Some(state)
            }

            fn take(slot: SlotState<B>) -> Option<Self> {
                let SlotState::$variant(state) = slot else {
                    return None;
                };
                Some(state)
            }
        }
    )* };
}

of_slot! {
    Threshold: ThresholdSlot<B> = "threshold",
    StepSize: StepSizes<B> = "step size",
    AmaxHistory: AmaxHistories<B> = "history of maxima",
    HadamardSize: HadamardSizes = "size of a transform",
}

impl<B: DataBackend> SlotState<B> {
    /// Uploads the slot of layers with these [complete] values.
    pub fn new(
        slot: &Slot,
        controllers: &Controllers,
        layers: &[SlotValues],
        device: &Device<B>,
    ) -> Self {
        match slot.kind {
            SlotKind::DelayThreshold => {
                Self::Threshold(ThresholdSlot::new(slot.name, layers, device))
            }
            SlotKind::StepSize => Self::StepSize(StepSizes::new(slot.name, layers, device)),
            SlotKind::AmaxHistory => Self::AmaxHistory(AmaxHistories::new(
                slot.name,
                layers,
                device,
                &controllers.scaling,
            )),
            SlotKind::HadamardSize => Self::HadamardSize(HadamardSizes::new(slot.name, layers)),
        }
    }

    /// Writes the slot to the values of layers. Waits for the device.
    pub fn read(&self, slot: &Slot, layers: &mut [SlotValues]) {
        match self {
            Self::Threshold(state) => state.read(slot.name, layers),
            Self::StepSize(state) => state.read(slot.name, layers),
            Self::AmaxHistory(state) => state.read(slot.name, layers),
            Self::HadamardSize(state) => state.read(slot.name, layers),
        }
    }

    /// Ends step number `step`: moves the slot by what all devices counted, on the first of them, and copies it to the
    /// others.
    pub fn advance(
        slot: &Slot,
        mut devices: Vec<(Device<B>, Self)>,
        controllers: &Controllers,
        step: u64,
        scaled: Option<&ScaledStep<B>>,
    ) -> Vec<Self> {
        let others = devices.split_off(devices.len().min(1));
        let Some((device, first)) = devices.pop() else {
            return Vec::new();
        };
        let (other_devices, others): (Vec<_>, Vec<_>) = others.into_iter().unzip();
        let others = others.into_iter();
        let moved = match first {
            Self::Threshold(state) => {
                let others = others.filter_map(ThresholdSlot::take);
                Self::Threshold(state.advance(others, &device, &controllers.threshold))
            }
            Self::StepSize(state) => {
                let others = others.filter_map(StepSizes::take);
                Self::StepSize(state.advance(others, &device, &controllers.steps, step, scaled))
            }
            Self::AmaxHistory(state) => {
                let others = others.filter_map(AmaxHistories::take);
                let state = state.advance(others, &device, &controllers.scaling, step);
                Self::AmaxHistory(match scaled {
                    Some(scaled) if slot.name == controllers.gradient_history => {
                        state.rescaled(scaled, &device)
                    }
                    Some(_) | None => state,
                })
            }
            Self::HadamardSize(state) => {
                Self::HadamardSize(state.advance(others.filter_map(HadamardSizes::take)))
            }
        };
        let copies: Vec<_> = other_devices.iter().map(|it| moved.to_device(it)).collect();
        std::iter::once(moved).chain(copies).collect()
    }

    fn to_device(&self, device: &Device<B>) -> Self {
        match self {
            Self::Threshold(state) => Self::Threshold(state.to_device(device)),
            Self::StepSize(state) => Self::StepSize(state.to_device(device)),
            Self::AmaxHistory(state) => Self::AmaxHistory(state.to_device(device)),
            Self::HadamardSize(state) => Self::HadamardSize(state.clone()),
        }
    }
}
