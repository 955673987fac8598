//! The result file of `qt-bench optimizer`.

use serde::{Deserialize, Serialize};

/// Median and spread of a measured time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    /// Half of the samples take longer.
    pub median_ms: f64,
    /// One in ten takes less.
    pub p10_ms: f64,
    /// One in ten takes longer.
    pub p90_ms: f64,
}

impl Spread {
    /// Of at least one sample, in milliseconds.
    ///
    /// # Panics
    ///
    /// Without samples.
    pub fn of(mut samples: Vec<f64>) -> Self {
        samples.sort_by(f64::total_cmp);
        let last = samples.len() - 1;
        // Between two samples on a straight line.
        let quantile = |part: f64| {
            let at = part * last as f64;
            let below = samples[at.floor() as usize];
            below + (samples[at.ceil() as usize] - below) * at.fract()
        };
        Self {
            median_ms: quantile(0.5),
            p10_ms: quantile(0.1),
            p90_ms: quantile(0.9),
        }
    }
}

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

/// Bytes over milliseconds as terabytes (10^12) over seconds.
pub fn tb_per_s(bytes: usize, ms: f64) -> f64 {
    bytes as f64 / ms / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_lie_between_samples() {
        let spread = Spread::of(vec![3.0, 1.0, 2.0, 5.0, 4.0]);
        assert_eq!(spread.median_ms, 3.0);
        assert!((spread.p10_ms - 1.4).abs() < 1e-12 && (spread.p90_ms - 4.6).abs() < 1e-12);
        let single = Spread::of(vec![7.0]);
        assert_eq!((single.p10_ms, single.p90_ms), (7.0, 7.0));
    }

    #[test]
    fn rates_are_decimal() {
        assert_eq!(tb_per_s(4_000_000_000, 2.0), 2.0);
    }
}
