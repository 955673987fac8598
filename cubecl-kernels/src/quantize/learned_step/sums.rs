//! Sums over the transform of a matrix, in one order whatever the device: in two launches, the first of which leaves a
//! sum for each tile.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{MatrixGeometry, MatrixView, array, empty, storage},
    error::KernelError,
    hadamard::HadamardTransform,
    number::storage::RUN,
    quantize::{
        reduction::cube_sum,
        tile::{UNITS, read_run, run_read_width},
    },
    scale::{MIN_ABSMAX_BITS, fp32::given_scale_cube, is_finite},
};

use super::{
    LARGEST, LARGEST_STEP, LearnedStep, check_matrix,
    rounded::round_run,
    transformed::{
        TilePlan, inverse_step, launch_size, run_place, shared_tile, tile_of, transform_tile,
    },
};

/// Sets the step size of a layer to `2 mean|h| / sqrt(7)`, in place (Appendix A.4). The step size that there is stays
/// where that is no size to divide by, as of a matrix of zeros, an empty one, or one that holds NaN or an infinity: see
/// [`is_step`](super::is_step). A step size that was positive thus stays positive.
///
/// - `x`: f32, f16 or bf16 `[rows, cols]`, any strides.
///
/// Returns the buffer of the step sizes, for callers that thread state through outputs.
///
/// # Errors
///
/// As [`quantize`](super::quantize).
pub fn cold_step<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    step: LearnedStep<'_, R>,
    transform: HadamardTransform,
) -> Result<TensorHandle<R>, KernelError> {
    const OPERATION: &str = "learned_step::cold_step";
    let view = check_matrix(client, OPERATION, x, transform)?;
    step.check(OPERATION)?;
    let elements = view.shape.num_elements();
    if elements > 0 {
        let sums = tile_sums(client, x, &view, step, transform, Term::Magnitude);
        let factor = 2.0 / (elements as f64 * f64::from(LARGEST).sqrt());
        total(client, &sums, step.steps, step, factor as f32, Total::Step);
    }
    Ok(step.steps.clone())
}

/// The mean of `(Z - h)^2`, f32 `[1]`, if `x` were quantized by this step size (Appendix A.5). Since `H` is orthogonal
/// it is the error of the matrix itself too, so that the sizes of `H` compare by it. NaN where the matrix holds NaN or
/// an infinity or the step size has no inverse; 0 for an empty matrix.
///
/// - `x`: f32, f16 or bf16 `[rows, cols]`, any strides.
///
/// # Errors
///
/// As [`quantize`](super::quantize).
pub fn squared_error<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    step: LearnedStep<'_, R>,
    transform: HadamardTransform,
) -> Result<TensorHandle<R>, KernelError> {
    const OPERATION: &str = "learned_step::squared_error";
    let view = check_matrix(client, OPERATION, x, transform)?;
    step.check(OPERATION)?;
    let elements = view.shape.num_elements();
    let sums = match elements {
        0 => empty(client, vec![0], storage::<f32>()),
        _ => tile_sums(client, x, &view, step, transform, Term::SquaredError),
    };
    let out = empty(client, vec![1], storage::<f32>());
    let factor = 1.0 / elements.max(1) as f64;
    total(client, &sums, &out, step, factor as f32, Total::Squares);
    Ok(out)
}

/// Sums of tiles that a unit reads in one turn.
const READS: usize = 32;

/// The terms of the sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Term {
    /// `|h|`.
    Magnitude,
    /// `(code - v)^2`, and NaN where `h` is NaN or infinite.
    SquaredError,
}

/// The use of the sum over all tiles, multiplied by a factor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Total {
    /// It is the result.
    Plain,
    /// It replaces the step size of the layer, unless it is none.
    Step,
    /// It counts the square of the step size.
    Squares,
}

