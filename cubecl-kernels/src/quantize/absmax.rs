//! The largest magnitude of each region: the first of two reads of the input.
//!
//! Reductions of rows, of groups of a row, of stretches of a column, and of parts of a whole matrix make all of them.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{
        MatrixGeometry, MatrixView, array, cube_grid, empty, or_unused, read_quad, read_width,
        storage,
    },
    granularity::Granularity,
    number::storage::RUN,
    rounding::magnitude_bits,
    scale::{has_scale, is_finite},
    shape::MatrixShape,
};

use super::{
    delayed::DelayedMaximum,
    run::run_max,
    tile::{Tile, read_lanes, read_run, run_position, run_read_width, segment_max, tile_position},
};

/// Units of a cube, here and of the kernels that go on with the maxima.
pub(crate) const UNITS: usize = 256;
/// Rows that one cube reduces to one, at most; longer columns take more than one launch, each on enough cubes.
const ROWS_OF_CUBE: usize = 256;
/// Vectors that a unit of the kernel of parts reads, none of which waits for another. Neighbours are those of units side
/// by side.
const VECTORS_OF_UNIT: usize = 8;
/// Vectors of a part of a matrix.
const VECTORS_OF_PART: usize = VECTORS_OF_UNIT * UNITS;
/// Maxima that a unit reads in one turn.
const READS: usize = 32;
/// Columns of a cube of the column kernel: neighbours, so that units read neighbouring addresses.
const COLS_OF_CUBE: usize = 64;

/// The largest magnitude, as f32, of each region of this granularity: `[batch, scale_rows, scale_cols]`. By its bits,
/// so that NaN lies above infinity above the rest.
pub(crate) fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    view: &MatrixView,
    granularity: Granularity,
) -> TensorHandle<R> {
    match granularity {
        Granularity::Block(size) => {
            let of_groups = groups(client, x, view, size);
            columns(client, &of_groups, &contiguous(&of_groups), size)
        }
        Granularity::Group(size) => groups(client, x, view, size),
        Granularity::Token => rows(client, x, view),
        Granularity::Channel => {
            let mut reduced = columns(client, x, view, ROWS_OF_CUBE);
            while reduced.shape()[1] > 1 {
                reduced = columns(client, &reduced, &contiguous(&reduced), ROWS_OF_CUBE);
            }
            reduced
        }
        Granularity::Tensor => matrices(client, x, view, Count::All),
    }
}

/// The largest of the maxima of regions, `[batch, scale_rows, scale_cols]`, that are finite: `[batch, 1, 1]`.
pub(super) fn of_finite_regions<R: Runtime>(
    client: &ComputeClient<R>,
    maxima: &TensorHandle<R>,
) -> TensorHandle<R> {
    matrices(client, maxima, &contiguous(maxima), Count::Finite)
}

/// The largest magnitude of each matrix, `[batch, 1, 1]`.
fn matrices<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    view: &MatrixView,
    count: Count,
) -> TensorHandle<R> {
    let of_parts = parts(client, x, view, count, None);
    rows(client, &of_parts, &contiguous(&of_parts))
}

/// Which elements count for a maximum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Count {
    All,
    Finite,
}

/// The largest magnitude of each part of each matrix, `[batch, 1, parts]`. With `unless` only where there is no delayed
/// maximum that gets a scale: else undefined, and `x` is not read.
pub(super) fn parts<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    view: &MatrixView,
    count: Count,
    unless: Option<DelayedMaximum<R>>,
) -> TensorHandle<R> {
    let MatrixShape { batch, rows, cols } = view.shape;
    let width = run_read_width(x, view);
    let parts = (rows * cols.div_ceil(width)).div_ceil(VECTORS_OF_PART);
    let out = empty(client, vec![batch, 1, parts], storage::<f32>());
    let delayed = unless.map(|delayed| delayed.maxima);
    // SAFETY: reads are guarded by the shape in `geometry`, writes by the number of parts. The layer is an index of the
    // delayed maxima.
    #[allow(unsafe_code)]
    unsafe {
        part_absmax_kernel::launch_unchecked::<R>(
            client,
            cube_grid(batch * parts),
            CubeDim::new_1d(UNITS as u32),
            width,
            array(x.clone()),
            array(or_unused(delayed, x, storage::<f32>())),
            array(out.clone()),
            view.geometry(),
            batch as u32,
            parts as u32,
            unless.map_or(0, |delayed| delayed.layer) as u32,
            width,
            count,
            unless.is_some(),
            x.dtype,
        );
    }
    out
}

