//! Attention with what Burn's function lacks: a window of keys, and dropout of probabilities; and for the layers of
//! Burn's [`MultiHeadAttention`](burn::nn::attention::MultiHeadAttention).
//!
//! Functions for a model of any backend. Under the [decorator](crate::QuantTrain) nothing of the size of the scores
//! waits for the backward pass, but a mask and a bias, where a kernel computes it; elsewhere it is composed of Burn's
//! operations.

mod multi_head;

use burn::{
    config::Config,
    tensor::{Bool, Tensor, backend::Backend, module, ops::AttentionModuleOptions},
};

pub use multi_head::{MultiHeadInput, multi_head_attention};

use crate::{
    backend::{
        attention::{Asked, Inputs, asking, composed, fits},
        is_decorated,
    },
    data::{
        attention::{AttentionShape, Band, Dropout, Dropped},
        composition::Draw,
    },
    layer::dropout_key,
};

/// The options of [`attention`].
///
/// ```
/// use burn_quant_train::attention::AttentionConfig;
///
/// // A query sees its own key and the 4,095 before it; a tenth of the probabilities is dropped.
/// let config = AttentionConfig::new()
///     .with_causal(true)
///     .with_before(Some(4095))
///     .with_dropout(0.1);
/// ```
#[derive(Config, Debug, PartialEq)]
pub struct AttentionConfig {
    /// Multiplies the products of queries and keys; `1 / sqrt(features)` if there is none.
    pub scale: Option<f64>,
    /// Bounds the scores smoothly, `softcap tanh(scores / softcap)`, before the bias; positive.
    pub softcap: Option<f64>,
    /// Hides the keys behind a query's own. The last query has the last key.
    #[config(default = false)]
    pub causal: bool,
    /// The keys before its own that a query sees; all if there is no bound (sliding window: Beltagy et al., 2020,
    /// "Longformer", section 3.1).
    pub before: Option<usize>,
    /// The keys behind its own that a query sees; all if there is no bound.
    pub behind: Option<usize>,
    /// The share of probabilities that are set to zero in training; the others are divided by what it leaves (Vaswani
    /// et al., 2017, whose code drops them behind the softmax). In `[0, 1)`.
    #[config(default = 0.0)]
    pub dropout: f64,
}

impl AttentionConfig {
    fn check(&self) {
        let Self {
            softcap, dropout, ..
        } = *self;
        assert!(
            // Kernels have the rate as an f32.
            (0.0..1.0).contains(&(dropout as f32)),
            "attention: a dropout of {dropout} is not in [0, 1)"
        );
        if let Some(softcap) = softcap {
            assert!(
                softcap > 0.0 && softcap.is_finite(),
                "attention: a soft cap of {softcap} is not positive and finite"
            );
        }
    }

    /// The options that Burn's function has.
    fn of_burn(&self) -> AttentionModuleOptions {
        AttentionModuleOptions {
            scale: self.scale,
            softcap: self.softcap,
            is_causal: self.causal,
        }
    }

    /// The others, if there are some.
    fn asked<B: Backend>(&self, device: &B::Device) -> Option<Asked> {
        // What 32 bits do not hold is beyond all keys.
        let bound = |keys: Option<usize>| keys.and_then(|keys| u32::try_from(keys).ok());
        let band = Band {
            left: bound(self.before),
            right: bound(self.behind),
        };
        let drops = self.dropout > 0.0 && B::ad_enabled(device);
        (drops || band != Band::ALL).then(|| Asked {
            band,
            dropout: drops.then(|| Dropout {
                dropped: Dropped::Probabilities,
                draw: Draw {
                    rate: self.dropout as f32,
                    key: dropout_key(),
                },
            }),
        })
    }
}

/// The values that each query reads: those of the keys that it sees, in proportion to the softmax of its scores.
///
/// - `query`: `[batch, heads, queries, features]`.
/// - `key`, `value`: `[batch, heads of keys, keys, features]`, each head for `heads / heads of keys` heads of queries;
///   the features of values may be others.
/// - `mask`: true where a key is hidden from a query; `bias`: added to the scores. Each dimension of both is that of
///   the scores, `[batch, heads, queries, keys]`, or 1.
/// - The result is `[batch, heads, queries, features of values]`. A query that sees nothing gets zero.
/// - Floats are of one dtype, and so is the result. Under the decorator they may differ, all are cast to its compute
///   dtype, and the result has that.
///
/// Without a window and dropout it is [Burn's function](burn::tensor::module::attention). Dropout is for training, as
/// Burn's is: on a backend without autodiff nothing is dropped.
///
/// Under the decorator a kernel drops by numbers that follow from [`Backend::seed`] and from how many calls with
/// dropout came after it in the thread's [lane](crate::layer::in_lane), and are the same on every device. Setting the
/// seed starts all lanes over; a checkpoint does not hold the count, so a run that is to resume exactly sets a seed for
/// each step. Where attention is composed the numbers are the backend's own.
///
/// # Panics
///
/// Where shapes do not fit each other, and where the soft cap or the dropout is out of its range.
///
/// ```
/// use burn::{
///     backend::{Autodiff, Flex},
///     tensor::{Distribution, Tensor},
/// };
/// use burn_quant_train::{
///     QuantTrain,
///     attention::{AttentionConfig, attention},
///     recipe::FallbackInt8,
/// };
///
/// // The compute dtype is BF16.
/// type Train = QuantTrain<Autodiff<Flex>, FallbackInt8>;
///
/// let device = Default::default();
/// let draw = |heads: usize| {
///     Tensor::<Train, 4>::random([2, heads, 48, 16], Distribution::Default, &device)
/// };
/// let config = AttentionConfig::new()
///     .with_causal(true)
///     .with_before(Some(15))
///     .with_dropout(0.1);
/// // Two heads of keys for eight of queries.
/// let output = attention(draw(8), draw(2), draw(2), None, None, &config);
/// assert_eq!(output.dims(), [2, 8, 48, 16]);
/// ```
pub fn attention<B: Backend>(
    query: Tensor<B, 4>,
    key: Tensor<B, 4>,
    value: Tensor<B, 4>,
    mask: Option<Tensor<B, 4, Bool>>,
    bias: Option<Tensor<B, 4>>,
    config: &AttentionConfig,
) -> Tensor<B, 4> {
    config.check();
    let shapes = [&query, &key, &value].map(|tensor| tensor.dims());
    let [of_query, of_key, of_value] = &shapes;
    let shape = AttentionShape::new("attention", of_query, of_key, of_value);
    let shape = shape.unwrap_or_else(|error| panic!("{error}"));
    let of_scores = [
        ("mask", mask.as_ref().map(|mask| mask.shape())),
        ("bias", bias.as_ref().map(|bias| bias.shape())),
    ];
    for (name, extents) in of_scores {
        assert!(
            extents.as_ref().is_none_or(|it| fits(it, &shape.scores())),
            "attention: a {name} {extents:?} is not broadcast to the scores {:?}",
            shape.scores()
        );
    }
    let device = query.device();
    let options = config.of_burn();
    match config.asked::<B>(&device) {
        None => module::attention(query, key, value, mask, bias, options),
        Some(asked) if is_decorated::<B>(&device) => asking(asked, || {
            module::attention(query, key, value, mask, bias, options)
        }),
        Some(asked) => {
            let inputs = Inputs {
                query,
                key,
                value,
                mask,
                bias,
            };
            composed(inputs, options, asked)
        }
    }
}
