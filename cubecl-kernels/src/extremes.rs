//! The smallest and the largest of scales, for health.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{array, check_contiguous, check_dtype, empty, or_unused, storage},
    error::KernelError,
    quantize::{reduction::cube_max, tile::UNITS},
    rounding::magnitude_bits,
};

const OPERATION: &str = "extremes";
/// Scales of a unit before there are more cubes.
const OF_UNIT: usize = 16;
/// More cubes than a device holds at once gain nothing.
const MAX_CUBES: usize = 256;

/// The smallest and the largest of scales as they are stored, and what multiplies them: f32 `[3]`. Of scales that hold
/// NaN the largest is NaN.
///
/// - `scales`: f32 or u8, at least one, none negative, contiguous, of any rank. Bytes count as the numbers 0 to 255.
/// - `of_scales`: f32 `[1]`, what multiplies the scales; `None`: 1.
///
/// # Errors
///
/// When shapes or element types differ from these.
pub fn extremes<R: Runtime>(
    client: &ComputeClient<R>,
    scales: &TensorHandle<R>,
    of_scales: Option<&TensorHandle<R>>,
) -> Result<TensorHandle<R>, KernelError> {
    if scales.dtype != storage::<u8>() {
        let remedy = "pass scales of f32 or u8";
        check_dtype(OPERATION, "scales", scales, storage::<f32>(), remedy)?;
    }
    let count = check_contiguous(OPERATION, scales)?;
    if let Some(scale) = of_scales {
        check_dtype(OPERATION, "of_scales", scale, storage::<f32>(), "use f32")?;
    }
    if count == 0 || of_scales.is_some_and(|it| it.shape().iter().product::<usize>() != 1) {
        return Err(KernelError::Shape {
            operation: OPERATION,
            got: format!(
                "scales {:?}, which {:?} multiplies",
                scales.shape(),
                of_scales.map(|it| it.shape())
            ),
            remedy: "pass at least one scale, and a scale of scales [1]",
        });
    }
    let cubes = count.div_ceil(UNITS * OF_UNIT).min(MAX_CUBES);
    let of_cubes = launch(client, scales, of_scales, [count, cubes], 0);
    Ok(match cubes {
        1 => of_cubes,
        _ => launch(client, &of_cubes, of_scales, [cubes, 1], cubes),
    })
}

/// The extremes that so many cubes find: the smallest of `count` values, and of those from `largest_from` on the
/// largest.
fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    values: &TensorHandle<R>,
    of_scales: Option<&TensorHandle<R>>,
    [count, cubes]: [usize; 2],
    largest_from: usize,
) -> TensorHandle<R> {
    let out = empty(client, vec![2 * cubes + 1], storage::<f32>());
    let scale = or_unused(of_scales, values, storage::<f32>());
    // SAFETY: reads are guarded by the number of values, and there is room for two numbers of each cube and one more.
    #[allow(unsafe_code)]
    unsafe {
        extremes_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            array(values.clone()),
            array(scale),
            array(out.clone()),
            count as u32,
            largest_from as u32,
            of_scales.is_some(),
            values.dtype,
        );
    }
    out
}

#[cube(launch_unchecked)]
fn extremes_kernel<E: Numeric>(
    values: &Array<E>,
    of_scales: &Array<f32>,
    out: &mut Array<f32>,
    count: u32,
    largest_from: u32,
    #[comptime] has_scale: bool,
    #[define(E)] _dtype: StorageType,
) {
    // Bits of numbers that are not negative are ordered as the numbers are.
    let mut largest = 0u32;
    let mut largest_complement = 0u32;
    let mut index = CUBE_POS as u32 * comptime!(UNITS as u32) + UNIT_POS;
    while index < count {
        let low = magnitude_bits(f32::cast_from(values[index as usize]));
        let high = magnitude_bits(f32::cast_from(values[(largest_from + index) as usize]));
        largest_complement = max(largest_complement, comptime!(u32::MAX) - low);
        largest = max(largest, high);
        index += CUBE_COUNT as u32 * comptime!(UNITS as u32);
    }
    let largest = cube_max(largest);
    let largest_complement = cube_max(largest_complement);
    if UNIT_POS == 0 {
        out[CUBE_POS] = f32::reinterpret(comptime!(u32::MAX) - largest_complement);
        out[CUBE_COUNT + CUBE_POS] = f32::reinterpret(largest);
        if CUBE_POS == 0 {
            out[2 * CUBE_COUNT] = if comptime!(has_scale) {
                of_scales[0]
            } else {
                1.0f32.runtime()
            };
        }
    }
}
