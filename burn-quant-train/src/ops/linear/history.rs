//! The histories of maxima that delayed scaling quantizes X, W and dY by.

use std::sync::Arc;

use burn_backend::tensor::{Device, FloatTensor};

use crate::{
    data::{
        DataBackend,
        quantize::{DelayedMaximum, Quantized},
    },
    layer::{Call, Layer},
    recipe::LinearRow,
};

/// A layer's history of the maxima of a matrix, and the run that adds to it.
#[derive(Debug)]
pub(super) struct History<B: DataBackend> {
    layer: Arc<Layer<B>>,
    slot: &'static str,
    call: Call,
}

impl<B: DataBackend> Clone for History<B> {
    fn clone(&self) -> Self {
        Self {
            layer: self.layer.clone(),
            ..*self
        }
    }
}

impl<B: DataBackend> History<B> {
    /// Those of X, W and dY, where the row has them.
    pub fn of_row(row: &LinearRow, layer: &Arc<Layer<B>>, call: Call) -> [Option<Self>; 3] {
        row.histories().map(|slot| {
            (!slot.is_empty()).then(|| Self {
                layer: layer.clone(),
                slot,
                call,
            })
        })
    }

    /// The maximum that the matrix had in earlier steps.
    pub fn delayed(&self, device: &Device<B>) -> DelayedMaximum<B> {
        self.layer.delayed_maximum(self.slot, device)
    }

    /// Adds the maximum of the matrix, FP32 `[1]`.
    pub fn note(&self, device: &Device<B>, absmax: FloatTensor<B>) {
        let layer = &self.layer;
        layer.note_maximum(self.slot, device, self.call, absmax);
    }

    /// Adds the maximum that copies of the matrix brought along, which is the same for all of them.
    pub fn note_copies(&self, device: &Device<B>, copies: [Option<&Arc<Quantized<B>>>; 2]) {
        let absmaxes = copies.into_iter().flatten();
        let absmax = absmaxes.filter_map(|copy| copy.absmax.clone()).next();
        if let Some(absmax) = absmax {
            self.note(device, absmax);
        }
    }
}
