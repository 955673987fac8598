//! The rounding of patches: the words of their copies, and of their residual.

use cubecl::prelude::*;

use crate::{
    device::MatrixGeometry,
    exact,
    number::{
        int8::{packed, push_byte, stochastic_integer},
        integer::{integer_of, nearest_sum},
    },
    philox::NEIGHBOURS,
    quantize::{block::Round, staged::write_words},
    rounding::{RandomStream, random_quad, random_words, stochastic_offset},
};

use super::{
    held::{Held, line_values},
    tile::{BlockTile, column_slot},
};

/// The copies that a launch writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Copies {
    pub row_major: Option<Round>,
    pub transposed: Option<Round>,
    pub fallback: bool,
}

impl Copies {
    pub fn any(&self, round: Round) -> bool {
        self.row_major == Some(round) || self.transposed == Some(round)
    }
}

/// Where a patch lies in its matrix, and how its block is rounded.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Patch {
    pub row: u32,
    pub col: u32,
    pub scale: f32,
    pub inverse: f32,
    /// Clears the integers of a block of zeros.
    pub mask: u32,
}

/// Rounds the rows of a patch: writes those of the row-major copy, while the integers of the transposed copy join those
/// of their columns. The largest magnitude of the residual, if that is asked for, else 0.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn round_patch<F: Numeric, N: Size, V: Numeric, NV: Size>(
    out: &mut Array<Vector<V, NV>>,
    held: &Held<F, N>,
    columns: &mut Array<u32>,
    of: &Patch,
    lines: u32,
    geometry: &MatrixGeometry,
    batch: u32,
    random: &RandomStream,
    zero: u32,
    #[comptime] patch: usize,
    #[comptime] tile: BlockTile,
    #[comptime] copies: Copies,
    #[comptime] with_residual: bool,
) -> f32 {
    let mut largest = 0.0f32;
    #[unroll(!tile.looped)]
    for step in 0..lines {
        let line = lines - 1 - step;
        let row = batch * geometry.rows + of.row + line;
        let values = line_values::<F, N>(held, patch, line, tile);
        let random_words = line_words(row, of.col, random, tile, copies);
        let mut words = Array::<u32>::new(comptime!(tile.patch_cols / 4));
        #[unroll]
        for quarter in 0..comptime!(tile.patch_cols / 4) {
            let mut word = 0u32;
            #[unroll]
            for lane in 0..4usize {
                let col = comptime!(quarter * 4 + 3 - lane);
                let scaled = exact::product(values[col], of.inverse, zero);
                let sum = nearest_sum(scaled);
                let nearest = u32::reinterpret(sum);
                let mut stochastic = 0u32;
                if comptime!(copies.any(Round::Stochastic)) {
                    let offset = stochastic_offset(random_words[comptime!(col / 2)], zero, col);
                    let in_range = if comptime!(tile.cuda) {
                        scaled
                    } else {
                        clamp(scaled, -127.0f32, 127.0f32)
                    };
                    stochastic = stochastic_integer(in_range, offset);
                }
                if comptime!(copies.row_major == Some(Round::Stochastic)) {
                    word = push_byte(word, stochastic);
                } else {
                    word = push_byte(word, nearest);
                }
                let slot = column_slot(patch, col, tile);
                if comptime!(copies.transposed == Some(Round::Stochastic)) {
                    columns[slot] = push_byte(columns[slot], stochastic);
                } else {
                    columns[slot] = push_byte(columns[slot], nearest);
                }
                if comptime!(with_residual) {
                    let rest = residual(values[col], sum, of.scale, zero);
                    largest = max(largest, f32::abs(rest));
                }
            }
            words[quarter] = packed(
                word,
                of.mask,
                comptime!(copies.row_major == Some(Round::Stochastic)),
            );
        }
        if comptime!(copies.row_major.is_some()) {
            write_line::<V, NV>(out, &words, geometry, batch, of.row + line, of.col, tile);
        }
    }
    largest
}

/// The words of the residual of a row of a patch.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn residual_line<F: Numeric, N: Size>(
    held: &Held<F, N>,
    #[comptime] patch: usize,
    line: u32,
    scale: f32,
    inverse: f32,
    residual_inverse: f32,
    mask: u32,
    zero: u32,
    #[comptime] tile: BlockTile,
) -> Array<u32> {
    let values = line_values::<F, N>(held, patch, line, tile);
    let mut words = Array::<u32>::new(comptime!(tile.patch_cols / 4));
    #[unroll]
    for quarter in 0..comptime!(tile.patch_cols / 4) {
        let mut word = 0u32;
        #[unroll]
        for lane in 0..4usize {
            let col = comptime!(quarter * 4 + 3 - lane);
            let value = values[col];
            let sum = nearest_sum(exact::product(value, inverse, zero));
            let rest = residual(value, sum, scale, zero);
            let product = exact::product(rest, residual_inverse, zero);
            word = push_byte(word, u32::reinterpret(nearest_sum(product)));
        }
        words[quarter] = packed(word, mask, false);
    }
    words
}

/// The random words of a row of a patch, one for two neighbours; without a stochastic copy nothing that is read.
#[cube]
pub(super) fn line_words(
    row: u32,
    first_col: u32,
    random: &RandomStream,
    #[comptime] tile: BlockTile,
    #[comptime] copies: Copies,
) -> Array<u32> {
    let mut words = Array::<u32>::new(comptime!(tile.patch_cols / 2));
    if comptime!(copies.any(Round::Stochastic)) {
        if comptime!(tile.patch_cols == NEIGHBOURS) {
            let index = first_col / comptime!(NEIGHBOURS as u32);
            let (b0, b1, b2, b3) = random_words(row, index, random, tile.wide);
            words[0] = b0;
            words[1] = b1;
            words[2] = b2;
            words[3] = b3;
        } else {
            let (low, high) = random_quad(row, first_col, random, tile.wide);
            words[0] = low;
            words[1] = high;
        }
    }
    words
}

/// The part of a value that its nearest integer misses, in a finite block; `sum` is the [`nearest_sum`].
#[cube]
pub(super) fn residual(value: f32, sum: f32, scale: f32, zero: u32) -> f32 {
    value - exact::product(integer_of(sum, zero), scale, zero)
}

/// Writes a row of a patch, four bytes in each word, where it lies inside the matrix.
#[cube]
pub(super) fn write_line<V: Numeric, N: Size>(
    out: &mut Array<Vector<V, N>>,
    words: &Array<u32>,
    geometry: &MatrixGeometry,
    batch: u32,
    row: u32,
    col: u32,
    #[comptime] tile: BlockTile,
) {
    if comptime!(tile.inside) || row < geometry.rows {
        write_words::<V, N>(
            out,
            words,
            (batch * geometry.rows + row) * geometry.cols,
            col,
            geometry.cols,
            comptime!(tile.patch_cols / 4),
            tile.write.0,
            tile.inside,
        );
    }
}
