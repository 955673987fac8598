//! Attention: Q, K and V are saved, and nothing of the size of the scores.

use burn_backend::tensor::FloatTensor;

use crate::data::{
    DataBackend,
    attention::{AttentionForward, AttentionGradients, AttentionInputs, AttentionScores},
};
use crate::saved::{HeldTensor, recorded::Recorded};

/// `softmax(scale Q Kᵀ + mask) V`, of Q, K and V of one dtype, on a device that has kernels for it.
pub(crate) struct Attention {
    pub scores: AttentionScores,
}

impl<B: DataBackend> Recorded<B, 3> for Attention {
    type Saved = ([HeldTensor<B>; 3], AttentionScores);

    fn forward(
        self,
        inputs: [HeldTensor<B>; 3],
        _wanted: [bool; 3],
    ) -> (HeldTensor<B>, Self::Saved) {
        let scores = self.scores;
        let values = AttentionInputs::from(inputs.clone().map(HeldTensor::into_value));
        let output = B::run(AttentionForward { scores }, values);
        (HeldTensor::of("attention", output), (inputs, scores))
    }

    fn backward(
        (inputs, scores): Self::Saved,
        gradient: FloatTensor<B>,
        wanted: [bool; 3],
    ) -> [Option<FloatTensor<B>>; 3] {
        let wanted = wanted.into();
        let inputs = AttentionInputs::from(inputs.map(HeldTensor::into_value));
        B::run(AttentionGradients { scores, wanted }, (inputs, gradient)).into_array()
    }
}
