//! The gate of SwiGLU, which saves its two inputs (Shazeer, 2020, equation 6).

use burn_backend::TensorMetadata;
use cubecl_kernels::quantize::QuantizeSpec;

use crate::{
    data::{
        DataBackend,
        composition::{SwigluCompressing, SwigluForward, SwigluGradients},
    },
    saved::{
        HeldTensor,
        compress::Compress,
        later::{self, GateAndUp, GradientPair, Later},
        recorded::Recorded,
    },
};

/// The output, which waits for who reads it.
fn waiting<B: DataBackend>(
    inputs: &[HeldTensor<B>; 2],
    contexts: Option<QuantizeSpec>,
) -> HeldTensor<B> {
    let factors = GateAndUp::new(inputs.clone(), contexts);
    HeldTensor::later("swiglu", Later::Swiglu(factors), inputs[0].cell().form())
}

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
        let stay_as_they_are = inputs
            .iter()
            .all(|input| input.cell().stays_exact() || input.is_in_numbers());
        let output = match contexts {
            [Some(context), Some(other)] if context == other && wanted.contains(&true) => {
                let compress = Compress { context };
                let shape = inputs[0].shape();
                let compressing = SwigluCompressing {
                    spec: compress.spec(),
                    matrix: compress.matrix(&shape),
                };
                if later::may_wait(&wanted)
                    && let Some(spec) = compress.of_rows(&shape)
                {
                    return (waiting(&inputs, Some(spec)), inputs);
                }
                let [gate, up] = inputs.clone().map(HeldTensor::into_value);
                let (output, (of_gate, of_up)) = B::run(compressing, (gate, up));
                for (input, compressed) in inputs.iter().zip([of_gate, of_up]) {
                    input.cell().keep_compressed(compressed);
                }
                output
            }
            [None, None] if stay_as_they_are && later::may_wait(&wanted) => {
                return (waiting(&inputs, None), inputs);
            }
            _ => {
                let [gate, up] = inputs.clone().map(HeldTensor::into_input);
                B::run(SwigluForward, (gate, up))
            }
        };
        (HeldTensor::of("swiglu", output), inputs)
    }

    fn backward_held(
        inputs: Self::Saved,
        (gradient, _): (HeldTensor<B>, Option<HeldTensor<B>>),
        wanted: [bool; 2],
    ) -> [Option<HeldTensor<B>>; 2] {
        let copies = inputs.each_ref().map(|input| input.cell().gradient_copy());
        let form = inputs[0].cell().form();
        let inputs = inputs.map(HeldTensor::into_input);
        let gradient = gradient.into_input();
        let ([gate, up], gradient) = match (copies, wanted) {
            ([Some(of_gate), Some(of_up)], [true, true]) => {
                match GradientPair::of((inputs, gradient), [of_gate, of_up], form) {
                    Ok(pair) => return pair.map(Some),
                    Err(inputs) => *inputs,
                }
            }
            _ => (inputs, gradient),
        };
        let (gate, up) = B::run(SwigluGradients, ((gate, up), gradient));
        let [wants_gate, wants_up] = wanted;
        let held = |wants: bool, gradient| wants.then(|| HeldTensor::new(gradient));
        [held(wants_gate, gate), held(wants_up, up)]
    }
}
