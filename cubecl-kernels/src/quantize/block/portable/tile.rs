//! How the units of a cube share a tile, and where their patches lie.

use cubecl::prelude::*;

use crate::{
    device::MatrixGeometry,
    quantize::{
        staged::{StagedTile, TILE},
        tile::TilePosition,
    },
};

/// Units along the columns and the rows of a plane, and the rows of a unit's patch.
pub(super) const LANES: usize = 8;
pub(super) const PLANE: usize = 32;
pub(super) const PATCH_ROWS: usize = 4;
/// Rows of the patches of a plane.
pub(super) const PLANE_ROWS: usize = PLANE / LANES * PATCH_ROWS;

/// How the units of a cube share a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct BlockTile {
    pub block: usize,
    /// Columns of a unit's patch.
    pub patch_cols: usize,
    pub units: usize,
    /// Elements read at once, a divisor of `patch_cols`.
    pub read: usize,
    /// True where a read is one of four words to the device.
    pub whole: bool,
    /// True where the elements are bf16, the upper halves of `f32`.
    pub bf16: bool,
    /// Bytes written at once to the row-major and to the transposed copy.
    pub write: (usize, usize),
    /// True where units reduce with plane operations, on planes of 32.
    pub planes: bool,
    /// True where the device multiplies to 64 bits.
    pub wide: bool,
    /// True where the device divides with correct rounding and counts planes along the units, as CUDA does. Vulkan
    /// allows two units in the last place more, with which the products of the largest elements can leave the range of
    /// the integers.
    pub cuda: bool,
    /// True where the cubes lie in a grid of the tiles of one matrix.
    pub flat: bool,
    /// True where no tile reaches over the edge of a matrix.
    pub inside: bool,
    /// True where the elements wait in shared memory, and the rows of a patch are rounded in a loop; see
    /// [`Held`](super::held::Held).
    pub looped: bool,
}

impl BlockTile {
    /// Patches of a plane along the columns of the tile.
    pub const fn plane_cols(&self) -> usize {
        TILE / (LANES * self.patch_cols)
    }

    pub const fn planes_of_cube(&self) -> usize {
        self.units / PLANE
    }

    /// Patches that each unit holds.
    pub const fn patches(&self) -> usize {
        TILE * TILE / (PATCH_ROWS * self.patch_cols) / self.units
    }

    /// Vectors that each unit holds.
    pub const fn held(&self) -> usize {
        self.patches() * PATCH_ROWS * self.patch_cols / self.read
    }

    /// Units of a plane, along the columns, whose patches lie in one block.
    pub const fn lanes_of_block(&self) -> usize {
        let lanes = self.block / self.patch_cols;
        if lanes < LANES { lanes } else { LANES }
    }

    pub const fn staged(&self) -> StagedTile {
        StagedTile {
            patch_cols: self.patch_cols,
            units: self.units,
            write: self.write.1,
            inside: self.inside,
        }
    }
}

#[cube]
pub(super) fn tile_position(
    geometry: &MatrixGeometry,
    #[comptime] tile: BlockTile,
) -> TilePosition {
    let side = comptime!(TILE as u32);
    if comptime!(tile.flat) {
        TilePosition {
            batch: 0u32.runtime(),
            row: CUBE_POS_Y * side,
            col: CUBE_POS_X * side,
        }
    } else {
        let grid_cols = geometry.cols.div_ceil(side);
        let grid = geometry.rows.div_ceil(side) * grid_cols;
        let index = CUBE_POS as u32;
        let in_matrix = index % grid;
        TilePosition {
            batch: index / grid,
            row: in_matrix / grid_cols * side,
            col: in_matrix % grid_cols * side,
        }
    }
}

/// A unit's plane in the cube and its lane in the plane. Without plane operations any numbering will do. CUDA's planes
/// are known to be these; the built-in numbers cost it divisions by a size that its compiler does not know.
#[cube]
pub(super) fn plane_and_lane(#[comptime] tile: BlockTile) -> (u32, u32) {
    if comptime!(tile.planes && !tile.cuda) {
        (PLANE_POS, UNIT_POS_PLANE)
    } else {
        let plane = comptime!(PLANE as u32);
        (UNIT_POS_X / plane, UNIT_POS_X % plane)
    }
}

/// First row and column, in the tile, of a unit's patch.
#[cube]
pub(super) fn patch_position(#[comptime] patch: u32, #[comptime] tile: BlockTile) -> (u32, u32) {
    let (plane, lane) = plane_and_lane(tile);
    let lanes = comptime!(LANES as u32);
    let plane_cols = comptime!(tile.plane_cols() as u32);
    let plane_patch = plane + comptime!(patch * tile.planes_of_cube() as u32);
    let row = plane_patch / plane_cols * comptime!(PLANE_ROWS as u32)
        + lane / lanes * comptime!(PATCH_ROWS as u32);
    let col = (plane_patch % plane_cols * lanes + lane % lanes) * comptime!(tile.patch_cols as u32);
    (row, col)
}

/// Row and column of a unit's patch in the tile's grid of patches.
#[cube]
pub(super) fn grid_position(#[comptime] patch: u32, #[comptime] tile: BlockTile) -> (u32, u32) {
    let (row, col) = patch_position(patch, tile);
    (
        row / comptime!(PATCH_ROWS as u32),
        col / comptime!(tile.patch_cols as u32),
    )
}

/// The place of a patch's column among the words of a unit's transposed copy.
#[cube]
pub(super) fn column_slot(
    #[comptime] patch: usize,
    #[comptime] col: usize,
    #[comptime] tile: BlockTile,
) -> comptime_type!(usize) {
    comptime!(patch * tile.patch_cols + col)
}

/// Index of a block in `[.., scale_rows, scale_cols]`.
#[cube]
pub(super) fn block_slot(
    geometry: &MatrixGeometry,
    at: &TilePosition,
    tile_row: u32,
    tile_col: u32,
    #[comptime] tile: BlockTile,
) -> usize {
    let block = comptime!(tile.block as u32);
    let rows = geometry.rows.div_ceil(block);
    let cols = geometry.cols.div_ceil(block);
    let row = (at.row + tile_row) / block;
    ((at.batch * rows + row) * cols + (at.col + tile_col) / block) as usize
}

/// True where a patch is the first of its block, and inside the matrix.
#[cube]
pub(super) fn is_first_of_block(
    geometry: &MatrixGeometry,
    row: u32,
    col: u32,
    #[comptime] tile: BlockTile,
) -> bool {
    let block = comptime!(tile.block as u32);
    row % block == 0 && col % block == 0 && is_inside(row, col, geometry, tile)
}

/// True where an element lies in the matrix.
#[cube]
pub(super) fn is_inside(
    row: u32,
    col: u32,
    geometry: &MatrixGeometry,
    #[comptime] tile: BlockTile,
) -> bool {
    if comptime!(tile.inside) {
        true.runtime()
    } else {
        row < geometry.rows && col < geometry.cols
    }
}
