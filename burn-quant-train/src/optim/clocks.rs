//! Step counts. The bias correction of AdamW counts, for each parameter, the steps in which it had a gradient.

use std::collections::{HashMap, HashSet};

use burn::module::ParamId;
use burn_backend::{
    TensorData,
    tensor::{Device, IntTensor},
};

use crate::data::{DataBackend, optimizer::tick, read::integers};

/// Steps taken and skipped.
#[derive(Debug, Clone)]
pub(super) enum Clock<B: DataBackend> {
    /// Before the first step, or as loaded.
    Host([i32; 2]),
    /// INT32 `[2]`.
    Device(IntTensor<B>),
}

impl<B: DataBackend> Clock<B> {
    pub(super) fn on(&self, device: &Device<B>) -> IntTensor<B> {
        match self {
            Self::Host(counts) => B::int_from_data(TensorData::new(counts.to_vec(), [2]), device),
            Self::Device(counts) => B::int_to_device(counts.clone(), device),
        }
    }

    /// Waits for the device.
    pub(super) fn read(&self) -> [u64; 2] {
        let counts: [i32; 2] = match self {
            Self::Host(counts) => *counts,
            Self::Device(counts) => integers::<B>(counts.clone())
                .try_into()
                .expect("a clock holds two counts"),
        };
        counts.map(|count| u64::try_from(count).expect("a clock counts up from 0"))
    }
}

/// A count of a record as the device holds it.
fn counted(steps: u64) -> i32 {
    i32::try_from(steps).unwrap_or_else(|_| {
        panic!(
            "adamw: the optimizer record counts {steps} steps, but a clock holds at most {}; the file is damaged, go \
             on from an earlier checkpoint",
            i32::MAX
        )
    })
}

/// The clocks of all parameters.
///
/// The device decides if a step is skipped, so the host does not know a count. It knows which parameters had a
/// gradient. Parameters with gradients in the same steps share a clock: all of them, unless some were frozen or are
/// experts that a batch may leave out. A clock costs a launch a step, and small parameters of different clocks share no
/// launch.
#[derive(Debug, Clone)]
pub(super) struct Clocks<B: DataBackend> {
    /// The one at [`Clocks::EVERY_STEP`] counts the steps of the optimizer, and serves the parameters that took part in
    /// all.
    clocks: Vec<Clock<B>>,
    by_parameter: HashMap<ParamId, usize>,
}

impl<B: DataBackend> Clocks<B> {
    const EVERY_STEP: usize = 0;

    /// The clocks of an optimizer that has taken and skipped these steps. `taken` has each parameter's own count of
    /// steps taken.
    ///
    /// # Panics
    ///
    /// If a count is more than INT32 holds.
    pub(super) fn new(counts: [u64; 2], taken: impl Iterator<Item = (ParamId, u64)>) -> Self {
        let mut clocks = vec![Clock::Host(counts.map(counted))];
        let mut by_count = HashMap::from([(counts[0], Self::EVERY_STEP)]);
        let by_parameter = taken
            .map(|(id, count)| {
                let clock = *by_count.entry(count).or_insert_with(|| {
                    clocks.push(Clock::Host([counted(count), 0]));
                    clocks.len() - 1
                });
                (id, clock)
            })
            .collect();
        Self {
            clocks,
            by_parameter,
        }
    }

    /// Counts a step of these parameters: as skipped if `nonfinite` is not 0.
    pub(super) fn tick(
        &mut self,
        stepping: &HashSet<ParamId>,
        device: &Device<B>,
        nonfinite: Option<&IntTensor<B>>,
    ) {
        let Self {
            clocks,
            by_parameter,
        } = self;
        let mut joined = match clocks[Self::EVERY_STEP] {
            Clock::Host([steps, _]) => (steps == 0).then_some(Self::EVERY_STEP),
            Clock::Device(_) => None,
        };
        let mut ticking = HashSet::from([Self::EVERY_STEP]);
        for id in stepping {
            let clock = by_parameter.entry(*id).or_insert_with(|| {
                *joined.get_or_insert_with(|| {
                    clocks.push(Clock::Host([0, 0]));
                    clocks.len() - 1
                })
            });
            ticking.insert(*clock);
        }
        // Parameters without a gradient keep their count, on a clock that stands.
        let mut standing = HashMap::new();
        for (id, clock) in by_parameter.iter_mut() {
            if ticking.contains(clock) && !stepping.contains(id) {
                *clock = *standing.entry(*clock).or_insert_with(|| {
                    clocks.push(clocks[*clock].clone());
                    clocks.len() - 1
                });
            }
        }
        for clock in ticking {
            clocks[clock] = Clock::Device(tick::<B>(clocks[clock].on(device), nonfinite.cloned()));
        }
    }

    /// The index of a stepping parameter's clock.
    pub(super) fn index_of(&self, id: &ParamId) -> usize {
        self.by_parameter[id]
    }

    /// The clock of this index: INT32 `[2]`.
    pub(super) fn on(&self, index: usize, device: &Device<B>) -> IntTensor<B> {
        self.clocks[index].on(device)
    }

    /// The clock that counts every step.
    pub(super) fn every_step(&self) -> &Clock<B> {
        &self.clocks[Self::EVERY_STEP]
    }

    /// The steps that each parameter took part in, those skipped not counted. Waits for the device.
    pub(super) fn taken(&self) -> impl Iterator<Item = (ParamId, u64)> {
        let counts: Vec<[u64; 2]> = self.clocks.iter().map(Clock::read).collect();
        self.by_parameter
            .iter()
            .map(move |(id, clock)| (*id, counts[*clock][0]))
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use std::panic::catch_unwind;

    use burn_flex::Flex;

    use super::*;

    const MOST: u64 = i32::MAX as u64;

    #[test]
    fn counts_are_read_as_they_were_loaded() {
        let id = ParamId::new();
        let clocks = Clocks::<Flex>::new([MOST, 3], [(id, MOST - 1)].into_iter());
        assert_eq!(clocks.every_step().read(), [MOST, 3]);
        assert_eq!(clocks.taken().collect::<Vec<_>>(), [(id, MOST - 1)]);
    }

    #[test]
    fn a_record_of_more_steps_than_a_clock_holds_is_refused() {
        let over = MOST + 1;
        // Cut to 32 bits, the last would be 3 steps.
        for (counts, taken) in [
            ([over, 0], 0),
            ([0, over], 0),
            ([0, 0], over),
            ([0, 0], (1 << 32) + 3),
        ] {
            let load = || Clocks::<Flex>::new(counts, [(ParamId::new(), taken)].into_iter());
            let refusal = catch_unwind(load).expect_err("more steps than a clock holds");
            let message = refusal.downcast::<String>().expect("a formatted message");
            let steps = counts.into_iter().chain([taken]).max().unwrap_or_default();
            let expected = format!("the optimizer record counts {steps} steps");
            assert!(message.contains(&expected), "{message}");
        }
    }
}
