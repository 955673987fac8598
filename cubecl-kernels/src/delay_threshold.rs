//! The Delay Threshold controller of fallback quantization (fallback-int8, section 4.4 and Algorithm 2).
//!
//! Picking the largest blocks exactly would need a reduction over the tensor before it is quantized. Instead each
//! layer keeps a threshold from the last step and moves it by a factor when its rate left the target range.
//!
//! With the paper's one factor for all moves, no threshold settles where the largest magnitudes of a layer's blocks lie
//! closer together than that factor: each move takes the rate across its whole range. So a layer has a factor of its
//! own, which adapts by the rule of Rprop (Riedmiller and Braun, 1993): what it has above 1 is halved when the
//! threshold turns around, and grows by a fifth when it goes on. Halving more than a fifth undoes matters: where the
//! rate is noise, turns and repeats are equally likely, and the factor still becomes small.

use cubecl::{calculate_cube_count_elemwise, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{check_dtype, empty, is_contiguous, storage},
    error::KernelError,
    scale::MIN_ABSMAX,
};

/// Smallest threshold that the controller sets, 2^-100: below it no block has a scale.
pub const MIN_THRESHOLD: f32 = MIN_ABSMAX;
/// Largest threshold that the controller sets, 2^100.
pub const MAX_THRESHOLD: f32 = 1.0 / MIN_ABSMAX;

const OPERATION: &str = "delay_threshold";

/// The part of a factor above 1 is multiplied by this when the threshold turns around (Rprop's η⁻).
pub const SHRINK: f32 = 0.5;
/// The part of a factor above 1 is multiplied by this when the threshold goes on as before (Rprop's η⁺).
pub const GROWTH: f32 = 1.2;

/// The target range of the fallback rate, and how fast a threshold moves towards it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DelayThreshold {
    /// Below this rate the threshold falls. The paper takes 0.1.
    pub r_min: f32,
    /// Above this rate the threshold rises. The paper takes 0.3.
    pub r_max: f32,
    /// The largest factor of one step, and that of a layer's first, above 1. The paper takes 1.3.
    pub alpha: f32,
    /// The smallest factor of one step, above 1 and at most `alpha`. With `alpha` itself every step has the same
    /// factor, as in the paper.
    pub alpha_min: f32,
}

impl DelayThreshold {
    /// The paper's settings.
    pub const PAPER: Self = Self {
        r_min: 0.1,
        r_max: 0.3,
        alpha: 1.3,
        alpha_min: 1.3,
    };
}

/// The state that [`delay_threshold`] leaves behind.
#[derive(Debug)]
pub struct DelayThresholdOutput<R: Runtime> {
    /// f32 `[layers]`: the buffer that was passed in, updated.
    pub thresholds: TensorHandle<R>,
    /// f32 `[layers]`: the buffer that was passed in, updated.
    pub moves: TensorHandle<R>,
    /// i32 `[layers, 2]`: the buffer that was passed in, zeroed.
    pub counts: TensorHandle<R>,
    /// f32 `[layers]`: the buffer that was passed in, updated.
    pub rates: TensorHandle<R>,
}

/// Moves the threshold of every layer at once, on the device.
///
/// - `thresholds`: f32 `[layers]`, updated in place, kept within [`MIN_THRESHOLD`] and [`MAX_THRESHOLD`] by every move.
/// - `moves`: f32 `[layers]`, updated in place: what the factor of the layer's last move has above 1, negative where
///   the threshold fell; 0 before the first.
/// - `counts`: i32 `[layers, 2]`, the blocks that fell back and all blocks since the last call, as
///   [`quantize_fallback`](crate::fallback::quantize_fallback) adds them up; zeroed.
/// - `rates`: f32 `[layers]`, receives the fallback rate of each layer.
///
/// A layer whose total is 0 (it did not run) keeps its threshold and its rate. All must be contiguous. The same buffers
/// are also returned, for callers that thread state through outputs.
///
/// # Errors
///
/// When shapes or element types differ from these, or `0 <= r_min <= r_max` and `1 < alpha_min <= alpha` do not hold.
pub fn delay_threshold<R: Runtime>(
    client: &ComputeClient<R>,
    thresholds: &TensorHandle<R>,
    moves: &TensorHandle<R>,
    counts: &TensorHandle<R>,
    rates: &TensorHandle<R>,
    config: DelayThreshold,
) -> Result<DelayThresholdOutput<R>, KernelError> {
    check_config(&config)?;
    let layers = check_state(thresholds, moves, counts, rates)?;
    if layers > 0 {
        let cube_dim = CubeDim::new_1d(64);
        // SAFETY: the kernel guards its index with the number of layers, to which all buffers were checked.
        #[allow(unsafe_code)]
        unsafe {
            delay_threshold_kernel::launch_unchecked::<R>(
                client,
                calculate_cube_count_elemwise(client, layers, cube_dim),
                cube_dim,
                thresholds.clone().into_arg(),
                moves.clone().into_arg(),
                counts.clone().into_arg(),
                rates.clone().into_arg(),
                layers as u32,
                config.r_min,
                config.r_max,
                config.alpha - 1.0,
                config.alpha_min - 1.0,
            );
        }
    }
    Ok(DelayThresholdOutput {
        thresholds: thresholds.clone(),
        moves: moves.clone(),
        counts: counts.clone(),
        rates: rates.clone(),
    })
}

