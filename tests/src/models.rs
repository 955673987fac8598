//! Tiny models, written with plain Burn modules, and samples for them.

use burn::{
    module::{Module, ModuleMapper, Param},
    nn::{
        BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, Linear, LinearConfig,
        PaddingConfig2d,
        conv::{Conv2d, Conv2dConfig},
        loss::CrossEntropyLossConfig,
        pool::{MaxPool2d, MaxPool2dConfig},
        transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput},
    },
    tensor::{Int, Tensor, TensorData, activation::relu, backend::Backend},
};

use crate::{Rng, data::tensor};

/// Classes of both classification tasks.
pub const CLASSES: usize = 4;

/// A batch, on the host.
#[derive(Debug, Clone)]
pub struct Sample {
    /// Inputs; tokens are whole numbers.
    pub inputs: Vec<f32>,
    /// Class of each item.
    pub labels: Vec<i32>,
}

/// A model that learns to classify.
pub trait Classifier<B: Backend>: Module<B> {
    /// A new model with Burn's own initialization.
    fn new(device: &B::Device) -> Self;

    /// A random batch.
    fn sample(rng: &mut Rng) -> Sample;

    /// Logits `[batch, CLASSES]`.
    fn logits(&self, sample: &Sample) -> Tensor<B, 2>;

    /// Mean cross entropy.
    fn loss(&self, sample: &Sample) -> Tensor<B, 1> {
        let logits = self.logits(sample);
        let device = logits.device();
        let labels = TensorData::new(sample.labels.clone(), [sample.labels.len()]);
        let labels = Tensor::<B, 1, Int>::from_data(labels, &device);
        CrossEntropyLossConfig::new()
            .init(&device)
            .forward(logits, labels)
    }
}

/// Burn's transformer encoder between an embedding and a linear head: names the class of tokens that is most frequent.
#[derive(Module, Debug)]
pub struct Encoder<B: Backend> {
    /// Token table.
    pub embedding: Embedding<B>,
    /// The encoder.
    pub encoder: TransformerEncoder<B>,
    /// Classification head.
    pub head: Linear<B>,
}

const VOCABULARY: usize = 16;
const SEQUENCE: usize = 11;
const BATCH: usize = 8;

impl<B: Backend> Classifier<B> for Encoder<B> {
    fn new(device: &B::Device) -> Self {
        let width = 32;
        Self {
            embedding: EmbeddingConfig::new(VOCABULARY, width).init(device),
            encoder: TransformerEncoderConfig::new(width, 48, 4, 2)
                .with_dropout(0.0)
                .init(device),
            head: LinearConfig::new(width, CLASSES).init(device),
        }
    }

    fn sample(rng: &mut Rng) -> Sample {
        let mut sample = Sample {
            inputs: Vec::new(),
            labels: Vec::new(),
        };
        for _ in 0..BATCH {
            let label = rng.below(CLASSES);
            for _ in 0..SEQUENCE {
                let class = if rng.uniform() < 0.6 {
                    label
                } else {
                    rng.below(CLASSES)
                };
                sample
                    .inputs
                    .push((class + CLASSES * rng.below(VOCABULARY / CLASSES)) as f32);
            }
            sample.labels.push(label as i32);
        }
        sample
    }

    fn logits(&self, sample: &Sample) -> Tensor<B, 2> {
        let device = self.head.weight.val().device();
        let batch = sample.labels.len();
        let tokens: Vec<i32> = sample.inputs.iter().map(|&token| token as i32).collect();
        let tokens = TensorData::new(tokens, [batch, SEQUENCE]);
        let x = self
            .embedding
            .forward(Tensor::<B, 2, Int>::from_data(tokens, &device));
        let x = self.encoder.forward(TransformerEncoderInput::new(x));
        let pooled = x.mean_dim(1).squeeze_dim::<2>(1);
        self.head.forward(pooled)
    }
}

/// A small convolutional classifier: names the quadrant of the image that is bright.
#[derive(Module, Debug)]
pub struct ConvNet<B: Backend> {
    /// Convolution.
    pub conv: Conv2d<B>,
    /// Normalization.
    pub norm: BatchNorm<B>,
    /// Pooling.
    pub pool: MaxPool2d,
    /// Hidden linear layer.
    pub hidden: Linear<B>,
    /// Classification head.
    pub head: Linear<B>,
}

const IMAGE: usize = 10;
const CHANNELS: usize = 6;

impl<B: Backend> Classifier<B> for ConvNet<B> {
    fn new(device: &B::Device) -> Self {
        let pooled = IMAGE / 2;
        Self {
            conv: Conv2dConfig::new([1, CHANNELS], [3, 3])
                .with_padding(PaddingConfig2d::Same)
                .init(device),
            norm: BatchNormConfig::new(CHANNELS).init(device),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            hidden: LinearConfig::new(CHANNELS * pooled * pooled, 24).init(device),
            head: LinearConfig::new(24, CLASSES).with_bias(false).init(device),
        }
    }

