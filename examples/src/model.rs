//! A Llama-style decoder from Burn's modules: RMSNorm, rotary positions, SwiGLU, causal attention.
//!
//! Nothing here knows of quantization: the same code trains on `Autodiff<Flex>` and on any `QuantTrain` backend. A
//! `Learner` has the model compute its gradients, so the model holds what scales its loss.

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
use burn::tensor::{Int, Tensor, TensorData};
use burn::train::{InferenceStep, TrainOutput, TrainStep};
use burn_quant_train::{optim::LossScaler, saved::checkpoint};

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
            rotary: Rotary::new(self.max_sequence, hidden / self.heads, device),
            layers,
            norm: RmsNormConfig::new(hidden).init(device),
            lm_head: linear(hidden, VOCABULARY, std),
            loss_scaler: LossScaler::default(),
            checkpointing: false,
        }
    }
}

/// The decoder: bytes in, logits of the next byte out.
#[derive(Module, Debug)]
pub struct Decoder<B: Backend> {
    embedding: Embedding<B>,
    rotary: Rotary<B>,
    layers: Vec<Layer<B>>,
    norm: RmsNorm<B>,
    lm_head: Linear<B>,
    #[module(skip)]
    loss_scaler: LossScaler,
    #[module(skip)]
    checkpointing: bool,
}

impl<B: Backend> Decoder<B> {
    /// Logits of shape `[batch, sequence, VOCABULARY]` for tokens of shape `[batch, sequence]`.
    pub fn forward(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        let mut x = self.embedding.forward(tokens);
        for layer in &self.layers {
            let layer = |x| layer.forward(x, &self.rotary);
            x = match self.checkpointing {
                true => checkpoint(layer, x),
                false => layer(x),
            };
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
    fn forward(&self, x: Tensor<B, 3>, rotary: &Rotary<B>) -> Tensor<B, 3> {
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
    fn forward(&self, x: Tensor<B, 3>, rotary: &Rotary<B>) -> Tensor<B, 3> {
        let [batch, sequence, hidden] = x.dims();
        let split = |x: Tensor<B, 3>| x.reshape([batch, sequence, self.heads, hidden / self.heads]);
        let q = rotary
            .forward(split(self.q.forward(x.clone())))
            .swap_dims(1, 2);
        let k = rotary
            .forward(split(self.k.forward(x.clone())))
            .swap_dims(1, 2);
        let v = split(self.v.forward(x)).swap_dims(1, 2);
        let causal = AttentionModuleOptions {
            is_causal: true,
            ..Default::default()
        };
        let mixed = attention(q, k, v, None, None, causal);
        self.o
            .forward(mixed.swap_dims(1, 2).reshape([batch, sequence, hidden]))
    }
}

/// Rotary positions (Su et al., "RoFormer", equation 34) from the table of Burn's [`RotaryEncoding`]: `x cos + turned
/// sin`, where `turned` is `x` with each pair of neighbours turned by a right angle.
///
/// The turn is a product with a matrix of 0, 1 and -1, exact where products are not in TF32, and the rest fuses. Burn's
/// module goes through a tensor of twice the size, which it multiplies and sums over pairs.
#[derive(Module, Debug)]
pub struct Rotary<B: Backend> {
    /// `[1, positions, 1, width]`, as the sines.
    cos: Tensor<B, 4>,
    sin: Tensor<B, 4>,
    right_angle: Tensor<B, 2>,
}

impl<B: Backend> Rotary<B> {
    /// For sequences of at most `max_sequence` and heads of `width`.
    ///
    /// # Panics
    ///
    /// When `width` is odd.
    fn new(max_sequence: usize, width: usize, device: &B::Device) -> Self {
        let RotaryEncoding { freq_complex, .. } =
            RotaryEncodingConfig::new(max_sequence, width).init(device);
        let part = |part: usize| {
            freq_complex
                .clone()
                .slice([0..max_sequence, 0..width, part..part + 1])
                .reshape([1, max_sequence, 1, width])
        };
        let mut right_angle = vec![0.0f32; width * width];
        for pair in (0..width).step_by(2) {
            right_angle[pair * width + pair + 1] = 1.0;
            right_angle[(pair + 1) * width + pair] = -1.0;
        }
        Self {
            cos: part(0),
            sin: part(1),
            right_angle: Tensor::from_data(TensorData::new(right_angle, [width, width]), device),
        }
    }

    /// For `x` of shape `[batch, sequence, heads, width]`.
    fn forward(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        let [batch, sequence, heads, width] = x.dims();
        let turned = x
            .clone()
            .reshape([batch * sequence * heads, width])
            .matmul(self.right_angle.clone())
            .reshape([batch, sequence, heads, width]);
        let here = |table: &Tensor<B, 4>| table.clone().slice([0..1, 0..sequence]);
        x * here(&self.cos) + turned * here(&self.sin)
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
    use burn::backend::{Autodiff, Flex};
    use burn::record::{FullPrecisionSettings, NamedMpkBytesRecorder, Recorder};
    use burn::tensor::{Distribution, Tolerance};

    use super::*;

    type B = Autodiff<Flex>;

    /// The output and the gradient of `x`, in Burn's order, `[batch, heads, sequence, width]`.
    fn with_gradient(
        x: &Tensor<B, 4>,
        upstream: &Tensor<B, 4>,
        forward: impl Fn(Tensor<B, 4>) -> Tensor<B, 4>,
    ) -> [TensorData; 2] {
        let x = x.clone().detach().require_grad();
        let y = forward(x.clone());
        let gradients = (y.clone() * upstream.clone()).backward();
        [
            y.into_data(),
            x.grad(&gradients).expect("a gradient of x").into_data(),
        ]
    }

    #[test]
    fn rotary_positions_are_those_of_burn() {
        let device = Default::default();
        let (longest, width) = (9, 6);
        let random = |shape: [usize; 4]| Tensor::random(shape, Distribution::Default, &device);
        let (x, upstream) = (random([2, 3, 7, width]), random([2, 3, 7, width]));
        let burn = RotaryEncodingConfig::new(longest, width).init::<B>(&device);
        let ours = Rotary::<B>::new(longest, width, &device);
        let expected = with_gradient(&x, &upstream, |x| burn.forward(x));
        let got = with_gradient(&x, &upstream, |x| {
            ours.forward(x.swap_dims(1, 2)).swap_dims(1, 2)
        });
        for (got, expected) in got.into_iter().zip(expected) {
            got.assert_approx_eq::<f32>(&expected, Tolerance::absolute(1e-6));
        }
    }

    /// Checkpoints of models that held Burn's module load.
    #[test]
    fn rotary_positions_load_from_a_record_of_burns_module() {
        let device = Default::default();
        let recorder = NamedMpkBytesRecorder::<FullPrecisionSettings>::new();
        let burn = RotaryEncodingConfig::new(9, 6).init::<B>(&device);
        let bytes = Recorder::<B>::record(&recorder, burn.into_record(), ()).expect("a record");
        let record = recorder.load(bytes, &device).expect("a record of Rotary");
        let ours = Rotary::<B>::new(9, 6, &device).load_record(record);
        assert_eq!(ours.right_angle.dims(), [6, 6]);
    }
}
