//! Values of which a linear layer keeps no copy for its backward pass, since they can be made again there of what waits
//! anyway (rematerialization): the output of a norm, and views of what waits as it is.

use std::sync::{Arc, Weak};

use super::{Cell, HeldTensor, again::Again};
use crate::data::{DataBackend, quantize::MatrixSource};

/// How such a value is made again.
#[derive(Debug)]
pub(crate) enum Rematerialized<B: DataBackend> {
    /// RMSNorm's output, of its input, which waits compressed.
    RmsNorm(NormInputs<B>),
    /// A view of a tensor that waits as it is.
    View(Again<B>),
}

impl<B: DataBackend> Rematerialized<B> {
    /// The value, for who quantizes it.
    pub fn source(&self) -> MatrixSource<B> {
        match self {
            Self::RmsNorm(inputs) => inputs.source(),
            Self::View(again) => MatrixSource::Floats(again.compute()),
        }
    }
}

/// What RMSNorm's output is made of.
#[derive(Debug)]
pub(crate) struct NormInputs<B: DataBackend> {
    /// The input, `[.., columns]`.
    pub x: HeldTensor<B>,
    /// A number for each column.
    pub gain: HeldTensor<B>,
    /// f32 `[rows, 1]`.
    pub inverse_rms: HeldTensor<B>,
}

impl<B: DataBackend> NormInputs<B> {
    /// The output, for who quantizes it.
    pub fn source(&self) -> MatrixSource<B> {
        let Self {
            x,
            gain,
            inverse_rms,
        } = self.clone();
        MatrixSource::RmsNorm {
            x: x.into_input(),
            gain: gain.into_value(),
            inverse_rms: inverse_rms.into_value(),
        }
    }
}

impl<B: DataBackend> Clone for NormInputs<B> {
    fn clone(&self) -> Self {
        Self {
            x: self.x.clone(),
            gain: self.gain.clone(),
            inverse_rms: self.inverse_rms.clone(),
        }
    }
}

/// The same for the output's cell, which keeps none of them: they wait as long as the norm's own node does.
#[derive(Debug)]
pub(super) struct WeakNormInputs<B: DataBackend>([Weak<Cell<B>>; 3]);

impl<B: DataBackend> WeakNormInputs<B> {
    pub fn of(inputs: &NormInputs<B>) -> Self {
        let NormInputs {
            x,
            gain,
            inverse_rms,
        } = inputs;
        Self([x, gain, inverse_rms].map(|it| Arc::downgrade(it.cell())))
    }

    /// They, if all of them are still there.
    pub fn upgrade(&self) -> Option<NormInputs<B>> {
        let [x, gain, inverse_rms] = &self.0;
        let held = |cell: &Weak<Cell<B>>| cell.upgrade().map(HeldTensor::share);
        Some(NormInputs {
            x: held(x)?,
            gain: held(gain)?,
            inverse_rms: held(inverse_rms)?,
        })
    }
}