    fn sample(rng: &mut Rng) -> Sample {
        let mut sample = Sample {
            inputs: Vec::new(),
            labels: Vec::new(),
        };
        for _ in 0..BATCH {
            let label = rng.below(CLASSES);
            for row in 0..IMAGE {
                for col in 0..IMAGE {
                    let quadrant = 2 * (2 * row / IMAGE) + 2 * col / IMAGE;
                    let brightness = if quadrant == label { 0.7 } else { 0.0 };
                    sample.inputs.push((brightness + 0.7 * rng.normal()) as f32);
                }
            }
            sample.labels.push(label as i32);
        }
        sample
    }

    fn logits(&self, sample: &Sample) -> Tensor<B, 2> {
        let device = self.head.weight.val().device();
        let batch = sample.labels.len();
        let images = tensor::<B, 4>(&sample.inputs, [batch, 1, IMAGE, IMAGE], &device);
        let x = self
            .pool
            .forward(relu(self.norm.forward(self.conv.forward(images))));
        self.head
            .forward(relu(self.hidden.forward(x.flatten::<2>(1, 3))))
    }
}

/// One linear layer.
#[derive(Module, Debug)]
pub struct One<B: Backend> {
    /// The layer.
    pub linear: Linear<B>,
}

impl<B: Backend> One<B> {
    /// A layer of this size.
    pub fn new(inputs: usize, outputs: usize, bias: bool, device: &B::Device) -> Self {
        let linear = LinearConfig::new(inputs, outputs)
            .with_bias(bias)
            .init(device);
        Self { linear }
    }
}

/// Three linear layers on one input, as attention has them.
#[derive(Module, Debug)]
pub struct Three<B: Backend> {
    /// First layer.
    pub q: Linear<B>,
    /// Second layer.
    pub k: Linear<B>,
    /// Third layer.
    pub v: Linear<B>,
}

impl<B: Backend> Three<B> {
    /// Layers of this size.
    pub fn new(inputs: usize, outputs: usize, device: &B::Device) -> Self {
        let linear = || {
            LinearConfig::new(inputs, outputs)
                .with_bias(false)
                .init(device)
        };
        Self {
            q: linear(),
            k: linear(),
            v: linear(),
        }
    }
}

/// An embedding whose table is also the vocabulary head.
#[derive(Module, Debug)]
pub struct Tied<B: Backend> {
    /// The table.
    pub embedding: Embedding<B>,
}

/// A network of two linear layers without biases.
#[derive(Module, Debug)]
pub struct Mlp<B: Backend> {
    /// First layer.
    pub up: Linear<B>,
    /// Second layer.
    pub down: Linear<B>,
}

/// Inputs of [`Mlp`].
pub const MLP_INPUTS: usize = 16;

impl<B: Backend> Classifier<B> for Mlp<B> {
    fn new(device: &B::Device) -> Self {
        let linear = |inputs, outputs| {
            LinearConfig::new(inputs, outputs)
                .with_bias(false)
                .init(device)
        };
        Self {
            up: linear(MLP_INPUTS, 32),
            down: linear(32, CLASSES),
        }
    }

    fn sample(rng: &mut Rng) -> Sample {
        let mut sample = Sample {
            inputs: Vec::new(),
            labels: Vec::new(),
        };
        for _ in 0..2 * BATCH {
            let label = rng.below(CLASSES);
            sample.inputs.extend((0..MLP_INPUTS).map(|index| {
                let mean = if index % CLASSES == label { 1.0 } else { 0.0 };
                (mean + rng.normal()) as f32
            }));
            sample.labels.push(label as i32);
        }
        sample
    }

    fn logits(&self, sample: &Sample) -> Tensor<B, 2> {
        let device = self.up.weight.val().device();
        let x = tensor::<B, 2>(&sample.inputs, [sample.labels.len(), MLP_INPUTS], &device);
        self.down.forward(relu(self.up.forward(x)))
    }
}

/// Gives a model the weights of `seed`, the same on every backend, whatever else draws random numbers in this process.
pub fn with_weights_of<B: Backend, M: Module<B>>(model: M, seed: u64) -> M {
    struct Draw(Rng);
    impl<B: Backend> ModuleMapper<B> for Draw {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
            param.map(|old| {
                let shape: [usize; D] = old.dims();
                let count = shape.iter().product();
                let values = if D == 1 {
                    // Gains start at 1, biases at 0.
                    let gain = old
                        .clone()
                        .mean()
                        .into_data()
                        .iter::<f32>()
                        .next()
                        .is_some_and(|mean| mean > 0.5);
                    let centre = if gain { 1.0 } else { 0.0 };
                    (0..count)
                        .map(|_| (centre + 0.05 * self.0.normal()) as f32)
                        .collect()
                } else {
                    let fan_in = if D == 2 {
                        shape[0]
                    } else {
                        shape[1..].iter().product()
                    };
                    self.0.normals(count, (fan_in as f64).powf(-0.5))
                };
                let new = tensor::<B, D>(&values, shape, &old.device());
                new.set_require_grad(old.is_require_grad())
            })
        }
    }
    model.map(&mut Draw(Rng::new(seed)))
}
