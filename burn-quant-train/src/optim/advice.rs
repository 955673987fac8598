//! Advice from health reports: which layers suffer under a recipe, by which figure, and what to change.

use std::{cmp::Reverse, collections::HashMap, fmt};

use serde::{Deserialize, Serialize};

use crate::{
    health::{CastHealth, HealthReport, MatrixHealth},
    layer::{DelayThreshold, LayerPolicy},
    recipe::{LinearMatrix, LinearOperand},
};

/// A matrix is dead from this share of zeros on.
const DEAD: f64 = 0.999;
/// Saturated values, as a share, that a sum feels.
const SATURATED: f64 = 1e-3;
/// Half of what was there.
const UNDERFLOWN: f64 = 0.5;
/// Outliers show in lost values earlier.
const UNDERFLOWN_BY_OUTLIERS: f64 = 0.1;
/// Octaves from the median to the largest magnitude; those of a normal distribution are 2 or 3.
const OUTLIER_OCTAVES: usize = 9;
/// 10 dB.
const NOISY: f64 = 0.1;
/// A layer stands out whose noise is ten times the median of the layers.
const OUTSTANDING: f64 = 10.0;
/// 25 dB: below this nothing stands out.
const QUIET: f64 = 0.003;
/// Measured steps at the end of which a threshold that has not settled is named.
const STEPS_TO_SETTLE: usize = 4;
/// A threshold that moves by less stands still: the smallest factor of the adaptive controller is ten times as large.
const STILL: f32 = 1.0001;
/// Another recipe helps if it leaves a quarter of the trouble.
const HELPS: f64 = 0.25;

/// The fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Fault {
    /// NaN or infinities.
    NotFinite,
    /// All values are 0, nearly: nothing goes through the layer, or no gradient comes.
    Dead,
    /// Values lie beyond the largest number.
    Saturation,
    /// A few magnitudes are so large that ordinary ones beside them are lost.
    Outliers,
    /// Values become 0.
    Underflow,
    /// The error is large beside the values, or beside that of the other layers.
    Noise,
    /// The fallback rate stays outside the range that it is kept in.
    Unsettled,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::NotFinite => "not finite",
            Self::Dead => "dead",
            Self::Saturation => "saturation",
            Self::Outliers => "outliers",
            Self::Underflow => "underflow",
            Self::Noise => "noise",
            Self::Unsettled => "unsettled threshold",
        })
    }
}

/// The remedy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Remedy {
    /// Leave the layer in the compute dtype.
    Skip,
    /// Another recipe that was tried on the same matrix.
    Recipe {
        /// Its name.
        recipe: String,
        /// Its signal-to-noise ratio of the operand, in decibel.
        snr_db: f64,
        /// Its share of values that underflow.
        underflow: f64,
    },
    /// No setting of quantization mends it.
    Look(String),
}

/// A fault of a layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    /// The module path.
    pub layer: String,
    /// The operand in which it shows, where it is one's.
    pub operand: Option<LinearOperand>,
    /// The fault.
    pub fault: Fault,
    /// The figure that says so.
    pub figure: String,
    /// How bad it is, among findings of the same fault.
    pub weight: f64,
    /// The remedy.
    pub remedy: Remedy,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.layer)?;
        if let Some(operand) = self.operand {
            write!(f, " ({operand})")?;
        }
        write!(f, ": {}: {}; ", self.fault, self.figure)?;
        match &self.remedy {
            Remedy::Skip => write!(f, "leave it out: skip(\"{}\")", self.layer),
            Remedy::Recipe {
                recipe,
                snr_db,
                underflow,
            } => {
                let underflow = 100.0 * underflow;
                write!(
                    f,
                    "{recipe} has {snr_db:.0} dB and loses {underflow:.1}% here"
                )
            }
            Remedy::Look(text) => write!(f, "{text}"),
        }
    }
}

/// The advice that follows from reports.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Advice {
    /// The faults, the worst first.
    pub findings: Vec<Finding>,
}

impl Advice {
    /// The layers that are better left in the compute dtype.
    pub fn skipped(&self) -> impl Iterator<Item = &str> {
        let skips = self.findings.iter();
        let skips = skips.filter(|finding| finding.remedy == Remedy::Skip);
        let mut seen: Vec<&str> = Vec::new();
        skips.filter_map(move |finding| {
            let layer = finding.layer.as_str();
            let is_new = !seen.contains(&layer);
            is_new.then(|| seen.push(layer))?;
            Some(layer)
        })
    }

    /// A policy that also leaves out the layers that are to be.
    pub fn policy(&self, policy: LayerPolicy) -> LayerPolicy {
        self.skipped()
            .fold(policy, |policy, layer| policy.skip(layer))
    }
}

impl fmt::Display for Advice {
    /// A line for each finding, and the policy as Rust.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.findings.is_empty() {
            return write!(f, "nothing stands out");
        }
        for finding in &self.findings {
            writeln!(f, "{finding}")?;
        }
        let mut skipped = self.skipped().peekable();
        if skipped.peek().is_none() {
            return Ok(());
        }
        write!(f, "LayerPolicy::default()")?;
        skipped.try_for_each(|layer| write!(f, ".skip({layer:?})"))
    }
}

