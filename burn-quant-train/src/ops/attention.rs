//! Attention: Q, K and V are saved, and nothing of the size of the scores.

use burn_backend::tensor::FloatTensor;

use crate::data::{
    DataBackend,
    attention::{
        AttentionForward, AttentionInputs, AttentionScores, ComposedGradients, FlashForward,
        FlashGradients, FlashOutput, Gradients,
    },
};
use crate::saved::{HeldTensor, recorded::Recorded};

/// `softmax(scale Q Kᵀ + mask) V`, of Q, K and V of one dtype, on a device that has kernels for it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attention {
    pub scores: AttentionScores,
    /// True for the kernel that holds no scores in memory.
    pub is_flash: bool,
}

/// What the backward pass needs.
#[derive(Debug, Clone)]
pub(crate) struct Saved<B: DataBackend> {
    inputs: [HeldTensor<B>; 3],
    attention: Attention,
    /// What the kernel left, if it is for the inputs as they will be read. Of inputs that wait compressed, the output is
    /// computed again: the gradient is then that of one function, and its probabilities sum to 1.
    forward: Option<FlashOutput<HeldTensor<B>>>,
}

impl<B: DataBackend> Recorded<B, 3> for Attention {
    type Saved = Saved<B>;

    fn again(&mut self, _inputs: &[HeldTensor<B>; 3]) -> Option<Self> {
        Some(*self)
    }

    fn forward(
        self,
        inputs: [HeldTensor<B>; 3],
        _wanted: [bool; 3],
    ) -> (HeldTensor<B>, Self::Saved) {
        let scores = self.scores;
        let values = AttentionInputs::from(inputs.clone().map(HeldTensor::into_value));
        let (output, forward) = if self.is_flash {
            let forward = B::run(FlashForward { scores }, values);
            let forward = forward.map(|tensor| HeldTensor::of("attention", tensor));
            let exact = inputs.iter().all(|input| input.cell().stays_exact());
            (forward.output.clone(), exact.then_some(forward))
        } else {
            let output = B::run(AttentionForward { scores }, values);
            (HeldTensor::of("attention", output), None)
        };
        let saved = Saved {
            inputs,
            attention: self,
            forward,
        };
        (output, saved)
    }

    fn backward(
        saved: Self::Saved,
        gradient: FloatTensor<B>,
        wanted: [bool; 3],
    ) -> [Option<FloatTensor<B>>; 3] {
        let Attention { scores, is_flash } = saved.attention;
        let wanted = wanted.into();
        let inputs = AttentionInputs::from(saved.inputs.map(HeldTensor::into_value));
        let gradients = Gradients { scores, wanted };
        let of_inputs = if is_flash {
            let forward = match saved.forward {
                Some(forward) => forward.map(HeldTensor::into_value),
                None => B::run(FlashForward { scores }, inputs.clone()),
            };
            B::run(FlashGradients(gradients), ((inputs, gradient), forward))
        } else {
            B::run(ComposedGradients(gradients), (inputs, gradient))
        };
        of_inputs.into_array()
    }
}
