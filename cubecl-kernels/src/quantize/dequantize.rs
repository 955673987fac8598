//! From quantized values back to floats.
//!
//! Memory bounds it. Where rows of the row-major copy are whole runs and a run has one scale, a unit reads parts of a few
//! runs in words, and writes each as 16 bytes behind those of its neighbour; else four neighbours of a row.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{
        MAX_CUBES, MatrixGeometry, MatrixView, array, check_dtype, check_float, cube_grid, empty,
        is_contiguous, or_unused, read_width, storage, vector_width, write_quad, write_width,
    },
    error::KernelError,
    number::{Storage, Symmetric, storage::RUN},
    operator_input::write_piece,
    scale::{ScaleNumber, load_scale},
    shape::MatrixShape,
};

use super::{
    Quantized, check_granularity, check_number,
    load::{Along, UNITS, load_codes, quad_position, quads},
    whole_runs::{RunCodes, RunGrid, Runs, decode_part, number_of},
};

const OPERATION: &str = "dequantize";
/// Parts of runs that a unit dequantizes.
const PARTS: usize = 4;

/// The constants that the kernel of runs is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct PartsPlan {
    codes: RunCodes,
    /// Elements of a part.
    len: usize,
    /// Elements that are written at once.
    write: usize,
    /// True where all units have as many parts.
    is_whole: bool,
}

/// The constants that the other kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct DequantizePlan {
    number: Symmetric,
    storage: Storage,
    along: Along,
    scale: ScaleNumber,
    /// Stored elements read at once.
    read: usize,
    /// Values written at once.
    write: usize,
}

