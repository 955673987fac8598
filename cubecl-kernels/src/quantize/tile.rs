//! Tiles of a matrix that a cube takes at once, a run of 16 neighbours of a row in each unit's registers.

use cubecl::{prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{MatrixGeometry, MatrixView, read_width_up_to},
    number::storage::RUN,
};

/// Units of a cube.
pub(crate) const UNITS: usize = 256;
/// Units of a plane.
const PLANE: usize = 32;
/// Bytes that a unit reads at once, where it can.
const VECTOR_BYTES: usize = 16;

/// The tile of a cube: as many rows and columns as its units hold runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Tile {
    /// Rows of the tile.
    pub rows: usize,
    /// Columns of the tile, a multiple of 16.
    pub cols: usize,
}

impl Tile {
    /// A square, in which the runs of a transposed copy are as many as those of the rows.
    pub const SQUARE: Self = Self { rows: 64, cols: 64 };

    /// The squarest tile of whole groups of this size.
    pub const fn of_groups(size: usize) -> Self {
        let cols = if size > 64 { size } else { 64 };
        Self {
            rows: UNITS * RUN / cols,
            cols,
        }
    }

    /// Tiles of all matrices.
    pub const fn count(&self, view: &MatrixView) -> usize {
        let shape = view.shape;
        shape.batch * shape.rows.div_ceil(self.rows) * shape.cols.div_ceil(self.cols)
    }
}

/// How many elements of a run are read at once.
pub(crate) fn run_read_width<R: Runtime>(x: &TensorHandle<R>, view: &MatrixView) -> usize {
    read_width_up_to(VECTOR_BYTES / x.dtype.size(), x, view)
}

/// Which tile a cube works on: the matrix, and the tile's first row and column.
#[derive(CubeType, Clone, Copy)]
pub(super) struct TilePosition {
    pub batch: u32,
    pub row: u32,
    pub col: u32,
}

#[cube]
pub(super) fn tile_position(geometry: &MatrixGeometry, #[comptime] tile: Tile) -> TilePosition {
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

/// Row and column, in the tile, of a unit's run.
#[cube]
pub(super) fn run_position(#[comptime] tile: Tile) -> (u32, u32) {
    let runs_of_row = comptime!((tile.cols / RUN) as u32);
    (
        UNIT_POS / runs_of_row,
        UNIT_POS % runs_of_row * comptime!(RUN as u32),
    )
}

/// Reads a run as `f32`, from column `col`, a multiple of 16; 0 outside the matrix.
#[cube]
pub(crate) fn read_run<F: Numeric, N: Size>(
    x: &Array<Vector<F, N>>,
    geometry: &MatrixGeometry,
    batch: u32,
    row: u32,
    col: u32,
    #[comptime] width: usize,
) -> Array<f32> {
    let mut run = Array::<f32>::new(RUN);
    #[unroll]
    for piece in 0..comptime!(RUN / width) {
        let first = comptime!(piece * width);
        let at = col + comptime!((piece * width) as u32);
        let lanes = read_lanes::<F, N>(x, geometry, batch, row, at, width);
        #[unroll]
        for lane in 0..width {
            run[comptime!(first + lane)] = lanes[lane];
        }
    }
    run
}

/// Reads `width` neighbours of a row as `f32`, from column `col`, a multiple of it; 0 outside the matrix.
#[cube]
pub(super) fn read_lanes<F: Numeric, N: Size>(
    x: &Array<Vector<F, N>>,
    geometry: &MatrixGeometry,
    batch: u32,
    row: u32,
    col: u32,
    #[comptime] width: usize,
) -> Array<f32> {
    let mut lanes = Array::<f32>::new(width);
    #[unroll]
    for lane in 0..width {
        lanes[lane] = 0.0f32;
    }
    if row < geometry.rows && col < geometry.cols {
        let start = batch * geometry.batch_stride + row * geometry.row_stride;
        // More than one element at once is read only where columns are neighbours.
        let index = if comptime!(width > 1) {
            (start + col) / comptime!(width as u32)
        } else {
            start + col * geometry.col_stride
        };
        let vector = x[index as usize];
        #[unroll]
        for lane in 0..width {
            lanes[lane] = f32::cast_from(vector[lane]);
        }
    }
    lanes
}

/// [`segment_max`], which all units of the cube must call together, and with `planes`, which are of 32 units, without
/// shared memory where a segment is within one.
#[cube]
pub(crate) fn group_max(
    value: u32,
    #[comptime] units: usize,
    #[comptime] segment: usize,
    #[comptime] planes: bool,
) -> u32 {
    if comptime!(segment == 1) {
        value
    } else if comptime!(planes && segment <= PLANE) {
        let mut largest = value;
        #[unroll]
        for step in 0..comptime!(segment.ilog2()) {
            largest = max(largest, plane_shuffle_xor(largest, comptime!(1u32 << step)));
        }
        largest
    } else {
        segment_max(value, units, segment)
    }
}

/// The largest value among each `segment` consecutive units, a power of two. All units of the cube must call it
/// together.
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
