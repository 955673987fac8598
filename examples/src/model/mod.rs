//! Decoders from Burn's modules: in Llama's style with RMSNorm, rotary positions and SwiGLU, and [in GPT-2's](gpt2).
//!
//! Nothing here knows of quantization: the same code trains on `Autodiff<Flex>` and on any `QuantTrain` backend. A
//! `Learner` has the model compute its gradients, so the model holds what scales its loss.

pub mod gpt2;

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
use burn::tensor::{Bool, FloatDType, Int, Tensor};
use burn::train::{InferenceStep, TrainOutput, TrainStep};
use burn_quant_train::{optim::LossScaler, saved::checkpoint};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use self::gpt2::Gpt2;
use crate::data::Batch;
use crate::metrics::StepOutput;

/// Tokens are bytes.
pub const VOCABULARY: usize = 256;

/// The layers of a decoder.
#[derive(ValueEnum, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Family {
    /// RMSNorm, rotary positions, SwiGLU, no biases.
    #[default]
    Llama,
    /// LayerNorm, learned positions, GELU, biases, one layer for queries, keys and values.
    Gpt2,
}

/// How a decoder computes attention.
#[derive(ValueEnum, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum AttentionWay {
    /// As one operation.
    #[default]
    Fused,
    /// Scores in memory by Burn's own operations one by one, to compare with.
    Composed,
}

/// The sizes of a [`Decoder`].
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// Its layers; Llama's in checkpoints from before there were others.
    #[serde(default)]
    pub family: Family,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width inside the feed-forward network.
    pub mlp_hidden: usize,
    /// Attention heads; must divide `hidden`.
    pub heads: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Longest sequence: positions are learned or tabulated for so many tokens.
    pub max_sequence: usize,
    /// The share of values that GPT-2's dropout sets to zero in training.
    #[serde(default)]
    pub dropout: f64,
}

/// Standard deviation of the weights.
const STD: f64 = 0.02;

impl DecoderConfig {
    /// The sizes of a decoder in Llama's style.
    pub fn new(
        hidden: usize,
        mlp_hidden: usize,
        heads: usize,
        layers: usize,
        max_sequence: usize,
    ) -> Self {
        Self {
            family: Family::Llama,
            hidden,
            mlp_hidden,
            heads,
            layers,
            max_sequence,
            dropout: 0.0,
        }
    }

    /// Initializes the model. Weights are drawn from N(0, 0.02), those that end in the residual stream from a
    /// distribution narrower by the square root of the number of such additions (GPT-2's scheme).
    pub fn init<B: Backend>(&self, device: &B::Device) -> Decoder<B> {
        let hidden = self.hidden;
        let is_llama = self.family == Family::Llama;
        let layers = match self.family {
            Family::Llama => (0..self.layers).map(|_| self.layer(device)).collect(),
            Family::Gpt2 => Vec::new(),
        };
        Decoder {
            embedding: embedding(VOCABULARY, hidden, device),
            rotary: is_llama.then(|| {
                RotaryEncodingConfig::new(self.max_sequence, hidden / self.heads).init(device)
            }),
            layers,
            norm: is_llama.then(|| RmsNormConfig::new(hidden).init(device)),
            gpt2: (self.family == Family::Gpt2).then(|| Gpt2::new(self, device)),
            lm_head: linear(hidden, VOCABULARY, STD, device),
            loss_scaler: LossScaler::default(),
            checkpointing: false,
            attention: AttentionWay::Fused,
        }
    }

    /// Of the weights that end in the residual stream.
    fn std_into_residual(&self) -> f64 {
        STD / (2.0 * self.layers as f64).sqrt()
    }

