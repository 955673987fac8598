//! The maximum that a layer's data had in earlier steps, by which delayed scaling quantizes.

use burn_backend::TensorMetadata;

use crate::data::tensors::{Bundle, Change, Outline, Tensors};

/// The maximum that a layer's data had in earlier steps, among those of all layers.
#[derive(Debug, Clone)]
pub struct DelayedMaximum<T: Tensors> {
    /// The index of the layer.
    pub layer: usize,
    /// FP32 `[layers]`: the magnitude that becomes the largest number; 0 for a layer that has none yet.
    pub maxima: T::Float,
}

impl Bundle for DelayedMaximum<Outline> {
    type On<T: Tensors> = DelayedMaximum<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        delayed: DelayedMaximum<S>,
        change: &mut impl Change<S, T>,
    ) -> DelayedMaximum<T> {
        DelayedMaximum {
            layer: delayed.layer,
            maxima: change.float(delayed.maxima),
        }
    }
}

impl<T: Tensors> DelayedMaximum<T> {
    /// Panics unless the layer is among those that have a maximum.
    pub(crate) fn check(&self, operation: &str) {
        let (maxima, layer) = (self.maxima.shape(), self.layer);
        assert!(
            matches!(maxima.as_slice(), &[layers] if layer < layers),
            "{operation}: layer {layer} of maxima {maxima:?}; pass maxima [layers] and a layer below their length"
        );
    }
}