/// The advice that follows from a run's reports, in the order of their steps: figures of the [last ones](HealthReport::latest),
/// and rates of the last few.
pub fn advise(reports: &[HealthReport]) -> Advice {
    let mut findings = Vec::new();
    if let Some(last) = HealthReport::latest(reports) {
        let medians = median_noises(&last);
        for matrix in &last.matrices {
            findings.extend(of_values(matrix));
            if !matrix.is_not_finite() && matrix.zeros() < DEAD {
                findings.extend(of_casts(matrix, &medians));
            }
        }
    }
    findings.extend(unsettled(reports));
    findings.sort_by(|a, b| {
        let order = (a.fault, Reverse(a.weight.to_bits()));
        order.cmp(&(b.fault, Reverse(b.weight.to_bits())))
    });
    Advice { findings }
}

/// The median noise over the layers of each operand of the running recipe.
fn median_noises(report: &HealthReport) -> HashMap<LinearOperand, f64> {
    let mut noises: HashMap<LinearOperand, Vec<f64>> = HashMap::new();
    for cast in report.matrices.iter().flat_map(MatrixHealth::running) {
        let of_operand = noises.entry(cast.operand).or_default();
        of_operand.extend(cast.noise);
    }
    let medians = noises.into_iter().filter_map(|(operand, mut noises)| {
        noises.sort_by(f64::total_cmp);
        Some((operand, *noises.get(noises.len() / 2)?))
    });
    medians.collect()
}

/// The faults of a matrix, however it is quantized.
fn of_values(matrix: &MatrixHealth) -> Option<Finding> {
    let finding = |fault, figure: String, look: &str| Finding {
        layer: matrix.layer.clone(),
        operand: Some(match matrix.matrix {
            LinearMatrix::X => LinearOperand::X,
            LinearMatrix::W => LinearOperand::W,
            LinearMatrix::Gradient => LinearOperand::Gradient,
        }),
        fault,
        figure,
        weight: 1.0,
        remedy: Remedy::Look(look.to_owned()),
    };
    if matrix.is_not_finite() {
        return Some(finding(
            Fault::NotFinite,
            format!("{} has NaN or infinities", matrix.matrix),
            "lower the learning rate, clip gradients, or find the operation that divides by 0",
        ));
    }
    (matrix.zeros() >= DEAD).then(|| {
        finding(
            Fault::Dead,
            format!("{:.1}% of {} is 0", 100.0 * matrix.zeros(), matrix.matrix),
            "look at the activation before or behind it, and at the initialization",
        )
    })
}

/// The faults of a matrix as the running recipe quantizes it: one finding for each operand, the worst.
fn of_casts<'a>(
    matrix: &'a MatrixHealth,
    medians: &'a HashMap<LinearOperand, f64>,
) -> impl Iterator<Item = Finding> + 'a {
    // Operands that are the same numbers have one finding.
    let running: Vec<_> = matrix.running().collect();
    let is_first = move |index: usize| {
        let same = |a: &CastHealth, b: &CastHealth| (&a.cast, a.noise) == (&b.cast, b.noise);
        running[..index]
            .iter()
            .all(|other| !same(other, running[index]))
    };
    let casts = matrix.running().enumerate();
    let casts = casts.filter_map(move |(index, cast)| is_first(index).then_some(cast));
    casts.filter_map(move |cast| {
        let nonzero = (1.0 - matrix.zeros()).max(f64::MIN_POSITIVE);
        let lost = cast.underflow / nonzero;
        let octaves = matrix.median_octave().unwrap_or(0);
        let noise = cast.noise.unwrap_or(f64::INFINITY);
        // Gradients have a wide range without outliers, and what becomes 0 at random is right on average.
        let by_outliers = match matrix.matrix {
            LinearMatrix::X | LinearMatrix::W => UNDERFLOWN_BY_OUTLIERS,
            LinearMatrix::Gradient => UNDERFLOWN,
        };
        let percent = |share: f64| format!("{:.1}%", 100.0 * share);
        let decibel = -10.0 * noise.log10();
        let median = medians.get(&cast.operand).copied();
        let median = median.unwrap_or(noise);
        let (fault, weight, figure) = if noise.is_infinite() {
            let figure = String::from("it became NaN or infinite");
            (Fault::NotFinite, 1.0, figure)
        } else if cast.saturation > SATURATED {
            let share = percent(cast.saturation);
            let figure = format!("{share} of the values lie beyond the largest number");
            (Fault::Saturation, cast.saturation, figure)
        } else if octaves >= OUTLIER_OCTAVES && lost > by_outliers {
            let share = percent(lost);
            let figure =
                format!("the largest magnitude is 2^{octaves} times the median, and {share} of the values become 0");
            (Fault::Outliers, lost, figure)
        } else if lost > UNDERFLOWN {
            let figure = format!("{} of the values become 0", percent(lost));
            (Fault::Underflow, lost, figure)
        } else if noise > NOISY {
            let figure = format!("a signal-to-noise ratio of {decibel:.1} dB");
            (Fault::Noise, noise, figure)
        } else if noise > QUIET && noise > OUTSTANDING * median {
            let of_median = -10.0 * median.log10();
            let figure =
                format!("a signal-to-noise ratio of {decibel:.1} dB, where half of the layers have {of_median:.1} or more");
            (Fault::Noise, noise, figure)
        } else {
            return None;
        };
        Some(Finding {
            layer: matrix.layer.clone(),
            operand: Some(cast.operand),
            fault,
            figure: format!("{figure} ({})", cast.cast),
            weight,
            remedy: remedy(matrix, cast, fault),
        })
    })
}