/// The bits of the largest of `count` maxima from the `first` on. All [`UNITS`] of a cube must call it together.
#[cube]
pub(crate) fn largest_of(maxima: &Array<f32>, first: u32, count: u32) -> u32 {
    let mut bits = 0u32;
    let mut next = UNIT_POS;
    while next < count {
        // Reads of one turn do not wait for each other; behind the last maximum it is read once more.
        #[unroll]
        for read in 0..comptime!(READS as u32) {
            let index = min(next + comptime!(read * UNITS as u32), count - 1);
            bits = max(bits, magnitude_bits(maxima[(first + index) as usize]));
        }
        next += comptime!((READS * UNITS) as u32);
    }
    segment_max(bits, UNITS, UNITS)
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

/// Groups of `size` neighbours of a row, a power of two from 16 on.
fn groups<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    view: &MatrixView,
    size: usize,
) -> TensorHandle<R> {
    let MatrixShape { batch, rows, cols } = view.shape;
    let out = empty(
        client,
        vec![batch, rows, cols.div_ceil(size)],
        storage::<f32>(),
    );
    let tile = Tile::of_groups(size);
    let width = run_read_width(x, view);
    // SAFETY: reads are guarded by the shape in `geometry`, writes by the number of rows and groups.
    #[allow(unsafe_code)]
    unsafe {
        group_absmax_kernel::launch_unchecked::<R>(
            client,
            cube_grid(tile.count(view)),
            CubeDim::new_1d(UNITS as u32),
            width,
            array(x.clone()),
            array(out.clone()),
            view.geometry(),
            batch as u32,
            tile,
            size,
            width,
            x.dtype,
        );
    }
    out
}

/// Stretches of `rows_of_stretch` neighbours of a column.
fn columns<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    view: &MatrixView,
    rows_of_stretch: usize,
) -> TensorHandle<R> {
    let MatrixShape { batch, rows, cols } = view.shape;
    let chunks = rows.div_ceil(rows_of_stretch);
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
            rows_of_stretch,
            width,
            x.dtype,
        );
    }
    out
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn part_absmax_kernel<F: Numeric, N: Size>(
    x: &Array<Vector<F, N>>,
    delayed: &Array<f32>,
    out: &mut Array<f32>,
    geometry: MatrixGeometry,
    batch_size: u32,
    parts: u32,
    layer: u32,
    #[comptime] width: usize,
    #[comptime] count: Count,
    #[comptime] unless_delayed: bool,
    #[define(F)] _dtype: StorageType,
) {
    let index = CUBE_POS as u32;
    if index >= batch_size * parts {
        terminate!();
    }
    if comptime!(unless_delayed) {
        if has_scale(u32::reinterpret(delayed[layer as usize])) {
            terminate!();
        }
    }
    let vectors_of_row = geometry.cols.div_ceil(comptime!(width as u32));
    let first = index % parts * comptime!(VECTORS_OF_PART as u32) + UNIT_POS;
    let mut bits = 0u32;
    #[unroll]
    for turn in 0..comptime!(VECTORS_OF_UNIT as u32) {
        let vector = first + comptime!(turn * UNITS as u32);
        let values = read_lanes::<F, N>(
            x,
            &geometry,
            index / parts,
            vector / vectors_of_row,
            vector % vectors_of_row * comptime!(width as u32),
            width,
        );
        #[unroll]
        for lane in 0..width {
            let of_element = magnitude_bits(values[lane]);
            if comptime!(count == Count::Finite) {
                bits = max(bits, select(is_finite(of_element), of_element, 0u32));
            } else {
                bits = max(bits, of_element);
            }
        }
    }
    let reduced = segment_max(bits, UNITS, UNITS);
    if UNIT_POS == 0 {
        out[index as usize] = f32::reinterpret(reduced);
    }
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
#[allow(clippy::too_many_arguments)]
fn group_absmax_kernel<F: Numeric, N: Size>(
    x: &Array<Vector<F, N>>,
    out: &mut Array<f32>,
    geometry: MatrixGeometry,
    batch_size: u32,
    #[comptime] tile: Tile,
    #[comptime] size: usize,
    #[comptime] width: usize,
    #[define(F)] _dtype: StorageType,
) {
    let position = tile_position(&geometry, tile);
    if position.batch >= batch_size {
        terminate!();
    }
    let (tile_row, tile_col) = run_position(tile);
    let (row, col) = (position.row + tile_row, position.col + tile_col);
    let run = read_run::<F, N>(x, &geometry, position.batch, row, col, width);
    let mut bits = run_max(&run);
    if comptime!(size > RUN) {
        bits = segment_max(bits, UNITS, comptime!(size / RUN));
    }
    let size = comptime!(size as u32);
    if col % size == 0 && row < geometry.rows && col < geometry.cols {
        let groups = geometry.cols.div_ceil(size);
        let slot = (position.batch * geometry.rows + row) * groups + col / size;
        out[slot as usize] = f32::reinterpret(bits);
    }
}

#[cube(launch_unchecked)]
fn column_absmax_kernel<F: Numeric, N: Size>(
    x: &Array<Vector<F, N>>,
    out: &mut Array<f32>,
    geometry: MatrixGeometry,
    batch_size: u32,
    #[comptime] rows_of_stretch: usize,
    #[comptime] width: usize,
    #[define(F)] _dtype: StorageType,
) {
    let quads_of_cube = comptime!(COLS_OF_CUBE as u32 / 4);
    let rows_at_once = comptime!(UNITS as u32 * 4 / COLS_OF_CUBE as u32);
    let chunks = geometry.rows.div_ceil(comptime!(rows_of_stretch as u32));
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
    let first_row = chunk * comptime!(rows_of_stretch as u32) + UNIT_POS / quads_of_cube;
    let mut bits = Array::<u32>::new(4usize);
    #[unroll]
    for lane in 0..4usize {
        bits[lane] = 0u32;
    }
    for step in 0..comptime!(rows_of_stretch as u32 * COLS_OF_CUBE as u32 / (4 * UNITS as u32)) {
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
