//! The streams of random numbers of stochastic rounding: a stream for each seed, step, layer, operand and run.

use std::{cell::Cell, collections::BTreeMap, sync::Mutex};

use burn_backend::DeviceId;

use crate::{data::StochasticKey, lock::lock};

static SEEDED: Mutex<Seeded> = Mutex::new(Seeded::new(0));

thread_local! {
    static LANE: Cell<u32> = const { Cell::new(0) };
}

/// Sets the seed of the banks created from now on, and of dropout; `Backend::seed` calls it.
pub(crate) fn set_seed(seed: u64) {
    *lock(&SEEDED) = Seeded::new(seed);
}

pub(crate) fn seed() -> u64 {
    lock(&SEEDED).seed
}

/// Runs `f` with the random numbers of lane number `lane`; everything else is in lane 0.
///
/// Layers tell their runs in a step apart by counting them. Where several threads run one layer at once on one device,
/// the count depends on who comes first; with a lane for each of them it does not, and the result is the same whatever
/// the order. The forward pass of a run belongs in its lane. Lanes do not nest: the innermost counts.
///
/// ```
/// use burn_quant_train::layer::in_lane;
///
/// let losses: Vec<f32> = std::thread::scope(|threads| {
///     let workers: Vec<_> = (0..4)
///         .map(|worker| threads.spawn(move || in_lane(worker, || worker as f32)))
///         .collect();
///     workers.into_iter().map(|it| it.join().unwrap()).collect()
/// });
/// # assert_eq!(losses, [0.0, 1.0, 2.0, 3.0]);
/// ```
pub fn in_lane<A>(lane: u32, f: impl FnOnce() -> A) -> A {
    struct Restore(u32);
    impl Drop for Restore {
        fn drop(&mut self) {
            LANE.set(self.0);
        }
    }
    let _restore = Restore(LANE.replace(lane));
    f()
}

/// The lane of this thread on a device.
///
/// On the model's home device it is the lane of [`in_lane`] alone, so that the numbers do not depend on which device
/// that is.
pub(super) fn lane(home: bool, device: DeviceId) -> u64 {
    let device = match home {
        true => 0,
        false => 1 + (u64::from(device.type_id) << 16 ^ u64::from(device.index_id)),
    };
    device << 32 | u64::from(LANE.get())
}

/// The key of the next dropout of this thread's [lane](in_lane): they are counted from when the seed was set.
pub(crate) fn dropout_key() -> StochasticKey {
    lock(&SEEDED).next_dropout(LANE.get())
}

/// The seed, and what was drawn by it.
#[derive(Debug)]
struct Seeded {
    seed: u64,
    /// The dropouts of each lane.
    dropouts: BTreeMap<u32, u64>,
}

impl Seeded {
    const fn new(seed: u64) -> Self {
        Self {
            seed,
            dropouts: BTreeMap::new(),
        }
    }

    fn next_dropout(&mut self, lane: u32) -> StochasticKey {
        /// Where the streams of roundings have a step.
        const DROPOUT: u64 = u64::MAX;
        let count = self.dropouts.entry(lane).or_default();
        let parts = [DROPOUT, u64::from(lane), *count].into_iter();
        *count += 1;
        StochasticKey {
            seed: self.seed,
            stream: parts.fold(0, |hash, part| split_mix(hash ^ part)),
        }
    }
}

