//! The health of quantized training: what quantization does to the inputs, the weights and the gradients of linear
//! layers, what other recipes would do to them, and what rounding does to the moments of AdamW.
//!
//! A [`HealthConfig`] of the optimizer says how often which layers are measured; [`LayersView::take_health`] has the
//! [`HealthReport`]s, one for each step that was measured, and [`advise`] says what they mean.
//!
//! [`LayersView::take_health`]: crate::optim::LayersView::take_health
//! [`advise`]: crate::optim::advice::advise

mod report;
mod sums;

pub use cubecl_kernels::magnitude::{BINS, TINY, ZEROS};
pub use report::{CastHealth, HealthReport, LayerState, MatrixHealth, MomentHealth};
pub(crate) use sums::{Label, MatrixSums, SCALES, moment_figures};

use serde::{Deserialize, Serialize};

use crate::recipe::Name;

/// The measurements, and how often they are made.
///
/// A step that is measured takes longer, and the host waits for the device at its end; other steps do nothing more than
/// without. Measuring changes no bit of the training.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HealthConfig {
    /// Every so many optimizer steps are measured: with 100, the 100th, the 200th, and so on.
    pub every: u64,
    /// The layers that are measured: patterns as those of a [`LayerPolicy`](crate::layer::LayerPolicy). All where there
    /// are none.
    pub layers: Vec<String>,
    /// Measured steps that share the layers: with 4, each measures every fourth of them, and the next one those
    /// that follow these. 1: each measures all.
    #[serde(default = "one")]
    pub turns: u64,
    /// Recipes that are not running, and are applied to the same matrices.
    ///
    /// A cast with a threshold, a learned step or a history has the layer's own only where the running recipe has that
    /// cast. Elsewhere it has the lowest threshold, of some that are 4% apart, at which less than a fifth of the blocks
    /// fall back; the step of a cold start after the largest transform; or the matrix' own maximum.
    pub what_if: Vec<Name>,
}

impl HealthConfig {
    /// Measures all layers every so many steps.
    pub fn every(steps: u64) -> Self {
        Self {
            every: steps,
            layers: Vec::new(),
            turns: one(),
            what_if: Vec::new(),
        }
    }

    /// The same for layers that match `pattern`, or another pattern given to `layers`.
    pub fn layers(mut self, pattern: impl Into<String>) -> Self {
        self.layers.push(pattern.into());
        self
    }

    /// The same with the layers in so many turns, for as small a part of the cost. [`HealthReport::latest`] has all of
    /// them.
    pub fn in_turns(self, turns: u64) -> Self {
        Self { turns, ..self }
    }

    /// The same with another recipe applied to the same matrices.
    pub fn what_if(mut self, recipe: Name) -> Self {
        if !self.what_if.contains(&recipe) {
            self.what_if.push(recipe);
        }
        self
    }

    /// Checks the settings.
    ///
    /// # Panics
    ///
    /// If `every` or `turns` is 0.
    pub fn validate(&self) {
        assert!(
            self.every > 0,
            "health: measures every {} steps; use at least 1, or leave health out",
            self.every
        );
        assert!(
            self.turns > 0,
            "health: layers have {} turns; use at least 1, in which all are measured",
            self.turns
        );
    }
}

/// The turns of settings and reports that do not name them.
pub(crate) fn one() -> u64 {
    1
}
