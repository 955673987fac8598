//! The elements of a tile while a cube holds it on chip.

use cubecl::prelude::*;

use crate::{
    device::MatrixGeometry,
    quantize::{staged::TILE, tile::TilePosition},
    rounding::magnitude_bits,
};

use super::{
    rounding::Copies,
    tile::{BlockTile, PATCH_ROWS, is_inside, patch_position},
};

pub(super) const HIGH_HALF: u32 = 0xffff_0000;

/// 16 bytes.
pub(super) type Words = Vector<u32, Const<4>>;

/// The elements of a cube: each unit's own, one vector after the other. Of the three only what a tile uses has a size.
///
/// Stochastic rounding takes so many registers that too few cubes would fit on a multiprocessor for some to round while
/// others read, if all elements were rounded side by side. There the elements wait in shared memory, where a loop
/// can index them, and the loop takes one row of a patch at a time; its length is an argument of the launch, so that no
/// compiler unrolls it. Elsewhere they stay in registers.
#[derive(CubeType)]
pub(super) struct Held<F: Numeric, N: Size> {
    /// Vectors of less than a row of a patch.
    pub registers: Array<Vector<F, N>>,
    /// Rows of patches.
    pub words: Array<Words>,
    /// The same, and in the end the staged tile.
    pub shared: SharedMemory<u32>,
}

/// The first word of a unit's vector in [`Held`]'s shared memory, where it lies beside those of its neighbours.
#[cube]
pub(super) fn shared_slot(slot: usize, #[comptime] tile: BlockTile) -> usize {
    (slot * tile.units + UNIT_POS_X as usize) * 4
}

/// All elements that this unit holds, in registers; 0 outside the matrix.
#[cube]
pub(super) fn read_patches<F: Numeric, N: Size>(
    x: &Array<Vector<F, N>>,
    geometry: &MatrixGeometry,
    at: &TilePosition,
    #[comptime] tile: BlockTile,
    #[comptime] copies: Copies,
) -> Held<F, N> {
    let pieces = comptime!(tile.patch_cols / tile.read);
    let width = comptime!(tile.read as u32);
    let (of_words, of_registers) = comptime!(if tile.whole {
        (tile.held(), 1)
    } else {
        (1, tile.held())
    });
    let mut registers = Array::<Vector<F, N>>::new(of_registers);
    let mut words = Array::<Words>::new(of_words);
    #[unroll]
    for patch in 0..comptime!(tile.patches()) {
        let (tile_row, tile_col) = patch_position(comptime!(patch as u32), tile);
        let (row, col) = (at.row + tile_row, at.col + tile_col);
        let start = at.batch * geometry.batch_stride + row * geometry.row_stride;
        #[unroll]
        for line in 0..PATCH_ROWS {
            #[unroll]
            for piece in 0..pieces {
                let slot = comptime!((patch * PATCH_ROWS + line) * pieces + piece);
                let col = col + comptime!((piece * tile.read) as u32);
                if comptime!(tile.whole) {
                    words[slot] = Words::new(0u32);
                } else {
                    registers[slot] = Vector::cast_from(0.0f32);
                }
                if is_inside(row + comptime!(line as u32), col, geometry, tile) {
                    let line_start = start + comptime!(line as u32) * geometry.row_stride;
                    // More than one element at once is read only where columns are neighbours.
                    let index = if comptime!(tile.read > 1) {
                        (line_start + col) / width
                    } else {
                        line_start + col * geometry.col_stride
                    };
                    if comptime!(tile.whole) {
                        words[slot] = Words::reinterpret(x[index as usize]);
                    } else {
                        registers[slot] = x[index as usize];
                    }
                }
            }
        }
    }
    let staged = comptime!(if copies.transposed.is_some() {
        TILE * TILE / 4
    } else {
        1
    });
    let held = comptime!(if tile.looped {
        tile.held() * tile.units * 4
    } else {
        1
    });
    let shared = SharedMemory::<u32>::new_aligned(comptime!(held.max(staged)), 16usize);
    Held::<F, N> {
        registers,
        words,
        shared,
    }
}

