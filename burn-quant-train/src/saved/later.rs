//! Values that their reader computes: SwiGLU's output and its gradients. A linear layer quantizes them in the launch
//! that computes them, so that they never go through memory; whoever else reads one has it computed by itself.

use std::{
    fmt::{self, Debug},
    sync::{Arc, Mutex},
};

use burn_backend::tensor::FloatTensor;
use cubecl_kernels::quantize::QuantizeSpec;

use super::HeldTensor;
use crate::{
    data::{
        DataBackend,
        composition::{OperatorInput, SwigluForward, SwigluGradients},
        quantize::{DelayedMaximum, Quantized, quantize_swiglu_gradients},
    },
    lock::lock,
};

/// A value that is not computed yet.
#[derive(Debug)]
pub(crate) enum Later<B: DataBackend> {
    /// `silu(gate) up`.
    Swiglu([HeldTensor<B>; 2]),
    /// The gradient of the gate (0) or of what it lets through (1).
    SwigluGradient(Arc<GradientPair<B>>, usize),
}

impl<B: DataBackend> Clone for Later<B> {
    fn clone(&self) -> Self {
        match self {
            Self::Swiglu(inputs) => Self::Swiglu(inputs.clone()),
            Self::SwigluGradient(pair, index) => Self::SwigluGradient(pair.clone(), *index),
        }
    }
}

impl<B: DataBackend> Later<B> {
    /// The value.
    pub(super) fn compute(&self) -> FloatTensor<B> {
        match self {
            Self::Swiglu(inputs) => {
                let [gate, up] = inputs.each_ref().map(|it| it.cell().read());
                let inputs = (OperatorInput::Floats(gate), OperatorInput::Floats(up));
                B::run(SwigluForward, inputs)
            }
            Self::SwigluGradient(pair, index) => pair.floats(*index),
        }
    }
}

/// How a linear layer quantizes the gradient of its output: row-major and transposed, of one rounding.
pub(crate) struct GradientCopy<B: DataBackend> {
    /// How.
    pub spec: QuantizeSpec,
    /// The maximum that it had in earlier steps, as of now, where its scale is that of one.
    pub delayed: Option<Arc<dyn Fn() -> DelayedMaximum<B> + Send + Sync>>,
}

impl<B: DataBackend> Clone for GradientCopy<B> {
    fn clone(&self) -> Self {
        Self {
            spec: self.spec,
            delayed: self.delayed.clone(),
        }
    }
}

impl<B: DataBackend> Debug for GradientCopy<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GradientCopy")
            .field("spec", &self.spec)
            .finish_non_exhaustive()
    }
}

/// Both gradients of SwiGLU: quantized together for the first layer that asks, or computed for the first other reader.
#[derive(Debug)]
pub(crate) struct GradientPair<B: DataBackend> {
    /// Gate, up, and the gradient of the output.
    inputs: [FloatTensor<B>; 3],
    copies: [GradientCopy<B>; 2],
    made: Mutex<Made<B>>,
}

/// The one of both that nobody has asked for yet.
#[derive(Debug)]
enum Made<B: DataBackend> {
    Nothing,
    Floats(Option<FloatTensor<B>>),
    Copy(Option<Quantized<B>>),
}

impl<B: DataBackend> GradientPair<B> {
    /// The gradients of `gate` and of `up`, of which linear layers take these copies, from both and the gradient of the
    /// output; these again where one launch does not make both copies.
    pub fn new(
        inputs: [FloatTensor<B>; 3],
        copies: [GradientCopy<B>; 2],
    ) -> Result<[HeldTensor<B>; 2], [FloatTensor<B>; 3]> {
        let [gate, up] = &copies;
        let together = match (&gate.delayed, &up.delayed) {
            (None, None) => true,
            (Some(_), Some(_)) => gate.spec == up.spec,
            (None, Some(_)) | (Some(_), None) => false,
        };
        if !together {
            return Err(inputs);
        }
        let like = inputs[0].clone();
        let pair = Arc::new(Self {
            inputs,
            copies,
            made: Mutex::new(Made::Nothing),
        });
        Ok([0, 1].map(|index| {
            let later = Later::SwigluGradient(pair.clone(), index);
            HeldTensor::later("swiglu", later, &like)
        }))
    }

    fn floats(&self, index: usize) -> FloatTensor<B> {
        let mut made = lock(&self.made);
        if let Made::Floats(waiting) = &mut *made
            && let Some(waiting) = waiting.take()
        {
            return waiting;
        }
        let [gate, up, gradient] = self.inputs.clone();
        let inputs = (OperatorInput::Floats(gate), OperatorInput::Floats(up));
        let (of_gate, of_up) = B::run(SwigluGradients, (inputs, gradient));
        let (own, other) = match index {
            0 => (of_gate, of_up),
            _ => (of_up, of_gate),
        };
        if let Made::Nothing = &*made {
            *made = Made::Floats(Some(other));
        }
        own
    }

    /// The copy of one of both, if it is to be made so, and the other one has not been computed by itself.
    pub fn copy(&self, index: usize, spec: &QuantizeSpec) -> Option<Quantized<B>> {
        if self.copies[index].spec != *spec {
            return None;
        }
        let mut made = lock(&self.made);
        match &mut *made {
            Made::Floats(_) => None,
            Made::Copy(waiting) => waiting.take(),
            Made::Nothing => {
                let delayed = self.copies.each_ref().map(|copy| copy.delayed.as_ref());
                let delayed = match delayed {
                    [Some(gate), Some(up)] => Some([gate(), up()]),
                    _ => None,
                };
                let specs = self.copies.each_ref().map(|copy| copy.spec);
                let [of_gate, of_up] =
                    quantize_swiglu_gradients::<B>(self.inputs.clone(), specs, delayed);
                let (own, other) = match index {
                    0 => (of_gate, of_up),
                    _ => (of_up, of_gate),
                };
                *made = Made::Copy(Some(other));
                Some(own)
            }
        }
    }
}
