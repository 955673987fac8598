//! The kernel of the controller, its settings, and the state that it moves.

use burn_backend::{Backend, IntDType, Shape, TensorData, tensor::Device};
use serde::{Deserialize, Serialize};

use crate::data::tensors::{Bundle, Change, Outline, Tensors};

/// How the threshold of a layer follows its fallback rate (fallback-int8, appendix D, algorithm 2).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct DelayThreshold {
    /// The threshold that layers start with.
    pub initial: f32,
    /// Below this fallback rate the threshold is divided by `alpha`.
    pub rate_min: f32,
    /// Above this fallback rate the threshold is multiplied by `alpha`.
    pub rate_max: f32,
    /// The adjustment factor, greater than 1.
    pub alpha: f32,
    /// The use of `alpha`: the factor of every move, or the largest one. Settings that were written without it are the
    /// paper's.
    #[serde(default = "ThresholdFactor::of_the_paper")]
    pub factor: ThresholdFactor,
}

/// The factor by which a threshold moves.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum ThresholdFactor {
    /// `alpha` (fallback-int8, algorithm 2). Where the largest magnitudes of a layer's blocks lie closer together than
    /// that, the fallback rate goes from 0 to 1 and back.
    Constant,
    /// One for each layer, from `smallest` to `alpha`. What it has above 1 is halved when the threshold turns around,
    /// and grows by a fifth when it moves on the same way (the rule of Rprop: Riedmiller and Braun, 1993).
    Adaptive {
        /// Greater than 1 and at most `alpha`. The closer to 1, the closer to each other may the magnitudes lie, and
        /// the longer does it take until the factor is large again where a layer's magnitudes begin to drift.
        smallest: f32,
    },
}

impl ThresholdFactor {
    fn of_the_paper() -> Self {
        Self::Constant
    }
}

impl Default for ThresholdFactor {
    /// Adaptive down to 1.001.
    fn default() -> Self {
        Self::Adaptive { smallest: 1.001 }
    }
}

impl Default for DelayThreshold {
    /// The paper's settings, 1.0, [0.1, 0.3] and 1.3, with a factor that adapts.
    fn default() -> Self {
        Self {
            initial: 1.0,
            rate_min: 0.1,
            rate_max: 0.3,
            alpha: 1.3,
            factor: ThresholdFactor::default(),
        }
    }
}

impl DelayThreshold {
    /// The settings of the paper: 1.0, [0.1, 0.3], and 1.3 as the factor of every move.
    pub fn paper() -> Self {
        Self {
            factor: ThresholdFactor::Constant,
            ..Self::default()
        }
    }

    /// Checks the settings.
    ///
    /// # Panics
    ///
    /// If the range is empty or outside [0, 1], if `alpha` is not above 1, if the smallest factor is not above 1 or is
    /// above `alpha`, or if `initial` is not positive and finite.
    pub fn validate(&self) {
        assert!(
            0.0 <= self.rate_min && self.rate_min <= self.rate_max && self.rate_max <= 1.0,
            "delay threshold: the range of fallback rates [{}, {}] must lie within [0, 1], lower bound first",
            self.rate_min,
            self.rate_max
        );
        assert!(
            self.alpha > 1.0 && self.alpha.is_finite(),
            "delay threshold: the adjustment factor alpha must be finite and above 1, got {}",
            self.alpha
        );
        let smallest = self.smallest_factor();
        assert!(
            1.0 < smallest && smallest <= self.alpha,
            "delay threshold: the smallest factor must be above 1 and at most alpha, {}, got {smallest}",
            self.alpha
        );
        assert!(
            self.initial > 0.0 && self.initial.is_finite(),
            "delay threshold: the initial threshold must be positive and finite, got {}",
            self.initial
        );
    }

    fn smallest_factor(&self) -> f32 {
        match self.factor {
            ThresholdFactor::Constant => self.alpha,
            ThresholdFactor::Adaptive { smallest } => smallest,
        }
    }

    /// The settings as the kernels take them.
    pub(crate) fn kernel(&self) -> cubecl_kernels::delay_threshold::DelayThreshold {
        cubecl_kernels::delay_threshold::DelayThreshold {
            r_min: self.rate_min,
            r_max: self.rate_max,
            alpha: self.alpha,
            alpha_min: self.smallest_factor(),
        }
    }
}

/// The thresholds of all layers of a model, on one device: one entry for each layer.
#[derive(Debug, Clone)]
pub struct Thresholds<T: Tensors> {
    /// FP32 `[layers]`: blocks whose largest magnitude exceeds this fall back.
    pub thresholds: T::Float,
    /// FP32 `[layers]`: what the factor of the last move had above 1, negative where the threshold fell; 0 before the
    /// first.
    pub moves: T::Float,
    /// INT32 `[layers, 2]`: blocks that fell back and blocks seen since the last update.
    pub counts: T::Int,
    /// FP32 `[layers]`: fallback rates of the last update; NaN before the first.
    pub rates: T::Float,
}

impl Bundle for Thresholds<Outline> {
    type On<T: Tensors> = Thresholds<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        state: Thresholds<S>,
        change: &mut impl Change<S, T>,
    ) -> Thresholds<T> {
        Thresholds {
            thresholds: change.float(state.thresholds),
            moves: change.float(state.moves),
            counts: change.int(state.counts),
            rates: change.float(state.rates),
        }
    }
}

impl<B: Backend> Thresholds<B> {
    /// Uploads thresholds, moves and rates, with counters at zero.
    ///
    /// # Panics
    ///
    /// If there are not as many moves and rates as thresholds.
    pub fn new(thresholds: &[f32], moves: &[f32], rates: &[f32], device: &Device<B>) -> Self {
        let layers = thresholds.len();
        assert_eq!(
            [layers; 2],
            [moves.len(), rates.len()],
            "thresholds: thresholds, moves and rates, one of each for a layer"
        );
        let upload =
            |values: &[f32]| B::float_from_data(TensorData::new(values.to_vec(), [layers]), device);
        Self {
            thresholds: upload(thresholds),
            moves: upload(moves),
            counts: B::int_zeros(Shape::new([layers, 2]), device, IntDType::I32),
            rates: upload(rates),
        }
    }
}

/// Controllers of thresholds on a backend that holds data.
pub trait ThresholdKernels: Backend {
    /// Moves every layer's threshold by its fallback rate and sets the counters to zero, without a host read
    /// (fallback-int8, algorithm 2). Buffers may be reused.
    ///
    /// # Panics
    ///
    /// On devices, if the tensors are not of the dtypes and shapes that [`Thresholds`] has, or the settings are out of
    /// range: see [`DelayThreshold::validate`].
    fn delay_threshold(state: Thresholds<Self>, config: &DelayThreshold) -> Thresholds<Self>;
}
