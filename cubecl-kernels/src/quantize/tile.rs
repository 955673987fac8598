//! Quantization by group: one read of the input. The tiles also serve the second read of rows, columns and matrices.
//!
//! A cube takes a tile that holds whole blocks, four neighbours of a row in each unit's registers at a time. The units
//! of a block reduce their maxima in shared memory, and round what they hold. For the transposed copy the integers
//! pass through a shared tile, whose rows are one byte longer than a multiple of four so that reading its columns does
//! not meet in one bank.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{
        MatrixGeometry, MatrixView, cube_grid, or_unused, read_quad, read_width, storage,
        write_quad, write_width,
    },
    format::{Format, Granularity, Layout, Rounding},
    rounding::{RandomStream, magnitude_bits, random_stream, round_quad, scale_and_inverse},
};

use super::{QuantizeSpec, Quantized};

const MAX_UNITS: usize = 256;

/// How the units of a cube share a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Tile {
    /// Rows of the tile.
    pub rows: usize,
    /// Columns of the tile, a multiple of 4.
    pub cols: usize,
    /// Units of the cube.
    pub units: usize,
    /// Consecutive units that hold one block: all of them, or those of a group.
    pub segment: usize,
    /// Rows of a block.
    pub block_rows: usize,
}

impl Tile {
    /// A tile of one block, or of some groups.
    pub fn new(granularity: Granularity) -> Self {
        match granularity {
            Granularity::Block(size) => {
                let units = (size * size / 4).min(MAX_UNITS);
                Self {
                    rows: size,
                    cols: size,
                    units,
                    segment: units,
                    block_rows: size,
                }
            }
            Granularity::Group(size) => Self {
                rows: MAX_UNITS * 4 / size,
                cols: size,
                units: MAX_UNITS,
                segment: size / 4,
                block_rows: 1,
            },
            Granularity::Token | Granularity::Channel | Granularity::Tensor => {
                unreachable!("{granularity:?} does not fit a tile")
            }
        }
    }

    /// Groups of four that each unit holds.
    pub const fn quads(&self) -> usize {
        self.rows * self.cols / 4 / self.units
    }

    /// Tiles along the rows and the columns of a matrix.
    pub fn grid(&self, view: &MatrixView) -> (usize, usize) {
        (
            view.shape.rows.div_ceil(self.rows),
            view.shape.cols.div_ceil(self.cols),
        )
    }

    /// Elements written at once to the transposed copy.
    pub fn transposed_width(&self, rows: usize) -> usize {
        if self.rows % 4 == 0 {
            write_width(rows)
        } else {
            1
        }
    }
}

