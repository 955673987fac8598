//! Times of repeated work.

use serde::{Deserialize, Serialize};

/// Median and spread of a measured time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
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
