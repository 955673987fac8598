//! The specification of [`adamw`](mod@crate::adamw), and what a backend without kernels runs: by chunks, each of whole
//! groups, that a caller may spread over threads. Nothing here allocates.

use half::bf16;

use crate::{
    adamw::{Coefficients, Hyperparameters, STATE_STEPS},
    error::KernelError,
    optimizer_state::{MAX_GROUP, Moment, StateFormat},
    philox,
    rounding::StochasticKey,
};

use super::optimizer_state::{dequantize_groups, quantize_group, quantize_group_dithered};

/// The numbers that are the same for all elements of a step.
///
/// The order of operations is that of Burn's AdamW, so that FP32 moments give its parameters to the bit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    coefficients: Coefficients,
    /// `1 - beta_1^t`
    correction_1: f32,
    /// `1 - beta_2^t`
    correction_2: f32,
    /// The inverse of the scale that the gradients have.
    unscale: f32,
    /// The factor that clips the gradient.
    clip: f32,
}

impl Step {
    /// The `t`-th step; the first is 1.
    ///
    /// # Errors
    ///
    /// When a beta is not in `[0, 1)` or epsilon is negative.
    pub fn new(hyperparameters: &Hyperparameters, t: u32) -> Result<Self, KernelError> {
        let coefficients = Coefficients::new(hyperparameters)?;
        let t = t.max(1) as i32;
        Ok(Self {
            coefficients,
            correction_1: 1.0 - coefficients.beta_1.powi(t),
            correction_2: 1.0 - coefficients.beta_2.powi(t),
            unscale: 1.0,
            clip: 1.0,
        })
    }

    /// The step for the gradients of a loss that was multiplied by this [scale](crate::loss_scaling::is_scale).
    pub fn of_scaled_loss(self, scale: f32) -> Self {
        Self {
            unscale: 1.0 / scale,
            ..self
        }
    }

    /// The step for a gradient that is multiplied by its [`clip_factor`].
    pub fn of_clipped_gradient(self, factor: f32) -> Self {
        Self {
            clip: factor,
            ..self
        }
    }

    /// Updates one element: the moments in place, the parameter as the result.
    #[inline]
    pub fn update(&self, p: f32, g: f32, m: &mut f32, v: &mut f32) -> f32 {
        let c = &self.coefficients;
        let g = g * self.unscale * self.clip;
        *m = *m * c.beta_1 + g * c.one_minus_beta_1;
        *v = *v * c.beta_2 + g * g * c.one_minus_beta_2;
        let root = (*v / self.correction_2).sqrt();
        p * c.decay - *m / self.correction_1 / (root + c.epsilon) * c.learning_rate
    }
}

/// The factor that shortens a gradient of this norm to the norm `threshold`: at most 1, and NaN of a norm that is NaN.
/// The operations are in the order of Burn's clipping, so that the bits are the same.
pub fn clip_factor(norm: f32, threshold: f32) -> f32 {
    let factor = 1.0 / (norm + f32::MIN_POSITIVE) * threshold;
    if factor >= 1.0 { 1.0 } else { factor }
}

/// The random numbers that round the moments of a chunk: 16 bits for each value of each moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateDither {
    /// Of the parameter. It may be the key that rounds the parameter to bf16.
    pub key: StochasticKey,
    /// The step, as in [`Step::new`].
    pub t: u32,
    /// The place of the chunk's first value in the flattened parameter, a multiple of 4.
    pub start: usize,
}

impl StateDither {
    /// Of the chunk that begins `elements` further on, a multiple of 4.
    pub(crate) fn behind(self, elements: usize) -> Self {
        Self {
            start: self.start + elements,
            ..self
        }
    }

    /// The dithers of a moment from the chunk's first value on.
    fn fill(&self, moment: Moment, out: &mut [u32]) {
        let row = (self.t ^ STATE_STEPS) as usize;
        for (quarter, out) in (self.start / 4..).zip(out.chunks_mut(4)) {
            let words = philox::neighbours(self.key, row, quarter);
            for (out, word) in out.iter_mut().zip(words) {
                *out = match moment {
                    Moment::First => word << 16,
                    Moment::Second => word & 0xffff_0000,
                };
            }
        }
    }
}

/// One moment of a chunk, updated in place.
#[derive(Debug)]
pub enum MomentChunk<'a> {
    /// FP32.
    Full(&'a mut [f32]),
    /// In a state format.
    Compressed {
        /// Its format. The group is at most [`MAX_GROUP`].
        format: StateFormat,
        /// One code for each element.
        codes: &'a mut [u8],
        /// One scale for each group.
        scales: &'a mut [f32],
        /// One exponent for each group; empty without expansion.
        exponents: &'a mut [u8],
    },
}