pub(super) fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    view: &MatrixView,
    spec: &QuantizeSpec,
    output: &Quantized<R>,
) {
    let tile = Tile::new(spec.granularity);
    let grid = tile.grid(view);
    let widths = (
        read_width(x, view),
        write_width(view.shape.cols),
        tile.transposed_width(view.shape.rows),
    );
    let copy = |tensor: &Option<TensorHandle<R>>| {
        or_unused(tensor.as_ref(), x, storage::<i8>()).into_arg()
    };
    // SAFETY: every access is guarded by the shapes in `geometry`, for which the outputs were allocated.
    #[allow(unsafe_code)]
    unsafe {
        quantize_tile_kernel::launch_unchecked::<R>(
            client,
            cube_grid(view.shape.batch * grid.0 * grid.1),
            CubeDim::new_1d(tile.units as u32),
            widths.0,
            widths.1,
            widths.2,
            x.clone().into_arg(),
            copy(&output.values),
            copy(&output.transposed),
            output.scales.clone().into_arg(),
            view.geometry(),
            view.shape.batch as u32,
            random_stream(spec.rounding),
            0,
            tile,
            widths,
            spec.layout,
            spec.rounding != Rounding::Nearest,
            Format::Int8.q_max(),
            x.dtype,
        );
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn quantize_tile_kernel<F: Numeric, NX: Size, NV: Size, NT: Size>(
    x: &Tensor<Vector<F, NX>>,
    values: &mut Tensor<Vector<i8, NV>>,
    transposed: &mut Tensor<Vector<i8, NT>>,
    scales: &mut Tensor<f32>,
    geometry: MatrixGeometry,
    batch_size: u32,
    random: RandomStream,
    zero: u32,
    #[comptime] tile: Tile,
    #[comptime] widths: (usize, usize, usize),
    #[comptime] layout: Layout,
    #[comptime] stochastic: bool,
    #[comptime] q_max: i32,
    #[define(F)] _dtype: StorageType,
) {
    let position = tile_position(&geometry, tile);
    if position.batch >= batch_size {
        terminate!();
    }
    let held = read_tile::<F, NX>(x, &geometry, &position, tile, widths.0);
    let absmax_bits = block_absmax(&held, tile);
    let (scale, inverse) = scale_and_inverse(absmax_bits, q_max);
    write_block_scale::<f32>(scales, scale, &geometry, &position, tile);

    let mut shared =
        SharedMemory::<i8>::new(comptime!(shared_tile_size(tile, layout.transposed())));
    #[unroll]
    for index in 0..comptime!(tile.quads() as u32) {
        let (tile_row, tile_col) = quad_position(index, tile);
        let row = position.row + tile_row;
        let col = position.col + tile_col;
        let mut quad = Array::<f32>::new(4usize);
        let mut inverses = Array::<f32>::new(4usize);
        #[unroll]
        for lane in 0..4u32 {
            quad[lane as usize] = held[(index * 4 + lane) as usize];
            inverses[lane as usize] = inverse;
        }
        let q = round_quad(
            &quad,
            &inverses,
            position.batch * geometry.rows + row,
            col,
            &random,
            zero,
            stochastic,
            q_max,
        );
        if comptime!(layout.row_major()) {
            write_tile_quad::<NV>(
                values, &q, &geometry, &position, tile_row, tile_col, widths.1,
            );
        }
        if comptime!(layout.transposed()) {
            stage_quad(&mut shared, &q, tile_row, tile_col, tile);
        }
    }
    if comptime!(layout.transposed()) {
        sync_cube();
        write_transposed::<NT>(transposed, &shared, &geometry, &position, tile, widths.2);
    }
}

/// Which tile a cube works on: the matrix, and the tile's first row and column.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct TilePosition {
    pub batch: u32,
    pub row: u32,
    pub col: u32,
}

#[cube]
pub(crate) fn tile_position(geometry: &MatrixGeometry, #[comptime] tile: Tile) -> TilePosition {
    let tile_rows = comptime!(tile.rows as u32);
    let tile_cols = comptime!(tile.cols as u32);
    let grid_rows = geometry.rows.div_ceil(tile_rows);
    let grid_cols = geometry.cols.div_ceil(tile_cols);
    let index = CUBE_POS as u32;
    let in_matrix = index % (grid_rows * grid_cols);
    TilePosition {
        batch: index / (grid_rows * grid_cols),
        row: in_matrix / grid_cols * tile_rows,
        col: in_matrix % grid_cols * tile_cols,
    }
}

/// Row and column, in the tile, of a unit's `index`-th four elements.
#[cube]
pub(crate) fn quad_position(#[comptime] index: u32, #[comptime] tile: Tile) -> (u32, u32) {
    let quads_of_row = comptime!(tile.cols as u32 / 4);
    let quad = UNIT_POS + comptime!(index * tile.units as u32);
    (quad / quads_of_row, quad % quads_of_row * 4)
}

/// All elements that this unit holds, as `f32`; 0 outside the matrix.
#[cube]
pub(crate) fn read_tile<F: Numeric, N: Size>(
    x: &Tensor<Vector<F, N>>,
    geometry: &MatrixGeometry,
    position: &TilePosition,
    #[comptime] tile: Tile,
    #[comptime] width: usize,
) -> Array<f32> {
    let mut held = Array::<f32>::new(comptime!(tile.quads() * 4));
    #[unroll]
    for index in 0..comptime!(tile.quads() as u32) {
        let (tile_row, tile_col) = quad_position(index, tile);
        let quad = read_quad::<F, N>(
            x,
            geometry,
            position.batch,
            position.row + tile_row,
            position.col + tile_col,
            width,
        );
        #[unroll]
        for lane in 0..4u32 {
            held[(index * 4 + lane) as usize] = quad[lane as usize];
        }
    }
    held
}

/// The bits of the largest magnitude of this unit's block, the same in all units of the block.
#[cube]
pub(crate) fn block_absmax(held: &Array<f32>, #[comptime] tile: Tile) -> u32 {
    let mut bits = 0u32;
    #[unroll]
    for index in 0..comptime!(tile.quads() * 4) {
        bits = max(bits, magnitude_bits(held[index]));
    }
    segment_max(bits, tile.units, tile.segment)
}

/// The largest value among each `segment` consecutive units, a power of two.
#[cube]
pub(crate) fn segment_max(value: u32, #[comptime] units: usize, #[comptime] segment: usize) -> u32 {
    let mut shared = SharedMemory::<u32>::new(units);
    let unit = UNIT_POS as usize;
    let in_segment = unit % segment;
    // The buffer may be read still by units that have not left an earlier reduction.
    sync_cube();
    shared[unit] = value;
    sync_cube();
    let steps = comptime!(segment.ilog2());
    #[unroll]
    for step in 0..steps {
        let distance = comptime!(segment >> (step + 1));
        if in_segment < distance {
            shared[unit] = max(shared[unit], shared[unit + distance]);
        }
        sync_cube();
    }
    shared[unit - in_segment]
}

/// Writes the value of this unit's block to `[.., scale_rows, scale_cols]`, from one unit of the block.
#[cube]
pub(crate) fn write_block_scale<T: Numeric>(
    out: &mut Tensor<T>,
    value: T,
    geometry: &MatrixGeometry,
    position: &TilePosition,
    #[comptime] tile: Tile,
) {
    let block_rows = comptime!(tile.block_rows as u32);
    let block_cols = comptime!(tile.cols as u32);
    let block_in_tile = UNIT_POS / comptime!(tile.segment as u32);
    let row = position.row / block_rows + block_in_tile;
    let rows = geometry.rows.div_ceil(block_rows);
    if UNIT_POS % comptime!(tile.segment as u32) == 0 && row < rows {
        let cols = geometry.cols.div_ceil(block_cols);
        out[((position.batch * rows + row) * cols + position.col / block_cols) as usize] = value;
    }
}

/// Bytes of the shared tile behind the transposed copy.
pub(crate) fn shared_tile_size(tile: Tile, transposed: bool) -> usize {
    if transposed {
        tile.rows * (tile.cols + 1)
    } else {
        1
    }
}

/// Puts four neighbours of a row into the shared tile.
#[cube]
pub(crate) fn stage_quad(
    shared: &mut SharedMemory<i8>,
    q: &Array<i32>,
    tile_row: u32,
    tile_col: u32,
    #[comptime] tile: Tile,
) {
    let pitch = comptime!(tile.cols as u32 + 1);
    #[unroll]
    for lane in 0..4u32 {
        shared[(tile_row * pitch + tile_col + lane) as usize] = i8::cast_from(q[lane as usize]);
    }
}

/// Writes the shared tile to the transposed copy, `[.., cols, rows]`.
#[cube]
pub(crate) fn write_transposed<N: Size>(
    transposed: &mut Tensor<Vector<i8, N>>,
    shared: &SharedMemory<i8>,
    geometry: &MatrixGeometry,
    position: &TilePosition,
    #[comptime] tile: Tile,
    #[comptime] width: usize,
) {
    let pitch = comptime!(tile.cols as u32 + 1);
    let pieces_of_col = comptime!((tile.rows / width) as u32);
    let pieces = comptime!((tile.rows * tile.cols / width / tile.units) as u32);
    for index in 0..pieces {
        let piece = UNIT_POS + index * comptime!(tile.units as u32);
        let tile_row = piece % pieces_of_col * comptime!(width as u32);
        let tile_col = piece / pieces_of_col;
        let row = position.row + tile_row;
        let col = position.col + tile_col;
        if row < geometry.rows && col < geometry.cols {
            let mut vector = Vector::<i8, N>::empty();
            #[unroll]
            for lane in 0..comptime!(width as u32) {
                vector[lane as usize] = shared[((tile_row + lane) * pitch + tile_col) as usize];
            }
            let start = (position.batch * geometry.cols + col) * geometry.rows + row;
            transposed[(start / comptime!(width as u32)) as usize] = vector;
        }
    }
}

/// Writes four neighbours of a row of the tile to a row-major matrix, where they lie inside it.
#[cube]
pub(crate) fn write_tile_quad<N: Size>(
    out: &mut Tensor<Vector<i8, N>>,
    q: &Array<i32>,
    geometry: &MatrixGeometry,
    position: &TilePosition,
    tile_row: u32,
    tile_col: u32,
    #[comptime] width: usize,
) {
    let row = position.row + tile_row;
    if row < geometry.rows {
        let row_start = (position.batch * geometry.rows + row) * geometry.cols;
        write_quad::<i32, i8, N>(
            out,
            q,
            row_start,
            position.col + tile_col,
            geometry.cols,
            width,
        );
    }
}
