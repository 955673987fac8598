//! Quantization by a scale that was given: delayed scaling, learned step sizes (int4-hq-lss, section 3.1).

use cubecl::{prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{array, check_dtype, empty, or_unused, storage},
    error::KernelError,
    granularity::Granularity,
    scale::{
        ScaleNumber,
        fp32::{given_inverse_cube, given_scale_cube},
        is_finite,
    },
};

use super::{
    Input, QuantizeSpec, Quantized,
    absmax::{UNITS, largest_of},
    buffers::allocate,
    encode,
};

const OPERATION: &str = "quantize_by";

/// Quantizes `x`, a matrix of f32, f16 or bf16 with any strides, by a scale that is on the device already, and finds
/// its largest magnitude in the same read.
///
/// - `spec`: [`Granularity::Tensor`] with [`ScaleNumber::F32`].
/// - `scale`: f32 `[1]`. Values are encoded from their products with its inverse, and what is too large becomes the
///   largest number.
/// - returns the values, with one scale for each matrix, and the largest magnitude of all matrices, f32 `[1]`: not
///   scaled, and NaN if they hold NaN or an infinity.
///
/// Nothing is hidden: the scale that goes with the values is NaN if that maximum is, or if the given scale is 0,
/// negative, not finite, subnormal, or above 2^126. The numbers are those of
/// [`reference::quantize_by`](crate::reference::quantize_by), to the bit.
///
/// # Errors
///
/// When `x` is no matrix or no float tensor, `scale` not f32 of one element, or `spec` not as above, or its number not
/// symmetric.
pub fn quantize_by<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    spec: &QuantizeSpec,
    scale: &TensorHandle<R>,
) -> Result<(Quantized<R>, TensorHandle<R>), KernelError> {
    check_given(spec)?;
    let input = Input::new(client, OPERATION, x, spec)?;
    check_dtype(OPERATION, "scale", scale, storage::<f32>(), "pass f32 [1]")?;
    if scale.shape().iter().product::<usize>() != 1 {
        return Err(KernelError::Shape {
            operation: OPERATION,
            got: format!("a scale of shape {:?}", scale.shape()),
            remedy: "pass one number, f32 [1]",
        });
    }
    Ok(by_scale(client, &input, scale))
}

/// [`quantize_by`] of what was checked.
pub(super) fn by_scale<R: Runtime>(
    client: &ComputeClient<R>,
    input: &Input<R>,
    scale: &TensorHandle<R>,
) -> (Quantized<R>, TensorHandle<R>) {
    let output = allocate(client, &input.view, input.spec);
    let tiles = match input.view.shape.num_elements() {
        0 => 0,
        _ => encode::tiles(&input.view, input.spec.number.storage()),
    };
    let maxima = empty(client, vec![tiles], storage::<f32>());
    if tiles > 0 {
        // SAFETY: the output was allocated for this input, and the given scale was checked.
        #[allow(unsafe_code)]
        unsafe {
            encode::by_given(client, input, scale, &maxima, &output);
        }
    }
    let absmax = empty(client, vec![1], storage::<f32>());
    // SAFETY: the scale was checked, and the maxima are those of the tiles.
    #[allow(unsafe_code)]
    unsafe {
        finish(client, &maxima, (scale, 0), Some(&absmax), &output);
    }
    (output, absmax)
}

/// Writes the scale that goes with values which were divided by the `slot`-th of the `given` scales, and the largest of
/// the maxima of tiles, f32 `[1]`, where it is wanted.
///
/// # Safety
///
/// All tensors are f32 and contiguous, and `slot` is an index of `given`.
#[allow(unsafe_code)]
pub(super) unsafe fn finish<R: Runtime>(
    client: &ComputeClient<R>,
    maxima: &TensorHandle<R>,
    (given, slot): (&TensorHandle<R>, usize),
    absmax: Option<&TensorHandle<R>>,
    output: &Quantized<R>,
) {
    let count = |tensor: &TensorHandle<R>| tensor.shape().iter().product::<usize>() as u32;
    // SAFETY: the kernel guards its indices with the number of tiles and of scales.
    unsafe {
        finish_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            array(maxima.clone()),
            array(given.clone()),
            array(output.scales.clone()),
            array(or_unused(absmax, maxima, storage::<f32>())),
            slot as u32,
            count(maxima),
            count(&output.scales),
            absmax.is_some(),
        );
    }
}

/// Accepts one FP32 scale for each matrix.
pub(crate) fn check_given(spec: &QuantizeSpec) -> Result<(), KernelError> {
    let QuantizeSpec {
        granularity, scale, ..
    } = spec;
    if (*granularity, *scale) == (Granularity::Tensor, ScaleNumber::F32) {
        return Ok(());
    }
    Err(KernelError::Unsupported {
        operation: OPERATION,
        reason: format!("a given scale for {granularity:?} with scales of {scale:?}"),
        remedy: "use Granularity::Tensor and ScaleNumber::F32",
    })
}

/// The largest of the maxima of tiles, and the scale that goes with the values.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn finish_kernel(
    maxima: &Array<f32>,
    given: &Array<f32>,
    scales: &mut Array<f32>,
    absmax: &mut Array<f32>,
    slot: u32,
    tiles: u32,
    matrices: u32,
    #[comptime] has_absmax: bool,
) {
    let bits = largest_of(maxima, 0u32, tiles);
    if comptime!(has_absmax) {
        if UNIT_POS == 0 {
            let quiet = select(is_finite(bits), 0u32, comptime!(f32::NAN.to_bits()));
            absmax[0] = f32::reinterpret(bits | quiet);
        }
    }
    let given = given[slot as usize];
    let scale = given_scale_cube(given, given_inverse_cube(given), bits);
    let mut matrix = UNIT_POS;
    while matrix < matrices {
        scales[matrix as usize] = scale;
        matrix += comptime!(UNITS as u32);
    }
}
