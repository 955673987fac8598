//! The result files of `qt-bench`.

mod attention;
mod gemm;
mod int4;
mod operators;
mod optimizer;
mod quantize;
mod run;
mod spread;
mod step;

pub use attention::{AttentionKernel, AttentionPass, AttentionProblem, AttentionSpeed};
pub use gemm::{Fallback, GemmSpeed, Kernel, LayerProduct, Placement, Product};
pub use int4::{Stage, StageSpeed};
pub use operators::{Operator, OperatorSpeed};
pub use optimizer::OptimizerSpeed;
pub use quantize::{Operand, QuantizeSpeed};
pub use run::{Peer, Run, utc};
pub use spread::{Spread, tb_per_s};
pub use step::{PartSpeed, StepSpeed, Subject, TrainingSpeed};

use std::{fs, path::Path};

use anyhow::{Context, Result};
use examples::rows;
use serde::{Deserialize, Serialize};

/// Writes a result file, a row a line.
///
/// # Errors
///
/// It cannot be written.
pub fn write(path: &Path, results: &impl Serialize) -> Result<()> {
    fs::write(path, rows::to_string(results)?)
        .with_context(|| format!("cannot write {}", path.display()))
}

/// A result file: what one command measured, and how.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// Machine, date, command.
    pub run: Run,
    /// The other libraries of the lines that they measured; none without a peers' file.
    pub peer: Option<Peer>,
    /// The measurements.
    #[serde(flatten)]
    pub rows: Rows,
}

/// The lines of a result file, by benchmark.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "bench", content = "rows", rename_all = "kebab-case")]
pub enum Rows {
    /// `qt-bench gemm`.
    Gemm(Vec<GemmSpeed>),
    /// `qt-bench attention`.
    Attention(Vec<AttentionSpeed>),
    /// `qt-bench quantize`.
    Quantize(Vec<QuantizeSpeed>),
    /// `qt-bench int4`.
    Int4(Vec<StageSpeed>),
    /// `qt-bench operators`.
    Operators(Vec<OperatorSpeed>),
    /// `qt-bench linear`.
    Linear(Vec<StepSpeed>),
    /// `qt-bench layer`.
    Layer(Vec<StepSpeed>),
    /// `qt-bench pretrain`.
    Pretrain(Vec<TrainingSpeed>),
}
