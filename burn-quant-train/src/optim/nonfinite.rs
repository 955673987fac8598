//! Gradients that hold NaN or Inf.

use burn_backend::{
    TensorMetadata,
    tensor::{Device, FloatTensor, IntTensor},
};
use serde::{Deserialize, Serialize};

use crate::data::{DataBackend, optimizer::find_nonfinite, read::integers};

/// How a step treats gradients that hold NaN or Inf.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum OnNonfinite {
    /// Changes nothing, neither parameters nor moments nor step counts, and counts the step as skipped. Decided on the
    /// device.
    Skip,
    /// Panics, naming the parameter. Waits for the device at every step.
    Error,
    /// Takes the step as it is.
    Propagate,
}

impl OnNonfinite {
    /// Searches the gradients, unless the setting needs no search: see [`find_nonfinite`]. With
    /// [`Error`](Self::Error) it panics if one holds NaN or Inf; `name` tells the parameter of a gradient, by index.
    pub(super) fn find<B: DataBackend>(
        self,
        gradients: impl FnOnce() -> Vec<FloatTensor<B>>,
        device: &Device<B>,
        name: impl FnOnce(usize) -> String,
    ) -> Option<IntTensor<B>> {
        if self == Self::Propagate {
            return None;
        }
        let gradients = gradients();
        let flag = find_nonfinite::<B>(gradients.clone(), device);
        if self == Self::Error {
            let found = integers::<B>(flag.clone())[0] as usize;
            assert!(
                found == 0,
                "adamw: the gradient of {}, {:?}, holds NaN or Inf; lower the learning rate or clip gradients, or let \
                 such steps pass with OnNonfinite::Skip",
                name(found - 1),
                gradients[found - 1].shape()
            );
        }
        Some(flag)
    }
}