/// The sums of the tiles of a matrix that is not empty, f32 `[tiles]`.
fn tile_sums<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    view: &MatrixView,
    step: LearnedStep<'_, R>,
    transform: HadamardTransform,
    term: Term,
) -> TensorHandle<R> {
    let tiles = tile_of(transform.axis).count(view);
    let sums = empty(client, vec![tiles], storage::<f32>());
    let (cubes, units) = launch_size(tiles);
    let read = run_read_width(x, view);
    // SAFETY: reads are guarded by the shape in `geometry`; there is a sum for each tile.
    #[allow(unsafe_code)]
    unsafe {
        tile_sums_kernel::launch_unchecked::<R>(
            client,
            cubes,
            units,
            read,
            array(x.clone()),
            array(step.steps.clone()),
            array(sums.clone()),
            view.geometry(),
            step.layer as u32,
            0,
            TilePlan::new(client, transform),
            term,
            read,
            x.dtype,
        );
    }
    sums
}

/// Adds up the sums of tiles, f32, and writes what becomes of them to `out`: f32 `[1]`, or the step sizes themselves
/// for [`Total::Step`]. The step size is not read for [`Total::Plain`].
pub(super) fn total<R: Runtime>(
    client: &ComputeClient<R>,
    sums: &TensorHandle<R>,
    out: &TensorHandle<R>,
    step: LearnedStep<'_, R>,
    factor: f32,
    total: Total,
) {
    // SAFETY: reads are guarded by the number of sums, and the layer was checked.
    #[allow(unsafe_code)]
    unsafe {
        total_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            array(sums.clone()),
            array(step.steps.clone()),
            array(out.clone()),
            sums.shape().iter().product::<usize>() as u32,
            step.layer as u32,
            factor,
            total,
        );
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn tile_sums_kernel<F: Numeric, NX: Size>(
    x: &Array<Vector<F, NX>>,
    steps: &Array<f32>,
    sums: &mut Array<f32>,
    geometry: MatrixGeometry,
    layer: u32,
    zero: u32,
    #[comptime] plan: TilePlan,
    #[comptime] term: Term,
    #[comptime] read: usize,
    #[define(F)] _x_dtype: StorageType,
) {
    let place = run_place(&geometry, comptime!(plan.transform.axis));
    if !place.inside {
        terminate!();
    }
    let mut run = read_run::<F, NX>(x, &geometry, 0, place.row, place.col, read);
    let mut shared = shared_tile();
    transform_tile(&mut run, &mut shared, plan);
    let mut sum = 0.0f32;
    if comptime!(term == Term::Magnitude) {
        #[unroll]
        for index in 0..RUN {
            sum += f32::abs(run[index]);
        }
    } else {
        let rounded = round_run(&run, inverse_step(steps, layer), zero);
        #[unroll]
        for index in 0..RUN {
            let rest = rounded.numbers[index] - rounded.quotients[index];
            sum += rest * rest;
        }
        let quiet = select(
            is_finite(rounded.largest),
            0u32,
            comptime!(f32::NAN.to_bits()),
        );
        sum = f32::reinterpret(u32::reinterpret(sum) | quiet);
    }
    let sum = cube_sum::<f32>(sum);
    if UNIT_POS == 0 {
        sums[CUBE_POS] = sum;
    }
}

#[cube(launch_unchecked)]
fn total_kernel(
    sums: &Array<f32>,
    steps: &Array<f32>,
    out: &mut Array<f32>,
    count: u32,
    layer: u32,
    factor: f32,
    #[comptime] total: Total,
) {
    let mut sum = 0.0f32;
    let mut first = UNIT_POS;
    while first < count {
        // Reads of one turn do not wait for each other.
        #[unroll]
        for read in 0..comptime!(READS as u32) {
            let tile = first + comptime!(read * UNITS as u32);
            let of_tile = sums[min(tile, count - 1) as usize];
            sum += select(tile < count, of_tile, 0.0f32);
        }
        first += comptime!((READS * UNITS) as u32);
    }
    let mean = cube_sum::<f32>(sum) * factor;
    if UNIT_POS == 0 {
        match comptime!(total) {
            Total::Plain => out[0] = mean,
            Total::Step => {
                // Below the smallest one the difference wraps around; bits of NaN lie above.
                let above_smallest = u32::reinterpret(mean) - MIN_ABSMAX_BITS;
                if above_smallest <= comptime!(LARGEST_STEP.to_bits() - MIN_ABSMAX_BITS) {
                    out[layer as usize] = mean;
                }
            }
            Total::Squares => {
                let step = given_scale_cube(steps[layer as usize], inverse_step(steps, layer), 0);
                out[0] = mean * step * step;
            }
        }
    }
}
