//! Fresh random inputs; the seed is printed, so a failing test shows it.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{SystemTime, UNIX_EPOCH},
};

use cubecl_kernels::{philox, rounding::StochasticKey, shape::MatrixShape};

/// A sequential generator.
pub struct Random {
    key: StochasticKey,
    next: usize,
}

impl Random {
    /// A generator that no earlier run had. `KERNELS_TEST_SEED` repeats one.
    pub fn fresh() -> Self {
        static STREAM: AtomicU64 = AtomicU64::new(0);
        let seed = match std::env::var("KERNELS_TEST_SEED") {
            Ok(seed) => seed.parse().expect("KERNELS_TEST_SEED is a number"),
            Err(_) => {
                SystemTime::now()
                    .duration_since(UNIX_EPOCH)
                    .expect("the clock is past 1970")
                    .as_nanos() as u64
                    ^ STREAM.fetch_add(1, Ordering::Relaxed) << 48
            }
        };
        println!("KERNELS_TEST_SEED={seed}");
        Self {
            key: StochasticKey { seed, stream: 0 },
            next: 0,
        }
    }

    /// Uniform in [0, 1).
    pub fn uniform(&mut self) -> f32 {
        self.next += 1;
        philox::uniform(self.key, self.next / 4, self.next % 4)
    }

    /// Uniform among `0..n`.
    pub fn index(&mut self, n: usize) -> usize {
        ((self.uniform() * n as f32) as usize).min(n - 1)
    }

    /// The key of a stochastic rounding: all bits of it.
    pub fn key(&mut self) -> StochasticKey {
        let mut word = || (0..4).fold(0, |word, _| word << 16 | self.index(1 << 16) as u64);
        StochasticKey {
            seed: word(),
            stream: word(),
        }
    }

    /// A few of cases that take long, or with `KERNELS_TEST_ALL` all of them. A seed draws the same again, with all
    /// cases other inputs.
    #[cfg(any(feature = "cuda", feature = "vulkan"))]
    pub fn few<T>(&mut self, cases: impl IntoIterator<Item = T>, few: usize) -> Vec<T> {
        let mut cases: Vec<T> = cases.into_iter().collect();
        if std::env::var_os("KERNELS_TEST_ALL").is_none() {
            while cases.len() > few {
                cases.remove(self.index(cases.len()));
            }
        }
        cases
    }

    /// Standard normal.
    pub fn normal(&mut self) -> f32 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f32::consts::TAU * self.uniform()).cos()
    }

    /// Standard normal numbers, a few of them 1000 times larger.
    pub fn with_outliers(&mut self, count: usize) -> Vec<f32> {
        (0..count)
            .map(|_| {
                let outlier = if self.uniform() < 0.002 { 1000.0 } else { 1.0 };
                self.normal() * outlier
            })
            .collect()
    }

    /// [`Self::with_outliers`] with zeros, denormals, ties, NaN and infinities strewn in, and a stretch of zeros.
    pub fn with_special_values(&mut self, shape: MatrixShape) -> Vec<f32> {
        const SPECIAL: [f32; 9] = [
            0.0,
            -0.0,
            1e-40,
            f32::MIN_POSITIVE,
            f32::MAX,
            0.5,
            f32::NAN,
            f32::INFINITY,
            f32::NEG_INFINITY,
        ];
        let mut x = self.with_outliers(shape.num_elements());
        for _ in 0..x.len().div_ceil(3000) {
            let index = self.index(x.len());
            x[index] = SPECIAL[self.index(SPECIAL.len())];
        }
        let quiet_rows = shape.rows / 4;
        for x in &mut x[..quiet_rows * shape.cols] {
            *x *= if *x > 0.0 { 1e-38 } else { 0.0 };
        }
        x
    }

    /// A matrix of whole blocks of 128 x 128, which differ in kind, which changes from one to the next: ordinary, with
    /// an outlier, all zeros, all too small for a scale, with NaN, with an infinity, with the largest float, of few
    /// values that meet at ties.
    #[cfg(any(feature = "cuda", feature = "vulkan"))]
    pub fn with_blocks_of_all_kinds(&mut self, shape: MatrixShape) -> Vec<f32> {
        assert_eq!((shape.rows % 128, shape.cols % 128), (0, 0));
        let mut x: Vec<f32> = (0..shape.num_elements()).map(|_| self.normal()).collect();
        let blocks_of_row = shape.cols / 128;
        let blocks = shape.num_elements() / (128 * 128);
        let chosen: Vec<usize> = (0..blocks).map(|_| self.index(128 * 128)).collect();
        for (index, x) in x.iter_mut().enumerate() {
            let (row, col) = (index / shape.cols, index % shape.cols);
            let block = row / 128 * blocks_of_row + col / 128;
            let is_chosen = row % 128 * 128 + col % 128 == chosen[block];
            *x = match (block % 8, is_chosen) {
                (1, true) => 300.0,
                (2, _) => 0.0,
                (3, _) => *x * 1e-38,
                (4, true) => f32::NAN,
                (5, true) => f32::NEG_INFINITY,
                (6, true) => f32::MAX,
                (7, _) => (*x * 4.0).round().clamp(-8.0, 8.0),
                _ => *x,
            };
        }
        x
    }
}
