//! A decoder in GPT-2's style: layer normalization, learned positions, GELU, biases, dropout.
//!
//! Dropout is behind the embedding and behind each half of a layer. GPT-2 also drops attention probabilities; this model
//! does not, since Hopper's kernel of attention has no dropout.

use burn::module::{Initializer, Module};
use burn::nn::{
    Dropout, DropoutConfig, Embedding, Gelu, LayerNorm, LayerNormConfig, Linear, LinearConfig,
};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};

use super::{AttentionWay, DecoderConfig, STD, block, embedding, mixed, normal};

/// All of it but the embedding of tokens and the vocabulary head.
#[derive(Module, Debug)]
pub struct Gpt2<B: Backend> {
    positions: Embedding<B>,
    dropout: Dropout,
    layers: Vec<Layer<B>>,
    norm: LayerNorm<B>,
}

impl<B: Backend> Gpt2<B> {
    pub(super) fn new(config: &DecoderConfig, device: &B::Device) -> Self {
        let layers = (0..config.layers).map(|_| Layer::new(config, device));
        Self {
            positions: embedding(config.max_sequence, config.hidden, device),
            dropout: DropoutConfig::new(config.dropout).init(),
            layers: layers.collect(),
            norm: LayerNormConfig::new(config.hidden).init(device),
        }
    }

    /// The input of the vocabulary head, for embedded tokens; both `[batch, sequence, hidden]`.
    pub(super) fn forward(
        &self,
        x: Tensor<B, 3>,
        checkpointing: bool,
        attention: AttentionWay,
    ) -> Tensor<B, 3> {
        let [_, sequence, _] = x.dims();
        let positions = Tensor::<B, 1, Int>::arange(0..sequence as i64, &x.device());
        let x = x + self.positions.forward(positions.unsqueeze());
        let layers = self.layers.iter();
        let x = layers.fold(self.dropout.forward(x), |x, layer| {
            block(checkpointing, |x| layer.forward(x, attention), x)
        });
        self.norm.forward(x)
    }
}

/// One layer, with normalization before each half.
#[derive(Module, Debug)]
pub struct Layer<B: Backend> {
    attention_norm: LayerNorm<B>,
    attention: Attention<B>,
    mlp_norm: LayerNorm<B>,
    mlp: Mlp<B>,
    dropout: Dropout,
}

impl<B: Backend> Layer<B> {
    fn new(config: &DecoderConfig, device: &B::Device) -> Self {
        let (hidden, mlp) = (config.hidden, config.mlp_hidden);
        let into_residual = config.std_into_residual();
        Self {
            attention_norm: LayerNormConfig::new(hidden).init(device),
            attention: Attention {
                qkv: linear(hidden, 3 * hidden, STD, device),
                o: linear(hidden, hidden, into_residual, device),
                heads: config.heads,
            },
            mlp_norm: LayerNormConfig::new(hidden).init(device),
            mlp: Mlp {
                up: linear(hidden, mlp, STD, device),
                gelu: Gelu::new(),
                down: linear(mlp, hidden, into_residual, device),
            },
            dropout: DropoutConfig::new(config.dropout).init(),
        }
    }

    fn forward(&self, x: Tensor<B, 3>, way: AttentionWay) -> Tensor<B, 3> {
        let of_attention = self.attention_norm.forward(x.clone());
        let of_attention = self.attention.forward(of_attention, way);
        let x = x + self.dropout.forward(of_attention);
        let of_mlp = self.mlp.forward(self.mlp_norm.forward(x.clone()));
        x + self.dropout.forward(of_mlp)
    }
}

/// A linear layer whose bias begins at zero.
fn linear<B: Backend>(inputs: usize, outputs: usize, std: f64, device: &B::Device) -> Linear<B> {
    let linear = LinearConfig::new(inputs, outputs).with_initializer(normal(std));
    Linear {
        bias: Some(Initializer::Zeros.init([outputs], device)),
        ..linear.init(device)
    }
}

