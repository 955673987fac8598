//! From quantized values back to floats.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{
        MatrixGeometry, MatrixView, array, check_dtype, check_float, cube_grid, empty,
        is_contiguous, read_quad, read_width, storage, write_quad, write_width,
    },
    error::KernelError,
    format::Format,
    shape::MatrixShape,
};

use super::{Quantized, check_granularity, int10_words};

const OPERATION: &str = "dequantize";
const UNITS: u32 = 256;

/// `q * scale`, computed in f32 and rounded once to `dtype` (f32, f16 or bf16): a contiguous tensor of the shape that
/// was quantized, whichever copies of it were kept.
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
    let stored = quantized
        .values
        .clone()
        .or_else(|| {
            quantized.transposed.clone().map(|mut transposed| {
                let rank = transposed.shape().len();
                transposed.metadata.swap(rank - 2, rank - 1);
                transposed
            })
        })
        .ok_or(KernelError::Unsupported {
            operation: OPERATION,
            reason: "no copy of the values was kept".into(),
            remedy: "keep the row-major or the transposed copy",
        })?;
    let view = check(quantized, &stored)?;
    let out = empty(
        client,
        view.tensor_shape(view.shape.rows, view.shape.cols),
        dtype,
    );
    if view.shape.num_elements() == 0 {
        return Ok(out);
    }
    let (scale_rows, scale_cols) = quantized.granularity.scale_block(quantized.shape);
    let quads = view.shape.batch * view.shape.rows * view.shape.cols.div_ceil(4);
    let count = cube_grid(quads.div_ceil(UNITS as usize));
    let out_width = write_width(view.shape.cols);
    // SAFETY: every access is guarded by the shapes in `geometry`, which are those of the buffers.
    #[allow(unsafe_code)]
    unsafe {
        match quantized.format {
            Format::Int8 => {
                let width = read_width(&stored, &view);
                dequantize_kernel::launch_unchecked::<R>(
                    client,
                    count,
                    CubeDim::new_1d(UNITS),
                    width,
                    out_width,
                    array(stored),
                    array(quantized.scales.clone()),
                    array(out.clone()),
                    view.geometry(),
                    view.shape.batch as u32,
                    scale_rows as u32,
                    scale_cols as u32,
                    width,
                    out_width,
                    dtype,
                );
            }
            Format::Int10 => dequantize_packed_kernel::launch_unchecked::<R>(
                client,
                count,
                CubeDim::new_1d(UNITS),
                out_width,
                array(stored),
                array(quantized.scales.clone()),
                array(out.clone()),
                view.geometry(),
                view.shape.batch as u32,
                scale_rows as u32,
                scale_cols as u32,
                out_width,
                dtype,
            ),
        }
    }
    Ok(out)
}

/// The view of the matrix whose values, in `[.., rows, cols]`, are `stored`.
fn check<R: Runtime>(
    quantized: &Quantized<R>,
    stored: &TensorHandle<R>,
) -> Result<MatrixView, KernelError> {
    let Quantized {
        scales,
        format,
        granularity,
        shape,
        ..
    } = quantized;
    check_granularity(OPERATION, *granularity)?;
    let (dtype, width) = match format {
        Format::Int8 => (storage::<i8>(), shape.cols),
        Format::Int10 => (storage::<u32>(), int10_words(shape.cols)),
    };
    let remedy = "pass what `quantize` made";
    check_dtype(OPERATION, "the values", stored, dtype, remedy)?;
    check_dtype(OPERATION, "scales", scales, storage::<f32>(), remedy)?;
    let view = MatrixView::new(OPERATION, stored)?;
    let values = MatrixShape {
        cols: width,
        ..*shape
    };
    if view.shape != values
        || MatrixView::new(OPERATION, scales)?.shape != granularity.scales_shape(*shape)
        || !is_contiguous(scales)
    {
        return Err(KernelError::Shape {
            operation: OPERATION,
            got: format!(
                "{shape:?} by {granularity:?} with values {:?} and scales {:?} of strides {:?}",
                stored.shape(),
                scales.shape(),
                scales.strides()
            ),
            remedy,
        });
    }
    Ok(MatrixView {
        shape: *shape,
        ..view
    })
}

