//! Random numbers on the host.

use cubecl_kernels::{philox, rounding::StochasticKey};

/// A stream of random numbers.
pub struct Random {
    key: StochasticKey,
    next: usize,
}

impl Random {
    /// The stream of a seed.
    pub fn new(seed: u64) -> Self {
        let key = StochasticKey { seed, stream: 0 };
        Self { key, next: 0 }
    }

    /// In `[0, 1)`.
    pub fn uniform(&mut self) -> f32 {
        self.next += 1;
        philox::uniform(self.key, self.next / 4, self.next % 4)
    }

    /// In `0..end`.
    pub fn below(&mut self, end: usize) -> usize {
        ((f64::from(self.uniform()) * end as f64) as usize).min(end - 1)
    }

    /// Of a standard normal distribution.
    pub fn normal(&mut self) -> f32 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f32::consts::TAU * self.uniform()).cos()
    }

    /// Normal numbers of this deviation, each divided by a random power of two up to 2^8: their squares span the range
    /// of the second moments of a training run.
    pub fn values(&mut self, n: usize, deviation: f32) -> Vec<f32> {
        (0..n)
            .map(|_| self.normal() * deviation * (-8.0 * self.uniform()).exp2())
            .collect()
    }

    /// The same in stretches that repeat: fast for large tensors.
    pub fn tiled(&mut self, n: usize, deviation: f32) -> Vec<f32> {
        repeated(self.values(n.min(1 << 20), deviation), n)
    }

    /// Normal numbers of this deviation, in stretches that repeat, but not at the same place of a row.
    pub fn normals(&mut self, n: usize, deviation: f32) -> Vec<f32> {
        let stretch = n.min((1 << 20) + 7);
        let values = (0..stretch).map(|_| deviation * self.normal()).collect();
        repeated(values, n)
    }

    /// `count` of `0..end`, all different, in ascending order.
    pub fn subset(&mut self, count: usize, end: usize) -> Vec<usize> {
        let mut all: Vec<usize> = (0..end).collect();
        for first in 0..count {
            let other = first + self.below(end - first);
            all.swap(first, other);
        }
        all.truncate(count);
        all.sort_unstable();
        all
    }

    /// One of each `stride` numbers of `0..end`.
    pub fn stratified(&mut self, stride: usize, end: usize) -> Vec<usize> {
        (0..end)
            .step_by(stride)
            .map(|first| first + self.below(stride.min(end - first)))
            .collect()
    }
}

fn repeated(stretch: Vec<f32>, n: usize) -> Vec<f32> {
    let mut values = stretch.repeat(n.div_ceil(stretch.len().max(1)));
    values.truncate(n);
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_numbers_have_their_deviation() {
        let values = Random::new(1).normals(100_000, 3.0);
        let mean = |of: fn(f64) -> f64| {
            let sum: f64 = values.iter().map(|&x| of(f64::from(x))).sum();
            sum / values.len() as f64
        };
        assert!(mean(|x| x).abs() < 0.05 && (mean(|x| x * x) - 9.0).abs() < 0.2);
    }

    #[test]
    fn stretches_fill_any_length() {
        let mut random = Random::new(2);
        assert!(random.tiled(0, 1.0).is_empty() && random.normals(0, 1.0).is_empty());
        assert_eq!(random.tiled((1 << 20) + 5, 1.0).len(), (1 << 20) + 5);
        let long = random.normals((1 << 21) + 5, 1.0);
        assert_eq!((long.len(), long[0]), ((1 << 21) + 5, long[(1 << 20) + 7]));
    }

    #[test]
    fn subsets_and_strata_lie_in_range() {
        let mut random = Random::new(3);
        let subset = random.subset(20, 100);
        assert_eq!(subset.len(), 20);
        assert!(subset.windows(2).all(|pair| pair[0] < pair[1]) && subset[19] < 100);
        assert_eq!(random.subset(5, 5), [0, 1, 2, 3, 4]);
        let strata = random.stratified(64, 130);
        assert_eq!(strata.len(), 3);
        assert!(
            strata
                .iter()
                .zip([0, 64, 128])
                .all(|(&it, first)| it / 64 * 64 == first)
        );
        assert!(strata[2] < 130);
    }
}
