//! The Delay Threshold controller of fallback quantization (fallback-int8, section 4.4 and Algorithm 2).
//!
//! Picking the largest blocks exactly would need a reduction over the tensor before it is quantized. Instead each
//! layer keeps a threshold from the last step and moves it by a constant factor when its rate left the target range.

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

/// The target range of the fallback rate, and how fast a threshold moves towards it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DelayThreshold {
    /// Below this rate the threshold falls. The paper takes 0.1.
    pub r_min: f32,
    /// Above this rate the threshold rises. The paper takes 0.3.
    pub r_max: f32,
    /// The factor of one step, above 1. The paper takes 1.3.
    pub alpha: f32,
}

/// The state that [`delay_threshold`] leaves behind.
#[derive(Debug)]
pub struct DelayThresholdOutput<R: Runtime> {
    /// f32 `[layers]`: the buffer that was passed in, updated.
    pub thresholds: TensorHandle<R>,
    /// i32 `[layers, 2]`: the buffer that was passed in, zeroed.
    pub counts: TensorHandle<R>,
    /// f32 `[layers]`: the buffer that was passed in, updated.
    pub rates: TensorHandle<R>,
}

/// Moves the threshold of every layer at once, on the device.
///
/// - `thresholds`: f32 `[layers]`, updated in place, kept within [`MIN_THRESHOLD`] and [`MAX_THRESHOLD`] by every move.
/// - `counts`: i32 `[layers, 2]`, the blocks that fell back and all blocks since the last call, as
///   [`quantize_fallback`](crate::fallback::quantize_fallback) adds them up; zeroed.
/// - `rates`: f32 `[layers]`, receives the fallback rate of each layer.
///
/// A layer whose total is 0 (it did not run) keeps its threshold and its rate. All three must be contiguous. The same
/// buffers are also returned, for callers that thread state through outputs.
///
/// # Errors
///
/// When shapes or element types differ from these, or `0 <= r_min <= r_max` and `alpha > 1` do not hold.
pub fn delay_threshold<R: Runtime>(
    client: &ComputeClient<R>,
    thresholds: &TensorHandle<R>,
    counts: &TensorHandle<R>,
    rates: &TensorHandle<R>,
    config: DelayThreshold,
) -> Result<DelayThresholdOutput<R>, KernelError> {
    let DelayThreshold {
        r_min,
        r_max,
        alpha,
    } = config;
    if !(0.0 <= r_min && r_min <= r_max && alpha > 1.0) {
        return Err(KernelError::Unsupported {
            operation: OPERATION,
            reason: format!("{config:?}"),
            remedy: "use 0 <= r_min <= r_max and alpha > 1",
        });
    }
    check_dtype(
        OPERATION,
        "thresholds",
        thresholds,
        storage::<f32>(),
        "use f32",
    )?;
    check_dtype(OPERATION, "counts", counts, storage::<i32>(), "use i32")?;
    check_dtype(OPERATION, "rates", rates, storage::<f32>(), "use f32")?;
    let layers = thresholds.shape().first().copied().unwrap_or_default();
    let shapes_fit = thresholds.shape().len() == 1
        && rates.shape().len() == 1
        && rates.shape()[0] == layers
        && counts.shape().len() == 2
        && counts.shape()[0] == layers
        && counts.shape()[1] == 2;
    if !shapes_fit || ![thresholds, counts, rates].into_iter().all(is_contiguous) {
        return Err(KernelError::Shape {
            operation: OPERATION,
            got: format!(
                "thresholds {:?}, counts {:?}, rates {:?}",
                thresholds.shape(),
                counts.shape(),
                rates.shape()
            ),
            remedy: "pass contiguous tensors [layers], [layers, 2] and [layers]",
        });
    }
    if layers > 0 {
        let cube_dim = CubeDim::new_1d(64);
        // SAFETY: the kernel guards its index with the number of layers, to which all three buffers were checked.
        #[allow(unsafe_code)]
        unsafe {
            delay_threshold_kernel::launch_unchecked::<R>(
                client,
                calculate_cube_count_elemwise(client, layers, cube_dim),
                cube_dim,
                thresholds.clone().into_arg(),
                counts.clone().into_arg(),
                rates.clone().into_arg(),
                layers as u32,
                r_min,
                r_max,
                alpha,
            );
        }
    }
    Ok(DelayThresholdOutput {
        thresholds: thresholds.clone(),
        counts: counts.clone(),
        rates: rates.clone(),
    })
}

/// A new state for this many layers: thresholds of `threshold`, counts and rates of zero.
pub fn initial_state<R: Runtime>(
    client: &ComputeClient<R>,
    layers: usize,
    threshold: f32,
) -> DelayThresholdOutput<R> {
    if layers == 0 {
        return DelayThresholdOutput {
            thresholds: empty(client, vec![0], storage::<f32>()),
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
    counts: &mut Tensor<i32>,
    rates: &mut Tensor<f32>,
    layers: u32,
    r_min: f32,
    r_max: f32,
    alpha: f32,
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
                thresholds[layer] = max(threshold / alpha, MIN_THRESHOLD);
            } else if rate > r_max {
                thresholds[layer] = min(threshold * alpha, MAX_THRESHOLD);
            }
            counts[layer * 2] = 0;
            counts[layer * 2 + 1] = 0;
        }
    }
}
