//! The sums that the figures of a matrix are made of, over all runs of a layer in a step.

use cubecl_kernels::reference::absmax;

use super::report::{CastHealth, MatrixHealth, MomentHealth};
use crate::{
    data::{
        health::{BINS, COUNTS, SUMS, add_histogram, octave, unit},
        optimizer::{Moment, StateFormat},
    },
    recipe::{Cast, LinearMatrix, LinearOperand, Name, ScaleNumber},
};

/// Numbers of a cast beside its sums: the smallest and the largest scale as they are stored, and the scale of scales.
pub(crate) const SCALES: usize = 3;

/// A cast that was measured.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Label {
    pub recipe: Name,
    pub operand: LinearOperand,
    pub cast: Cast,
    /// True for one of the running recipe.
    pub runs: bool,
    /// Its place among the casts that were computed: recipes share them.
    pub index: usize,
}

/// The sums of a matrix of a layer.
#[derive(Debug, Clone)]
pub(crate) struct MatrixSums {
    layer: String,
    matrix: LinearMatrix,
    elements: u64,
    absmax: f32,
    histogram: [u64; BINS],
    labels: Vec<Label>,
    casts: Vec<CastSums>,
}

/// The sums of a cast, of values themselves.
#[derive(Debug, Clone, Copy)]
struct CastSums {
    sums: [f64; SUMS],
    counts: [u64; COUNTS],
    scales: [f32; 2],
}

impl MatrixSums {
    /// From what a probe found: `numbers` are the largest magnitude and for each cast sums and scales, `counts` the
    /// histogram and for each cast the counts.
    pub fn new(
        layer: String,
        matrix: LinearMatrix,
        elements: u64,
        labels: Vec<Label>,
        numbers: &[f32],
        counts: &[u32],
    ) -> Self {
        let (absmax, numbers) = numbers.split_first().expect("a probe has a maximum");
        let (histogram, counts) = counts.split_at(BINS);
        let scale_of = |index: usize| {
            let of_cast = labels.iter().find(|label| label.index == index);
            of_cast.map_or(ScaleNumber::F32, |label| label.cast.scale)
        };
        let casts = numbers.chunks(SUMS + SCALES).zip(counts.chunks(COUNTS));
        let casts = casts.enumerate().map(|(index, (numbers, counts))| {
            let (sums, scales) = numbers.split_at(SUMS);
            let scale = |stored| scale_of(index).decode(stored, scales[2]);
            CastSums {
                sums: of_values(sums, *absmax),
                counts: std::array::from_fn(|count| u64::from(counts[count])),
                scales: [scale(scales[0]), scale(scales[1])],
            }
        });
        Self {
            layer,
            matrix,
            elements,
            absmax: *absmax,
            histogram: std::array::from_fn(|bin| u64::from(histogram[bin])),
            casts: casts.collect(),
            labels,
        }
    }

    /// True if both are of one matrix of one layer.
    pub fn is_of(&self, other: &Self) -> bool {
        self.layer == other.layer && self.matrix == other.matrix
    }

    /// Adds another run of the layer.
    pub fn add(&mut self, other: &Self) {
        let largest = absmax([self.absmax, other.absmax].into_iter());
        let mut histogram = [0; BINS];
        for part in [&*self, other] {
            let below = octave(largest) - octave(part.absmax);
            add_histogram(&mut histogram, &part.histogram, below);
        }
        self.histogram = histogram;
        self.absmax = largest;
        self.elements += other.elements;
        for (mine, theirs) in self.casts.iter_mut().zip(&other.casts) {
            let sums = mine.sums.iter_mut().zip(theirs.sums);
            sums.for_each(|(mine, theirs)| *mine += theirs);
            let counts = mine.counts.iter_mut().zip(theirs.counts);
            counts.for_each(|(mine, theirs)| *mine += theirs);
            mine.scales = [
                mine.scales[0].min(theirs.scales[0]),
                mine.scales[1].max(theirs.scales[1]),
            ];
        }
    }

    /// The figures.
    pub fn figures(self) -> MatrixHealth {
        let elements = self.elements;
        let absmax = self.absmax.is_finite().then_some(self.absmax);
        let casts = self.labels.iter().map(|label| {
            let CastSums {
                sums,
                counts: [underflown, saturated],
                scales,
            } = self.casts[label.index];
            let share = |count: u64| count as f64 / elements.max(1) as f64;
            let (noise, cosine) = noise_and_cosine(sums);
            CastHealth {
                recipe: label.recipe.to_string(),
                operand: label.operand,
                runs: label.runs,
                cast: label.cast.to_string(),
                underflow: share(underflown),
                saturation: share(saturated),
                noise,
                cosine,
                // Backends differ in the least of numbers with NaN.
                scales: absmax.map(|_| scales),
            }
        });
        MatrixHealth {
            layer: self.layer,
            matrix: self.matrix,
            elements,
            absmax,
            histogram: self.histogram.to_vec(),
            casts: casts.collect(),
        }
    }
}

/// Sums of values: those that were found are of values times the unit of the largest magnitude.
fn of_values(sums: &[f32], absmax: f32) -> [f64; SUMS] {
    let square = f64::from(unit(absmax)).powi(2);
    std::array::from_fn(|sum| f64::from(sums[sum]) / square)
}

/// The squared error over the squared values, and the cosine, where they are defined.
fn noise_and_cosine([xx, ee, xy, yy]: [f64; SUMS]) -> (Option<f64>, Option<f64>) {
    let finite = |value: f64| value.is_finite().then_some(value);
    (finite(ee / xx), finite(xy / (xx * yy).sqrt()))
}

/// The figures of a moment from what was found of it: `numbers` are the largest magnitude and the sums, `counts` the
/// histogram and the counts; without sums and counts it is stored exactly.
pub(crate) fn moment_figures(
    layer: String,
    moment: Moment,
    format: Option<StateFormat>,
    elements: u64,
    numbers: &[f32],
    counts: &[u32],
) -> MomentHealth {
    let (absmax, sums) = numbers.split_first().expect("there is a maximum");
    let (histogram, counts) = counts.split_at(BINS);
    let (noise, cosine) = match sums {
        // Of zeros alone, and of what is not finite, neither is defined.
        [] if *absmax > 0.0 && absmax.is_finite() => (Some(0.0), Some(1.0)),
        [] => (None, None),
        sums => noise_and_cosine(of_values(sums, *absmax)),
    };
    MomentHealth {
        layer,
        moment,
        format,
        elements,
        absmax: absmax.is_finite().then_some(*absmax),
        histogram: histogram.iter().copied().map(u64::from).collect(),
        underflow: f64::from(counts.first().copied().unwrap_or(0)) / elements.max(1) as f64,
        noise,
        cosine,
    }
}
