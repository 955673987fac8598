//! The gate of SwiGLU, which saves its two inputs (Shazeer, 2020, equation 6).

use burn_backend::tensor::FloatTensor;

use crate::{
    data::{
        DataBackend,
        composition::{SwigluForward, SwigluGradients},
    },
    saved::{HeldTensor, recorded::Recorded},
};

/// `silu(gate) up`, of one shape and dtype.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Swiglu;

impl<B: DataBackend> Recorded<B, 2> for Swiglu {
    type Saved = [HeldTensor<B>; 2];

    fn again(&mut self, _inputs: &[HeldTensor<B>; 2]) -> Option<Self> {
        Some(*self)
    }

    fn forward(
        self,
        inputs: [HeldTensor<B>; 2],
        _wanted: [bool; 2],
    ) -> (HeldTensor<B>, Self::Saved) {
        let [gate, up] = inputs.clone().map(HeldTensor::into_input);
        let output = B::run(SwigluForward, (gate, up));
        (HeldTensor::of("swiglu", output), inputs)
    }

    fn backward(
        inputs: Self::Saved,
        gradient: FloatTensor<B>,
        wanted: [bool; 2],
    ) -> [Option<FloatTensor<B>>; 2] {
        let [gate, up] = inputs.map(HeldTensor::into_input);
        let (of_gate, of_up) = B::run(SwigluGradients, ((gate, up), gradient));
        let [wants_gate, wants_up] = wanted;
        [wants_gate.then_some(of_gate), wants_up.then_some(of_up)]
    }
}
