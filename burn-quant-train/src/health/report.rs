//! The figures of a measured step.

use serde::{Deserialize, Serialize};

use super::{TINY, ZEROS};
use crate::data::threshold::DelayThreshold;
use crate::recipe::{LinearMatrix, LinearOperand};

/// The figures of a measured step: plain data, for programs that draw or store it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HealthReport {
    /// Optimizer steps taken when the measured one was over.
    pub step: u64,
    /// The matrices of the layers that ran, in the order of their first runs.
    pub matrices: Vec<MatrixHealth>,
    /// The state of the quantized layers after the step, in module order.
    pub layers: Vec<LayerState>,
    /// The controller of their thresholds.
    pub controller: DelayThreshold,
}

/// The state of a quantized layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerState {
    /// The module path.
    pub layer: String,
    /// The fallback threshold of the next step, of recipes that have one.
    pub threshold: Option<f32>,
    /// The fallback rate of the step, of recipes with fallback.
    pub rate: Option<f32>,
}

/// The figures of a matrix of a layer, over all its runs in the step. A gradient is as the layer got it: times the
/// scale of the loss, where losses are scaled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MatrixHealth {
    /// The module path of the layer.
    pub layer: String,
    /// The matrix.
    pub matrix: LinearMatrix,
    /// Its elements.
    pub elements: u64,
    /// The largest magnitude; none if there is NaN or an infinity.
    pub absmax: Option<f32>,
    /// Elements in each octave below that of the largest magnitude, all those further below, and zeros: see
    /// [`BINS`](super::BINS).
    pub histogram: Vec<u64>,
    /// Its quantized form, and those that other recipes would give it. Operands of a recipe that are the same numbers
    /// have the same figures.
    pub casts: Vec<CastHealth>,
}

/// The figures of a matrix that was quantized.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CastHealth {
    /// The recipe.
    pub recipe: String,
    /// The operand.
    pub operand: LinearOperand,
    /// True for the recipe that is running.
    pub runs: bool,
    /// How the operand is quantized, in words.
    pub cast: String,
    /// The share of elements that were not 0 and became 0.
    pub underflow: f64,
    /// The share of elements beyond the largest number. 0 where scales follow from the elements themselves, and not
    /// counted after a Hadamard transform.
    pub saturation: f64,
    /// The squared error over the squared values; none where values are not finite, or all 0.
    pub noise: Option<f64>,
    /// The cosine between the values and those that they became; none as for `noise`, or where all became 0.
    pub cosine: Option<f64>,
    /// The smallest and the largest scale; none if there is NaN or an infinity.
    pub scales: Option<[f32; 2]>,
}

impl CastHealth {
    /// The signal-to-noise ratio in decibel; infinite where nothing was lost.
    pub fn snr_db(&self) -> Option<f64> {
        self.noise.map(|noise| -10.0 * noise.log10())
    }
}

impl MatrixHealth {
    /// The share of zeros.
    pub fn zeros(&self) -> f64 {
        self.share(ZEROS)
    }

    /// True if an element is NaN or infinite.
    pub fn is_not_finite(&self) -> bool {
        self.absmax.is_none()
    }

    /// Octaves from the largest magnitude down to the median of those that are not 0; none where all are 0.
    pub fn median_octave(&self) -> Option<usize> {
        let nonzero = &self.histogram[..=TINY];
        let half = nonzero.iter().sum::<u64>().div_ceil(2);
        let mut seen = 0;
        nonzero.iter().position(|count| {
            seen += count;
            half > 0 && seen >= half
        })
    }

    /// The casts of the running recipe.
    pub fn running(&self) -> impl Iterator<Item = &CastHealth> {
        self.casts.iter().filter(|cast| cast.runs)
    }

    fn share(&self, bin: usize) -> f64 {
        self.histogram[bin] as f64 / self.elements.max(1) as f64
    }
}
