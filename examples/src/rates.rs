//! How often the fallback rates of layers lie in their range.

use std::collections::BTreeMap;

use burn_quant_train::layer::DelayThreshold;
use serde::{Deserialize, Serialize};

/// The readings of a run's fallback rates.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct RateReadings {
    /// How often the rates were read.
    pub readings: usize,
    /// By layer, how often its rate lay in the range that its threshold follows, ends included.
    pub inside: BTreeMap<String, usize>,
}

impl RateReadings {
    /// Takes a reading: path and rate of every layer.
    pub fn take(&mut self, rates: Vec<(String, f32)>) {
        let DelayThreshold {
            rate_min, rate_max, ..
        } = DelayThreshold::default();
        self.readings += 1;
        for (path, rate) in rates {
            *self.inside.entry(path).or_default() +=
                usize::from((rate_min..=rate_max).contains(&rate));
        }
    }

    /// By layer, the share of readings that lay in the range.
    pub fn shares(&self) -> BTreeMap<String, f64> {
        let share = |inside: &usize| *inside as f64 / self.readings as f64;
        let layers = self.inside.iter();
        layers
            .map(|(path, inside)| (path.clone(), share(inside)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ends_of_the_range_are_in_it() {
        let mut readings = RateReadings::default();
        assert!(readings.shares().is_empty());
        for (up, down) in [(0.1, 0.0), (0.3, 0.31), (0.2, 0.1), (1.0, 1.0)] {
            readings.take(vec![("up".into(), up), ("down".into(), down)]);
        }
        let shares = readings.shares();
        assert_eq!((shares["up"], shares["down"]), (0.75, 0.25));
    }
}
