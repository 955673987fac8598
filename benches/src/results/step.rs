//! The rows of `qt-bench linear`, `qt-bench layer` and `qt-bench pretrain`.

use burn_quant_train::recipe::{NAMES, Name};
use clap::ValueEnum;
use examples::args::{Checkpointing, Contexts, Optimizer};
use serde::{Deserialize, Serialize};

use super::Spread;

/// Whose forward and backward pass is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Subject {
    /// `Autodiff<B>`, parameters and activations in BF16.
    Burn,
    /// `QuantTrain<Autodiff<B>, R>` with the recipe of this name: FP32 parameters, BF16 activations.
    Recipe(Name),
    /// PyTorch in BF16.
    TorchEager,
    /// PyTorch in BF16, through `torch.compile`.
    TorchCompiled,
    /// PyTorch in BF16, its linear layers in FP8 by torchao with a scale for each tensor, through `torch.compile`.
    TorchaoTensorwise,
    /// The same with a scale for each row.
    TorchaoRowwise,
}

impl Subject {
    /// All that are no recipe of ours.
    pub const RIVALS: [Self; 5] = [
        Self::Burn,
        Self::TorchEager,
        Self::TorchCompiled,
        Self::TorchaoTensorwise,
        Self::TorchaoRowwise,
    ];

    /// The recipe of this name.
    ///
    /// # Panics
    ///
    /// If there is none.
    pub fn recipe(name: &str) -> Self {
        Self::Recipe(name.parse().unwrap_or_else(|error| panic!("{error}")))
    }

    /// The name in tables: of a recipe, that of its type.
    pub fn name(self) -> String {
        match self {
            Self::Recipe(name) => format!("`{}`", type_name(name.as_str())),
            Self::Burn => String::from("Burn BF16"),
            Self::TorchEager => String::from("PyTorch BF16"),
            Self::TorchCompiled => String::from("PyTorch BF16, compiled"),
            Self::TorchaoTensorwise => String::from("torchao FP8, tensorwise, compiled"),
            Self::TorchaoRowwise => String::from("torchao FP8, rowwise, compiled"),
        }
    }

    /// The name in tables, and how activations wait, where that is not as they are.
    pub fn name_with(self, contexts: Option<Contexts>) -> String {
        let mut name = self.name();
        if let Some(contexts) = contexts.filter(|it| *it != Contexts::Exact) {
            let format = contexts.to_possible_value().expect("no format is hidden");
            name += &format!(", {} contexts", format.get_name());
        }
        name
    }

    /// The name in result files.
    const fn key(self) -> &'static str {
        match self {
            Self::Burn => "burn",
            Self::Recipe(name) => name.as_str(),
            Self::TorchEager => "torch-eager",
            Self::TorchCompiled => "torch-compiled",
            Self::TorchaoTensorwise => "torchao-tensorwise",
            Self::TorchaoRowwise => "torchao-rowwise",
        }
    }

    /// True for PyTorch.
    pub const fn is_torch(self) -> bool {
        match self {
            Self::TorchEager
            | Self::TorchCompiled
            | Self::TorchaoTensorwise
            | Self::TorchaoRowwise => true,
            Self::Burn | Self::Recipe(_) => false,
        }
    }
}

impl From<Subject> for String {
    fn from(subject: Subject) -> Self {
        subject.key().to_owned()
    }
}

impl TryFrom<String> for Subject {
    type Error = String;

    fn try_from(key: String) -> Result<Self, String> {
        let recipes = NAMES.iter().copied().map(Self::Recipe);
        Self::RIVALS
            .into_iter()
            .chain(recipes)
            .find(|subject| subject.key() == key)
            .ok_or_else(|| format!("{key:?} is no recipe, nor one of its rivals"))
    }
}

/// The name of a recipe's type: `BlockInt8` of `block-int8`, `JetfireInt8Of64` of `jetfire-int8-64`.
fn type_name(recipe: &str) -> String {
    let capitalized = |word: &str| match word.split_at(word.len().min(1)) {
        (first, rest) if first.starts_with(|it: char| it.is_alphabetic()) => {
            first.to_uppercase() + rest
        }
        _ => format!("Of{word}"),
    };
    recipe.split('-').map(capitalized).collect()
}

/// The time of a forward and a backward pass.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepSpeed {
    /// Whose.
    pub subject: Subject,
    /// Rows of the input, batch times sequence.
    pub tokens: usize,
    /// Length of a sequence, where it matters.
    #[serde(default)]
    pub sequence: Option<usize>,
    /// Features of the input.
    pub hidden: usize,
    /// Features of the output; as many where nobody says.
    #[serde(default)]
    pub outputs: Option<usize>,
    /// How activations wait for the backward pass; none where only one way is known.
    #[serde(default)]
    pub contexts: Option<Contexts>,
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
#[serde(deny_unknown_fields)]
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
    /// How activations wait for the backward pass; none where only one way is known.
    #[serde(default)]
    pub contexts: Option<Contexts>,
    /// Which parts of the model run again in the backward pass.
    #[serde(default)]
    pub checkpointing: Checkpointing,
    /// The moments of the recipe's AdamW; none where only one kind is known.
    #[serde(default)]
    pub moments: Option<Optimizer>,
    /// Bytes that wait between the passes, the loss among them; none where nobody asked.
    #[serde(default)]
    pub activation_bytes: Option<u64>,
    /// Bytes that the program had taken from the device after these steps, free ones of its pools among them, and not
    /// before its first tensor; none where nobody asked.
    #[serde(default)]
    pub peak_bytes: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subjects_are_read_as_they_are_written() {
        let recipes = NAMES.iter().copied().map(Subject::Recipe);
        for subject in Subject::RIVALS.into_iter().chain(recipes) {
            let text = serde_json::to_string(&subject).unwrap();
            assert_eq!(serde_json::from_str::<Subject>(&text).unwrap(), subject);
        }
        assert!(serde_json::from_str::<Subject>("\"int3\"").is_err());
        assert_eq!(Subject::recipe("fallback-int8").name(), "`FallbackInt8`");
        assert_eq!(
            Subject::recipe("jetfire-int8-64").name(),
            "`JetfireInt8Of64`"
        );
    }
}