impl<'a> MomentChunk<'a> {
    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        match self {
            MomentChunk::Full(values) => values.len(),
            MomentChunk::Compressed { codes, .. } => codes.len(),
        }
    }

    /// Cut into chunks of `elements`, which the group divides.
    pub(crate) fn split(self, elements: usize) -> Vec<Self> {
        let group = self.group().unwrap_or(1);
        assert!(
            elements.is_multiple_of(group),
            "chunks of {elements} elements in groups of {group}"
        );
        match self {
            MomentChunk::Full(values) => {
                values.chunks_mut(elements).map(MomentChunk::Full).collect()
            }
            MomentChunk::Compressed {
                format,
                codes,
                scales,
                exponents,
            } => {
                let groups = elements / format.group;
                let mut exponents = exponents.chunks_mut(groups);
                codes
                    .chunks_mut(elements)
                    .zip(scales.chunks_mut(groups))
                    .map(|(codes, scales)| MomentChunk::Compressed {
                        format,
                        codes,
                        scales,
                        exponents: exponents.next().unwrap_or_default(),
                    })
                    .collect()
            }
        }
    }

    pub(crate) fn group(&self) -> Option<usize> {
        match self {
            MomentChunk::Full(_) => None,
            MomentChunk::Compressed { format, .. } => Some(format.group),
        }
    }

    /// Reads the values from element `start` on.
    fn load(&self, start: usize, moment: Moment, out: &mut [f32]) {
        match self {
            MomentChunk::Full(values) => out.copy_from_slice(&values[start..][..out.len()]),
            MomentChunk::Compressed {
                format,
                codes,
                scales,
                exponents,
            } => {
                let first = start / format.group;
                dequantize_groups(
                    &codes[start..][..out.len()],
                    &scales[first..],
                    if format.expand {
                        &exponents[first..]
                    } else {
                        &[]
                    },
                    *format,
                    moment,
                    out,
                );
            }
        }
    }

    /// Writes the values from element `start` on.
    fn store(&mut self, start: usize, moment: Moment, x: &[f32], dither: Option<StateDither>) {
        match self {
            MomentChunk::Full(values) => values[start..][..x.len()].copy_from_slice(x),
            MomentChunk::Compressed {
                format,
                codes,
                scales,
                exponents,
            } => {
                let codes = codes[start..][..x.len()].chunks_mut(format.group);
                let groups = start / format.group..;
                let mut dithers = [0; MAX_GROUP];
                if let Some(dither) = dither {
                    dither.behind(start).fill(moment, &mut dithers[..x.len()]);
                }
                let dithers = dithers.chunks(format.group);
                let groups = codes.zip(x.chunks(format.group)).zip(dithers).zip(groups);
                for (((codes, x), dithers), index) in groups {
                    let group = match dither {
                        None => quantize_group(x, *format, moment, codes),
                        Some(_) => quantize_group_dithered(x, dithers, *format, moment, codes),
                    };
                    scales[index] = group.scale;
                    if format.expand {
                        exponents[index] = group.exponent;
                    }
                }
            }
        }
    }
}

/// Updates a chunk of a parameter that begins where a group of each moment begins. Without `dither` the moments are
/// rounded to nearest.
///
/// # Panics
///
/// When the slices differ in length, a group is larger than [`MAX_GROUP`], or the smaller group does not divide the
/// larger.
pub fn adamw(
    step: &Step,
    parameter: &mut [f32],
    gradient: &[f32],
    mut first: MomentChunk<'_>,
    mut second: MomentChunk<'_>,
    dither: Option<StateDither>,
) {
    assert_eq!(parameter.len(), gradient.len(), "elements of the gradient");
    let groups = || [first.group(), second.group()].into_iter().flatten();
    let larger = groups().max().unwrap_or(MAX_GROUP);
    let smaller = groups().min().unwrap_or(larger);
    assert!(
        larger <= MAX_GROUP && larger.is_multiple_of(smaller),
        "groups of {smaller} and {larger}"
    );
    let (mut m, mut v) = ([0.0; MAX_GROUP], [0.0; MAX_GROUP]);
    for start in (0..parameter.len()).step_by(larger) {
        let len = larger.min(parameter.len() - start);
        let (m, v) = (&mut m[..len], &mut v[..len]);
        first.load(start, Moment::First, m);
        second.load(start, Moment::Second, v);
        let p = &mut parameter[start..][..len];
        let g = &gradient[start..][..len];
        for (((p, g), m), v) in p.iter_mut().zip(g).zip(m.iter_mut()).zip(v.iter_mut()) {
            *p = step.update(*p, *g, m, v);
        }
        first.store(start, Moment::First, m, dither);
        second.store(start, Moment::Second, v, dither);
    }
}

/// Rounds updated parameters to bf16, up with the probability of what is cut off.
///
/// - `t`: the step, as in [`Step::new`].
/// - `start`: the place of `x[0]` in the flattened parameter, a multiple of 4.
pub fn round_to_bf16(x: &[f32], key: StochasticKey, t: u32, start: usize, out: &mut [bf16]) {
    let quads = x.chunks(4).zip(out.chunks_mut(4));
    for (quarter, (x, out)) in (start / 4..).zip(quads) {
        let words = philox::neighbours(key, t as usize, quarter);
        for ((x, out), word) in x.iter().zip(out).zip(words) {
            *out = if x.is_finite() {
                bf16::from_bits(((x.to_bits() + (word >> 16)) >> 16) as u16)
            } else {
                bf16::from_f32(*x)
            };
        }
    }
}