/// Causal multi-head attention, its queries, keys and values of one layer.
#[derive(Module, Debug)]
pub struct Attention<B: Backend> {
    qkv: Linear<B>,
    o: Linear<B>,
    heads: usize,
}

impl<B: Backend> Attention<B> {
    fn forward(&self, x: Tensor<B, 3>, way: AttentionWay) -> Tensor<B, 3> {
        let [batch, sequence, hidden] = x.dims();
        let qkv = self.qkv.forward(x);
        let part = |index: usize| -> Tensor<B, 4> {
            qkv.clone()
                .narrow(2, index * hidden, hidden)
                .reshape([batch, sequence, self.heads, hidden / self.heads])
                .swap_dims(1, 2)
        };
        self.o.forward(mixed(part(0), part(1), part(2), way))
    }
}

/// The feed-forward network.
#[derive(Module, Debug)]
pub struct Mlp<B: Backend> {
    up: Linear<B>,
    gelu: Gelu,
    down: Linear<B>,
}

impl<B: Backend> Mlp<B> {
    fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        self.down.forward(self.gelu.forward(self.up.forward(x)))
    }
}

#[cfg(test)]
mod tests {
    use burn::backend::{Autodiff, Flex};
    use burn::module::AutodiffModule;
    use burn::tensor::Distribution;

    use super::*;
    use crate::advise::shapes::Shapes;
    use crate::args::Preset;
    use crate::model::{Family, VOCABULARY};

    type B = Autodiff<Flex>;

    #[test]
    fn it_has_the_parameters_of_its_formula() {
        let device = Default::default();
        let config = DecoderConfig {
            family: Family::Gpt2,
            ..DecoderConfig::new(24, 72, 3, 2, 10)
        };
        // Weights and biases of a layer's linear layers, and its norms; tables of tokens and positions, norm and head.
        let layer = 24 * (3 * 24 + 24 + 2 * 72) + (3 * 24 + 24 + 72 + 24) + 4 * 24;
        let expected = 2 * layer + 24 * (2 * VOCABULARY + 10) + 2 * 24;
        assert_eq!(config.init::<B>(&device).num_params(), expected);
        assert_eq!(Shapes::from(&config).parameters(), expected);
        let tiny = Preset::Gpt2Tiny.model(128);
        let parameters = tiny.init::<B>(&device).num_params();
        assert_eq!(parameters, Shapes::from(&tiny).parameters());
        assert!((800_000..1_000_000).contains(&parameters), "{parameters}");
    }

    #[test]
    fn tokens_read_what_is_before_them_and_dropout_is_for_training() {
        let device = Default::default();
        let config = DecoderConfig {
            family: Family::Gpt2,
            dropout: 0.5,
            ..DecoderConfig::new(24, 72, 3, 2, 10)
        };
        let model = config.init::<B>(&device);
        let tokens =
            Tensor::<B, 2>::random([1, 10], Distribution::Uniform(0.0, 255.0), &device).int();
        let changed = tokens
            .clone()
            .slice_assign([0..1, 7..8], (tokens.clone().slice([0..1, 7..8]) + 1) % 256);
        let (training, again) = (model.forward(tokens.clone()), model.forward(tokens.clone()));
        assert_ne!(training.to_data(), again.to_data(), "a half is dropped");
        let valid = model.valid();
        let logits = |tokens: Tensor<B, 2, Int>| valid.forward(tokens.inner());
        let (before, after) = (logits(tokens.clone()), logits(changed));
        assert_eq!(
            before.to_data(),
            logits(tokens).to_data(),
            "nothing is dropped"
        );
        let of =
            |logits: &Tensor<Flex, 3>, from, to| logits.clone().slice([0..1, from..to]).to_data();
        assert_eq!(of(&before, 0, 7), of(&after, 0, 7));
        for token in 7..10 {
            assert_ne!(of(&before, token, token + 1), of(&after, token, token + 1));
        }
    }
}
