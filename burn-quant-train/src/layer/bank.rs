//! The state that all layers of a model share.

use std::sync::{Mutex, MutexGuard, Weak};

use burn_backend::tensor::{Device, FloatTensor, IntTensor};

use super::{
    Call, Watch,
    slot::{
        Controllers, LearnedSteps, OfSlot, ScaledStep, SlotState, SlotValues, ThresholdSlot,
        complete,
    },
};
use crate::{data::DataBackend, lock::lock, recipe::Slot};

/// The state that all layers of a model share.
///
/// It has their slots, on each device that runs them, and the position in the stream of random numbers.
pub struct Bank<B: DataBackend> {
    slots: &'static [Slot],
    controllers: Controllers,
    home: Option<Device<B>>,
    owner: Weak<()>,
    watch: Option<Watch<B>>,
    state: Mutex<State<B>>,
}

struct State<B: DataBackend> {
    seed: u64,
    now: Now,
    /// The values of every layer's slots before a device runs them.
    initial: Vec<SlotValues>,
    /// The slots on each device, in the order of the row's.
    devices: Vec<(Device<B>, Vec<SlotState<B>>)>,
}

/// The present of a bank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Now {
    /// Optimizer steps taken.
    pub step: u64,
    /// Counts steps and restored records: a step that is taken once more, from a record, is another time.
    pub time: u64,
}

impl<B: DataBackend> Bank<B> {
    /// A bank at optimizer step `step`, with a layer for each of the initial values.
    ///
    /// `seed` keys stochastic rounding; `home` is the device of the model; `owner` lives as long as an optimizer that
    /// steps the bank. Device buffers are made at first use, on the
    /// device of that use.
    ///
    /// # Panics
    ///
    /// If a value is none that its slot can have.
    pub(crate) fn new(
        seed: u64,
        step: u64,
        slots: &'static [Slot],
        controllers: Controllers,
        initial: Vec<SlotValues>,
        home: Option<Device<B>>,
        owner: Weak<()>,
    ) -> Self {
        let bank = Self {
            slots,
            controllers,
            home,
            owner,
            watch: None,
            state: Mutex::new(State {
                seed,
                now: Now::default(),
                initial: Vec::new(),
                devices: Vec::new(),
            }),
        };
        bank.restore(seed, step, initial);
        bank
    }

    /// The same with what measures its layers.
    pub(crate) fn with_watch(self, watch: Option<Watch<B>>) -> Self {
        Self { watch, ..self }
    }

    /// The seed of stochastic rounding.
    pub fn seed(&self) -> u64 {
        self.lock().seed
    }

    /// Optimizer steps taken so far.
    pub fn step(&self) -> u64 {
        self.now().step
    }

    pub(crate) fn now(&self) -> Now {
        self.lock().now
    }

    /// True while an optimizer steps the bank.
    pub(crate) fn is_owned(&self) -> bool {
        self.owner.strong_count() > 0
    }

    /// The instrument that measures the layers.
    pub(crate) fn watch(&self) -> Option<&Watch<B>> {
        self.watch.as_ref()
    }

    /// The device of the model when it was attached.
    pub(super) fn home(&self) -> Option<&Device<B>> {
        self.home.as_ref()
    }

