//! Thresholds of fallback.

use burn_backend::{
    IntDType, TensorData, TensorMetadata,
    tensor::{Device, FloatTensor, IntTensor},
};

use super::{
    SlotValues,
    accumulator::{Accumulator, LentSum},
};
use crate::data::{
    DataBackend,
    read::floats,
    threshold::{DelayThreshold, Thresholds, delay_threshold},
};

/// The thresholds of all layers on one device, and the counters of blocks that fell back.
#[derive(Debug, Clone)]
pub(in crate::layer) struct ThresholdSlot<B: DataBackend> {
    thresholds: FloatTensor<B>,
    moves: FloatTensor<B>,
    rates: FloatTensor<B>,
    counts: Accumulator<IntTensor<B>>,
    followers: Followers<B>,
}

/// Which layers took over what another one quantized in this step. What that one counted counts for them too, so that
/// thresholds of layers that always read the same move alike.
#[derive(Debug, Clone)]
struct Followers<B: DataBackend> {
    /// For each layer, in whose row its blocks were counted.
    rows: Vec<i32>,
    /// Rows on the device, of a step that was.
    uploaded: Option<(Vec<i32>, IntTensor<B>)>,
}

impl<B: DataBackend> Followers<B> {
    fn none(layers: usize) -> Self {
        Self {
            rows: (0..layers as i32).collect(),
            uploaded: None,
        }
    }

    /// What all layers counted, from what each counted itself.
    fn counted(&mut self, counts: IntTensor<B>) -> IntTensor<B> {
        let own = std::mem::replace(self, Self::none(self.rows.len()));
        if own.rows == self.rows {
            return counts;
        }
        let indices = match own.uploaded {
            Some((rows, indices)) if rows == own.rows => indices,
            Some(_) | None => {
                let rows = TensorData::new(own.rows.clone(), [own.rows.len()]);
                B::int_from_data(rows, &B::int_device(&counts))
            }
        };
        self.uploaded = Some((own.rows, indices.clone()));
        B::int_select(counts, 0, indices)
    }
}

/// The name of the value beside a threshold that holds the fallback rate of the last step.
pub(in crate::layer) fn rate_of(slot: &str) -> String {
    format!("{slot}.rate")
}

/// The name of the value beside a threshold that holds its last move.
fn move_of(slot: &str) -> String {
    format!("{slot}.move")
}

/// Gives a layer without a threshold the one that it starts with.
///
/// # Panics
///
/// If layer number `index` has one, or a move, that the controller never gives.
pub(super) fn complete(
    slot: &str,
    controller: &DelayThreshold,
    index: usize,
    layer: &mut SlotValues,
) {
    let values = layer.entry(slot.to_owned()).or_default();
    if values.is_empty() {
        values.push(controller.initial);
    }
    assert!(
        matches!(values[..], [value] if value > 0.0 && value.is_finite()),
        "layers: slot `{slot}` of quantized layer {index} has {values:?} in the record, where one positive finite \
         threshold belongs; the record is damaged, load another one",
    );
    let moves = layer.get(&move_of(slot)).map_or(&[][..], Vec::as_slice);
    assert!(
        moves.len() <= 1 && moves.iter().all(|it| it.is_finite()),
        "layers: slot `{}` of quantized layer {index} has {moves:?} in the record, where one finite move belongs; the record \
         is damaged, load another one",
        move_of(slot)
    );
}

impl<B: DataBackend> ThresholdSlot<B> {
    pub(super) fn new(slot: &str, layers: &[SlotValues], device: &Device<B>) -> Self {
        let column = |name: &str, missing: f32| -> Vec<f32> {
            let value = |layer: &SlotValues| layer.get(name)?.first().copied();
            let values = layers.iter().map(value);
            values.map(|value| value.unwrap_or(missing)).collect()
        };
        let thresholds = column(slot, f32::NAN);
        let (moves, rates) = (
            column(&move_of(slot), 0.0),
            column(&rate_of(slot), f32::NAN),
        );
        let state = Thresholds::new(&thresholds, &moves, &rates, device);
        Self::of(state, Followers::none(layers.len()))
    }

    fn of(state: Thresholds<B>, followers: Followers<B>) -> Self {
        Self {
            thresholds: state.thresholds,
            moves: state.moves,
            rates: state.rates,
            counts: Accumulator::new(state.counts),
            followers,
        }
    }

    /// The thresholds, FP32 `[layers]`.
    pub fn thresholds(&self) -> FloatTensor<B> {
        self.thresholds.clone()
    }

    /// Thresholds and counters for a run of a layer.
    pub fn lend(&mut self) -> (FloatTensor<B>, LentSum<IntTensor<B>>) {
        let counts = self.counts.lend(|counts| {
            let device = B::int_device(counts);
            B::int_zeros(counts.shape(), &device, IntDType::I32)
        });
        (self.thresholds.clone(), counts)
    }

    /// Takes the counters of a run.
    pub fn take_back(&mut self, counts: LentSum<IntTensor<B>>) {
        self.counts.take_back(counts, B::int_add);
    }

    /// Notes that a layer took over what another one quantized.
    pub fn follow(&mut self, layer: usize, leader: usize) {
        self.followers.rows[layer] = leader as i32;
    }

    /// Waits for the device.
    pub(super) fn read(&self, slot: &str, layers: &mut [SlotValues]) {
        let thresholds = floats::<B>(self.thresholds.clone());
        let moves = floats::<B>(self.moves.clone());
        let rates = floats::<B>(self.rates.clone());
        for (index, layer) in layers.iter_mut().enumerate() {
            let (threshold, last, rate) = (thresholds[index], moves[index], rates[index]);
            layer.insert(slot.to_owned(), vec![threshold]);
            if last != 0.0 {
                layer.insert(move_of(slot), vec![last]);
            }
            // Text formats have no NaN.
            if !rate.is_nan() {
                layer.insert(rate_of(slot), vec![rate]);
            }
        }
    }

    /// Moves the thresholds by the counts of this device and of others.
    pub(super) fn advance(
        mut self,
        others: impl Iterator<Item = Self>,
        device: &Device<B>,
        controller: &DelayThreshold,
    ) -> Self {
        let of_others = others.map(|mut other| B::int_to_device(other.counted(), device));
        let counts = std::iter::once(self.counted()).chain(of_others);
        let state = Thresholds {
            thresholds: self.thresholds,
            moves: self.moves,
            counts: counts.reduce(B::int_add).expect("a device has counters"),
            rates: self.rates,
        };
        Self::of(delay_threshold(state, controller), self.followers)
    }

    /// What all layers counted on this device.
    fn counted(&mut self) -> IntTensor<B> {
        let counts = self.counts.clone().parts().reduce(B::int_add);
        self.followers
            .counted(counts.expect("a sum has a first part"))
    }

    /// The same on another device, with counters at zero.
    pub(super) fn to_device(&self, device: &Device<B>) -> Self {
        let zeros = |counts: IntTensor<B>| B::int_zeros(counts.shape(), device, IntDType::I32);
        let mut counts = self.counts.clone().parts();
        Self {
            thresholds: B::float_to_device(self.thresholds.clone(), device),
            moves: B::float_to_device(self.moves.clone(), device),
            rates: B::float_to_device(self.rates.clone(), device),
            counts: Accumulator::new(zeros(counts.next().expect("a sum has a first part"))),
            followers: Followers::none(self.followers.rows.len()),
        }
    }
}
