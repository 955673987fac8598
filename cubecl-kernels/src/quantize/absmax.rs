//! The largest magnitude of each row, column or matrix: the first of the two reads of regions that do not fit on chip.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{MatrixGeometry, MatrixView, array, cube_grid, empty, read_quad, read_width, storage},
    format::Granularity,
    rounding::magnitude_bits,
    shape::MatrixShape,
};

use super::tile::segment_max;

const UNITS: usize = 256;
/// Rows that one cube reduces to one; longer columns take more than one launch, each on enough cubes.
const ROWS_OF_CUBE: usize = 256;
/// Columns of a cube of the column kernel: neighbours, so that units read neighbouring addresses.
const COLS_OF_CUBE: usize = 64;

/// The largest magnitude, as f32, of each scale of this granularity: `[batch, rows, 1]`, `[batch, 1, cols]` or
/// `[batch, 1, 1]`.
pub(super) fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    view: &MatrixView,
    granularity: Granularity,
) -> TensorHandle<R> {
    match granularity {
        Granularity::Token => rows(client, x, view),
        Granularity::Channel => {
            let mut reduced = columns(client, x, view);
            while reduced.shape()[1] > 1 {
                reduced = columns(client, &reduced, &contiguous(&reduced));
            }
            reduced
        }
        _ => {
            let mut of_rows = rows(client, x, view);
            of_rows.metadata.swap(1, 2);
            rows(client, &of_rows, &contiguous(&of_rows))
        }
    }
}

/// The view of a tensor `[batch, rows, cols]` that this module made.
fn contiguous<R: Runtime>(tensor: &TensorHandle<R>) -> MatrixView {
    let (shape, strides) = (tensor.shape(), tensor.strides());
    MatrixView {
        shape: MatrixShape::batched(shape[0], shape[1], shape[2]),
        batch_stride: strides[0],
        row_stride: strides[1],
        col_stride: strides[2],
        batched: true,
    }
}

fn rows<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    view: &MatrixView,
) -> TensorHandle<R> {
    let MatrixShape { batch, rows, .. } = view.shape;
    let out = empty(client, vec![batch, rows, 1], storage::<f32>());
    let width = read_width(x, view);
    // SAFETY: reads are guarded by the shape in `geometry`, writes by the number of rows.
    #[allow(unsafe_code)]
    unsafe {
        row_absmax_kernel::launch_unchecked::<R>(
            client,
            cube_grid(batch * rows),
            CubeDim::new_1d(UNITS as u32),
            width,
            array(x.clone()),
            array(out.clone()),
            view.geometry(),
            batch as u32,
            width,
            x.dtype,
        );
    }
    out
}

fn columns<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    view: &MatrixView,
) -> TensorHandle<R> {
    let MatrixShape { batch, rows, cols } = view.shape;
    let chunks = rows.div_ceil(ROWS_OF_CUBE);
    let out = empty(client, vec![batch, chunks, cols], storage::<f32>());
    let width = read_width(x, view);
    // SAFETY: reads are guarded by the shape in `geometry`, writes by the number of columns and chunks.
    #[allow(unsafe_code)]
    unsafe {
        column_absmax_kernel::launch_unchecked::<R>(
            client,
            cube_grid(batch * chunks * cols.div_ceil(COLS_OF_CUBE)),
            CubeDim::new_1d(UNITS as u32),
            width,
            array(x.clone()),
            array(out.clone()),
            view.geometry(),
            batch as u32,
            width,
            x.dtype,
        );
    }
    out
}

#[cube(launch_unchecked)]
fn row_absmax_kernel<F: Numeric, N: Size>(
    x: &Array<Vector<F, N>>,
    out: &mut Array<f32>,
    geometry: MatrixGeometry,
    batch_size: u32,
    #[comptime] width: usize,
    #[define(F)] _dtype: StorageType,
) {
    let index = CUBE_POS as u32;
    if index >= batch_size * geometry.rows {
        terminate!();
    }
    let batch = index / geometry.rows;
    let row = index % geometry.rows;
    let mut bits = 0u32;
    let mut col = UNIT_POS * 4;
    while col < geometry.cols {
        let quad = read_quad::<F, N>(x, &geometry, batch, row, col, width);
        #[unroll]
        for lane in 0..4usize {
            bits = max(bits, magnitude_bits(quad[lane]));
        }
        col += comptime!(4 * UNITS as u32);
    }
    let reduced = segment_max(bits, UNITS, UNITS);
    if UNIT_POS == 0 {
        out[index as usize] = f32::reinterpret(reduced);
    }
}

#[cube(launch_unchecked)]
fn column_absmax_kernel<F: Numeric, N: Size>(
    x: &Array<Vector<F, N>>,
    out: &mut Array<f32>,
    geometry: MatrixGeometry,
    batch_size: u32,
    #[comptime] width: usize,
    #[define(F)] _dtype: StorageType,
) {
    let quads_of_cube = comptime!(COLS_OF_CUBE as u32 / 4);
    let rows_at_once = comptime!(UNITS as u32 * 4 / COLS_OF_CUBE as u32);
    let chunks = geometry.rows.div_ceil(comptime!(ROWS_OF_CUBE as u32));
    let cubes_of_chunk = geometry.cols.div_ceil(comptime!(COLS_OF_CUBE as u32));
    let index = CUBE_POS as u32;
    let chunk_index = index / cubes_of_chunk;
    let batch = chunk_index / chunks;
    if batch >= batch_size {
        terminate!();
    }
    let chunk = chunk_index % chunks;
    let quad_of_cube = UNIT_POS % quads_of_cube;
    let col = index % cubes_of_chunk * comptime!(COLS_OF_CUBE as u32) + quad_of_cube * 4;
    let first_row = chunk * comptime!(ROWS_OF_CUBE as u32) + UNIT_POS / quads_of_cube;
    let mut bits = Array::<u32>::new(4usize);
    #[unroll]
    for lane in 0..4usize {
        bits[lane] = 0u32;
    }
    for step in 0..comptime!(ROWS_OF_CUBE as u32 * COLS_OF_CUBE as u32 / (4 * UNITS as u32)) {
        let row = first_row + step * rows_at_once;
        let quad = read_quad::<F, N>(x, &geometry, batch, row, col, width);
        #[unroll]
        for lane in 0..4usize {
            bits[lane] = max(bits[lane], magnitude_bits(quad[lane]));
        }
    }
    // One column of the cube at a time: each unit of the first rows collects one column.
    let mut shared = SharedMemory::<u32>::new(comptime!(UNITS * 4));
    #[unroll]
    for lane in 0..4u32 {
        shared[(UNIT_POS * 4 + lane) as usize] = bits[lane as usize];
    }
    sync_cube();
    if UNIT_POS < comptime!(COLS_OF_CUBE as u32) {
        let mut reduced = 0u32;
        for row in 0..rows_at_once {
            let slot = row * comptime!(COLS_OF_CUBE as u32) + UNIT_POS;
            reduced = max(reduced, shared[slot as usize]);
        }
        let out_col = index % cubes_of_chunk * comptime!(COLS_OF_CUBE as u32) + UNIT_POS;
        if out_col < geometry.cols {
            out[(chunk_index * geometry.cols + out_col) as usize] = f32::reinterpret(reduced);
        }
    }
}
