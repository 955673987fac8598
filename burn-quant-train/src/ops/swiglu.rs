//! The gate of SwiGLU, which saves its two inputs (Shazeer, 2020, equation 6).

use burn_backend::{TensorMetadata, tensor::FloatTensor};

use crate::{
    data::{
        DataBackend,
        composition::{SwigluCompressing, SwigluForward, SwigluGradients},
    },
    saved::{HeldTensor, compress::Compress, recorded::Recorded},
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
        wanted: [bool; 2],
    ) -> (HeldTensor<B>, Self::Saved) {
        let contexts = inputs.each_ref().map(|input| input.cell().will_wait_as());
        let output = match contexts {
            [Some(context), Some(other)] if context == other && wanted.contains(&true) => {
                let [gate, up] = inputs.clone().map(HeldTensor::into_value);
                let compress = Compress { context };
                let compressing = SwigluCompressing {
                    spec: compress.spec(),
                    matrix: compress.matrix(&gate.shape()),
                };
                let (output, (of_gate, of_up)) = B::run(compressing, (gate, up));
                for (input, compressed) in inputs.iter().zip([of_gate, of_up]) {
                    input.cell().keep_compressed(compressed);
                }
                output
            }
            _ => {
                let [gate, up] = inputs.clone().map(HeldTensor::into_input);
                B::run(SwigluForward, (gate, up))
            }
        };
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
