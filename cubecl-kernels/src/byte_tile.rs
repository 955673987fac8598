//! Matrices of a byte an element, written in tiles of 128 x 128 bytes by cubes of 256 units, in either layout or both.
//!
//! Each unit holds a *patch* of four rows and 16 columns: four words of 16 bytes, which it writes at once to the
//! row-major copy. For the transposed copy patches pass through shared memory.

use cubecl::{ir::StorageType, prelude::*};

use crate::{
    layout::Layout,
    quantize::staged::{
        CHUNK, StagedTile, TILE, byte_dtype, byte_width, read_staged, stage_patch, write_words,
    },
};

/// Units of a cube.
pub(crate) const UNITS: usize = 256;
/// Rows of a patch.
pub(crate) const PATCH_ROWS: usize = 4;
/// Words of a row of a patch, and of the patch.
pub(crate) const LINE_WORDS: usize = CHUNK / 4;
pub(crate) const PATCH_WORDS: usize = PATCH_ROWS * LINE_WORDS;
/// Patches of a row of the tile.
const CHUNKS: usize = TILE / CHUNK;

/// How the copies of a matrix are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ByteCopies {
    layout: Layout,
    /// Bytes written at once to the row-major copy.
    row_major_width: usize,
    staged: StagedTile,
}

impl ByteCopies {
    /// Of a matrix `[rows, cols]`.
    pub fn new(layout: Layout, rows: usize, cols: usize) -> Self {
        // A copy that is not written must not tell kernels apart.
        let width = |is_written, bytes| match is_written {
            true => byte_width(bytes, CHUNK),
            false => CHUNK,
        };
        Self {
            layout,
            row_major_width: width(layout.row_major(), cols),
            staged: StagedTile {
                patch_cols: CHUNK,
                units: UNITS,
                write: width(layout.transposed(), rows),
                inside: false,
            },
        }
    }

    /// Elements of the vectors that are written at once to the row-major and the transposed copy, and their types.
    pub fn vectors(&self) -> [(usize, StorageType); 2] {
        [self.row_major_width, self.staged.write]
            .map(|width| (width.div_ceil(4), byte_dtype(width)))
    }
}

/// Tiles of a matrix.
pub(crate) fn tiles(rows: usize, cols: usize) -> usize {
    rows.div_ceil(TILE) * cols.div_ceil(TILE)
}

/// The place of a unit's patch: the first row and column of its tile in the matrix, and its own in the tile.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct PatchPosition {
    pub first_row: u32,
    pub first_col: u32,
    pub tile_row: u32,
    pub tile_col: u32,
}

/// The patch of this unit in a matrix of `cols` columns.
#[cube]
pub(crate) fn patch_position(cols: u32) -> PatchPosition {
    position_of(CUBE_POS as u32, cols)
}

/// The matrix of a batch, each `[rows, cols]`, and the patch of this unit in it.
#[cube]
pub(crate) fn batched_patch_position(rows: u32, cols: u32) -> (u32, PatchPosition) {
    let side = comptime!(TILE as u32);
    let tiles = rows.div_ceil(side) * cols.div_ceil(side);
    let index = CUBE_POS as u32;
    (index / tiles, position_of(index % tiles, cols))
}

#[cube]
fn position_of(index: u32, cols: u32) -> PatchPosition {
    let side = comptime!(TILE as u32);
    let grid_cols = cols.div_ceil(side);
    PatchPosition {
        first_row: index / grid_cols * side,
        first_col: index % grid_cols * side,
        tile_row: UNIT_POS / comptime!(CHUNKS as u32) * comptime!(PATCH_ROWS as u32),
        tile_col: UNIT_POS % comptime!(CHUNKS as u32) * comptime!(CHUNK as u32),
    }
}

/// A patch of zeros.
#[cube]
pub(crate) fn zero_patch() -> Array<u32> {
    let mut lines = Array::<u32>::new(PATCH_WORDS);
    #[unroll]
    for word in 0..PATCH_WORDS {
        lines[word] = 0u32;
    }
    lines
}

/// Writes the patches of a tile to the copies of the `batch`-th matrix `[rows, cols]`, where they lie inside it. All
/// units of the cube must call it together.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn write_patch<V: Numeric, NV: Size, T: Numeric, NT: Size>(
    values: &mut Array<Vector<V, NV>>,
    transposed: &mut Array<Vector<T, NT>>,
    lines: &Array<u32>,
    at: &PatchPosition,
    batch: u32,
    rows: u32,
    cols: u32,
    #[comptime] copies: ByteCopies,
) {
    if comptime!(copies.layout.row_major()) {
        #[unroll]
        for line in 0..comptime!(PATCH_ROWS as u32) {
            let row = at.first_row + at.tile_row + line;
            let mut words = Array::<u32>::new(LINE_WORDS);
            #[unroll]
            for word in 0..LINE_WORDS {
                words[word] = lines[comptime!(line as usize * LINE_WORDS + word)];
            }
            if row < rows {
                write_words::<V, NV>(
                    values,
                    &words,
                    (batch * rows + row) * cols,
                    at.first_col + at.tile_col,
                    cols,
                    LINE_WORDS,
                    copies.row_major_width,
                    false,
                );
            }
        }
    }
    if comptime!(copies.layout.transposed()) {
        let mut staged = SharedMemory::<u32>::new_aligned(comptime!(TILE * TILE / 4), 16usize);
        stage_patch(&mut staged, lines, at.tile_row, at.tile_col, copies.staged);
        sync_cube();
        read_staged::<T, NT>(
            transposed,
            &staged,
            rows,
            cols,
            batch,
            at.first_row,
            at.first_col,
            copies.staged,
        );
    }
}
