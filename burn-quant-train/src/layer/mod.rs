//! Linear layers between steps: which are quantized, and the state that they keep.
//!
//! A [`Layer`] is one linear layer as its weight's [tag](tag::Tag) knows it. The [`Bank`] holds the state of all layers
//! of a model, on each device that runs them, and the position in the stream of random numbers. The
//! [optimizer](crate::optim::QuantOptimizer) makes both, puts layers on weights, and moves the bank on.

mod bank;
mod health;
mod policy;
mod products;
mod random;
mod record;
mod slot;
pub mod tag;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use burn_backend::{
    DeviceOps, IntDType, Shape, TensorMetadata,
    tensor::{Device, FloatTensor, IntTensor},
};

pub use crate::data::threshold::{DelayThreshold, ThresholdFactor};
pub use bank::Bank;
pub(crate) use bank::Now;
pub(crate) use health::{MomentSample, Sample as HealthSample, Watch};
pub(crate) use policy::covers;
pub use policy::{Decision, LayerPolicy, MIN_ELEMENTS, PRODUCTS};
pub(crate) use products::{count_product, has_int8_attention, next_products, ran};
pub use random::{Call, Role, in_lane};
pub(crate) use random::{dropout_key, seed, set_seed};
pub use record::{LayerRecord, LayersRecord};
pub use slot::{AmaxAlgorithm, DelayedScaling, HadamardChoice, LearnedSteps, SlotValues};
use slot::{AmaxHistories, HadamardSizes, StepSizes, ThresholdSlot};
pub(crate) use slot::{Controllers, ScaledStep};

use crate::{
    data::{
        DataBackend, StochasticKey,
        learned_step::{HadamardSize, LearnedStep},
        quantize::{DelayedMaximum, Fallback},
    },
    lock::lock,
};
use random::lane;

/// One linear layer.
#[derive(Debug)]
pub struct Layer<B: DataBackend> {
    path: String,
    index: usize,
    decision: Decision,
    bank: Arc<Bank<B>>,
    /// The products of activations behind it that are quantized.
    products: Vec<Arc<Layer<B>>>,
    /// True if attention behind it has INT8 products.
    int8_attention: bool,
    calls: Mutex<Calls>,
}

/// A layer's step size for a run.
pub(crate) struct StepSize<B: DataBackend> {
    /// FP32 `[layers]`: that of this layer among those of all.
    pub steps: FloatTensor<B>,
    /// True if the run sets it before it uses it.
    pub is_cold: bool,
}

/// How often a layer ran in the present step, by lane.
#[derive(Debug, Default)]
struct Calls {
    now: Now,
    of_lane: HashMap<u64, u64>,
}

impl<B: DataBackend> Layer<B> {
    /// Layer number `index` of `bank`, found at module path `path`.
    pub(crate) fn new(path: String, index: usize, decision: Decision, bank: Arc<Bank<B>>) -> Self {
        Self {
            path,
            index,
            decision,
            bank,
            products: Vec::new(),
            int8_attention: false,
            calls: Mutex::default(),
        }
    }

    /// The same with the products of activations behind it, each a layer that has no weight.
    pub(crate) fn with_products(self, products: Vec<Arc<Self>>) -> Self {
        Self { products, ..self }
    }

    /// The same, and attention behind it has INT8 products or not.
    pub(crate) fn with_int8_attention(self, int8_attention: bool) -> Self {
        Self {
            int8_attention,
            ..self
        }
    }

    /// The products of activations behind it that are quantized.
    pub(crate) fn products(&self) -> &[Arc<Self>] {
        &self.products
    }

    /// The module path, such as `layers.3.mlp.down`.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The position in the bank.
    pub fn index(&self) -> usize {
        self.index
    }

    /// True if the policy lets the recipe quantize this layer.
    pub fn is_quantized(&self) -> bool {
        self.decision.is_quantized()
    }

    /// True if rows of this table are rounded when they are looked up.
    pub(crate) fn rounds_rows(&self) -> bool {
        self.decision == Decision::EmbeddingRows
    }

    /// The bank, shared with the other layers of the model.
    pub fn bank(&self) -> &Arc<Bank<B>> {
        &self.bank
    }

