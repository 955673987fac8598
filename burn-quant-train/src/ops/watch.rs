//! A run of a layer that is measured: its input and its weight before the product, and the gradient of its output.

use std::sync::Arc;

use burn_backend::{
    TensorMetadata,
    tensor::{Device, FloatTensor},
};

use super::{
    probe::{Probe, ProbeInputs},
    stand_in::{CastState, Remake},
};
use crate::{
    data::{DataBackend, StochasticKey},
    health::Label,
    layer::{HealthSample, Layer, Now},
    recipe::{LinearMatrix, LinearRow, Name, Row},
    saved::{HeldTensor, recorded::Recorded},
};

/// Measures a run of a layer. As an operation of the layer's output it changes nothing, and sees the gradient.
pub(crate) struct Watched<B: DataBackend> {
    layer: Arc<Layer<B>>,
    /// The row of the layer, if it is quantized.
    row: Option<LinearRow>,
    recipe: Name,
    now: Now,
}

impl<B: DataBackend> Clone for Watched<B> {
    fn clone(&self) -> Self {
        Self {
            layer: self.layer.clone(),
            ..*self
        }
    }
}

impl<B: DataBackend> std::fmt::Debug for Watched<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watched")
            .field("layer", &self.layer.path())
            .finish_non_exhaustive()
    }
}

impl<B: DataBackend> Watched<B> {
    /// A run of the layer, if it is measured.
    pub fn of(layer: &Arc<Layer<B>>, row: &Row) -> Option<Self> {
        let now = layer.measured_now()?;
        Some(Self {
            layer: layer.clone(),
            row: row.linear.filter(|_| layer.is_quantized()),
            recipe: row.name(),
            now,
        })
    }

    /// Measures X `[.., K]` and W `[K, N]`, after the product: what that chooses and sets is what it was made with.
    pub fn inputs(&self, x: FloatTensor<B>, weight: FloatTensor<B>) {
        self.measure(LinearMatrix::X, x);
        self.measure(LinearMatrix::W, weight);
    }

    fn measure(&self, matrix: LinearMatrix, value: FloatTensor<B>) {
        let (layer, now) = (&self.layer, self.now);
        let watch = layer.watch();
        let Some(watch) = watch.filter(|it| it.claims(now, layer.path(), matrix)) else {
            return;
        };
        let device = B::float_device(&value);
        let (casts, labels) = self.casts(matrix, &watch.config().what_if);
        let elements = value.shape().num_elements() as u64;
        let state = match self.row {
            Some(row) => self.state(matrix, &row, &device),
            None => CastState::default(),
        };
        let probe = Probe { casts };
        let inputs = ProbeInputs {
            matrix: value,
            state,
        };
        let findings = B::run(probe, inputs);
        watch.add(
            now,
            HealthSample {
                layer: layer.path().to_owned(),
                matrix,
                elements,
                labels,
                findings,
            },
        );
    }

    /// The casts of a matrix, of the running recipe and of others, each computed once, and a label for each use of one.
    fn casts(&self, matrix: LinearMatrix, what_if: &[Name]) -> (Vec<Remake>, Vec<Label>) {
        let others = what_if.iter().copied();
        let others = others.filter(|name| self.row.is_none() || *name != self.recipe);
        let others = others.filter_map(|name| Some((name, name.row().linear?, false)));
        let running = self.row.map(|row| (self.recipe, row, true));
        let mut casts: Vec<Remake> = Vec::new();
        let mut labels: Vec<Label> = Vec::new();
        for (recipe, row, runs) in running.into_iter().chain(others) {
            for (operand, cast) in row.operands().filter(|(it, _)| it.matrix() == matrix) {
                let key = self.key(casts.len());
                let remake = Remake {
                    operand,
                    cast,
                    runs,
                    key,
                };
                let known = casts.iter().position(|known| known.is_same_as(&remake));
                let index = known.unwrap_or(casts.len());
                if known.is_none() {
                    casts.push(remake);
                }
                labels.push(Label {
                    recipe,
                    operand,
                    cast,
                    runs,
                    index,
                });
            }
        }
        (casts, labels)
    }

    /// Random numbers of its own, so that those of the training stay as they are.
    fn key(&self, cast: usize) -> StochasticKey {
        StochasticKey {
            seed: !self.layer.bank().seed(),
            stream: self.now.step << 32 | (self.layer.index() << 8 | cast) as u64,
        }
    }

    fn state(&self, matrix: LinearMatrix, row: &LinearRow, device: &Device<B>) -> CastState<B> {
        let layer = &self.layer;
        let [x, weight, gradient] = row.histories();
        let (history, step) = match matrix {
            LinearMatrix::X => (x, row.learned().map(|slots| slots.x)),
            LinearMatrix::W => (weight, row.learned().map(|slots| slots.weight)),
            LinearMatrix::Gradient => (gradient, None),
        };
        let threshold = row.threshold().filter(|_| matrix == LinearMatrix::X);
        let hadamard = row.learned().and_then(|slots| slots.hadamard);
        CastState {
            fallback: threshold.map(|slot| layer.present_threshold(slot, device)),
            delayed: (!history.is_empty()).then(|| layer.delayed_maximum(history, device)),
            step: step.and_then(|slot| layer.present_step(slot, device, self.now.step)),
            size: hadamard.and_then(|slot| layer.present_size(slot, device)),
        }
    }
}

impl<B: DataBackend> Recorded<B, 1> for Watched<B> {
    type Saved = Self;

    /// A run is measured once.
    fn again(&mut self, _inputs: &[HeldTensor<B>; 1]) -> Option<Self> {
        None
    }

    fn forward(self, inputs: [HeldTensor<B>; 1], _wanted: [bool; 1]) -> (HeldTensor<B>, Self) {
        let [output] = inputs;
        (output, self)
    }

    fn backward(
        watched: Self,
        gradient: FloatTensor<B>,
        _wanted: [bool; 1],
    ) -> [Option<FloatTensor<B>>; 1] {
        watched.measure(LinearMatrix::Gradient, gradient.clone());
        [Some(gradient)]
    }
}
