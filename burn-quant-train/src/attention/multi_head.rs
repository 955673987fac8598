//! Attention by the layers of Burn's `MultiHeadAttention`, in place of its `forward`.

use burn::{
    nn::{Linear, attention::MultiHeadAttention},
    tensor::{Bool, Tensor, backend::Backend},
};

use super::{AttentionConfig, attention};

/// Inputs of [`multi_head_attention`], as Burn's `MhaInput` has them.
#[derive(Debug, Clone)]
pub struct MultiHeadInput<B: Backend> {
    /// `[batch, queries, features]`.
    pub query: Tensor<B, 3>,
    /// `[batch, keys, features]`.
    pub key: Tensor<B, 3>,
    /// `[batch, keys, features]`.
    pub value: Tensor<B, 3>,
    /// `[batch, keys]`, true where a key is hidden from all queries.
    pub mask_pad: Option<Tensor<B, 2, Bool>>,
    /// `[batch, queries, keys]`, true where a key is hidden from a query.
    pub mask_attn: Option<Tensor<B, 3, Bool>>,
    /// Hides the keys behind a query's own, for which a kernel needs no mask.
    pub causal: bool,
}

impl<B: Backend> MultiHeadInput<B> {
    /// Of three tensors, without a mask.
    pub fn new(query: Tensor<B, 3>, key: Tensor<B, 3>, value: Tensor<B, 3>) -> Self {
        Self {
            query,
            key,
            value,
            mask_pad: None,
            mask_attn: None,
            causal: false,
        }
    }

    /// Of one tensor, without a mask.
    pub fn self_attn(x: Tensor<B, 3>) -> Self {
        Self::new(x.clone(), x.clone(), x)
    }

    /// Hides keys `[batch, keys]` from all queries.
    pub fn mask_pad(mut self, mask: Tensor<B, 2, Bool>) -> Self {
        self.mask_pad = Some(mask);
        self
    }

    /// Hides keys from queries, `[batch, queries, keys]`.
    pub fn mask_attn(mut self, mask: Tensor<B, 3, Bool>) -> Self {
        self.mask_attn = Some(mask);
        self
    }

    /// Hides the keys behind a query's own.
    pub fn causal(mut self) -> Self {
        self.causal = true;
        self
    }

    /// `[batch, 1, queries or 1, keys]`.
    fn mask(&self) -> Option<Tensor<B, 4, Bool>> {
        let pad = self
            .mask_pad
            .clone()
            .map(|mask| mask.unsqueeze_dims(&[1, 1]));
        let attn = self.mask_attn.clone().map(|mask| mask.unsqueeze_dim(1));
        match (pad, attn) {
            (Some(pad), Some(attn)) => Some(pad.expand(attn.shape()).bool_or(attn)),
            (pad, attn) => pad.or(attn),
        }
    }
}

/// What `layer.forward` computes, `[batch, queries, features]` in the dtype of its linear layers, by [`attention`]:
/// without scores in memory where a kernel computes it.
///
/// It differs from Burn's in this:
///
/// - The weights of the scores are not returned.
/// - The layer's dropout sets probabilities to zero. Burn's sets scores to zero, before the softmax.
/// - A hidden key has probability 0, and a query that sees nothing gets zero. Burn's gives hidden keys the score
///   `min_float`, so a query that sees nothing reads the mean of all values.
///
/// `quiet_softmax` (Miller, 2023, "Attention Is Off By One") is that of Burn's: a key and a value of zeros stand before
/// the others, whose score is 0.
///
/// # Panics
///
/// Where shapes do not fit each other or the layer, and where the layer's dropout is 1.
///
/// ```
/// use burn::{
///     backend::{Autodiff, Flex},
///     nn::attention::MultiHeadAttentionConfig,
///     tensor::{Distribution, Tensor},
/// };
/// use burn_quant_train::{
///     QuantTrain,
///     attention::{MultiHeadInput, multi_head_attention},
///     recipe::MixedPrecision,
/// };
///
/// // The compute dtype is BF16.
/// type Train = QuantTrain<Autodiff<Flex>, MixedPrecision>;
///
/// let device = Default::default();
/// let layer = MultiHeadAttentionConfig::new(64, 4).init::<Train>(&device);
/// let x = Tensor::<Train, 3>::random([2, 48, 64], Distribution::Default, &device);
/// let y = multi_head_attention(&layer, MultiHeadInput::self_attn(x).causal());
/// assert_eq!(y.dims(), [2, 48, 64]);
/// ```
pub fn multi_head_attention<B: Backend>(
    layer: &MultiHeadAttention<B>,
    input: MultiHeadInput<B>,
) -> Tensor<B, 3> {
    let [batch, queries, features] = input.query.dims();
    let heads = |x: Tensor<B, 3>, linear: &Linear<B>| {
        let [batch, sequence, _] = x.dims();
        linear
            .forward(x)
            .reshape([batch, sequence, layer.n_heads, layer.d_k])
            .swap_dims(1, 2)
    };
    let mut mask = input.mask();
    let query = heads(input.query, &layer.query);
    let mut key = heads(input.key, &layer.key);
    let mut value = heads(input.value, &layer.value);
    if layer.quiet_softmax {
        // In front, where they leave each query its own key.
        [key, value] = [key, value].map(|x| {
            let zeros = Tensor::<B, 4>::zeros([batch, layer.n_heads, 1, layer.d_k], &x.device());
            Tensor::cat(vec![zeros.cast(x.dtype()), x], 2)
        });
        mask = mask.map(|mask| {
            let [batch, heads, queries, _] = mask.dims();
            let seen =
                Tensor::<B, 4, Bool>::full([batch, heads, queries, 1], false, &mask.device());
            Tensor::cat(vec![seen, mask], 3)
        });
    }
    let config = AttentionConfig::new()
        .with_causal(input.causal)
        .with_dropout(layer.dropout.prob);
    let output = attention(query, key, value, mask, None, &config);
    let output = output.swap_dims(1, 2).reshape([batch, queries, features]);
    layer.output.forward(output)
}