    /// Runs `f` on this layer's fallback state, in the threshold slot `name`, on `device`.
    ///
    /// `f` returns the increased counters beside its result.
    ///
    /// # Panics
    ///
    /// If the bank has no such slot.
    pub fn with_fallback<A>(
        &self,
        name: &str,
        device: &Device<B>,
        f: impl FnOnce(Fallback<B>) -> (A, IntTensor<B>),
    ) -> A {
        self.bank
            .with_thresholds(name, device, |thresholds, counts| {
                f(Fallback {
                    layer: self.index,
                    thresholds,
                    counts,
                })
            })
    }

    /// Notes that a run took over what `leader`, another layer of the model, quantized with its own threshold, unless
    /// the step of that run is over.
    ///
    /// # Panics
    ///
    /// If the bank has no such slot.
    pub(crate) fn follow(&self, name: &str, device: &Device<B>, call: Call, leader: usize) {
        let follow = |slot: &mut ThresholdSlot<B>| slot.follow(self.index, leader);
        self.bank.in_step_of(call, name, device, follow);
    }

    /// This layer's step size in the slot `name`, on `device`, for a run in step number `step`.
    ///
    /// # Panics
    ///
    /// If the bank has no such slot.
    pub(crate) fn step_size(&self, name: &str, device: &Device<B>, step: u64) -> StepSize<B> {
        let of_layer = |slot: &mut StepSizes<B>| slot.get(self.index);
        let (steps, known) = self.bank.with_slot(name, device, of_layer);
        StepSize {
            steps,
            is_cold: !known || self.bank.learned_steps().is_cold(step),
        }
    }

    /// The layer's step size in the slot `name`, on `device`, if it has one.
    ///
    /// # Panics
    ///
    /// If the bank has no such slot.
    pub(crate) fn known_step(&self, name: &str, device: &Device<B>) -> Option<LearnedStep<B>> {
        let of_layer = |slot: &mut StepSizes<B>| slot.get(self.index);
        let (steps, known) = self.bank.with_slot(name, device, of_layer);
        let layer = self.index;
        known.then_some(LearnedStep { steps, layer })
    }

    /// True if the layer's step sizes quantize evaluation too.
    pub(crate) fn quantizes_evaluation(&self) -> bool {
        self.bank.learned_steps().evaluation
    }

    /// Takes over the step size that a run of the layer set, unless the step of that run is over.
    ///
    /// # Panics
    ///
    /// If the bank has no such slot.
    pub(crate) fn set_step_size(
        &self,
        name: &str,
        device: &Device<B>,
        call: Call,
        steps: FloatTensor<B>,
    ) {
        self.bank
            .in_step_of(call, name, device, |slot: &mut StepSizes<B>| {
                slot.set(self.index, steps);
            });
    }

    /// Adds a gradient, FP32 `[1]`, of this layer's step size, unless the step of that run is over.
    ///
    /// # Panics
    ///
    /// If the bank has no such slot.
    pub(crate) fn add_step_gradient(
        &self,
        name: &str,
        device: &Device<B>,
        call: Call,
        gradient: FloatTensor<B>,
    ) {
        self.bank
            .in_step_of(call, name, device, |slot: &mut StepSizes<B>| {
                slot.add_gradient(self.index, gradient);
            });
    }

    /// The maximum that this layer's data had in earlier steps, of the slot `name`, on `device`.
    ///
    /// # Panics
    ///
    /// If the bank has no such slot.
    pub(crate) fn delayed_maximum(&self, name: &str, device: &Device<B>) -> DelayedMaximum<B> {
        let maxima = |slot: &mut AmaxHistories<B>| slot.maxima();
        DelayedMaximum {
            layer: self.index,
            maxima: self.bank.with_slot(name, device, maxima),
        }
    }

    /// Takes the largest magnitude, FP32 `[1]`, of this layer's data in a run, unless the step of that run is over.
    ///
    /// # Panics
    ///
    /// If the bank has no such slot.
    pub(crate) fn note_maximum(
        &self,
        name: &str,
        device: &Device<B>,
        call: Call,
        absmax: FloatTensor<B>,
    ) {
        self.bank
            .in_step_of(call, name, device, |slot: &mut AmaxHistories<B>| {
                slot.note(self.index, absmax);
            });
    }