    fn layer<B: Backend>(&self, device: &B::Device) -> Layer<B> {
        let (hidden, mlp) = (self.hidden, self.mlp_hidden);
        let into_residual = self.std_into_residual();
        Layer {
            attention_norm: RmsNormConfig::new(hidden).init(device),
            attention: Attention {
                q: linear(hidden, hidden, STD, device),
                k: linear(hidden, hidden, STD, device),
                v: linear(hidden, hidden, STD, device),
                o: linear(hidden, hidden, into_residual, device),
                heads: self.heads,
            },
            mlp_norm: RmsNormConfig::new(hidden).init(device),
            mlp: Mlp {
                gate: linear(hidden, mlp, STD, device),
                up: linear(hidden, mlp, STD, device),
                down: linear(mlp, hidden, into_residual, device),
            },
        }
    }
}

fn normal(std: f64) -> Initializer {
    Initializer::Normal { mean: 0.0, std }
}

fn embedding<B: Backend>(rows: usize, hidden: usize, device: &B::Device) -> Embedding<B> {
    EmbeddingConfig::new(rows, hidden)
        .with_initializer(normal(STD))
        .init(device)
}

/// A linear layer without a bias.
fn linear<B: Backend>(inputs: usize, outputs: usize, std: f64, device: &B::Device) -> Linear<B> {
    LinearConfig::new(inputs, outputs)
        .with_bias(false)
        .with_initializer(normal(std))
        .init(device)
}

/// The decoder: bytes in, logits of the next byte out.
///
/// Llama's parts are its own, where checkpoints from before there were others have them.
#[derive(Module, Debug)]
pub struct Decoder<B: Backend> {
    embedding: Embedding<B>,
    rotary: Option<RotaryEncoding<B>>,
    layers: Vec<Layer<B>>,
    norm: Option<RmsNorm<B>>,
    gpt2: Option<Gpt2<B>>,
    lm_head: Linear<B>,
    #[module(skip)]
    loss_scaler: LossScaler,
    #[module(skip)]
    checkpointing: bool,
    #[module(skip)]
    attention: AttentionWay,
}

impl<B: Backend> Decoder<B> {
    /// Logits of shape `[batch, sequence, VOCABULARY]` for tokens of shape `[batch, sequence]`.
    pub fn forward(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        let x = self.embedding.forward(tokens);
        let x = match (&self.gpt2, &self.rotary, &self.norm) {
            (Some(gpt2), _, _) => gpt2.forward(x, self.checkpointing, self.attention),
            (None, Some(rotary), Some(norm)) => {
                let layers = self.layers.iter();
                norm.forward(layers.fold(x, |x, layer| {
                    let layer = |x| layer.forward(x, rotary, self.attention);
                    block(self.checkpointing, layer, x)
                }))
            }
            (None, _, _) => unreachable!("a decoder is of one family"),
        };
        self.lm_head.forward(x)
    }

    /// Mean cross entropy, in nats per byte, of shape `[1]`.
    pub fn loss(&self, batch: Batch<B>) -> Tensor<B, 1> {
        let logits = self.forward(batch.inputs);
        let device = logits.device();
        CrossEntropyLossConfig::new()
            .init(&device)
            .forward(logits.flatten::<2>(0, 1), batch.targets.flatten::<1>(0, 1))
    }

    /// The same model, its losses scaled in training.
    pub fn with_loss_scaler(self, loss_scaler: LossScaler) -> Self {
        Self {
            loss_scaler,
            ..self
        }
    }

    /// The same model, each layer of which runs again in the backward pass, so that only its input waits.
    pub fn with_checkpointing(self, checkpointing: bool) -> Self {
        Self {
            checkpointing,
            ..self
        }
    }

