//! Codes read from their storage, four neighbours of a row by each unit.

use cubecl::prelude::*;

use crate::{
    device::MatrixGeometry,
    number::{Storage, storage::RUN},
    shape::MatrixShape,
};

/// Units of a cube.
pub(super) const UNITS: u32 = 256;

/// Along which of a matrix' two dimensions codes are packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Along {
    /// Neighbours of a row lie in one stored element: the row-major copy.
    Rows,
    /// Neighbours of a column do: the transposed copy.
    Columns,
}

/// Units that matrices of this shape take.
pub(super) fn quads(shape: MatrixShape) -> usize {
    shape.batch * shape.rows * shape.cols.div_ceil(4)
}

/// Which four elements of a row a unit works on.
#[derive(CubeType, Clone, Copy)]
pub(super) struct QuadPosition {
    pub batch: u32,
    pub row: u32,
    pub col: u32,
}

#[cube]
pub(super) fn quad_position(geometry: &MatrixGeometry) -> QuadPosition {
    let quads_of_row = geometry.cols.div_ceil(4);
    let index = CUBE_POS as u32 * UNITS + UNIT_POS;
    let row = index / quads_of_row;
    QuadPosition {
        batch: row / geometry.rows,
        row: row % geometry.rows,
        col: index % quads_of_row * 4,
    }
}

/// The codes of four neighbours of a row, from column `col`, a multiple of 4. The strides of `geometry` are those of
/// the stored elements; `width` of them are read at once where one holds one code. Bits above a code may be anything.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn load_codes<V: Numeric, N: Size>(
    values: &Array<Vector<V, N>>,
    geometry: &MatrixGeometry,
    batch: u32,
    row: u32,
    col: u32,
    #[comptime] stored: Storage,
    #[comptime] along: Along,
    #[comptime] width: usize,
) -> Array<u32> {
    let mut codes = Array::<u32>::new(4usize);
    let start = batch * geometry.batch_stride;
    if comptime!(width == 4) {
        let vector = values[((start + row * geometry.row_stride + col) / 4) as usize];
        #[unroll]
        for lane in 0..4usize {
            codes[lane] = u32::cast_from(vector[lane]);
        }
    } else {
        #[unroll]
        for lane in 0..4u32 {
            let col = min(col + lane, geometry.cols - 1);
            let (of_row, of_col) = match comptime!(along) {
                Along::Rows => (row * geometry.row_stride, col),
                Along::Columns => (col * geometry.col_stride, row),
            };
            let stride = match comptime!(along) {
                Along::Rows => geometry.col_stride,
                Along::Columns => geometry.row_stride,
            };
            codes[lane as usize] =
                load_code::<V, N>(values, start + of_row, of_col, stride, stored);
        }
    }
    codes
}

/// The `index`-th code of a stored row that starts at `start`, with elements `stride` apart.
#[cube]
fn load_code<V: Numeric, N: Size>(
    values: &Array<Vector<V, N>>,
    start: u32,
    index: u32,
    stride: u32,
    #[comptime] stored: Storage,
) -> u32 {
    match comptime!(stored) {
        Storage::SignedBytes | Storage::Bytes => {
            u32::cast_from(values[(start + index * stride) as usize][0usize])
        }
        Storage::Nibbles => {
            let byte = u32::cast_from(values[(start + index / 2 * stride) as usize][0usize]);
            byte >> (index % 2 * 4)
        }
        Storage::TenBits => {
            let bit = index % comptime!(RUN as u32) * 10;
            let word = index / comptime!(RUN as u32) * 5 + bit / 32;
            let shift = bit % 32;
            let mut bits =
                u32::cast_from(values[(start + word * stride) as usize][0usize]) >> shift;
            if shift > 22 {
                let next = u32::cast_from(values[(start + (word + 1) * stride) as usize][0usize]);
                bits |= next << (32 - shift);
            }
            bits
        }
    }
}
