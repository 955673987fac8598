//! The error that compressed moments make in `m / (sqrt(v) + epsilon)`, the part of an update that depends on them:
//! tables 1 and 9 of COAT (coat-fp8), on the moments of a checkpoint.

use cubecl_kernels::{
    dynamic_range_expansion::expand,
    optimizer_state::{Encoding, Moment, StateFormat},
    reference::optimizer_state::{dequantize_state, quantize_state},
};
use serde::{Deserialize, Serialize};

use crate::format;

/// The formats of both papers' tables, each for either moment.
pub const FORMATS: [StateFormat; 6] = [
    StateFormat::E4M3,
    StateFormat::E4M3.expanded(),
    StateFormat::E5M2,
    StateFormat::E5M2.expanded(),
    StateFormat::DYNAMIC_EXPONENT,
    StateFormat::DYNAMIC_EXPONENT.expanded(),
];

/// Elements that are worked on at once, whole groups of each format.
const CHUNK: usize = 1 << 15;

/// The result file of `states`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StateErrors {
    /// Optimizer steps of the checkpoint.
    pub steps: u64,
    /// Parameter tensors that count.
    pub tensors: usize,
    /// Their elements in all.
    pub elements: usize,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Mean of `(m / (sqrt(v) + epsilon))^2` with FP32 moments, to compare the errors with.
    pub mean_square: f64,
    /// The error of every pair of [`FORMATS`].
    pub pairs: Vec<PairError>,
}

/// The mean squared error of one pair of formats.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PairError {
    /// Format of the first moment.
    pub first: String,
    /// Format of the second moment.
    pub second: String,
    /// As the library compresses: a second moment that is not zero never becomes zero.
    pub mse: f64,
    /// With second moments rounded to the nearest number, also where that is zero.
    pub mse_nearest: f64,
}

/// Sums of squared errors, to which tensors are added.
#[derive(Debug, Clone)]
pub struct Sums {
    epsilon: f64,
    tensors: usize,
    elements: usize,
    square: f64,
    /// By first format, then second; the library's and that of plain rounding.
    errors: [[[f64; 2]; FORMATS.len()]; FORMATS.len()],
}

impl Sums {
    /// No tensor yet.
    pub fn new(epsilon: f64) -> Self {
        Self {
            epsilon,
            tensors: 0,
            elements: 0,
            square: 0.0,
            errors: Default::default(),
        }
    }

    /// Adds the moments of one parameter tensor, FP32.
    ///
    /// # Panics
    ///
    /// When the moments differ in length.
    pub fn add(&mut self, first: &[f32], second: &[f32]) {
        assert_eq!(first.len(), second.len(), "elements of the moments");
        self.tensors += 1;
        self.elements += first.len();
        for (m, v) in first.chunks(CHUNK).zip(second.chunks(CHUNK)) {
            self.add_chunk(m, v);
        }
    }

    fn add_chunk(&mut self, m: &[f32], v: &[f32]) {
        let roots = |v: &[f32]| -> Vec<f64> {
            v.iter()
                .map(|&v| 1.0 / (f64::from(v).sqrt() + self.epsilon))
                .collect()
        };
        let quotients: Vec<f64> = m
            .iter()
            .zip(roots(v))
            .map(|(&m, root)| f64::from(m) * root)
            .collect();
        self.square += quotients.iter().map(|q| q * q).sum::<f64>();

        let first = FORMATS.map(|format| {
            let state = quantize_state(m, format, Moment::First);
            dequantize_state(&state, format, Moment::First)
        });
        let second = FORMATS.map(|format| compressed(v, format).map(|v| roots(&v)));
        for (sums, m) in self.errors.iter_mut().zip(&first) {
            for (sums, roots) in sums.iter_mut().zip(&second) {
                for (sum, roots) in sums.iter_mut().zip(roots) {
                    let errors = m
                        .iter()
                        .zip(roots)
                        .zip(&quotients)
                        .map(|((&m, root), exact)| f64::from(m) * root - exact);
                    *sum += errors.map(|error| error * error).sum::<f64>();
                }
            }
        }
    }

    /// The mean errors.
    pub fn finish(&self, steps: u64) -> StateErrors {
        let mean = |sum: f64| sum / self.elements.max(1) as f64;
        let pair = |first: usize, second: usize| {
            let [library, nearest] = self.errors[first][second];
            PairError {
                first: format::name(FORMATS[first]),
                second: format::name(FORMATS[second]),
                mse: mean(library),
                mse_nearest: mean(nearest),
            }
        };
        let formats = 0..FORMATS.len();
        StateErrors {
            steps,
            tensors: self.tensors,
            elements: self.elements,
            epsilon: self.epsilon,
            mean_square: mean(self.square),
            pairs: formats
                .clone()
                .flat_map(|first| formats.clone().map(move |second| pair(first, second)))
                .collect(),
        }
    }
}