/// The recipe that mends most, if one was tried that mends enough; else the compute dtype.
fn remedy(matrix: &MatrixHealth, cast: &CastHealth, fault: Fault) -> Remedy {
    let trouble = |cast: &CastHealth| match fault {
        Fault::Outliers | Fault::Underflow => cast.underflow,
        Fault::Saturation => cast.saturation,
        Fault::NotFinite | Fault::Dead | Fault::Noise | Fault::Unsettled => {
            cast.noise.unwrap_or(f64::INFINITY)
        }
    };
    let others = matrix.casts.iter();
    let others = others.filter(|other| !other.runs && other.operand == cast.operand);
    // Where outliers are most of the signal, a ratio of signal to noise speaks of them alone.
    let allowed = cast.noise.map_or(QUIET, |noise| noise.max(QUIET));
    let enough = |other: &&CastHealth| {
        let is_quiet = other.noise.is_some_and(|noise| noise <= allowed);
        is_quiet && trouble(other) <= HELPS * trouble(cast)
    };
    let best = others
        .filter(enough)
        .min_by(|a, b| trouble(a).total_cmp(&trouble(b)));
    match best.and_then(|best| Some((best, best.snr_db()?))) {
        Some((best, snr_db)) => Remedy::Recipe {
            recipe: best.recipe.clone(),
            snr_db,
            underflow: best.underflow,
        },
        None => Remedy::Skip,
    }
}

/// Layers whose fallback rate was outside the range of the controller in each of the last measured steps.
fn unsettled(reports: &[HealthReport]) -> Vec<Finding> {
    let Some(first) = reports.len().checked_sub(STEPS_TO_SETTLE) else {
        return Vec::new();
    };
    let last = &reports[first..];
    let DelayThreshold {
        rate_min, rate_max, ..
    } = last[STEPS_TO_SETTLE - 1].controller;
    let layers = last[0].layers.iter().map(|state| &state.layer);
    let findings = layers.filter_map(|layer| {
        let states = last.iter().filter_map(|report| {
            let mut states = report.layers.iter();
            states.find(|state| state.layer == *layer)
        });
        let rates: Vec<f32> = states.clone().filter_map(|state| state.rate).collect();
        let outside = rates
            .iter()
            .filter(|rate| !(rate_min..=rate_max).contains(*rate));
        if rates.len() < STEPS_TO_SETTLE || outside.count() < rates.len() {
            return None;
        }
        let fold = |f: fn(f32, f32) -> f32| rates.iter().copied().reduce(f);
        let (lowest, highest) = fold(f32::min).zip(fold(f32::max))?;
        let thresholds: Vec<_> = states.filter_map(|state| state.threshold).collect();
        // A threshold that goes up and down by turns may have been measured in one phase only; one that still moves
        // goes one way.
        let ratios = thresholds.windows(2).map(|pair| pair[1] / pair[0]);
        let moves = |way: fn(f32, f32) -> bool| ratios.clone().all(|ratio| way(ratio, STILL));
        let rises = moves(|ratio, still| ratio > still);
        let falls = moves(|ratio, still| ratio < 1.0 / still);
        let swings = !rises && !falls;
        let (text, look) = match (swings, rises) {
            (true, _) => (
                "is between",
                "no threshold settles: its blocks have nearly one maximum. A constant factor also swings where their maxima lie \
                 close together: see ThresholdFactor",
            ),
            (false, true) => (
                "stays between",
                "the threshold still rises: measure later, or begin with a larger one",
            ),
            (false, false) => (
                "stays between",
                "the threshold still falls: measure later, or begin with a smaller one",
            ),
        };
        let figure = format!(
            "the fallback rate {text} {:.0}% and {:.0}%, outside {:.0}% to {:.0}%",
            100.0 * lowest,
            100.0 * highest,
            100.0 * rate_min,
            100.0 * rate_max,
        );
        Some(Finding {
            layer: layer.clone(),
            operand: Some(LinearOperand::X),
            fault: Fault::Unsettled,
            figure,
            weight: if swings { 1.0 } else { 0.0 },
            remedy: Remedy::Look(look.to_owned()),
        })
    });
    findings.collect()
}
