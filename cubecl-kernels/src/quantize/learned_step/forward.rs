//! The quantizer.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{MatrixGeometry, MatrixView, array, empty, or_unused, storage},
    error::KernelError,
    granularity::Granularity,
    hadamard::HadamardTransform,
    layout::Layout,
    number::{Number, storage::RUN},
    quantize::{
        Input, QuantizeSpec, Quantized,
        buffers::allocate,
        given::finish,
        reduction::cube_max,
        staged::{byte_dtype, byte_width, write_words},
        stored::{Copies, copy_args},
        tile::{read_run, run_read_width},
    },
};

use super::{
    LearnedStep, ResidualRows, SATURATION_GROUP, SavedRounding, check_matrix,
    rounded::{pack_sums, round_run},
    saved::{begins_group, group_flags, holds_groups, residual_words},
    transformed::{
        TilePlan, inverse_step, launch_size, run_place, shared_tile, tile_of, transform_tile,
        transpose_tile,
    },
};

const OPERATION: &str = "learned_step::quantize";

/// Quantizes the transform of `x` to INT4 by a learned step size (equations 2 and 3).
///
/// - `x`: f32, f16 or bf16 `[rows, cols]`, any strides. It is read once, and fastest where columns are neighbours.
/// - `step`: the step size `s`.
/// - `layout`: which copies are written, each packed along its own rows: see [`Quantized`].
/// - `save`: the rows of which residuals are kept for the backward pass; `None` keeps nothing for it.
///
/// The one scale of the result is `s`, and NaN where the transform holds NaN or an infinity, or where `s` is 0,
/// negative, not finite, subnormal or above 2^126. Codes of NaN are 0, and so are all codes where `s` is such a one; of
/// neither is anything clamped.
///
/// The result is that of [`quantize_by`](crate::quantize::quantize_by) on the transform, and that of
/// [`reference::learned_step::quantize`](crate::reference::learned_step::quantize), to the bit.
///
/// # Errors
///
/// When `x` is no matrix of rank 2 or no float tensor, when the blocks of the transform do not divide its axis, or when
/// `step` is not as [`LearnedStep`] says.
pub fn quantize<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    step: LearnedStep<'_, R>,
    transform: HadamardTransform,
    layout: Layout,
    save: Option<ResidualRows>,
) -> Result<(Quantized<R>, Option<SavedRounding<R>>), KernelError> {
    check_matrix(client, OPERATION, x, transform)?;
    step.check(OPERATION)?;
    let spec = QuantizeSpec::new(Number::Int4, Granularity::Tensor).with_layout(layout);
    let input = Input::new(client, OPERATION, x, &spec)?;
    let output = allocate(client, &input.view, &spec);
    let saved = save.map(|sample| allocate_saved(client, &input.view, sample));
    let tiles = match input.view.shape.num_elements() {
        0 => 0,
        _ => tile_of(transform.axis).count(&input.view),
    };
    let maxima = empty(client, vec![tiles], storage::<f32>());
    // SAFETY: the outputs were allocated for this input, and the step size was checked.
    #[allow(unsafe_code)]
    unsafe {
        if tiles > 0 {
            launch(
                client,
                &input,
                step,
                transform,
                &maxima,
                &output,
                saved.as_ref(),
            );
        }
        finish(client, &maxima, (step.steps, step.layer), None, &output);
    }
    Ok((output, saved))
}

fn allocate_saved<R: Runtime>(
    client: &ComputeClient<R>,
    view: &MatrixView,
    sample: ResidualRows,
) -> SavedRounding<R> {
    let (rows, cols) = (view.shape.rows, view.shape.cols);
    let groups = cols.div_ceil(SATURATION_GROUP);
    SavedRounding {
        saturation: empty(client, vec![rows, groups], storage::<u8>()),
        residuals: empty(client, vec![sample.count(rows), cols], storage::<i8>()),
        sample,
    }
}

/// The constants that the kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct ForwardPlan {
    tile: TilePlan,
    copies: Copies,
    /// Elements read at once.
    read: usize,
    /// True where something is kept for the backward pass.
    saves: bool,
    /// Residuals written at once.
    residual_width: usize,
}

