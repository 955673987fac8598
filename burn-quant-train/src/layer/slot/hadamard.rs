//! Sizes of Hadamard transforms, in host memory.

use cubecl_kernels::hadamard::HadamardSize;

use super::SlotValues;

/// The sizes of the transforms of all layers, where they were chosen.
#[derive(Debug, Clone)]
pub(in crate::layer) struct HadamardSizes {
    sizes: Vec<Option<HadamardSize>>,
    /// The bank's time at which each was chosen on this device.
    chosen: Vec<Option<u64>>,
}

/// Checks the size in a record.
///
/// # Panics
///
/// If layer number `index` has a size that there is not.
pub(super) fn complete(slot: &str, index: usize, layer: &SlotValues) {
    let values = layer.get(slot).map_or(&[][..], Vec::as_slice);
    assert!(
        values.is_empty() || of_values(values).is_some(),
        "layers: slot `{slot}` of quantized layer {index} has {values:?} in the record, where one size from 0 to 7 \
         belongs; the record is damaged, load another one",
    );
}

fn of_values(values: &[f32]) -> Option<HadamardSize> {
    let [order] = values else { return None };
    HadamardSize::all().find(|size| size.order() as f32 == *order)
}

impl HadamardSizes {
    pub(super) fn new(slot: &str, layers: &[SlotValues]) -> Self {
        let of_layer = |layer: &SlotValues| of_values(layer.get(slot)?);
        Self {
            sizes: layers.iter().map(of_layer).collect(),
            chosen: vec![None; layers.len()],
        }
    }

    /// The size of a layer's transform, if one was chosen.
    pub fn get(&self, layer: usize) -> Option<HadamardSize> {
        self.sizes[layer]
    }

    /// True if it was chosen at this time of the bank.
    pub fn was_chosen(&self, layer: usize, time: u64) -> bool {
        self.chosen[layer] == Some(time)
    }

    pub fn set(&mut self, layer: usize, size: HadamardSize, time: u64) {
        self.sizes[layer] = Some(size);
        self.chosen[layer] = Some(time);
    }

    pub(super) fn read(&self, slot: &str, layers: &mut [SlotValues]) {
        for (layer, size) in layers.iter_mut().zip(&self.sizes) {
            if let Some(size) = size {
                layer.insert(slot.to_owned(), vec![size.order() as f32]);
            }
        }
    }

    /// Takes over what was chosen last, on this device or on others.
    pub(super) fn advance(mut self, others: impl Iterator<Item = Self>) -> Self {
        for other in others {
            for layer in 0..self.sizes.len() {
                if other.chosen[layer] > self.chosen[layer] {
                    self.sizes[layer] = other.sizes[layer];
                    self.chosen[layer] = other.chosen[layer];
                }
            }
        }
        self
    }
}