/// A second moment as the library stores it, and as it would be with values nearer to zero than to the smallest number
/// rounded to zero.
fn compressed(v: &[f32], format: StateFormat) -> [Vec<f32>; 2] {
    let state = quantize_state(v, format, Moment::Second);
    let library = dequantize_state(&state, format, Moment::Second);
    let largest = format.encoding.largest(Moment::Second);
    let half = format.encoding.smallest(Moment::Second) * 0.5;
    let vanishes = |index: usize, v: f32| {
        let scale = state.scales[index / format.group];
        let number = if format.expand {
            expand(v / scale, state.exponents[index / format.group]) * largest
        } else {
            v / scale
        };
        // Of the two neighbours of a tie, a float rounds to the even one, zero.
        number < half || (number == half && format.encoding != Encoding::DynamicExponent)
    };
    let nearest = v
        .iter()
        .zip(&library)
        .enumerate()
        .map(|(index, (&v, &stored))| if vanishes(index, v) { 0.0 } else { stored })
        .collect();
    [library, nearest]
}

#[cfg(test)]
mod tests {
    use cubecl_kernels::{number::Minifloat, philox, rounding::StochasticKey};

    use super::*;

    /// Moments whose groups span a few powers of two, each group at a level of its own, as those of a training run do.
    fn moments(len: usize) -> [Vec<f32>; 2] {
        let key = StochasticKey { seed: 7, stream: 0 };
        let uniform = |index: usize, lane| philox::uniform(key, index, lane);
        let level = |index: usize| (-20.0 * uniform(index / 128, 3)).exp2();
        let m = (0..len)
            .map(|index| {
                let sign = if uniform(index, 0) < 0.5 { -1.0 } else { 1.0 };
                sign * level(index) * (-8.0 * uniform(index, 1)).exp2()
            })
            .collect();
        let v = (0..len)
            .map(|index| level(index).powi(2) * (-6.0 * uniform(index, 2)).exp2())
            .collect();
        [m, v]
    }

    fn pair(errors: &StateErrors, first: StateFormat, second: StateFormat) -> (f64, f64) {
        let (first, second) = (format::name(first), format::name(second));
        let mut pairs = errors.pairs.iter();
        let pair = pairs.find(|pair| pair.first == first && pair.second == second);
        pair.map(|pair| (pair.mse, pair.mse_nearest)).unwrap()
    }

    #[test]
    fn expansion_lowers_the_error() {
        let [m, v] = moments(10_000);
        let mut sums = Sums::new(1e-12);
        sums.add(&m, &v);
        let errors = sums.finish(500);
        assert_eq!(errors.pairs.len(), 36);
        let (plain, expanded) = (StateFormat::E4M3, StateFormat::E4M3.expanded());
        let (plain, expanded) = (
            pair(&errors, plain, plain),
            pair(&errors, expanded, expanded),
        );
        assert!(plain.0 > 1.5 * expanded.0, "{plain:?}, {expanded:?}");
        assert!(expanded.0 > 0.0 && expanded.0 < 0.01 * errors.mean_square);
        // Nothing is as small as half of the smallest number here.
        assert!(errors.pairs.iter().all(|pair| pair.mse == pair.mse_nearest));
    }

    #[test]
    fn errors_are_means_over_all_tensors() {
        let [m, v] = moments(3 * CHUNK + 1000);
        let mut whole = Sums::new(1e-8);
        whole.add(&m, &v);
        let mut parts = Sums::new(1e-8);
        let (m, v) = (m.split_at(CHUNK), v.split_at(CHUNK));
        parts.add(m.0, v.0);
        parts.add(m.1, v.1);
        let (whole, parts) = (whole.finish(1), parts.finish(1));
        assert_eq!((whole.tensors, parts.tensors), (1, 2));
        assert_eq!(whole.elements, parts.elements);
        for (a, b) in whole.pairs.iter().zip(&parts.pairs) {
            assert!((a.mse - b.mse).abs() <= 1e-9 * a.mse);
        }
    }

    #[test]
    fn rounding_to_nearest_makes_zeros() {
        let v: Vec<f32> = (0..256).map(|index| (-0.2 * index as f32).exp2()).collect();
        let [library, nearest] = compressed(&v, StateFormat::E4M3);
        assert!(library.iter().all(|&v| v > 0.0));
        for (group, nearest) in v.chunks(128).zip(nearest.chunks(128)) {
            for (v, nearest) in group.iter().zip(nearest) {
                let code = Minifloat::E4M3.encode(v / group[0] * 448.0);
                assert_eq!(*nearest == 0.0, code == 0);
            }
        }
        assert!(nearest.contains(&0.0));

        let mut sums = Sums::new(1e-8);
        sums.add(&[1.0; 128], &v[..128]);
        let (library, nearest) = pair(&sums.finish(1), StateFormat::E4M3, StateFormat::E4M3);
        assert!(nearest > 1e6 * library);
    }
}