fn check_config(config: &DelayThreshold) -> Result<(), KernelError> {
    let DelayThreshold {
        r_min,
        r_max,
        alpha,
        alpha_min,
    } = *config;
    match 0.0 <= r_min && r_min <= r_max && 1.0 < alpha_min && alpha_min <= alpha {
        true => Ok(()),
        false => Err(KernelError::Unsupported {
            operation: OPERATION,
            reason: format!("{config:?}"),
            remedy: "use 0 <= r_min <= r_max and 1 < alpha_min <= alpha",
        }),
    }
}

/// The number of layers of a state that fits together.
fn check_state<R: Runtime>(
    thresholds: &TensorHandle<R>,
    moves: &TensorHandle<R>,
    counts: &TensorHandle<R>,
    rates: &TensorHandle<R>,
) -> Result<usize, KernelError> {
    let f32s = [
        ("thresholds", thresholds),
        ("moves", moves),
        ("rates", rates),
    ];
    for (name, tensor) in f32s {
        check_dtype(OPERATION, name, tensor, storage::<f32>(), "use f32")?;
    }
    check_dtype(OPERATION, "counts", counts, storage::<i32>(), "use i32")?;
    let layers = thresholds.shape().first().copied().unwrap_or_default();
    let is_column = |tensor: &TensorHandle<R>| tensor.shape().as_slice() == [layers];
    let shapes_fit = f32s.iter().all(|(_, tensor)| is_column(tensor))
        && counts.shape().as_slice() == [layers, 2];
    let contiguous = [thresholds, moves, counts, rates]
        .into_iter()
        .all(is_contiguous);
    match shapes_fit && contiguous {
        true => Ok(layers),
        false => Err(KernelError::Shape {
            operation: OPERATION,
            got: format!(
                "thresholds {:?}, moves {:?}, counts {:?}, rates {:?}",
                thresholds.shape(),
                moves.shape(),
                counts.shape(),
                rates.shape()
            ),
            remedy: "pass contiguous tensors [layers], [layers], [layers, 2] and [layers]",
        }),
    }
}

/// A new state for this many layers: thresholds of `threshold`, moves, counts and rates of zero.
pub fn initial_state<R: Runtime>(
    client: &ComputeClient<R>,
    layers: usize,
    threshold: f32,
) -> DelayThresholdOutput<R> {
    if layers == 0 {
        return DelayThresholdOutput {
            thresholds: empty(client, vec![0], storage::<f32>()),
            moves: empty(client, vec![0], storage::<f32>()),
            counts: empty(client, vec![0, 2], storage::<i32>()),
            rates: empty(client, vec![0], storage::<f32>()),
        };
    }
    let upload = |shape: Vec<usize>, bytes: &[u8], dtype| {
        TensorHandle::new_contiguous(shape, client.create_from_slice(bytes), dtype)
    };
    let zeros = vec![0u32; 2 * layers];
    DelayThresholdOutput {
        thresholds: upload(
            vec![layers],
            bytemuck::cast_slice(&vec![threshold; layers]),
            storage::<f32>(),
        ),
        moves: upload(
            vec![layers],
            bytemuck::cast_slice(&zeros[..layers]),
            storage::<f32>(),
        ),
        counts: upload(
            vec![layers, 2],
            bytemuck::cast_slice(&zeros),
            storage::<i32>(),
        ),
        rates: upload(
            vec![layers],
            bytemuck::cast_slice(&zeros[..layers]),
            storage::<f32>(),
        ),
    }
}

#[cube(launch_unchecked)]
fn delay_threshold_kernel(
    thresholds: &mut Tensor<f32>,
    moves: &mut Tensor<f32>,
    counts: &mut Tensor<i32>,
    rates: &mut Tensor<f32>,
    layers: u32,
    r_min: f32,
    r_max: f32,
    largest: f32,
    smallest: f32,
) {
    let layer = ABSOLUTE_POS;
    if layer < layers as usize {
        let fallback = counts[layer * 2];
        let total = counts[layer * 2 + 1];
        if total != 0 {
            let rate = f32::cast_from(fallback) / f32::cast_from(total);
            let threshold = thresholds[layer];
            rates[layer] = rate;
            if rate < r_min {
                let excess = next_excess(-moves[layer], largest, smallest);
                thresholds[layer] = bounded(threshold / (1.0 + excess));
                moves[layer] = -excess;
            } else if rate > r_max {
                let excess = next_excess(moves[layer], largest, smallest);
                thresholds[layer] = bounded(threshold * (1.0 + excess));
                moves[layer] = excess;
            }
            counts[layer * 2] = 0;
            counts[layer * 2 + 1] = 0;
        }
    }
}

/// The next factor's part above 1. `along` is that of the last one, positive where the threshold goes on as before.
#[cube]
fn next_excess(along: f32, largest: f32, smallest: f32) -> f32 {
    let adapted = select(along < 0.0, -along * SHRINK, along * GROWTH);
    let adapted = select(along == 0.0, largest, adapted);
    // The bounds also keep compilers from merging the product with the sum that follows, which would round once.
    max(min(adapted, largest), smallest)
}

#[cube]
fn bounded(threshold: f32) -> f32 {
    max(min(threshold, MAX_THRESHOLD), MIN_THRESHOLD)
}
