//! Attention from products and a softmax that is one kernel; nothing of the size of the scores is saved.

use burn_backend::tensor::FloatTensor;

use super::{
    QuantOps,
    attention::{AttentionInputs, AttentionScores},
    matmul::MatmulKernel,
};

/// Kernels of the softmax of attention's scores, and of the products around it.
pub(super) struct SoftmaxKernels<B: QuantOps> {
    /// The product of `[batch, heads, M, K]` and `[batch, heads, K, N]`.
    pub product: MatmulKernel<B>,
    /// The same for a result that layers see as rows: in the memory of `[batch, M, heads, N]` where that costs nothing.
    pub product_in_rows: MatmulKernel<B>,
    /// The probabilities of scores `[batch, heads, queries, keys]`, in their dtype.
    pub forward: fn(FloatTensor<B>, AttentionScores) -> FloatTensor<B>,
    /// The probabilities, and the gradient of the scores, from the scores and the gradient of the probabilities.
    pub backward: SoftmaxBackward<B>,
}

/// See [`SoftmaxKernels::backward`].
type SoftmaxBackward<B> =
    fn(FloatTensor<B>, FloatTensor<B>, AttentionScores) -> (FloatTensor<B>, FloatTensor<B>);

impl<B: QuantOps> SoftmaxKernels<B> {
    /// See [`AttentionKernels::forward`](super::attention::AttentionKernels::forward).
    pub fn attention(
        &self,
        inputs: AttentionInputs<FloatTensor<B>>,
        scores: AttentionScores,
    ) -> FloatTensor<B> {
        let AttentionInputs { query, key, value } = inputs;
        let of_scores = (self.product)(query, B::float_transpose(key));
        (self.product_in_rows)((self.forward)(of_scores, scores), value)
    }

    /// See [`AttentionKernels::backward`](super::attention::AttentionKernels::backward).
    pub fn attention_backward(
        &self,
        inputs: AttentionInputs<FloatTensor<B>>,
        grad: FloatTensor<B>,
        wanted: AttentionInputs<bool>,
        scores: AttentionScores,
    ) -> AttentionInputs<Option<FloatTensor<B>>> {
        let AttentionInputs { query, key, value } = inputs;
        let grad_probabilities = (self.product)(grad.clone(), B::float_transpose(value));
        let of_scores = (self.product)(query.clone(), B::float_transpose(key.clone()));
        let (probabilities, grad_scores) = (self.backward)(of_scores, grad_probabilities, scores);
        let of_value = || (self.product_in_rows)(B::float_transpose(probabilities), grad);
        let of_query = || (self.product_in_rows)(grad_scores.clone(), key);
        let of_key = || (self.product_in_rows)(B::float_transpose(grad_scores.clone()), query);
        AttentionInputs {
            value: wanted.value.then(of_value),
            query: wanted.query.then(of_query),
            key: wanted.key.then(of_key),
        }
    }
}