/// # Safety
///
/// The outputs were allocated for `input`, which is not empty; `step` was checked, and `maxima` is f32 `[tiles]`.
#[allow(unsafe_code)]
unsafe fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    input: &Input<R>,
    step: LearnedStep<'_, R>,
    transform: HadamardTransform,
    maxima: &TensorHandle<R>,
    output: &Quantized<R>,
    saved: Option<&SavedRounding<R>>,
) {
    let Input { x, view, spec, .. } = input;
    let copies = Copies::new(spec.number.storage(), spec.layout, view.shape);
    let [
        (row_major_vector, row_major_dtype),
        (transposed_vector, transposed_dtype),
    ] = copies.vectors();
    let [values, transposed] = copy_args(output, x);
    let residual_width = match saved {
        Some(_) => byte_width(view.shape.cols, RUN),
        None => RUN,
    };
    let sample = saved.map_or(ResidualRows::ALL, |saved| saved.sample);
    let optional = |tensor: Option<&TensorHandle<R>>, dtype| array(or_unused(tensor, x, dtype));
    let (cubes, units) = launch_size(tile_of(transform.axis).count(view));
    // SAFETY: every access is guarded by the shapes in `geometry`, for which by the caller's promise the outputs were
    // allocated; the residuals by the sample too.
    unsafe {
        forward_kernel::launch_unchecked::<R>(
            client,
            cubes,
            units,
            run_read_width(x, view),
            row_major_vector,
            transposed_vector,
            residual_width.div_ceil(4),
            array((*x).clone()),
            array(step.steps.clone()),
            array(maxima.clone()),
            values,
            transposed,
            optional(saved.map(|saved| &saved.saturation), storage::<u8>()),
            optional(saved.map(|saved| &saved.residuals), storage::<i8>()),
            view.geometry(),
            step.layer as u32,
            sample.interval() as u32,
            sample.offset() as u32,
            0,
            ForwardPlan {
                tile: TilePlan::new(client, transform),
                copies,
                read: run_read_width(x, view),
                saves: saved.is_some(),
                residual_width,
            },
            x.dtype,
            row_major_dtype,
            transposed_dtype,
            byte_dtype(residual_width),
        );
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn forward_kernel<
    F: Numeric,
    NX: Size,
    V: Numeric,
    NV: Size,
    T: Numeric,
    NT: Size,
    E: Numeric,
    NE: Size,
>(
    x: &Array<Vector<F, NX>>,
    steps: &Array<f32>,
    maxima: &mut Array<f32>,
    values: &mut Array<Vector<V, NV>>,
    transposed: &mut Array<Vector<T, NT>>,
    saturation: &mut Array<u8>,
    residuals: &mut Array<Vector<E, NE>>,
    geometry: MatrixGeometry,
    layer: u32,
    interval: u32,
    offset: u32,
    zero: u32,
    #[comptime] plan: ForwardPlan,
    #[define(F)] _x_dtype: StorageType,
    #[define(V)] _values_dtype: StorageType,
    #[define(T)] _transposed_dtype: StorageType,
    #[define(E)] _residuals_dtype: StorageType,
) {
    let axis = comptime!(plan.tile.transform.axis);
    let place = run_place(&geometry, axis);
    if !place.inside {
        terminate!();
    }
    let (row, col) = (place.row, place.col);
    let mut run = read_run::<F, NX>(x, &geometry, 0, row, col, plan.read);
    let mut shared = shared_tile();
    transform_tile(&mut run, &mut shared, plan.tile);
    let rounded = round_run(&run, inverse_step(steps, layer), zero);
    let bits = cube_max(rounded.largest);
    if UNIT_POS == 0 {
        maxima[CUBE_POS] = f32::reinterpret(bits);
    }
    if comptime!(plan.copies.layout.row_major()) {
        if row < geometry.rows {
            write_codes::<V, NV>(
                values,
                &rounded.sums,
                row,
                col,
                geometry.cols,
                comptime!(plan.copies.row_major_width),
            );
        }
    }
    if comptime!(plan.saves) {
        comptime!(assert!(
            holds_groups(tile_of(axis)),
            "a tile of whole groups"
        ));
        let flags = group_flags(&rounded, comptime!(plan.tile.planes));
        if begins_group() && row < geometry.rows && col < geometry.cols {
            let groups = geometry.cols.div_ceil(comptime!(SATURATION_GROUP as u32));
            let at = row * groups + col / comptime!(SATURATION_GROUP as u32);
            saturation[at as usize] = u8::cast_from(flags);
        }
        if row < geometry.rows && row % interval == offset {
            write_words::<E, NE>(
                residuals,
                &residual_words(&rounded, zero),
                row / interval * geometry.cols,
                col,
                geometry.cols,
                comptime!(RUN / 4),
                plan.residual_width,
                false,
            );
        }
    }
    if comptime!(plan.copies.layout.transposed()) {
        let (sums, tile_row, tile_col) = transpose_tile(&rounded.sums, &mut shared, axis);
        let row = row - place.tile_row + tile_row;
        let col = col - place.tile_col + tile_col;
        if col < geometry.cols {
            write_codes::<T, NT>(
                transposed,
                &sums,
                col,
                row,
                geometry.rows,
                comptime!(plan.copies.transposed_width),
            );
        }
    }
}

/// Writes a run to the `row`-th of packed rows of `cols` codes, from column `col`, what of it lies inside.
#[cube]
fn write_codes<V: Numeric, N: Size>(
    out: &mut Array<Vector<V, N>>,
    sums: &Array<u32>,
    row: u32,
    col: u32,
    cols: u32,
    #[comptime] width: usize,
) {
    let row_bytes = cols.div_ceil(2u32);
    write_words::<V, N>(
        out,
        &pack_sums(sums),
        row * row_bytes,
        col / 2,
        row_bytes,
        comptime!(RUN / 8),
        width,
        false,
    );
}