/// The numbers of the values times their scales, computed in f32 and rounded once to `dtype` (f32, f16 or bf16): a
/// contiguous tensor of the shape that was quantized, whichever copies of it were kept.
///
/// # Errors
///
/// When `dtype` is no float type of the device, or `quantized` holds neither copy, or tensors of other shapes or
/// element types than [`Quantized`] says, or scales that are not contiguous.
pub fn dequantize<R: Runtime>(
    client: &ComputeClient<R>,
    quantized: &Quantized<R>,
    dtype: StorageType,
) -> Result<TensorHandle<R>, KernelError> {
    check_float(client, OPERATION, "the output", dtype)?;
    let number = check_number(OPERATION, quantized.number)?;
    let (stored, along) = stored_copy(OPERATION, quantized)?;
    let view = check(OPERATION, quantized, &stored, along)?;
    let out = empty(
        client,
        view.tensor_shape(view.shape.rows, view.shape.cols),
        dtype,
    );
    if view.shape.num_elements() == 0 {
        return Ok(out);
    }
    if along == Along::Rows {
        if let Some(runs) = Runs::of(quantized, number, &stored, &view) {
            launch_runs(client, &runs, &out);
            return Ok(out);
        }
    }
    let (scale_rows, scale_cols) = quantized.granularity.scale_block(quantized.shape);
    let stored_as = quantized.number.storage();
    let plan = DequantizePlan {
        number,
        storage: stored_as,
        along,
        scale: quantized.scale,
        read: match stored_as {
            Storage::SignedBytes | Storage::Bytes => read_width(&stored, &view),
            Storage::Nibbles | Storage::TenBits => 1,
        },
        write: write_width(view.shape.cols),
    };
    // SAFETY: every access is guarded by the shapes in `geometry`, which are those of the buffers.
    #[allow(unsafe_code)]
    unsafe {
        dequantize_kernel::launch_unchecked::<R>(
            client,
            cube_grid(quads(view.shape).div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            plan.read,
            plan.write,
            array(stored.clone()),
            array(quantized.scales.clone()),
            array(or_unused(
                quantized.tensor_scale.as_ref(),
                &quantized.scales,
                storage::<f32>(),
            )),
            array(out.clone()),
            view.geometry(),
            view.shape.batch as u32,
            scale_rows as u32,
            scale_cols as u32,
            plan,
            stored.dtype,
            quantized.scales.dtype,
            dtype,
        );
    }
    Ok(out)
}

fn launch_runs<R: Runtime>(client: &ComputeClient<R>, runs: &Runs<R>, out: &TensorHandle<R>) {
    let write = vector_width(RUN, &[out]);
    // As many as are written at once: then what neighbours write follows one another.
    let len = if runs.codes.has_parts(write) {
        write
    } else {
        RUN
    };
    let parts = runs.count * RUN / len;
    let cubes = parts.div_ceil(UNITS as usize * PARTS);
    let plan = PartsPlan {
        codes: runs.codes,
        len,
        write,
        // A grid of more has cubes without a part.
        is_whole: parts.is_multiple_of(UNITS as usize * PARTS) && cubes <= MAX_CUBES,
    };
    // SAFETY: a unit whose part lies behind the matrix does nothing; of the others the part, its scale and its place in
    // the output lie inside of their buffers, whose shapes `check` has compared.
    #[allow(unsafe_code)]
    unsafe {
        dequantize_runs_kernel::launch_unchecked::<R>(
            client,
            cube_grid(cubes),
            CubeDim::new_1d(UNITS),
            runs.codes.read(len),
            write,
            array(runs.words.clone()),
            array(runs.scales.clone()),
            array(runs.tensor_scales.clone()),
            array(out.clone()),
            runs.grid(),
            parts as u32,
            plan,
            runs.scales.dtype,
            out.dtype,
        );
    }
}

/// The whole runs of a matrix, if it has them in a row-major copy and is not empty.
///
/// # Errors
///
/// As [`dequantize`].
pub(crate) fn runs_of<R: Runtime>(
    operation: &'static str,
    quantized: &Quantized<R>,
) -> Result<Option<Runs<R>>, KernelError> {
    let number = check_number(operation, quantized.number)?;
    let (stored, along) = stored_copy(operation, quantized)?;
    let view = check(operation, quantized, &stored, along)?;
    Ok(match along {
        Along::Rows if view.shape.num_elements() > 0 => Runs::of(quantized, number, &stored, &view),
        Along::Rows | Along::Columns => None,
    })
}

/// The copy that is read, `[.., rows, cols]`, and along which of the two its codes are packed.
fn stored_copy<R: Runtime>(
    operation: &'static str,
    quantized: &Quantized<R>,
) -> Result<(TensorHandle<R>, Along), KernelError> {
    if let Some(values) = &quantized.values {
        return Ok((values.clone(), Along::Rows));
    }
    let Some(transposed) = &quantized.transposed else {
        return Err(KernelError::Unsupported {
            operation,
            reason: "no copy of the values was kept".into(),
            remedy: "keep the row-major or the transposed copy",
        });
    };
    let mut transposed = transposed.clone();
    let rank = transposed.shape().len();
    if rank >= 2 {
        transposed.metadata.swap(rank - 2, rank - 1);
    }
    Ok((transposed, Along::Columns))
}

/// The view of the matrix whose stored values, in `[.., rows, cols]`, are `stored`.
fn check<R: Runtime>(
    operation: &'static str,
    quantized: &Quantized<R>,
    stored: &TensorHandle<R>,
    along: Along,
) -> Result<MatrixView, KernelError> {
    let Quantized {
        scales,
        tensor_scale,
        number,
        scale,
        granularity,
        shape,
        ..
    } = quantized;
    check_granularity(operation, *granularity)?;
    let stored_as = number.storage();
    let remedy = "pass what `quantize` made";
    check_dtype(operation, "the values", stored, stored_as.dtype(), remedy)?;
    check_dtype(operation, "scales", scales, scale.dtype(), remedy)?;
    let view = MatrixView::new(operation, stored)?;
    let values = match along {
        Along::Rows => MatrixShape {
            cols: stored_as.stored_cols(shape.cols),
            ..*shape
        },
        Along::Columns => MatrixShape {
            rows: stored_as.stored_cols(shape.rows),
            ..*shape
        },
    };
    let has_tensor_scale = match tensor_scale {
        None => !scale.has_tensor_scale(),
        Some(tensor_scale) => {
            scale.has_tensor_scale()
                && tensor_scale.dtype == storage::<f32>()
                && tensor_scale.shape().iter().product::<usize>() == shape.batch
                && is_contiguous(tensor_scale)
        }
    };
    if view.shape != values
        || MatrixView::new(operation, scales)?.shape != granularity.scales_shape(*shape)
        || !is_contiguous(scales)
        || !has_tensor_scale
    {
        return Err(KernelError::Shape {
            operation,
            got: format!(
                "{shape:?} of {number:?} by {granularity:?} with values {:?}, {scale:?} scales {:?} of strides {:?} and \
                 tensor scales {:?}",
                stored.shape(),
                scales.shape(),
                scales.strides(),
                tensor_scale.as_ref().map(|scale| scale.shape().to_vec()),
            ),
            remedy,
        });
    }
    Ok(MatrixView {
        shape: *shape,
        ..view
    })
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn dequantize_kernel<V: Numeric, NV: Size, S: Numeric, F: Numeric, NO: Size>(
    values: &Array<Vector<V, NV>>,
    scales: &Array<S>,
    tensor_scales: &Array<f32>,
    out: &mut Array<Vector<F, NO>>,
    geometry: MatrixGeometry,
    batch_size: u32,
    scale_rows: u32,
    scale_cols: u32,
    #[comptime] plan: DequantizePlan,
    #[define(V)] _values_dtype: StorageType,
    #[define(S)] _scales_dtype: StorageType,
    #[define(F)] _dtype: StorageType,
) {
    let position = quad_position(&geometry);
    if position.batch < batch_size {
        let (batch, row, col) = (position.batch, position.row, position.col);
        let codes = load_codes::<V, NV>(
            values,
            &geometry,
            batch,
            row,
            col,
            comptime!(plan.storage),
            comptime!(plan.along),
            comptime!(plan.read),
        );
        let grid_rows = geometry.rows.div_ceil(scale_rows);
        let grid_cols = geometry.cols.div_ceil(scale_cols);
        let first = (batch * grid_rows + row / scale_rows) * grid_cols;
        let mut tensor_scale = 1.0f32;
        if comptime!(plan.scale.has_tensor_scale()) {
            tensor_scale = tensor_scales[batch as usize];
        }
        let mut scaled = Array::<f32>::new(4usize);
        #[unroll]
        for lane in 0..4u32 {
            let col = min(col + lane, geometry.cols - 1);
            let slot = first + col / scale_cols;
            let scale = load_scale::<S>(scales, slot, tensor_scale, comptime!(plan.scale));
            scaled[lane as usize] = number_of(codes[lane as usize], comptime!(plan.number)) * scale;
        }
        let row_start = (batch * geometry.rows + row) * geometry.cols;
        write_quad::<f32, F, NO>(
            out,
            &scaled,
            row_start,
            col,
            geometry.cols,
            comptime!(plan.write),
        );
    }
}

/// A unit dequantizes a few parts of runs, and those of its neighbours lie between them.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn dequantize_runs_kernel<NW: Size, S: Numeric, F: Numeric, NO: Size>(
    words: &Array<Vector<u32, NW>>,
    scales: &Array<S>,
    tensor_scales: &Array<f32>,
    out: &mut Array<Vector<F, NO>>,
    grid: RunGrid,
    parts: u32,
    #[comptime] plan: PartsPlan,
    #[define(S)] _scales_dtype: StorageType,
    #[define(F)] _dtype: StorageType,
) {
    let first = CUBE_POS as u32 * comptime!(UNITS * PARTS as u32) + UNIT_POS;
    #[unroll]
    for index in 0..PARTS {
        let part = first + comptime!(index as u32 * UNITS);
        if comptime!(plan.is_whole) || part < parts {
            let values = decode_part::<u32, NW, S>(
                words,
                scales,
                tensor_scales,
                &grid,
                part,
                plan.len,
                plan.codes,
            );
            // Apart from the place of what was read: of words of ten bits NVRTC 13.0 computes one from the other as if
            // unsigned numbers did not wrap around, and writes outside of the tensor.
            let part = part + grid.zero;
            write_piece::<F, NO>(out, &values, part, plan.len, plan.write);
        }
    }
}