    /// The same model, its attention computed this way.
    pub fn with_attention(self, attention: AttentionWay) -> Self {
        Self { attention, ..self }
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
    fn forward(
        &self,
        x: Tensor<B, 3>,
        rotary: &RotaryEncoding<B>,
        way: AttentionWay,
    ) -> Tensor<B, 3> {
        let of_attention = self.attention_norm.forward(x.clone());
        let x = x + self.attention.forward(of_attention, rotary, way);
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
    fn forward(
        &self,
        x: Tensor<B, 3>,
        rotary: &RotaryEncoding<B>,
        way: AttentionWay,
    ) -> Tensor<B, 3> {
        let [batch, sequence, hidden] = x.dims();
        let split = |x: Tensor<B, 3>| {
            x.reshape([batch, sequence, self.heads, hidden / self.heads])
                .swap_dims(1, 2)
        };
        let q = rotary.forward(split(self.q.forward(x.clone())));
        let k = rotary.forward(split(self.k.forward(x.clone())));
        let v = split(self.v.forward(x));
        self.o.forward(mixed(q, k, v, way))
    }
}

/// Runs a layer, in the backward pass once more if it is a block of its own.
fn block<B: Backend>(
    checkpointing: bool,
    layer: impl FnOnce(Tensor<B, 3>) -> Tensor<B, 3>,
    x: Tensor<B, 3>,
) -> Tensor<B, 3> {
    match checkpointing {
        true => checkpoint(layer, x),
        false => layer(x),
    }
}

/// The values `[batch, sequence, hidden]` that each token reads from itself and those before it, of queries, keys and
/// values `[batch, heads, sequence, width]`.
fn mixed<B: Backend>(
    q: Tensor<B, 4>,
    k: Tensor<B, 4>,
    v: Tensor<B, 4>,
    way: AttentionWay,
) -> Tensor<B, 3> {
    let [batch, heads, sequence, width] = q.dims();
    let causal = AttentionModuleOptions {
        is_causal: true,
        ..Default::default()
    };
    let read = match way {
        AttentionWay::Fused => attention(q, k, v, None, None, causal),
        AttentionWay::Composed => composed(q, k, v),
    };
    read.swap_dims(1, 2)
        .reshape([batch, sequence, heads * width])
}

/// Causal attention by operations one by one.
///
/// Its softmax, in FP32, is written out: one between two products would be found, and computed with them as one
/// operation.
fn composed<B: Backend>(q: Tensor<B, 4>, k: Tensor<B, 4>, v: Tensor<B, 4>) -> Tensor<B, 4> {
    let [_, _, sequence, width] = q.dims();
    let dtype = v.dtype();
    let later = Tensor::<B, 2, Bool>::tril_mask([sequence, sequence], 0, &q.device());
    let scores = q.matmul(k.swap_dims(2, 3)).cast(FloatDType::F32) / (width as f64).sqrt();
    let scores = scores.mask_fill(later.unsqueeze(), f32::NEG_INFINITY);
    let largest = scores.clone().detach().max_dim(3);
    let exponentials = (scores - largest).exp();
    let sums = exponentials.clone().sum_dim(3);
    (exponentials / sums).cast(dtype).matmul(v)
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
        let gradients = self.loss_scaler.scale(loss.clone()).backward();
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

#[cfg(test)]
mod tests {
    use burn::backend::Flex;
    use burn::record::{FullPrecisionSettings, NamedMpkBytesRecorder, Recorder};

    use super::*;

    /// As models held rotary positions whose checkpoints may still be there.
    #[derive(Module, Debug)]
    struct Earlier<B: Backend> {
        cos: Tensor<B, 4>,
        sin: Tensor<B, 4>,
        right_angle: Tensor<B, 2>,
    }

    #[test]
    fn rotary_positions_load_from_records_of_their_earlier_form() {
        let device = Default::default();
        let recorder = NamedMpkBytesRecorder::<FullPrecisionSettings>::new();
        let earlier = Earlier::<Flex> {
            cos: Tensor::zeros([1, 9, 1, 6], &device),
            sin: Tensor::zeros([1, 9, 1, 6], &device),
            right_angle: Tensor::zeros([6, 6], &device),
        };
        let bytes = Recorder::<Flex>::record(&recorder, earlier.into_record(), ());
        let record = recorder.load(bytes.expect("a record"), &device);
        let rotary = RotaryEncodingConfig::new(9, 6).init::<Flex>(&device);
        let expected = rotary.freq_complex.clone();
        let rotary = rotary.load_record(record.expect("a record of RotaryEncoding"));
        assert_eq!(rotary.freq_complex.into_data(), expected.into_data());
    }
}
