//! The rows of `qt-bench int4`.

use serde::{Deserialize, Serialize};

use super::{Spread, tb_per_s};

/// A stage of an INT4 linear layer (int4-hq-lss, HQ-MM and LSS-MM; their times: Fig. 6).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// X by the Hadamard quantizer, with what the backward pass needs.
    QuantizeX,
    /// W by the Hadamard quantizer, both layouts: once a step.
    QuantizeW,
    /// Y from the codes, unpacked.
    Forward,
    /// dY as two INT4 matrices.
    BitSplitting,
    /// Scores, probabilities and kept rows for dX.
    SampleInput,
    /// The kept rows of dY for dX.
    GatherInput,
    /// The product for dX.
    Input,
    /// dX from the product: rows added up, the straight-through mask, the transform.
    StraightThroughX,
    /// Scores, probabilities and kept rows for dW.
    SampleWeight,
    /// The kept rows of dY and of X for dW.
    GatherWeight,
    /// The product for dW.
    Weight,
    /// dW from the product: the straight-through mask, the transform.
    StraightThroughW,
}

impl Stage {
    /// The name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::QuantizeX => "HQ of X",
            Self::QuantizeW => "HQ of W, both layouts",
            Self::Forward => "product Y",
            Self::BitSplitting => "bit splitting of dY",
            Self::SampleInput => "leverage scores and sampling, dX",
            Self::GatherInput => "kept rows of dY, dX",
            Self::Input => "product dX",
            Self::StraightThroughX => "straight-through and transform, dX",
            Self::SampleWeight => "leverage scores and sampling, dW",
            Self::GatherWeight => "kept rows of dY and X, dW",
            Self::Weight => "product dW",
            Self::StraightThroughW => "straight-through and transform, dW",
        }
    }
}

/// The speed of a stage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StageSpeed {
    /// The stage.
    pub stage: Stage,
    /// Rows of X.
    pub tokens: usize,
    /// Columns of X and of W.
    pub features: usize,
    /// Its time.
    pub time: Spread,
    /// Bytes that must move, of a stage that is bound by them: each input read once, each output written once.
    pub bytes: Option<usize>,
    /// The time of copying half as many bytes.
    pub copy: Option<Spread>,
    /// Operations of a product, two for each multiplication: of the rows that there is room for.
    pub operations: Option<usize>,
}

impl StageSpeed {
    /// The rate over the bytes that must move.
    pub fn tb_per_s(&self) -> Option<f64> {
        Some(tb_per_s(self.bytes?, self.time.median_ms))
    }

    /// The rate over the operations.
    pub fn tops(&self) -> Option<f64> {
        Some(self.operations? as f64 / self.time.median_ms / 1e9)
    }
}
