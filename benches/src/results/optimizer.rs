//! The rows of `qt-bench optimizer`.

use serde::{Deserialize, Serialize};

use super::Spread;

/// The speed of one optimizer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OptimizerSpeed {
    /// The optimizer: ours as `pretrain --optimizer` calls it, or another library's.
    pub name: String,
    /// The format of the first moment and of the second.
    pub states: [String; 2],
    /// Parameters of the one tensor that is stepped.
    pub n: usize,
    /// Median time of a step.
    pub median_ms: f64,
    /// One step in ten takes less; none where another program measured.
    pub p10_ms: Option<f64>,
    /// One step in ten takes longer.
    pub p90_ms: Option<f64>,
    /// Bytes that a step must move: parameter and states read and written, gradient read.
    pub bytes: usize,
    /// `bytes` over the median.
    pub tb_per_s: f64,
    /// `tb_per_s` over the device-copy rate.
    pub of_copy: f64,
    /// Median time of a step with the search for gradients that are not finite; none where there is no such search.
    pub with_search_ms: Option<f64>,
    /// PyTorch's fused AdamW over this, by time for a parameter; none where PyTorch was not measured.
    pub versus_torch_fused: Option<f64>,
    /// Burn's AdamW over this, by time for a parameter.
    pub versus_burn: f64,
    /// The name of the GPU.
    pub device: String,
    /// The rate of a copy in the same run, read and written bytes counted.
    pub copy_tb_per_s: f64,
}

impl OptimizerSpeed {
    /// With this spread.
    pub fn with_spread(self, spread: Spread) -> Self {
        Self {
            p10_ms: Some(spread.p10_ms),
            p90_ms: Some(spread.p90_ms),
            ..self
        }
    }
}