/// Which four elements a unit works on.
#[derive(CubeType, Clone, Copy)]
struct QuadPosition {
    batch: u32,
    row: u32,
    col: u32,
}

#[cube]
fn quad_position(geometry: &MatrixGeometry) -> QuadPosition {
    let quads_of_row = geometry.cols.div_ceil(4);
    let index = CUBE_POS as u32 * UNITS + UNIT_POS;
    let row = index / quads_of_row;
    QuadPosition {
        batch: row / geometry.rows,
        row: row % geometry.rows,
        col: index % quads_of_row * 4,
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn dequantize_kernel<F: Numeric, NV: Size, NO: Size>(
    values: &Array<Vector<i8, NV>>,
    scales: &Array<f32>,
    out: &mut Array<Vector<F, NO>>,
    geometry: MatrixGeometry,
    batch_size: u32,
    scale_rows: u32,
    scale_cols: u32,
    #[comptime] width: usize,
    #[comptime] out_width: usize,
    #[define(F)] _dtype: StorageType,
) {
    let position = quad_position(&geometry);
    if position.batch < batch_size {
        let quad = read_quad::<i8, NV>(
            values,
            &geometry,
            position.batch,
            position.row,
            position.col,
            width,
        );
        write_scaled::<F, NO>(
            out, &quad, scales, &geometry, &position, scale_rows, scale_cols, out_width,
        );
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn dequantize_packed_kernel<F: Numeric, NO: Size>(
    words: &Array<u32>,
    scales: &Array<f32>,
    out: &mut Array<Vector<F, NO>>,
    geometry: MatrixGeometry,
    batch_size: u32,
    scale_rows: u32,
    scale_cols: u32,
    #[comptime] out_width: usize,
    #[define(F)] _dtype: StorageType,
) {
    let position = quad_position(&geometry);
    if position.batch < batch_size {
        let start = position.batch * geometry.batch_stride
            + position.row * geometry.row_stride
            + position.col / 16 * 5;
        let mut quad = Array::<f32>::new(4usize);
        #[unroll]
        for lane in 0..4u32 {
            let bit = (position.col % 16 + lane) * 10;
            let word = (start + bit / 32) as usize;
            let shift = bit % 32;
            let mut bits = words[word] >> shift;
            if shift > 22 {
                bits |= words[word + 1] << (32 - shift);
            }
            // The shifts drop what follows the ten bits and extend their sign.
            quad[lane as usize] = f32::cast_from(i32::reinterpret(bits << 22) >> 22);
        }
        write_scaled::<F, NO>(
            out, &quad, scales, &geometry, &position, scale_rows, scale_cols, out_width,
        );
    }
}

/// Multiplies four neighbours of a row by their scales and writes them.
#[cube]
#[allow(clippy::too_many_arguments)]
fn write_scaled<F: Numeric, N: Size>(
    out: &mut Array<Vector<F, N>>,
    quad: &Array<f32>,
    scales: &Array<f32>,
    geometry: &MatrixGeometry,
    position: &QuadPosition,
    scale_rows: u32,
    scale_cols: u32,
    #[comptime] width: usize,
) {
    let grid_rows = geometry.rows.div_ceil(scale_rows);
    let grid_cols = geometry.cols.div_ceil(scale_cols);
    let scale_row = (position.batch * grid_rows + position.row / scale_rows) * grid_cols;
    let mut scaled = Array::<f32>::new(4usize);
    #[unroll]
    for lane in 0..4u32 {
        let col = min(position.col + lane, geometry.cols - 1);
        scaled[lane as usize] =
            quad[lane as usize] * scales[(scale_row + col / scale_cols) as usize];
    }
    let row_start = (position.batch * geometry.rows + position.row) * geometry.cols;
    write_quad::<f32, F, N>(out, &scaled, row_start, position.col, geometry.cols, width);
}
