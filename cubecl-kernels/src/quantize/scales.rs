//! From the maxima of regions to their scales.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{array, cube_grid, empty, or_unused, storage},
    scale::{ScaleNumber, region_scale, store_scale, two_level::tensor_scale_cube},
};

use super::{
    Quantized,
    absmax::{self, UNITS, largest_of},
};

/// Writes the scales of regions, and where there are some the tensor scales, from the maxima of the regions, f32
/// `[batch, scale_rows, scale_cols]`. Gives back the inverse scales in the place of the maxima.
///
/// # Safety
///
/// The maxima are those of the matrices that `output` was allocated for, which are not empty.
#[allow(unsafe_code)]
pub(super) unsafe fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    maxima: TensorHandle<R>,
    output: &Quantized<R>,
) -> TensorHandle<R> {
    let of_matrices = output
        .tensor_scale
        .as_ref()
        .map(|_| absmax::of_finite_regions(client, &maxima));
    let regions = maxima.shape().iter().product::<usize>();
    let optional =
        |tensor: Option<&TensorHandle<R>>| array(or_unused(tensor, &maxima, storage::<f32>()));
    // SAFETY: the kernel guards its index with the number of regions, by the caller's promise that of the scales.
    unsafe {
        scales_kernel::launch_unchecked::<R>(
            client,
            cube_grid(regions.div_ceil(UNITS)),
            CubeDim::new_1d(UNITS as u32),
            array(maxima.clone()),
            optional(of_matrices.as_ref()),
            array(output.scales.clone()),
            optional(output.tensor_scale.as_ref()),
            regions as u32,
            (regions / output.shape.batch) as u32,
            output.number.largest(),
            output.scale,
            output.scales.dtype,
        );
    }
    maxima
}

/// Writes the scale of each matrix from the maxima of its parts, f32 `[batch, 1, parts]`. Gives back the inverse
/// scales, f32 `[batch, 1, 1]`.
///
/// # Safety
///
/// The maxima are those of the matrices that `output` was allocated for, which are not empty and have a scale each, and
/// no tensor scale.
#[allow(unsafe_code)]
pub(super) unsafe fn of_parts<R: Runtime>(
    client: &ComputeClient<R>,
    maxima: &TensorHandle<R>,
    output: &Quantized<R>,
) -> TensorHandle<R> {
    let (batch, parts) = (maxima.shape()[0], maxima.shape()[2]);
    let inverses = empty(client, vec![batch, 1, 1], storage::<f32>());
    // SAFETY: there is a cube for each matrix, which has so many parts.
    unsafe {
        matrix_scales_kernel::launch_unchecked::<R>(
            client,
            cube_grid(batch),
            CubeDim::new_1d(UNITS as u32),
            array(maxima.clone()),
            array(output.scales.clone()),
            array(inverses.clone()),
            batch as u32,
            parts as u32,
            output.number.largest(),
            output.scale,
            output.scales.dtype,
        );
    }
    inverses
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn matrix_scales_kernel<S: Numeric>(
    maxima: &Array<f32>,
    scales: &mut Array<S>,
    inverses: &mut Array<f32>,
    batch_size: u32,
    parts: u32,
    largest: f32,
    #[comptime] number: ScaleNumber,
    #[define(S)] _dtype: StorageType,
) {
    let matrix = CUBE_POS as u32;
    if matrix >= batch_size {
        terminate!();
    }
    let absmax = largest_of(maxima, matrix * parts, parts);
    if UNIT_POS == 0 {
        let (stored, inverse) = region_scale(absmax, largest, 1.0f32, number);
        store_scale::<S>(scales, matrix, stored, number);
        inverses[matrix as usize] = inverse;
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn scales_kernel<S: Numeric>(
    maxima: &mut Array<f32>,
    maxima_of_matrices: &Array<f32>,
    scales: &mut Array<S>,
    tensor_scales: &mut Array<f32>,
    regions: u32,
    regions_of_matrix: u32,
    largest: f32,
    #[comptime] number: ScaleNumber,
    #[define(S)] _dtype: StorageType,
) {
    let region = CUBE_POS as u32 * comptime!(UNITS as u32) + UNIT_POS;
    if region < regions {
        let mut tensor_scale = 1.0f32;
        if comptime!(number.has_tensor_scale()) {
            let matrix = region / regions_of_matrix;
            let absmax = u32::reinterpret(maxima_of_matrices[matrix as usize]);
            tensor_scale = tensor_scale_cube(absmax, largest);
            if region % regions_of_matrix == 0 {
                tensor_scales[matrix as usize] = tensor_scale;
            }
        }
        let absmax = u32::reinterpret(maxima[region as usize]);
        let (stored, inverse) = region_scale(absmax, largest, tensor_scale, number);
        store_scale::<S>(scales, region, stored, number);
        maxima[region as usize] = inverse;
    }
}