/// The largest magnitude of a patch, as bits, from registers.
#[cube]
pub(super) fn patch_max<F: Numeric, N: Size>(
    held: &Held<F, N>,
    #[comptime] patch: usize,
    #[comptime] tile: BlockTile,
) -> u32 {
    let mut bits = 0u32;
    if comptime!(tile.bf16 && tile.whole) {
        // Both halves of a word, without their signs, at its top; what lies below the upper one goes in the end.
        #[unroll]
        for line in 0..PATCH_ROWS {
            let words = held.words[comptime!(patch * PATCH_ROWS + line)];
            #[unroll]
            for index in 0..4usize {
                bits = max(bits, max(words[index] << 17, words[index] << 1));
            }
        }
        bits = (bits >> 1) & HIGH_HALF;
    } else {
        #[unroll]
        for line in 0..comptime!(PATCH_ROWS as u32) {
            let values = values_of_registers::<F, N>(held, patch, line, tile);
            #[unroll]
            for col in 0..tile.patch_cols {
                bits = max(bits, magnitude_bits(values[col]));
            }
        }
    }
    bits
}

/// A row of a patch.
#[cube]
pub(super) fn line_values<F: Numeric, N: Size>(
    held: &Held<F, N>,
    #[comptime] patch: usize,
    line: u32,
    #[comptime] tile: BlockTile,
) -> Array<f32> {
    if comptime!(tile.looped) {
        let pieces = comptime!(tile.patch_cols / tile.read);
        let slot = line as usize * pieces + comptime!(patch * PATCH_ROWS * pieces);
        let mut values = Array::<f32>::new(tile.patch_cols);
        #[unroll]
        for piece in 0..pieces {
            let first = shared_slot(slot + piece, tile);
            let mut words = Words::empty();
            #[unroll]
            for word in 0..4usize {
                words[word] = held.shared[first + word];
            }
            values_of_words::<F, N>(words, &mut values, comptime!(piece * tile.read), tile);
        }
        values
    } else {
        values_of_registers::<F, N>(held, patch, line, tile)
    }
}

/// A row of a patch that lies in registers; `line` is known to the compiler.
#[cube]
pub(super) fn values_of_registers<F: Numeric, N: Size>(
    held: &Held<F, N>,
    #[comptime] patch: usize,
    line: u32,
    #[comptime] tile: BlockTile,
) -> Array<f32> {
    let pieces = comptime!(tile.patch_cols / tile.read);
    let slot = line as usize * pieces + comptime!(patch * PATCH_ROWS * pieces);
    let mut values = Array::<f32>::new(tile.patch_cols);
    #[unroll]
    for piece in 0..pieces {
        let first = comptime!(piece * tile.read);
        if comptime!(tile.whole) {
            values_of_words::<F, N>(held.words[slot + piece], &mut values, first, tile);
        } else {
            let vector = held.registers[slot + piece];
            #[unroll]
            for col in 0..tile.read {
                values[first + col] = f32::cast_from(vector[col]);
            }
        }
    }
    values
}

/// The elements of four words, which go to `values` from `first` on.
#[cube]
pub(super) fn values_of_words<F: Numeric, N: Size>(
    words: Words,
    values: &mut Array<f32>,
    #[comptime] first: usize,
    #[comptime] tile: BlockTile,
) {
    if comptime!(tile.bf16) {
        #[unroll]
        for index in 0..4usize {
            values[comptime!(first + 2 * index)] = f32::reinterpret(words[index] << 16);
            values[comptime!(first + 2 * index + 1)] = f32::reinterpret(words[index] & HIGH_HALF);
        }
    } else {
        let vector = Vector::<F, N>::reinterpret(words);
        #[unroll]
        for col in 0..tile.read {
            values[comptime!(first + col)] = f32::cast_from(vector[col]);
        }
    }
}
