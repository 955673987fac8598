//! Tiles of a matrix that a cube takes at once, four neighbours of a row in each unit's registers at a time.
//!
//! For the transposed copy the integers pass through a shared tile, whose rows are one byte longer than a multiple of
//! four so that reading its columns does not meet in one bank.

use cubecl::{prelude::*, std::tensor::TensorHandle};

use crate::device::{MatrixGeometry, MatrixView, read_width, write_quad, write_width};

/// Units of a cube.
pub(super) const UNITS: usize = 256;

/// The tile of a cube.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Tile {
    /// Rows of the tile.
    pub rows: usize,
    /// Columns of the tile, a multiple of 4.
    pub cols: usize,
}

impl Tile {
    /// A square, whose transposed copy is written in whole sectors.
    pub const SQUARE: Self = Self { rows: 64, cols: 64 };

    /// As many groups of this size as a cube has units for, one below the other.
    pub const fn of_groups(size: usize) -> Self {
        Self {
            rows: UNITS * 4 / size,
            cols: size,
        }
    }

    /// Groups of four that each unit holds.
    pub const fn quads(&self) -> usize {
        self.rows * self.cols / 4 / UNITS
    }

    /// Tiles of all matrices.
    pub fn count(&self, view: &MatrixView) -> usize {
        let shape = view.shape;
        shape.batch * shape.rows.div_ceil(self.rows) * shape.cols.div_ceil(self.cols)
    }

    /// Elements read at once, and written at once to the row-major and to the transposed copy.
    pub fn widths<R: Runtime>(
        &self,
        x: &TensorHandle<R>,
        view: &MatrixView,
    ) -> (usize, usize, usize) {
        let transposed = if self.rows % 4 == 0 {
            write_width(view.shape.rows)
        } else {
            1
        };
        (
            read_width(x, view),
            write_width(view.shape.cols),
            transposed,
        )
    }
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

/// Row and column, in the tile, of a unit's `index`-th four elements.
#[cube]
pub(super) fn quad_position(#[comptime] index: u32, #[comptime] tile: Tile) -> (u32, u32) {
    let quads_of_row = comptime!(tile.cols as u32 / 4);
    let quad = UNIT_POS + comptime!(index * UNITS as u32);
    (quad / quads_of_row, quad % quads_of_row * 4)
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

/// Bytes of the shared tile behind the transposed copy.
pub(super) fn shared_tile_size(tile: Tile, transposed: bool) -> usize {
    if transposed {
        tile.rows * (tile.cols + 1)
    } else {
        1
    }
}

/// Puts four neighbours of a row into the shared tile.
#[cube]
pub(super) fn stage_quad(
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
pub(super) fn write_transposed<N: Size>(
    transposed: &mut Array<Vector<i8, N>>,
    shared: &SharedMemory<i8>,
    geometry: &MatrixGeometry,
    position: &TilePosition,
    #[comptime] tile: Tile,
    #[comptime] width: usize,
) {
    let pitch = comptime!(tile.cols as u32 + 1);
    let pieces_of_col = comptime!((tile.rows / width) as u32);
    let pieces = comptime!((tile.rows * tile.cols / width / UNITS) as u32);
    for index in 0..pieces {
        let piece = UNIT_POS + index * comptime!(UNITS as u32);
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
pub(super) fn write_tile_quad<N: Size>(
    out: &mut Array<Vector<i8, N>>,
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