    /// The present, if this step of the layer is measured.
    pub(crate) fn measured_now(&self) -> Option<Now> {
        let watch = self.bank.watch()?;
        let now = self.bank.now();
        watch.watches(&self.path, now.step).then_some(now)
    }

    /// The instrument that measures the layer.
    pub(crate) fn watch(&self) -> Option<&Watch<B>> {
        self.bank.watch()
    }

    /// The layer's threshold in the slot `name`, on `device`, with counters at zero.
    ///
    /// # Panics
    ///
    /// If the bank has no such slot.
    pub(crate) fn present_threshold(&self, name: &str, device: &Device<B>) -> Fallback<B> {
        let thresholds = |slot: &mut ThresholdSlot<B>| slot.thresholds();
        let thresholds = self.bank.with_slot(name, device, thresholds);
        let counts = Shape::new([thresholds.shape()[0], 2]);
        Fallback {
            layer: self.index,
            counts: B::int_zeros(counts, device, IntDType::I32),
            thresholds,
        }
    }

    /// The layer's step size in the slot `name`, on `device`; none if a run of step number `step` sets it.
    ///
    /// # Panics
    ///
    /// If the bank has no such slot.
    pub(crate) fn present_step(
        &self,
        name: &str,
        device: &Device<B>,
        step: u64,
    ) -> Option<LearnedStep<B>> {
        let StepSize { steps, is_cold } = self.step_size(name, device, step);
        let layer = self.index;
        (!is_cold).then_some(LearnedStep { steps, layer })
    }

    /// The size of the layer's transform in the slot `name`, if it has one.
    ///
    /// # Panics
    ///
    /// If the bank has no such slot.
    pub(crate) fn present_size(&self, name: &str, device: &Device<B>) -> Option<HadamardSize> {
        let of_layer = |slot: &mut HadamardSizes| slot.get(self.index);
        self.bank.with_slot(name, device, of_layer)
    }

    /// The size of this layer's transform, of the slot `name`: the one that it has, or the one that `choose` gives
    /// where it has none or chooses again.
    ///
    /// # Panics
    ///
    /// If the bank has no such slot.
    pub(crate) fn hadamard_size(
        &self,
        name: &str,
        device: &Device<B>,
        call: Call,
        choose: impl FnOnce(HadamardChoice) -> HadamardSize,
    ) -> HadamardSize {
        let config = self.bank.learned_steps();
        let known = self
            .bank
            .with_slot(name, device, |sizes: &mut HadamardSizes| {
                let again =
                    config.chooses_again(call.step) && !sizes.was_chosen(self.index, call.time);
                sizes.get(self.index).filter(|_| !again)
            });
        match (known, config.hadamard) {
            (Some(size), HadamardChoice::SmallestError) => size,
            (None, HadamardChoice::SmallestError) | (_, HadamardChoice::Order(_)) => {
                let size = choose(config.hadamard);
                self.bank
                    .with_slot(name, device, |sizes: &mut HadamardSizes| {
                        sizes.set(self.index, size, call.time);
                    });
                size
            }
        }
    }

    /// Counts a run of the layer on `device`, and tells it from all others: it has random numbers of its own.
    ///
    /// Each lane has a count of its own. So the order of threads does not matter where each thread works in a
    /// [lane](in_lane) or on a device of its own.
    pub(crate) fn next_call(&self, device: &Device<B>) -> Call {
        let lane = lane(self.bank.home() == Some(device), device.id());
        let mut calls = lock(&self.calls);
        let now = self.bank.now();
        if calls.now != now {
            *calls = Calls {
                now,
                ..Calls::default()
            };
        }
        let index = calls.of_lane.entry(lane).or_default();
        let call = Call {
            step: now.step,
            time: now.time,
            lane,
            index: *index,
        };
        *index += 1;
        call
    }

    /// The key that rounds a tensor in this role, in this run of the layer.
    pub fn key(&self, call: Call, role: Role) -> StochasticKey {
        StochasticKey {
            seed: self.bank.seed(),
            stream: call.stream(self.index as u64, role),
        }
    }
}
