//! The model of `pretrain`, step by step: what its linear layers and its operators between them read is in the hands of
//! a [`Step`].

use burn::{
    module::Module,
    nn::{
        Embedding, EmbeddingConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig, RotaryEncoding,
        RotaryEncodingConfig, loss::CrossEntropyLossConfig,
    },
    tensor::{
        Tensor,
        activation::silu,
        backend::Backend,
        module::{attention, linear},
        ops::AttentionModuleOptions,
    },
};
use examples::{
    data::Batch,
    model::{DecoderConfig, VOCABULARY},
};

/// The linear layers of the decoder, by what they do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Queries, keys and values.
    Qkv,
    /// Behind attention.
    Output,
    /// Gate and up.
    GateUp,
    /// Behind SwiGLU's product.
    Down,
    /// The vocabulary head.
    Head,
}

/// The work of a pass where layers and operators read. As it stands there is none.
pub trait Step<B: Backend> {
    /// The input of the first layer, `[batch, sequence, hidden]`.
    fn first(&mut self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        x
    }

    /// The output of the last layer.
    fn last(&mut self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        x
    }

    /// A linear layer.
    fn linear(&mut self, _place: Place, x: Tensor<B, 3>, layer: &Linear<B>) -> Tensor<B, 3> {
        product(x, layer.weight.val())
    }

    /// A norm; the one before the head is the last.
    fn norm(&mut self, _is_last: bool, x: Tensor<B, 3>, norm: &RmsNorm<B>) -> Tensor<B, 3> {
        norm.forward(x)
    }

    /// SwiGLU's product.
    fn gate(&mut self, gate: Tensor<B, 3>, up: Tensor<B, 3>) -> Tensor<B, 3> {
        gated(gate, up)
    }
}

/// Changes nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Exact;

impl<B: Backend> Step<B> for Exact {}

/// `x W`, of `[batch, sequence, inputs]` by `[inputs, outputs]`.
pub fn product<B: Backend>(x: Tensor<B, 3>, weight: Tensor<B, 2>) -> Tensor<B, 3> {
    linear(x, weight, None)
}

/// `silu(gate) up`.
pub fn gated<B: Backend>(gate: Tensor<B, 3>, up: Tensor<B, 3>) -> Tensor<B, 3> {
    silu(gate) * up
}

/// [`examples::model::Decoder`], with fields of the same names, so that a record of one loads into the other.
#[derive(Module, Debug)]
pub struct Decoder<B: Backend> {
    embedding: Embedding<B>,
    layers: Vec<Layer<B>>,
    norm: RmsNorm<B>,
    lm_head: Linear<B>,
}

#[derive(Module, Debug)]
struct Layer<B: Backend> {
    attention_norm: RmsNorm<B>,
    attention: Attention<B>,
    mlp_norm: RmsNorm<B>,
    mlp: Mlp<B>,
}

#[derive(Module, Debug)]
struct Attention<B: Backend> {
    q: Linear<B>,
    k: Linear<B>,
    v: Linear<B>,
    o: Linear<B>,
    heads: usize,
}

#[derive(Module, Debug)]
struct Mlp<B: Backend> {
    gate: Linear<B>,
    up: Linear<B>,
    down: Linear<B>,
}

impl<B: Backend> Decoder<B> {
    /// A model of this shape, for a record to be loaded into.
    pub fn new(config: &DecoderConfig, device: &B::Device) -> Self {
        let (hidden, mlp) = (config.hidden, config.mlp_hidden);
        let linear = |inputs, outputs| {
            LinearConfig::new(inputs, outputs)
                .with_bias(false)
                .init(device)
        };
        let norm = || RmsNormConfig::new(hidden).init(device);
        let layer = |_| Layer {
            attention_norm: norm(),
            attention: Attention {
                q: linear(hidden, hidden),
                k: linear(hidden, hidden),
                v: linear(hidden, hidden),
                o: linear(hidden, hidden),
                heads: config.heads,
            },
            mlp_norm: norm(),
            mlp: Mlp {
                gate: linear(hidden, mlp),
                up: linear(hidden, mlp),
                down: linear(mlp, hidden),
            },
        };
        Self {
            embedding: EmbeddingConfig::new(VOCABULARY, hidden).init(device),
            layers: (0..config.layers).map(layer).collect(),
            norm: norm(),
            lm_head: linear(hidden, VOCABULARY),
        }
    }

    /// Mean cross entropy, in nats per byte, of shape `[1]`.
    pub fn loss(&self, batch: Batch<B>, step: &mut impl Step<B>) -> Tensor<B, 1> {
        let [_, sequence] = batch.inputs.dims();
        let mut x = step.first(self.embedding.forward(batch.inputs));
        let [_, _, hidden] = x.dims();
        for layer in &self.layers {
            let width = hidden / layer.attention.heads;
            let rotary = RotaryEncodingConfig::new(sequence, width).init(&x.device());
            x = layer.forward(x, &rotary, step);
        }
        let x = step.last(x);
        let x = step.norm(true, x, &self.norm);
        let logits = step.linear(Place::Head, x, &self.lm_head);
        CrossEntropyLossConfig::new()
            .init(&logits.device())
            .forward(logits.flatten::<2>(0, 1), batch.targets.flatten::<1>(0, 1))
    }
}

impl<B: Backend> Layer<B> {
    fn forward(
        &self,
        x: Tensor<B, 3>,
        rotary: &RotaryEncoding<B>,
        step: &mut impl Step<B>,
    ) -> Tensor<B, 3> {
        let normed = step.norm(false, x.clone(), &self.attention_norm);
        let x = x + self.attention.forward(normed, rotary, step);
        let normed = step.norm(false, x.clone(), &self.mlp_norm);
        x + self.mlp.forward(normed, step)
    }
}

impl<B: Backend> Attention<B> {
    fn forward(
        &self,
        x: Tensor<B, 3>,
        rotary: &RotaryEncoding<B>,
        step: &mut impl Step<B>,
    ) -> Tensor<B, 3> {
        let [batch, sequence, hidden] = x.dims();
        let mut heads = |layer| {
            let x = step.linear(Place::Qkv, x.clone(), layer);
            let width = hidden / self.heads;
            x.reshape([batch, sequence, self.heads, width])
                .swap_dims(1, 2)
        };
        let (q, k, v) = (heads(&self.q), heads(&self.k), heads(&self.v));
        let causal = AttentionModuleOptions {
            is_causal: true,
            ..Default::default()
        };
        let (q, k) = (rotary.forward(q), rotary.forward(k));
        let mixed = attention(q, k, v, None, None, causal);
        let mixed = mixed.swap_dims(1, 2).reshape([batch, sequence, hidden]);
        step.linear(Place::Output, mixed, &self.o)
    }
}

impl<B: Backend> Mlp<B> {
    fn forward(&self, x: Tensor<B, 3>, step: &mut impl Step<B>) -> Tensor<B, 3> {
        let gate = step.linear(Place::GateUp, x.clone(), &self.gate);
        let up = step.linear(Place::GateUp, x, &self.up);
        let product = step.gate(gate, up);
        step.linear(Place::Down, product, &self.down)
    }
}
