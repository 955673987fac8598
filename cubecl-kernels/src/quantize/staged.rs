//! A tile of 128 x 128 bytes on its way through shared memory from rows to columns, and the reading and writing of
//! bytes as words.
//!
//! The tile is staged column by column, 32 words of four rows each. The eight 16-byte chunks of a column are permuted
//! by an exclusive or with a number that changes from one patch of columns to the next: then the 32 units of a plane
//! that write words of the same eight patches of columns and four neighbouring rows of words meet no bank twice, and
//! neither do eight units that read the chunks of one column.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::device::storage;

/// Rows and columns of the tile.
pub(crate) const TILE: usize = 128;
/// Bytes of a chunk.
pub(crate) const CHUNK: usize = 16;
const WORDS_OF_COLUMN: u32 = TILE as u32 / 4;
const CHUNKS_OF_COLUMN: u32 = (TILE / CHUNK) as u32;

/// How the units of a cube share a staged tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct StagedTile {
    /// Neighbouring columns that a unit stages.
    pub patch_cols: usize,
    /// Units of the cube.
    pub units: usize,
    /// Bytes written at once to the transposed matrix: 16, 4 or 1.
    pub write: usize,
    /// True where no tile reaches over the edge of a matrix.
    pub inside: bool,
}

/// How many bytes of a contiguous row of this length can be written at once: `most`, 4 or 1.
pub(crate) fn byte_width(cols: usize, most: usize) -> usize {
    [most, 4]
        .into_iter()
        .find(|width| cols % width == 0)
        .unwrap_or(1)
}

/// The element type in which a kernel writes this many bytes at once: words, or single bytes.
pub(crate) fn byte_dtype(width: usize) -> StorageType {
    if width == 1 {
        storage::<i8>()
    } else {
        storage::<u32>()
    }
}

/// Puts four rows of a column into the staged tile: the word `word_row` of the column `first_col + col`, where
/// `first_col` is the first column of the unit's patch.
#[cube]
pub(crate) fn stage_word(
    staged: &mut SharedMemory<u32>,
    word: u32,
    word_row: u32,
    first_col: u32,
    #[comptime] col: u32,
    #[comptime] tile: StagedTile,
) {
    let swizzle = first_col / comptime!(tile.patch_cols as u32) % CHUNKS_OF_COLUMN * 4;
    let start = (first_col + col) * WORDS_OF_COLUMN;
    staged[(start + (word_row ^ swizzle)) as usize] = word;
}

/// Puts a patch of four rows and [`CHUNK`] columns into the staged tile: `lines` has the four words of each row.
#[cube]
pub(crate) fn stage_patch(
    staged: &mut SharedMemory<u32>,
    lines: &Array<u32>,
    tile_row: u32,
    tile_col: u32,
    #[comptime] tile: StagedTile,
) {
    #[unroll]
    for word in 0..4usize {
        // The bytes of two columns in two rows change places by pairs of rows, then pairs of rows do.
        let (a, b) = (lines[word], lines[comptime!(word + 4)]);
        let (c, d) = (lines[comptime!(word + 8)], lines[comptime!(word + 12)]);
        let (even, odd) = interleave(a, b);
        let (even_below, odd_below) = interleave(c, d);
        let mut columns = Array::<u32>::new(4usize);
        columns[0] = (even & 0xffff) | (even_below << 16);
        columns[1] = (odd & 0xffff) | (odd_below << 16);
        columns[2] = (even >> 16) | (even_below & 0xffff_0000u32);
        columns[3] = (odd >> 16) | (odd_below & 0xffff_0000u32);
        #[unroll]
        for col in 0..4usize {
            stage_word(
                staged,
                columns[col],
                tile_row / 4,
                tile_col,
                comptime!((word * 4 + col) as u32),
                tile,
            );
        }
    }
}

/// The even bytes of two words by turns, and their odd bytes.
#[cube]
fn interleave(a: u32, b: u32) -> (u32, u32) {
    (
        (a & 0x00ff_00ff) | ((b & 0x00ff_00ff) << 8),
        ((a >> 8) & 0x00ff_00ff) | (b & 0xff00_ff00u32),
    )
}

