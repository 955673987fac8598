//! The controller: the reference, on distributions of block maxima, and the kernel against it.

use cubecl_kernels::{
    delay_threshold::{DelayThreshold, MAX_THRESHOLD, MIN_THRESHOLD},
    reference::delay_threshold,
};

use crate::random::Random;

#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod on_device;

const PAPER: DelayThreshold = DelayThreshold::PAPER;

const ADAPTIVE: DelayThreshold = DelayThreshold {
    alpha_min: 1.001,
    ..PAPER
};

/// A layer, its threshold and its rate.
struct Layer {
    threshold: f32,
    last: f32,
    rate: f32,
}

impl Layer {
    fn new(threshold: f32) -> Self {
        Self {
            threshold,
            last: 0.0,
            rate: f32::NAN,
        }
    }

    /// Counts blocks of these largest magnitudes, and moves.
    fn step(&mut self, maxima: &[f32], config: &DelayThreshold) {
        let fallen = maxima.iter().filter(|it| **it > self.threshold).count();
        delay_threshold(
            std::slice::from_mut(&mut self.threshold),
            std::slice::from_mut(&mut self.last),
            &mut [[fallen as i32, maxima.len() as i32]],
            std::slice::from_mut(&mut self.rate),
            config,
        );
        assert!((MIN_THRESHOLD..=MAX_THRESHOLD).contains(&self.threshold));
        let factors = config.alpha_min - 1.0..=config.alpha - 1.0;
        assert!(self.last == 0.0 || factors.contains(&self.last.abs()));
    }

    fn is_inside(&self) -> bool {
        (0.1..=0.3).contains(&self.rate)
    }
}

/// Largest magnitudes that lie `spread` apart in the logarithm and drift by `drift` in a step.
#[derive(Debug)]
struct Blocks {
    count: usize,
    spread: f64,
    drift: f64,
    /// The shares of blocks that lie higher, by ten times the spread, as where a channel is an outlier.
    high: f64,
}

impl Blocks {
    fn of_step(&self, step: usize, random: &mut Random) -> Vec<f32> {
        let center = self.drift * step as f64;
        let high = (self.high * self.count as f64) as usize;
        let mut maximum = |index| {
            let shift = if index < high { 10.0 } else { 0.0 };
            (center + self.spread * (shift + f64::from(random.normal()))).exp() as f32
        };
        (0..self.count).map(&mut maximum).collect()
    }

    /// The share of steps in which the rate is in the range, after `settling` of them.
    fn share_inside(&self, config: &DelayThreshold, random: &mut Random) -> f64 {
        let (settling, steps) = (150, 100);
        let mut layer = Layer::new(1000f32.powf(2.0 * random.uniform() - 1.0));
        let mut inside = 0;
        for step in 0..settling + steps {
            layer.step(&self.of_step(step, random), config);
            inside += usize::from(step >= settling && layer.is_inside());
        }
        inside as f64 / steps as f64
    }
}

/// Whatever the distribution, 200 blocks and more have a rate in the range at one threshold in nearly every step, and
/// the adaptive controller finds and follows it. It drifts from one end of the range to the other in 15 steps.
#[test]
fn rates_settle_in_their_range_where_a_threshold_does_that() {
    let mut random = Random::fresh();
    for _ in 0..60 {
        let spread = 10f64.powf(-2.0 * f64::from(random.uniform()));
        let blocks = Blocks {
            count: 200 + (300.0 * random.uniform()) as usize,
            spread,
            drift: 0.05 * spread * (2.0 * f64::from(random.uniform()) - 1.0),
            high: [0.0, 0.05, 0.2, 0.5][(4.0 * random.uniform()) as usize],
        };
        let share = blocks.share_inside(&ADAPTIVE, &mut random);
        assert!(share >= 0.75, "{share} of {blocks:?}");
    }
}

/// The fault that factors adapt for: the paper's takes the rate from 0 to 1 and back, unless the threshold that it
/// starts with happens to lead into the range.
#[test]
fn one_factor_does_not_settle_where_maxima_lie_close_together() {
    let mut random = Random::fresh();
    for spread in [0.01, 0.03] {
        let blocks = Blocks {
            count: 300,
            spread,
            drift: 0.0,
            high: 0.0,
        };
        let mut mean = |config| {
            let shares = (0..20).map(|_| blocks.share_inside(config, &mut random));
            shares.sum::<f64>() / 20.0
        };
        let shares = [mean(&PAPER), mean(&ADAPTIVE)];
        assert!(shares[0] < 0.5 && shares[1] > 0.9, "{spread}: {shares:?}");
    }
}

/// One, two or three blocks have no rate inside, and where all maxima are equal none has: the threshold then stays at
/// the magnitude where the rate jumps.
#[test]
fn without_a_rate_inside_the_threshold_stays_at_the_jump() {
    for (maxima, jump) in [
        (&[2.0f32][..], 2.0),
        (&[2.0, 3.0], 3.0),
        (&[2.0, 3.0, 5.0], 5.0),
        (&[7.0; 64], 7.0),
    ] {
        for start in [1e-3, 1.0, 1e3] {
            let mut layer = Layer::new(start);
            (0..120).for_each(|_| layer.step(maxima, &ADAPTIVE));
            for _ in 0..20 {
                layer.step(maxima, &ADAPTIVE);
                let off = layer.threshold / jump;
                assert!((off - 1.0).abs() <= 0.003, "{maxima:?} from {start}: {off}");
            }
        }
    }
}

/// From where a layer has settled, its magnitudes change tenfold at once.
#[test]
fn a_settled_threshold_follows_a_jump_of_the_magnitudes() {
    let mut random = Random::fresh();
    for factor in [10.0, 0.1] {
        let maxima = |scale: f32, random: &mut Random| -> Vec<f32> {
            let maximum = |_| scale * (0.02 * random.normal()).exp();
            (0..256).map(maximum).collect()
        };
        let mut layer = Layer::new(1.0);
        (0..100).for_each(|_| layer.step(&maxima(1.0, &mut random), &ADAPTIVE));
        assert!(layer.last.abs() < 0.03, "{}", layer.last);
        (0..60).for_each(|_| layer.step(&maxima(factor, &mut random), &ADAPTIVE));
        let inside = (0..20).filter(|_| {
            layer.step(&maxima(factor, &mut random), &ADAPTIVE);
            layer.is_inside()
        });
        assert!(inside.count() >= 14, "{factor}");
    }
}

/// A layer of zeros has a rate of 0 at every threshold.
#[test]
fn a_layer_of_zeros_ends_at_the_smallest_threshold_and_comes_back() {
    let mut layer = Layer::new(1.0);
    (0..300).for_each(|_| layer.step(&[0.0; 16], &ADAPTIVE));
    assert_eq!(layer.threshold, MIN_THRESHOLD);
    let maxima: Vec<f32> = (0..16).map(|index| 1.0 + index as f32 / 16.0).collect();
    (0..400).for_each(|_| layer.step(&maxima, &ADAPTIVE));
    assert!(layer.is_inside(), "{}", layer.rate);
}

#[test]
fn a_layer_that_did_not_run_keeps_its_state() {
    let mut layer = Layer::new(3.0);
    let (fallen, total) = (0, 0);
    delay_threshold(
        std::slice::from_mut(&mut layer.threshold),
        std::slice::from_mut(&mut layer.last),
        &mut [[fallen, total]],
        std::slice::from_mut(&mut layer.rate),
        &ADAPTIVE,
    );
    assert_eq!((layer.threshold, layer.last), (3.0, 0.0));
    assert!(layer.rate.is_nan());
}
