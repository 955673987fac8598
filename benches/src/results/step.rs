//! The rows of `qt-bench linear`, `qt-bench layer` and `qt-bench pretrain`.

use serde::{Deserialize, Serialize};

use super::Spread;

/// Whose forward and backward pass is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Subject {
    /// `Autodiff<B>`, parameters and activations in BF16.
    Burn,
    /// `QuantTrain<Autodiff<B>, MixedPrecision>`: FP32 parameters, BF16 activations.
    MixedPrecision,
    /// `QuantTrain<Autodiff<B>, FallbackInt8>`: FP32 parameters, INT8 products, BF16 activations.
    FallbackInt8,
    /// PyTorch in BF16.
    TorchEager,
    /// PyTorch in BF16, through `torch.compile`.
    TorchCompiled,
}

impl Subject {
    /// The name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Burn => "Burn BF16",
            Self::MixedPrecision => "`MixedPrecision`",
            Self::FallbackInt8 => "`FallbackInt8`",
            Self::TorchEager => "PyTorch BF16",
            Self::TorchCompiled => "PyTorch BF16, compiled",
        }
    }

    /// True for PyTorch.
    pub const fn is_torch(self) -> bool {
        matches!(self, Self::TorchEager | Self::TorchCompiled)
    }
}

/// The time of a forward and a backward pass.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepSpeed {
    /// Whose.
    pub subject: Subject,
    /// Rows of the input, batch times sequence.
    pub tokens: usize,
    /// Features of the input.
    pub hidden: usize,
    /// A forward pass that saves what the backward pass needs, one after another.
    pub forward: Spread,
    /// Forward and backward pass, one after another.
    pub both: Spread,
    /// Forward and backward pass from an idle device: until the host has handed over the last operation.
    pub enqueue: Option<Spread>,
    /// Forward and backward pass from an idle device: until the device is idle again.
    pub alone: Option<Spread>,
    /// Bytes that are in use after a forward pass and not before it, the output among them.
    pub activation_bytes: Option<u64>,
    /// The mean of the layers' fallback rates.
    pub fallback_rate: Option<f64>,
    /// The largest relative error, root mean square over root mean square, of outputs and gradients.
    pub error: Option<f64>,
    /// Where the time goes, each part by itself.
    #[serde(default)]
    pub parts: Vec<PartSpeed>,
}

/// The time of one part of a layer by itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PartSpeed {
    /// Its name.
    pub name: String,
    /// How often the layer has it.
    pub count: usize,
    /// A forward pass.
    pub forward: Spread,
    /// Forward and backward pass.
    pub both: Spread,
    /// Forward and backward pass from an idle device, until the host has handed over the last operation.
    pub enqueue: Spread,
}

/// The time of a training step: forward and backward pass, and AdamW.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainingSpeed {
    /// Whose.
    pub subject: Subject,
    /// The model.
    pub model: String,
    /// Its parameters.
    pub parameters: usize,
    /// Sequences in a batch.
    pub batch: usize,
    /// Tokens in a sequence.
    pub sequence: usize,
    /// A step, one after another.
    pub step: Spread,
    /// Tokens of a batch over the median.
    pub tokens_per_s: f64,
}
