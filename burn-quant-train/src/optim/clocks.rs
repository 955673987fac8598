//! Step counts. The bias correction of AdamW counts, for each parameter, the steps in which it had a gradient.

use std::collections::{HashMap, HashSet};

use burn::module::ParamId;
use burn_backend::{
    TensorData,
    tensor::{Device, IntTensor},
};

use crate::{ops::QuantOps, read::integers};

/// Steps taken and skipped.
#[derive(Debug, Clone)]
pub(super) enum Clock<B: QuantOps> {
    /// Before the first step, or as loaded.
    Host([i32; 2]),
    /// INT32 `[2]`.
    Device(IntTensor<B>),
}

impl<B: QuantOps> Clock<B> {
    pub(super) fn on(&self, device: &Device<B>) -> IntTensor<B> {
        match self {
            Self::Host(counts) => B::int_from_data(TensorData::new(counts.to_vec(), [2]), device),
            Self::Device(counts) => B::int_to_device(counts.clone(), device),
        }
    }

    /// Waits for the device.
    pub(super) fn read(&self) -> [i32; 2] {
        match self {
            Self::Host(counts) => *counts,
            Self::Device(counts) => integers::<B>(counts.clone())
                .try_into()
                .expect("a clock holds two counts"),
        }
    }
}

/// The clocks of all parameters.
///
/// Whether a step is skipped is decided on the device, so the host does not know a count. It knows which parameters had
/// a gradient, and those that had one in the same steps share a clock: all of them, unless some were frozen or are
/// experts that a batch may leave out. A clock costs a launch a step, and the small parameters of two clocks share no
/// launch.
#[derive(Debug, Clone)]
pub(super) struct Clocks<B: QuantOps> {
    /// The one at [`Clocks::EVERY_STEP`] counts the steps of the optimizer, and serves the parameters that took part in
    /// all.
    clocks: Vec<Clock<B>>,
    by_parameter: HashMap<ParamId, usize>,
}

impl<B: QuantOps> Clocks<B> {
    const EVERY_STEP: usize = 0;

    /// The clocks after these steps of the optimizer, taken and skipped, of which each parameter took part in this
    /// many.
    pub(super) fn new(counts: [i32; 2], taken: impl Iterator<Item = (ParamId, u64)>) -> Self {
        let mut clocks = vec![Clock::Host(counts)];
        let mut by_count = HashMap::from([(counts[0] as u64, Self::EVERY_STEP)]);
        let by_parameter = taken
            .map(|(id, count)| {
                let clock = *by_count.entry(count).or_insert_with(|| {
                    clocks.push(Clock::Host([count as i32, 0]));
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
            Clock::Host([0, _]) => Some(Self::EVERY_STEP),
            _ => None,
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
            clocks[clock] = Clock::Device(B::tick(clocks[clock].on(device), nonfinite));
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
        let counts: Vec<[i32; 2]> = self.clocks.iter().map(Clock::read).collect();
        self.by_parameter
            .iter()
            .map(move |(id, clock)| (*id, counts[*clock][0] as u64))
    }
}