/// The operand of a layer's product that is rounded stochastically: part of its key in the stream of random numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub enum Role {
    /// X as saved for dW = Xᵀ dY.
    SavedInput = 0,
    /// dY in dX = dY Wᵀ, and in dW where both products quantize it in one way.
    OutputGradient = 1,
    /// X in Y = X W.
    Input = 2,
    /// W in Y = X W, and in dX where both products quantize it in one way.
    Weight = 3,
    /// dY in dW, where it is quantized in another way than in dX.
    OutputGradientOfWeight = 4,
    /// W in dX, where it is quantized in another way than in Y.
    WeightOfInput = 5,
    /// The rows of X whose residuals are kept for the gradient of its step size.
    ResidualRows = 6,
    /// The rows of dY that are sampled for dX.
    SampledRows = 7,
    /// The rows of dY that are sampled for dW.
    SampledRowsOfWeight = 8,
    /// The sampled rows of dY in dW.
    SampledGradient = 9,
    /// dX, on its way to the operator that made X.
    InputGradient = 10,
    /// The rows of a right operand that is no weight whose residuals are kept.
    ResidualRowsOfRight = 11,
}

/// A run of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    /// The optimizer step.
    pub step: u64,
    /// Counts the steps and the restored records of the bank.
    pub time: u64,
    /// The lane: of [`in_lane`], and in the upper half one more than the device's index, or 0 on the model's device.
    pub lane: u64,
    /// The position among the runs of the layer in this step and lane.
    pub index: u64,
}

impl Call {
    /// The one call that all runs of a layer in this step share: W is quantized once for them.
    pub(crate) fn of_weight(self) -> Self {
        Self {
            lane: 0,
            index: 0,
            ..self
        }
    }

    /// A stream that no other layer, role or call has.
    pub(super) fn stream(&self, layer: u64, role: Role) -> u64 {
        let parts = [self.step, layer, role as u64, self.index];
        // Lane 0 leaves the hash as it is in a program without lanes.
        let lane = (self.lane != 0).then_some(self.lane);
        parts
            .into_iter()
            .chain(lane)
            .fold(0, |hash, part| split_mix(hash ^ part))
    }
}

/// The finalizer of SplitMix64: spreads nearby inputs over all 64 bits.
fn split_mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_seed_names_the_dropouts_of_each_lane() {
        let keys = |seed: u64, lanes: [u32; 4]| {
            let mut seeded = Seeded::new(seed);
            lanes.map(|lane| seeded.next_dropout(lane))
        };
        let [a, x, b, y] = keys(3, [0, 7, 0, 7]);
        assert_eq!(HashSet::from([a, b, x, y]).len(), 4);
        // Those of a lane do not depend on the other lanes.
        assert_eq!(keys(3, [0, 0, 7, 7]), [a, b, x, y]);
        assert_ne!(keys(4, [0, 7, 0, 7]), [a, x, b, y]);
    }

    #[test]
    fn no_two_roundings_of_a_run_share_a_stream() {
        let roles = [
            Role::SavedInput,
            Role::OutputGradient,
            Role::Input,
            Role::Weight,
            Role::OutputGradientOfWeight,
            Role::WeightOfInput,
            Role::ResidualRows,
            Role::SampledRows,
            Role::SampledRowsOfWeight,
            Role::SampledGradient,
            Role::InputGradient,
        ];
        let mut streams = HashSet::new();
        let mut count = 0;
        for step in 0..10 {
            for lane in [0, 1, 7, 1 << 32, 2 << 32 | 1] {
                for index in 0..4 {
                    let call = Call {
                        step,
                        time: 0,
                        lane,
                        index,
                    };
                    for layer in 0..5 {
                        for role in roles {
                            streams.insert(call.stream(layer, role));
                            count += 1;
                        }
                    }
                }
            }
        }
        assert_eq!(streams.len(), count);
    }

    #[test]
    fn lanes_are_of_threads_and_devices() {
        let device = |index_id| DeviceId {
            type_id: 0,
            index_id,
        };
        assert_eq!(lane(true, device(3)), 0);
        assert_eq!(lane(false, device(3)), 4 << 32);
        let nested = in_lane(2, || {
            (in_lane(5, || lane(true, device(0))), lane(true, device(0)))
        });
        assert_eq!(nested, (5, 2));
        assert_eq!(lane(true, device(0)), 0, "the lane ends with its scope");
    }
}
