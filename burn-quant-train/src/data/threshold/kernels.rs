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
}

impl Default for DelayThreshold {
    /// The paper's settings: 1.0, [0.1, 0.3], 1.3.
    fn default() -> Self {
        Self {
            initial: 1.0,
            rate_min: 0.1,
            rate_max: 0.3,
            alpha: 1.3,
        }
    }
}

impl DelayThreshold {
    /// Checks the settings.
    ///
    /// # Panics
    ///
    /// If the range is empty or outside [0, 1], if `alpha` is not above 1, or if `initial` is not positive and finite.
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
        assert!(
            self.initial > 0.0 && self.initial.is_finite(),
            "delay threshold: the initial threshold must be positive and finite, got {}",
            self.initial
        );
    }

    /// The settings as the kernels take them.
    pub(crate) fn kernel(&self) -> cubecl_kernels::delay_threshold::DelayThreshold {
        cubecl_kernels::delay_threshold::DelayThreshold {
            r_min: self.rate_min,
            r_max: self.rate_max,
            alpha: self.alpha,
        }
    }
}

/// The thresholds of all layers of a model, on one device: one entry for each layer.
#[derive(Debug, Clone)]
pub struct Thresholds<T: Tensors> {
    /// FP32 `[layers]`: blocks whose largest magnitude exceeds this fall back.
    pub thresholds: T::Float,
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
            counts: change.int(state.counts),
            rates: change.float(state.rates),
        }
    }
}

impl<B: Backend> Thresholds<B> {
    /// Uploads thresholds and rates, with counters at zero.
    ///
    /// # Panics
    ///
    /// If there are not as many rates as thresholds.
    pub fn new(thresholds: &[f32], rates: &[f32], device: &Device<B>) -> Self {
        let layers = thresholds.len();
        assert_eq!(
            layers,
            rates.len(),
            "thresholds: thresholds and rates, one of each for a layer"
        );
        let upload =
            |values: &[f32]| B::float_from_data(TensorData::new(values.to_vec(), [layers]), device);
        Self {
            thresholds: upload(thresholds),
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
