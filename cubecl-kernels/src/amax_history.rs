//! Histories of the largest magnitudes of tensors, from which delayed scaling takes its scales (NVIDIA's
//! TransformerEngine: amax history).

use cubecl::{prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{array, check_dtype, cube_grid, empty, is_contiguous, storage},
    error::KernelError,
    quantize::{
        absmax::{UNITS, largest_of},
        tile::segment_max,
    },
    scale::has_scale,
};

const OPERATION: &str = "advance_amax_history";
/// The largest exponent of a margin.
pub const MAX_MARGIN: u32 = 64;

/// How maxima follow from histories.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DelayedScaling {
    /// The maximum counts `2^margin` times, at most [`MAX_MARGIN`].
    pub margin: u32,
    /// The last maximum of a history counts instead of the largest.
    pub most_recent: bool,
    /// True in a step in which maxima follow. Of a layer that has none yet they always do.
    pub due: bool,
}

impl DelayedScaling {
    fn check(&self) -> Result<(), KernelError> {
        match self.margin <= MAX_MARGIN {
            true => Ok(()),
            false => Err(KernelError::Unsupported {
                operation: OPERATION,
                reason: format!("a margin of 2^{}", self.margin),
                remedy: "use an exponent of at most 64, such as 0",
            }),
        }
    }

    /// What a maximum is multiplied by.
    pub(crate) fn factor(&self) -> f32 {
        2f32.powi(self.margin as i32)
    }
}

/// The state that [`advance_amax_history`] makes.
#[derive(Debug)]
pub struct AmaxHistory<R: Runtime> {
    /// f32 `[layers]`: the magnitude that becomes the largest number; 0 for a layer that has none yet.
    pub maxima: TensorHandle<R>,
    /// f32 `[layers, length]`: the last step first; 0 where there was none.
    pub history: TensorHandle<R>,
}

/// Ends a step: each layer's history takes the largest maximum of its runs in front and loses its last number, and its
/// maximum follows. To the bit [`reference::amax_history`](crate::reference::amax_history::advance_amax_history).
///
/// - `state`: contiguous.
/// - `runs`: f32 `[layers, runs]`, contiguous: the maxima of a step, not negative; 0 for a run that was not.
///
/// The state of a layer stays as it is if its largest maximum is below [`MIN_ABSMAX`](crate::scale::MIN_ABSMAX), or one
/// of them is not finite.
///
/// # Errors
///
/// When shapes or element types differ from these, or the margin is out of its range.
pub fn advance_amax_history<R: Runtime>(
    client: &ComputeClient<R>,
    state: &AmaxHistory<R>,
    runs: &TensorHandle<R>,
    scaling: &DelayedScaling,
) -> Result<AmaxHistory<R>, KernelError> {
    scaling.check()?;
    let AmaxHistory { maxima, history } = state;
    for (name, tensor) in [("maxima", maxima), ("history", history), ("runs", runs)] {
        check_dtype(OPERATION, name, tensor, storage::<f32>(), "pass f32")?;
    }
    let fits = [maxima, history, runs].into_iter().all(is_contiguous);
    let (&[layers], &[of_history, length], &[of_runs, count], true) = (
        &maxima.shape()[..],
        &history.shape()[..],
        &runs.shape()[..],
        fits,
    ) else {
        return Err(shape_error(state, runs));
    };
    if [of_history, of_runs] != [layers; 2] || length == 0 {
        return Err(shape_error(state, runs));
    }
    let next = AmaxHistory {
        maxima: empty(client, vec![layers], storage::<f32>()),
        history: empty(client, vec![layers, length], storage::<f32>()),
    };
    if layers > 0 {
        // SAFETY: a cube accesses what belongs to its layer, of which there are as many as the kernel is told, within
        // the shapes that were checked, for which the outputs were allocated.
        #[allow(unsafe_code)]
        unsafe {
            amax_history_kernel::launch_unchecked::<R>(
                client,
                cube_grid(layers),
                CubeDim::new_1d(UNITS as u32),
                array(maxima.clone()),
                array(history.clone()),
                array(runs.clone()),
                array(next.maxima.clone()),
                array(next.history.clone()),
                layers as u32,
                length as u32,
                count as u32,
                scaling.factor(),
                f32::MAX / scaling.factor(),
                u32::from(scaling.due),
                scaling.most_recent,
            );
        }
    }
    Ok(next)
}

fn shape_error<R: Runtime>(state: &AmaxHistory<R>, runs: &TensorHandle<R>) -> KernelError {
    KernelError::Shape {
        operation: OPERATION,
        got: format!(
            "maxima {:?}, history {:?}, runs {:?}",
            state.maxima.shape(),
            state.history.shape(),
            runs.shape()
        ),
        remedy: "pass contiguous tensors [layers], [layers, length] and [layers, runs], and a length of at least 1",
    }
}

/// A cube has a layer. `limit` is the largest maximum whose product with `factor` is a number.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn amax_history_kernel(
    maxima: &Array<f32>,
    history: &Array<f32>,
    runs: &Array<f32>,
    next_maxima: &mut Array<f32>,
    next_history: &mut Array<f32>,
    layers: u32,
    length: u32,
    count: u32,
    factor: f32,
    limit: f32,
    due: u32,
    #[comptime] most_recent: bool,
) {
    let layer = CUBE_POS as u32;
    if layer >= layers {
        terminate!();
    }
    let latest = largest_of(runs, layer * count, count);
    let is_kept = has_scale(latest);
    let first = layer * length;
    let mut largest = 0u32;
    let mut at = UNIT_POS;
    while at < length {
        let mut number = latest;
        if !is_kept {
            number = u32::reinterpret(history[(first + at) as usize]);
        } else if at > 0 {
            number = u32::reinterpret(history[(first + at - 1) as usize]);
        }
        next_history[(first + at) as usize] = f32::reinterpret(number);
        largest = max(largest, number);
        at += UNITS as u32;
    }
    let counts = match comptime!(most_recent) {
        true => latest,
        false => segment_max(largest, UNITS, UNITS),
    };
    if UNIT_POS == 0 {
        let mut maximum = maxima[layer as usize];
        if is_kept && (due != 0 || u32::reinterpret(maximum) == 0) {
            maximum = min(f32::reinterpret(counts), limit) * factor;
        }
        next_maxima[layer as usize] = maximum;
    }
}
