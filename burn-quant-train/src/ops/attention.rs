//! Attention: Q, K and V are saved, and nothing of the size of the scores.

use burn_backend::tensor::FloatTensor;

use crate::data::{
    DataBackend,
    attention::{AttentionForward, AttentionGradients, AttentionInputs, AttentionScores},
    recorded::Recorded,
};

/// `softmax(scale Q Kᵀ + mask) V`, of Q, K and V of one dtype, on a device that has kernels for it.
pub(crate) struct Attention {
    pub scores: AttentionScores,
}

impl<B: DataBackend> Recorded<B, 3> for Attention {
    type Saved = (AttentionInputs<FloatTensor<B>>, AttentionScores);

    fn forward(
        self,
        inputs: [FloatTensor<B>; 3],
        _wanted: [bool; 3],
    ) -> (FloatTensor<B>, Self::Saved) {
        let scores = self.scores;
        let inputs = AttentionInputs::from(inputs);
        let output = B::run(AttentionForward { scores }, inputs.clone());
        (output, (inputs, scores))
    }

    fn backward(
        (inputs, scores): Self::Saved,
        gradient: FloatTensor<B>,
        wanted: [bool; 3],
    ) -> [Option<FloatTensor<B>>; 3] {
        let wanted = wanted.into();
        B::run(AttentionGradients { scores, wanted }, (inputs, gradient)).into_array()
    }
}
