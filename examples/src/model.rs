//! A Llama-style decoder from plain Burn modules: RMSNorm, rotary positions, SwiGLU, causal attention.
//!
//! Nothing here knows of quantization: the same code trains on `Autodiff<Flex>` and on any `QuantTrain` backend.

use burn::config::Config;
use burn::module::{AutodiffModule, Initializer, Module, ModuleVisitor, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{
    Embedding, EmbeddingConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig, RotaryEncoding,
    RotaryEncodingConfig,
};
use burn::tensor::activation::silu;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::module::attention;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Int, Tensor};
use burn::train::{InferenceStep, TrainOutput, TrainStep};

use crate::data::Batch;
use crate::metrics::StepOutput;

/// Tokens are bytes.
pub const VOCABULARY: usize = 256;

/// The sizes of a [`Decoder`].
#[derive(Config, Debug, PartialEq)]
pub struct DecoderConfig {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width inside the feed-forward network.
    pub mlp_hidden: usize,
    /// Attention heads; must divide `hidden`.
    pub heads: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Longest sequence that the rotary table covers.
    pub max_sequence: usize,
}

impl DecoderConfig {
    /// Initializes the model. Weights are drawn from N(0, 0.02), those that end in the residual stream from a
    /// distribution narrower by the square root of the number of such additions (GPT-2's scheme).
    pub fn init<B: Backend>(&self, device: &B::Device) -> Decoder<B> {
        let std = 0.02;
        let into_residual = std / (2.0 * self.layers as f64).sqrt();
        let linear = |inputs, outputs, std| {
            LinearConfig::new(inputs, outputs)
                .with_bias(false)
                .with_initializer(Initializer::Normal { mean: 0.0, std })
                .init(device)
        };
        let (hidden, mlp) = (self.hidden, self.mlp_hidden);
        let layers = (0..self.layers)
            .map(|_| Layer {
                attention_norm: RmsNormConfig::new(hidden).init(device),
                attention: Attention {
                    q: linear(hidden, hidden, std),
                    k: linear(hidden, hidden, std),
                    v: linear(hidden, hidden, std),
                    o: linear(hidden, hidden, into_residual),
                    heads: self.heads,
                },
                mlp_norm: RmsNormConfig::new(hidden).init(device),
                mlp: Mlp {
                    gate: linear(hidden, mlp, std),
                    up: linear(hidden, mlp, std),
                    down: linear(mlp, hidden, into_residual),
                },
            })
            .collect();
        Decoder {
            embedding: EmbeddingConfig::new(VOCABULARY, hidden)
                .with_initializer(Initializer::Normal { mean: 0.0, std })
                .init(device),
            rotary: RotaryEncodingConfig::new(self.max_sequence, hidden / self.heads).init(device),
            layers,
            norm: RmsNormConfig::new(hidden).init(device),
            lm_head: linear(hidden, VOCABULARY, std),
        }
    }
}

/// The decoder: bytes in, logits of the next byte out.
#[derive(Module, Debug)]
pub struct Decoder<B: Backend> {
    embedding: Embedding<B>,
    rotary: RotaryEncoding<B>,
    layers: Vec<Layer<B>>,
    norm: RmsNorm<B>,
    lm_head: Linear<B>,
}

impl<B: Backend> Decoder<B> {
    /// Logits of shape `[batch, sequence, VOCABULARY]` for tokens of shape `[batch, sequence]`.
    pub fn forward(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        let mut x = self.embedding.forward(tokens);
        for layer in &self.layers {
            x = layer.forward(x, &self.rotary);
        }
        self.lm_head.forward(self.norm.forward(x))
    }

    /// Mean cross entropy, in nats per byte, of shape `[1]`.
    pub fn loss(&self, batch: Batch<B>) -> Tensor<B, 1> {
        let logits = self.forward(batch.inputs);
        let device = logits.device();
        CrossEntropyLossConfig::new()
            .init(&device)
            .forward(logits.flatten::<2>(0, 1), batch.targets.flatten::<1>(0, 1))
    }

    /// Draws the lazily initialized weights now, in the order of the modules, so that a seed means one model.
    pub fn materialize(&self) {
        struct Draw;
        impl<B: Backend> ModuleVisitor<B> for Draw {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
                let _ = param.val();
            }
        }
        self.visit(&mut Draw);
    }
}

/// One decoder layer, with normalization before each half.
#[derive(Module, Debug)]
pub struct Layer<B: Backend> {
    attention_norm: RmsNorm<B>,
    attention: Attention<B>,
    mlp_norm: RmsNorm<B>,
    mlp: Mlp<B>,
}

impl<B: Backend> Layer<B> {
    fn forward(&self, x: Tensor<B, 3>, rotary: &RotaryEncoding<B>) -> Tensor<B, 3> {
        let x = x.clone()
            + self
                .attention
                .forward(self.attention_norm.forward(x), rotary);
        x.clone() + self.mlp.forward(self.mlp_norm.forward(x))
    }
}

/// Causal multi-head attention with rotary positions.
#[derive(Module, Debug)]
pub struct Attention<B: Backend> {
    q: Linear<B>,
    k: Linear<B>,
    v: Linear<B>,
    o: Linear<B>,
    heads: usize,
}

impl<B: Backend> Attention<B> {
    fn forward(&self, x: Tensor<B, 3>, rotary: &RotaryEncoding<B>) -> Tensor<B, 3> {
        let [batch, sequence, hidden] = x.dims();
        let split = |x: Tensor<B, 3>| {
            x.reshape([batch, sequence, self.heads, hidden / self.heads])
                .swap_dims(1, 2)
        };
        let q = rotary.forward(split(self.q.forward(x.clone())));
        let k = rotary.forward(split(self.k.forward(x.clone())));
        let v = split(self.v.forward(x));
        let causal = AttentionModuleOptions {
            is_causal: true,
            ..Default::default()
        };
        let mixed = attention(q, k, v, None, None, causal);
        self.o
            .forward(mixed.swap_dims(1, 2).reshape([batch, sequence, hidden]))
    }
}

/// The SwiGLU feed-forward network.
#[derive(Module, Debug)]
pub struct Mlp<B: Backend> {
    gate: Linear<B>,
    up: Linear<B>,
    down: Linear<B>,
}

impl<B: Backend> Mlp<B> {
    fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        self.down
            .forward(silu(self.gate.forward(x.clone())) * self.up.forward(x))
    }
}

impl<B: AutodiffBackend> TrainStep for Decoder<B> {
    type Input = Batch<B>;
    type Output = StepOutput<B>;

    fn step(&self, batch: Batch<B>) -> TrainOutput<StepOutput<B>> {
        let tokens = batch.tokens();
        let loss = self.loss(batch);
        let gradients = loss.backward();
        let output = StepOutput {
            loss: loss.detach(),
            tokens,
        };
        TrainOutput::new(self, gradients, output)
    }
}

impl<B: Backend> InferenceStep for Decoder<B> {
    type Input = Batch<B>;
    type Output = StepOutput<B>;

    fn step(&self, batch: Batch<B>) -> StepOutput<B> {
        let tokens = batch.tokens();
        StepOutput {
            loss: self.loss(batch),
            tokens,
        }
    }
}

/// The model that validation runs on.
pub type InnerDecoder<B> = <Decoder<B> as AutodiffModule<B>>::InnerModule;