    fn lock(&self) -> MutexGuard<'_, State<B>> {
        lock(&self.state)
    }

    /// Takes over the seed, the step and the slots of a loaded record.
    ///
    /// # Panics
    ///
    /// If a value is none that its slot can have.
    pub(crate) fn restore(&self, seed: u64, step: u64, mut values: Vec<SlotValues>) {
        for (index, layer) in values.iter_mut().enumerate() {
            for slot in self.slots {
                complete(slot, &self.controllers, index, layer);
            }
        }
        let mut state = self.lock();
        if let Some(watch) = &self.watch {
            watch.restore(step);
        }
        let time = state.now.time + 1;
        *state = State {
            seed,
            now: Now { step, time },
            initial: values,
            devices: Vec::new(),
        };
    }

    /// Runs `f` on the thresholds of all layers, in the slot `name`, and on counters of fallback blocks, on `device`.
    /// `f` returns the increased counters.
    ///
    /// Runs of several threads do not wait for each other: the first counts on from the slot's counters, the others
    /// from zero, and all are added up. A device that runs layers for the first time in a step takes the values that
    /// the others have, with counters at zero.
    ///
    /// # Panics
    ///
    /// If there is no such slot.
    pub(super) fn with_thresholds<A>(
        &self,
        name: &str,
        device: &Device<B>,
        f: impl FnOnce(FloatTensor<B>, IntTensor<B>) -> (A, IntTensor<B>),
    ) -> A {
        let (time, (thresholds, lent)) = {
            let mut state = self.lock();
            let time = state.now.time;
            (
                time,
                self.state_of::<ThresholdSlot<B>>(&mut state, name, device)
                    .lend(),
            )
        };
        // The lock is not held: a host's kernels hand work to a pool of threads, and one that waits takes up other
        // work of the pool, which may be another run of a layer.
        let (result, counts) = f(thresholds, lent.sum.clone());
        let mut state = self.lock();
        if state.now.time == time {
            self.state_of::<ThresholdSlot<B>>(&mut state, name, device)
                .take_back(lent.with(counts));
        }
        result
    }

    /// Runs `f` on the state of all layers in the slot `name`, on `device`.
    ///
    /// # Panics
    ///
    /// If there is no such slot, or it holds something else.
    pub(super) fn with_slot<S: OfSlot<B>, A>(
        &self,
        name: &str,
        device: &Device<B>,
        f: impl FnOnce(&mut S) -> A,
    ) -> A {
        f(self.state_of(&mut self.lock(), name, device))
    }

    /// [`Self::with_slot`], unless the step of `call` is over.
    pub(super) fn in_step_of<S: OfSlot<B>>(
        &self,
        call: Call,
        name: &str,
        device: &Device<B>,
        f: impl FnOnce(&mut S),
    ) {
        let mut state = self.lock();
        if state.now.time == call.time {
            f(self.state_of(&mut state, name, device));
        }
    }

    fn state_of<'a, S: OfSlot<B> + 'a>(
        &self,
        state: &'a mut State<B>,
        name: &str,
        device: &Device<B>,
    ) -> &'a mut S {
        S::of(self.slot(state, name, device))
            .unwrap_or_else(|| panic!("layers: slot `{name}` holds no {}", S::WHAT))
    }

    /// How step sizes move.
    pub(super) fn learned_steps(&self) -> &LearnedSteps {
        &self.controllers.steps
    }

    fn slot<'a>(
        &self,
        state: &'a mut State<B>,
        name: &str,
        device: &Device<B>,
    ) -> &'a mut SlotState<B> {
        let slot = self.slots.iter().position(|slot| slot.name == name);
        let slot = slot.unwrap_or_else(|| panic!("layers: no slot `{name}` in {:?}", self.slots));
        let known = state.devices.iter().position(|(it, _)| it == device);
        let index = known.unwrap_or_else(|| {
            let values = self.values_of(state)();
            let slots = self.slots.iter();
            let slots = slots
                .map(|slot| SlotState::new(slot, &self.controllers, &values, device))
                .collect();
            state.devices.push((device.clone(), slots));
            state.devices.len() - 1
        });
        &mut state.devices[index].1[slot]
    }

    /// Ends an optimizer step, unless one has ended since step `seen`: moves every slot, on the device, and the random
    /// stream. `scaled` has the scales of losses around the step, if they are scaled. Returns the number of steps that
    /// ended. Waits for the device where the step was measured.
    ///
    /// So clones of an optimizer that step copies of one model side by side, as data parallel training does, end each
    /// step once.
    pub(crate) fn end_step(&self, seen: u64, scaled: Option<&ScaledStep<B>>) -> u64 {
        let mut state = self.lock();
        if state.now.step > seen {
            return state.now.step;
        }
        let (devices, slots): (Vec<_>, Vec<_>) = state.devices.drain(..).unzip();
        // From the slots of each device to the devices of each slot, and back.
        let mut of_devices: Vec<_> = slots.into_iter().map(Vec::into_iter).collect();
        let mut moved: Vec<Vec<SlotState<B>>> = devices.iter().map(|_| Vec::new()).collect();
        for slot in self.slots {
            let of_slot = devices.iter().zip(&mut of_devices);
            let of_slot =
                of_slot.filter_map(|(device, slots)| Some((device.clone(), slots.next()?)));
            let states = SlotState::advance(
                slot,
                of_slot.collect(),
                &self.controllers,
                state.now.step,
                scaled,
            );
            moved
                .iter_mut()
                .zip(states)
                .for_each(|(slots, state)| slots.push(state));
        }
        state.devices = devices.into_iter().zip(moved).collect();
        let ended = state.now;
        state.now.step += 1;
        state.now.time += 1;
        let step = state.now.step;
        let watch = self.watch.as_ref();
        if let Some(watch) = watch.filter(|watch| watch.is_due(ended.step)) {
            let values = self.values_of(&state);
            // Runs of layers do not wait while the device is read.
            drop(state);
            watch.end_step(ended, &values());
        }
        step
    }

    /// The values of every layer's slots. Waits for the device: for records and metrics only.
    pub fn read(&self) -> Vec<SlotValues> {
        let values = self.values_of(&self.lock());
        values()
    }

    /// Reads the values of every layer's slots as they are now.
    fn values_of(&self, state: &State<B>) -> impl FnOnce() -> Vec<SlotValues> + use<B> {
        let mut values = state.initial.clone();
        let first = state.devices.first();
        let states = first.map_or_else(Vec::new, |(_, states)| states.clone());
        let slots = self.slots;
        move || {
            for (slot, state) in slots.iter().zip(states) {
                state.read(slot, &mut values);
            }
            values
        }
    }
}

impl<B: DataBackend> std::fmt::Debug for Bank<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.lock();
        f.debug_struct("Bank")
            .field("seed", &state.seed)
            .field("step", &state.now.step)
            .field("layers", &state.initial.len())
            .finish()
    }
}
