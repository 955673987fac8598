//! From quantized values back to floats.
//!
//! Memory bounds it. Where rows of the row-major copy are whole runs and a run has one scale, a unit reads a run, 16
//! codes, in words, and writes it in vectors of 16 bytes; else four neighbours of a row.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{
        MatrixGeometry, MatrixView, array, check_dtype, check_float, cube_grid, empty,
        is_contiguous, or_unused, read_width, storage, vector_width, write_quad, write_width,
    },
    error::KernelError,
    number::{
        Storage, Symmetric, integer, minifloat,
        storage::{RUN, unpack_run},
    },
    scale::{ScaleNumber, load_scale},
    shape::MatrixShape,
};

use super::{
    Quantized, check_granularity, check_number,
    load::{Along, UNITS, load_codes, quad_position, quads},
};

const OPERATION: &str = "dequantize";

/// The constants that the kernel is compiled for.
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

/// The constants that the kernel of runs is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct RunPlan {
    number: Symmetric,
    storage: Storage,
    scale: ScaleNumber,
    /// Words read at once.
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
    let (stored, along) = stored_copy(quantized)?;
    let view = check(quantized, &stored, along)?;
    let out = empty(
        client,
        view.tensor_shape(view.shape.rows, view.shape.cols),
        dtype,
    );
    if view.shape.num_elements() == 0 {
        return Ok(out);
    }
    let (scale_rows, scale_cols) = quantized.granularity.scale_block(quantized.shape);
    let stored_as = quantized.number.storage();
    if along == Along::Rows && has_whole_runs(&stored, &view, scale_cols) {
        launch_runs(client, quantized, number, &stored, &view, &out);
        return Ok(out);
    }
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

/// True if the stored rows follow one another without gaps, are whole runs, and elements of a run share a scale.
fn has_whole_runs<R: Runtime>(
    stored: &TensorHandle<R>,
    view: &MatrixView,
    scale_cols: usize,
) -> bool {
    let offset = stored.handle.offset_start.unwrap_or_default() as usize;
    is_contiguous(stored) && offset % 16 == 0 && view.shape.cols % RUN == 0 && scale_cols % RUN == 0
}

fn launch_runs<R: Runtime>(
    client: &ComputeClient<R>,
    quantized: &Quantized<R>,
    number: Symmetric,
    stored: &TensorHandle<R>,
    view: &MatrixView,
    out: &TensorHandle<R>,
) {
    let (shape, stored_as) = (view.shape, quantized.number.storage());
    let (scale_rows, scale_cols) = quantized.granularity.scale_block(shape);
    let run_words = stored_as.run_words();
    let plan = RunPlan {
        number,
        storage: stored_as,
        scale: quantized.scale,
        // Runs of five words start at multiples of 4 bytes.
        read: if run_words == 5 { 1 } else { run_words },
        write: vector_width(RUN, &[out]),
    };
    let runs = shape.num_elements() / RUN;
    let words = TensorHandle::new_contiguous(
        vec![runs * run_words],
        stored.handle.clone(),
        storage::<u32>(),
    );
    // SAFETY: a unit whose run lies behind the matrix does nothing; of the others the run, its scale and its place in
    // the output lie inside of their buffers, whose shapes `check` has compared.
    #[allow(unsafe_code)]
    unsafe {
        dequantize_runs_kernel::launch_unchecked::<R>(
            client,
            cube_grid(runs.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            plan.read,
            plan.write,
            array(words),
            array(quantized.scales.clone()),
            array(or_unused(
                quantized.tensor_scale.as_ref(),
                &quantized.scales,
                storage::<f32>(),
            )),
            array(out.clone()),
            runs as u32,
            shape.rows as u32,
            shape.cols as u32,
            scale_rows as u32,
            scale_cols as u32,
            plan,
            quantized.scales.dtype,
            out.dtype,
        );
    }
}

/// The copy that is read, `[.., rows, cols]`, and along which of the two its codes are packed.
fn stored_copy<R: Runtime>(
    quantized: &Quantized<R>,
) -> Result<(TensorHandle<R>, Along), KernelError> {
    if let Some(values) = &quantized.values {
        return Ok((values.clone(), Along::Rows));
    }
    let Some(transposed) = &quantized.transposed else {
        return Err(KernelError::Unsupported {
            operation: OPERATION,
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
    check_granularity(OPERATION, *granularity)?;
    let stored_as = number.storage();
    let remedy = "pass what `quantize` made";
    check_dtype(OPERATION, "the values", stored, stored_as.dtype(), remedy)?;
    check_dtype(OPERATION, "scales", scales, scale.dtype(), remedy)?;
    let view = MatrixView::new(OPERATION, stored)?;
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
        || MatrixView::new(OPERATION, scales)?.shape != granularity.scales_shape(*shape)
        || !is_contiguous(scales)
        || !has_tensor_scale
    {
        return Err(KernelError::Shape {
            operation: OPERATION,
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

/// A unit dequantizes a run.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn dequantize_runs_kernel<NW: Size, S: Numeric, F: Numeric, NO: Size>(
    values: &Array<Vector<u32, NW>>,
    scales: &Array<S>,
    tensor_scales: &Array<f32>,
    out: &mut Array<Vector<F, NO>>,
    runs: u32,
    rows: u32,
    cols: u32,
    scale_rows: u32,
    scale_cols: u32,
    #[comptime] plan: RunPlan,
    #[define(S)] _scales_dtype: StorageType,
    #[define(F)] _dtype: StorageType,
) {
    let run = CUBE_POS as u32 * UNITS + UNIT_POS;
    if run < runs {
        let mut words = Array::<u32>::new(comptime!(plan.storage.run_words()));
        let reads = comptime!(plan.storage.run_words() / plan.read);
        #[unroll]
        for read in 0..reads {
            let vector = values[run as usize * reads + read];
            #[unroll]
            for lane in 0..comptime!(plan.read) {
                words[comptime!(read * plan.read + lane)] = vector[lane];
            }
        }
        let codes = unpack_run(&words, comptime!(plan.storage));
        let runs_of_row = cols / comptime!(RUN as u32);
        let (row, col) = (run / runs_of_row, run % runs_of_row * comptime!(RUN as u32));
        let batch = row / rows;
        let first = (batch * rows.div_ceil(scale_rows) + row % rows / scale_rows)
            * cols.div_ceil(scale_cols);
        let mut tensor_scale = 1.0f32;
        if comptime!(plan.scale.has_tensor_scale()) {
            tensor_scale = tensor_scales[batch as usize];
        }
        let slot = first + col / scale_cols;
        let scale = load_scale::<S>(scales, slot, tensor_scale, comptime!(plan.scale));
        let writes = comptime!(RUN / plan.write);
        #[unroll]
        for write in 0..writes {
            let mut vector = Vector::<F, NO>::empty();
            #[unroll]
            for lane in 0..comptime!(plan.write) {
                let code = codes[comptime!(write * plan.write + lane)];
                vector[lane] = F::cast_from(number_of(code, comptime!(plan.number)) * scale);
            }
            out[run as usize * writes + write] = vector;
        }
    }
}

/// The number of a code.
#[cube]
fn number_of(code: u32, #[comptime] number: Symmetric) -> f32 {
    match comptime!(number) {
        Symmetric::Integer(integer) => integer::decode(code, integer),
        Symmetric::Float(float) => minifloat::decode(code, float),
    }
}
