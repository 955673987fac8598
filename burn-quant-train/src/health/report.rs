//! The figures of a measured step.

use serde::{Deserialize, Serialize};

use super::{TINY, ZEROS, one};
use crate::data::optimizer::{Moment, StateFormat};
use crate::data::threshold::DelayThreshold;
use crate::recipe::{LinearMatrix, LinearOperand};

/// The figures of a measured step: plain data, for programs that draw or store it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HealthReport {
    /// Optimizer steps taken when the measured one was over.
    pub step: u64,
    /// The turns of the layers: so many reports one after the other have all of them.
    #[serde(default = "one")]
    pub turns: u64,
    /// The matrices of the layers that ran, in the order of their first runs.
    pub matrices: Vec<MatrixHealth>,
    /// The moments of the layers' weights, in module order, the first before the second; none of an optimizer that
    /// [`QuantAdamWConfig::init`](crate::optim::QuantAdamWConfig::init) has not made.
    #[serde(default)]
    pub moments: Vec<MomentHealth>,
    /// The state of the quantized layers after the step, in module order, and of products of activations.
    pub layers: Vec<LayerState>,
    /// The controller of their thresholds.
    pub controller: DelayThreshold,
}

impl HealthReport {
    /// The last report, with the last figures of layers that had their turn in the reports before it; none of no
    /// reports.
    pub fn latest(reports: &[Self]) -> Option<Self> {
        let (last, before) = reports.split_last()?;
        let mut latest = last.clone();
        let others = before
            .iter()
            .rev()
            .take((last.turns as usize).saturating_sub(1));
        for report in others.filter(|report| report.turns == last.turns) {
            for matrix in &report.matrices {
                let is_known =
                    |it: &MatrixHealth| (&it.layer, it.matrix) == (&matrix.layer, matrix.matrix);
                if !latest.matrices.iter().any(is_known) {
                    latest.matrices.push(matrix.clone());
                }
            }
            for moment in &report.moments {
                let is_known =
                    |it: &MomentHealth| (&it.layer, it.moment) == (&moment.layer, moment.moment);
                if !latest.moments.iter().any(is_known) {
                    latest.moments.push(moment.clone());
                }
            }
        }
        Some(latest)
    }
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

/// The figures of a moment of a layer's weight: of what the step made of it in FP32, and of what that became as it was
/// stored. Rounding of earlier steps is not among them. A step that is skipped leaves moments as they were, and loses
/// nothing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MomentHealth {
    /// The module path of the layer.
    pub layer: String,
    /// The moment.
    pub moment: Moment,
    /// How it is stored; none: in FP32, where nothing is lost.
    pub format: Option<StateFormat>,
    /// Its elements.
    pub elements: u64,
    /// The largest magnitude; none if there is NaN or an infinity.
    pub absmax: Option<f32>,
    /// As [`MatrixHealth::histogram`].
    pub histogram: Vec<u64>,
    /// The share of elements that were not 0 and became 0. Scales follow from the elements, so that none saturates.
    pub underflow: f64,
    /// The squared error over the squared values; none where values are not finite, or all 0.
    pub noise: Option<f64>,
    /// The cosine between the values and those that they became; none as for `noise`, or where all became 0.
    pub cosine: Option<f64>,
}

/// A squared error over squared values as a signal-to-noise ratio in decibel.
fn decibel(noise: Option<f64>) -> Option<f64> {
    noise.map(|noise| -10.0 * noise.log10())
}

/// The octave of the median of a histogram, zeros left out; none where all are 0.
fn median_octave(histogram: &[u64]) -> Option<usize> {
    let nonzero = &histogram[..=TINY];
    let half = nonzero.iter().sum::<u64>().div_ceil(2);
    let mut seen = 0;
    nonzero.iter().position(|count| {
        seen += count;
        half > 0 && seen >= half
    })
}

impl CastHealth {
    /// The signal-to-noise ratio in decibel; infinite where nothing was lost.
    pub fn snr_db(&self) -> Option<f64> {
        decibel(self.noise)
    }
}

impl MomentHealth {
    /// The share of zeros.
    pub fn zeros(&self) -> f64 {
        self.histogram[ZEROS] as f64 / self.elements.max(1) as f64
    }

    /// As [`MatrixHealth::median_octave`].
    pub fn median_octave(&self) -> Option<usize> {
        median_octave(&self.histogram)
    }

    /// As [`CastHealth::snr_db`].
    pub fn snr_db(&self) -> Option<f64> {
        decibel(self.noise)
    }
}

impl MatrixHealth {
    /// The share of zeros.
    pub fn zeros(&self) -> f64 {
        self.histogram[ZEROS] as f64 / self.elements.max(1) as f64
    }

    /// True if an element is NaN or infinite.
    pub fn is_not_finite(&self) -> bool {
        self.absmax.is_none()
    }

    /// Octaves from the largest magnitude down to the median of those that are not 0; none where all are 0.
    pub fn median_octave(&self) -> Option<usize> {
        median_octave(&self.histogram)
    }

    /// The casts of the running recipe.
    pub fn running(&self) -> impl Iterator<Item = &CastHealth> {
        self.casts.iter().filter(|cast| cast.runs)
    }
}
