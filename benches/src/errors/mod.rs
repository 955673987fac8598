//! The errors of quantized tensors in a model that trains: its activations, its gradients, and the gradients of
//! its weights under compressed contexts, by format, granularity, bits, groups and transforms, to be compared with the
//! papers' figures.
//!
//! A checkpoint of `pretrain` gives the model, the text the batch that its next step reads. Everything is exact FP32 on
//! the CPU but for what a sweep rounds, and repeats to the bit.
//!
//! | file | what it computes | papers |
//! | --- | --- | --- |
//! | [`contexts`] | gradients under contexts of 4 to 16 bits | fallback-int8, Fig. 7a |
//! | [`groups`] | E4M3 in groups of 4 to 128, as a flow and as contexts | coat-fp8, Fig. 4a, Table 10 |
//! | [`granularity`] | INT8 from tensors to 32x32; INT8, E4M3 and E5M2 | jetfire-int8, Fig. 5; the guide, FP8 |
//! | [`hadamard`] | INT4 after Hadamard transforms | int4-hq-lss, Fig. 1 |
//!
//! [`checkpoint`] runs them all. [`decoder`] is the model with places to step in, [`capture`] notes what it reads,
//! [`numbers`] rounds, [`straight_through`] lets gradients pass, and [`metric`] compares.

pub mod capture;
pub mod checkpoint;
pub mod contexts;
pub mod decoder;
pub mod granularity;
pub mod groups;
pub mod hadamard;
pub mod metric;
pub mod numbers;
pub mod straight_through;

use serde::{Deserialize, Serialize};

use contexts::ContextError;
use granularity::MatrixError;
use groups::GroupError;
use hadamard::HadamardError;

/// A result file of `errors`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ErrorResults {
    /// Of what.
    pub model: Model,
    /// The errors.
    #[serde(flatten)]
    pub rows: ErrorRows,
}

/// The model and the batch that errors are of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Model {
    /// Steps that it was trained for.
    pub steps: usize,
    /// The seed of its run.
    pub seed: u64,
    /// Its parameters.
    pub parameters: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Sequences in the batch, and bytes in each.
    pub batch: [usize; 2],
    /// The loss of the batch, in nats per byte.
    pub loss: f64,
}

/// The errors of a result file, by sweep.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "errors", content = "rows", rename_all = "kebab-case")]
pub enum ErrorRows {
    /// Gradients under contexts.
    Contexts(Vec<ContextError>),
    /// E4M3 by the size of groups.
    Groups(Vec<GroupError>),
    /// INT8 by granularity.
    Granularity(Vec<MatrixError>),
    /// Formats by granularity.
    Formats(Vec<MatrixError>),
    /// INT4 after transforms.
    Hadamard(Vec<HadamardError>),
}

impl ErrorRows {
    /// The name of the sweep, at the end of the result file's.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Contexts(_) => "contexts",
            Self::Groups(_) => "groups",
            Self::Granularity(_) => "granularity",
            Self::Formats(_) => "formats",
            Self::Hadamard(_) => "hadamard",
        }
    }
}