/// Reads `count` words of a row of `cols` bytes, from byte `col`, into `words[first..first + count]`, of them the bytes
/// that lie inside the row, `read` at once. The words must be 0 before.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn read_bytes<V: Numeric, N: Size>(
    values: &Array<Vector<V, N>>,
    words: &mut Array<u32>,
    row_start: u32,
    col: u32,
    cols: u32,
    #[comptime] first: usize,
    #[comptime] count: usize,
    #[comptime] read: usize,
) {
    #[unroll]
    for piece in 0..comptime!(count * 4 / read) {
        let at = col + comptime!((piece * read) as u32);
        if at < cols {
            let vector = values[((row_start + at) / comptime!(read as u32)) as usize];
            if comptime!(read == 1) {
                let byte = u32::reinterpret(i32::cast_from(vector[0usize])) & 0xff;
                words[comptime!(first + piece / 4)] |= byte << comptime!(piece as u32 % 4 * 8);
            } else {
                #[unroll]
                for lane in 0..comptime!(read / 4) {
                    words[comptime!(first + piece * read / 4 + lane)] =
                        u32::cast_from(vector[lane]);
                }
            }
        }
    }
}

/// How many bytes a kernel reads at once of the contiguous rows, `cols` bytes each, of a tensor: `most`, 4 or 1.
pub(crate) fn byte_read_width<R: Runtime>(
    tensor: &TensorHandle<R>,
    cols: usize,
    most: usize,
) -> usize {
    let offset = tensor.handle.offset_start.unwrap_or_default() as usize;
    [most, 4]
        .into_iter()
        .find(|width| cols % width == 0 && offset % width == 0)
        .unwrap_or(1)
}

/// Writes the staged tile to the transposed matrix, `[.., cols, rows]`, where it lies inside it.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn read_staged<T: Numeric, N: Size>(
    transposed: &mut Array<Vector<T, N>>,
    staged: &SharedMemory<u32>,
    rows: u32,
    cols: u32,
    batch: u32,
    first_row: u32,
    first_col: u32,
    #[comptime] tile: StagedTile,
) {
    #[unroll]
    for index in 0..comptime!((TILE * TILE / CHUNK / tile.units) as u32) {
        let piece = UNIT_POS_X + comptime!(index * tile.units as u32);
        let chunk = piece % CHUNKS_OF_COLUMN;
        let tile_col = piece / CHUNKS_OF_COLUMN;
        let swizzle = tile_col / comptime!(tile.patch_cols as u32) % CHUNKS_OF_COLUMN;
        let from = tile_col * WORDS_OF_COLUMN + (chunk ^ swizzle) * 4;
        let col = first_col + tile_col;
        if comptime!(tile.inside) || col < cols {
            let mut words = Array::<u32>::new(4usize);
            #[unroll]
            for word in 0..4u32 {
                words[word as usize] = staged[(from + word) as usize];
            }
            write_words::<T, N>(
                transposed,
                &words,
                (batch * cols + col) * rows,
                first_row + chunk * comptime!(CHUNK as u32),
                rows,
                4usize,
                tile.write,
                tile.inside,
            );
        }
    }
}

/// Writes the bytes of `words[..count]` to a contiguous row of `cols` bytes from `col`, where they lie
/// inside it, as all do if `inside`, `width` of them at once.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn write_words<T: Numeric, N: Size>(
    out: &mut Array<Vector<T, N>>,
    words: &Array<u32>,
    row_start: u32,
    col: u32,
    cols: u32,
    #[comptime] count: usize,
    #[comptime] width: usize,
    #[comptime] inside: bool,
) {
    #[unroll]
    for piece in 0..comptime!(count * 4 / width) {
        let at = col + comptime!((piece * width) as u32);
        if comptime!(inside) || at < cols {
            let mut vector = Vector::<T, N>::empty();
            if comptime!(width == 1) {
                let bits = words[comptime!(piece / 4)] << comptime!(24 - piece as u32 % 4 * 8);
                // The shift back extends the sign.
                vector[0usize] = T::cast_from(i32::reinterpret(bits) >> 24);
            } else {
                #[unroll]
                for lane in 0..comptime!(width / 4) {
                    vector[lane] = T::cast_from(words[comptime!(piece * width / 4 + lane)]);
                }
            }
            out[((row_start + at) / comptime!(width as u32)) as usize] = vector;
        }
    }
}
