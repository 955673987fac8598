//! The transposition of INT8 matrices: one read, one write, 16 bytes at a time.
//!
//! Square blocks quantize the same way in either layout, so a weight is kept once, row-major, and gets its other layout
//! for the time of one product.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{MatrixView, array, check_dtype, cube_grid, empty, is_contiguous, storage},
    error::KernelError,
    quantize::staged::{CHUNK, StagedTile, TILE, byte_dtype, byte_width, read_staged, stage_word},
};

const OPERATION: &str = "transpose_int8";
const UNITS: usize = 256;
/// Chunks of a row of a tile.
const CHUNKS: usize = TILE / CHUNK;
const STAGED_WORDS: usize = TILE * TILE / 4;

/// The transposed copy of a batch of INT8 matrices.
///
/// - `values`: i8 `[rows, cols]` or `[batch, rows, cols]`, contiguous.
/// - returns i8 `[cols, rows]` or `[batch, cols, rows]`, contiguous.
///
/// # Errors
///
/// When `values` is no matrix, not of i8, or not contiguous.
pub fn transpose_int8<R: Runtime>(
    client: &ComputeClient<R>,
    values: &TensorHandle<R>,
) -> Result<TensorHandle<R>, KernelError> {
    let view = MatrixView::new(OPERATION, values)?;
    check_dtype(OPERATION, "values", values, storage::<i8>(), "use i8")?;
    if !is_contiguous(values) {
        return Err(KernelError::Unsupported {
            operation: OPERATION,
            reason: format!("strides {:?}", values.strides()),
            remedy: "pass a contiguous matrix",
        });
    }
    let shape = view.shape;
    let out = empty(
        client,
        view.tensor_shape(shape.cols, shape.rows),
        storage::<i8>(),
    );
    if shape.num_elements() == 0 {
        return Ok(out);
    }
    let offset = values.handle.offset_start.unwrap_or_default() as usize;
    let read = [CHUNK, 4]
        .into_iter()
        .find(|width| shape.cols % width == 0 && offset % width == 0)
        .unwrap_or(1);
    let tile = StagedTile {
        patch_cols: CHUNK,
        units: UNITS,
        write: byte_width(shape.rows, CHUNK),
        inside: shape.rows % TILE == 0 && shape.cols % TILE == 0,
    };
    let tiles = shape.batch * shape.rows.div_ceil(TILE) * shape.cols.div_ceil(TILE);
    // SAFETY: every access is guarded by the shape, for which the output was allocated.
    #[allow(unsafe_code)]
    unsafe {
        transpose_kernel::launch_unchecked::<R>(
            client,
            cube_grid(tiles),
            CubeDim::new_1d(UNITS as u32),
            read.div_ceil(4),
            tile.write.div_ceil(4),
            array(values.clone()),
            array(out.clone()),
            shape.batch as u32,
            shape.rows as u32,
            shape.cols as u32,
            read,
            tile,
            byte_dtype(read),
            byte_dtype(tile.write),
        );
    }
    Ok(out)
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn transpose_kernel<V: Numeric, NV: Size, T: Numeric, NT: Size>(
    values: &Array<Vector<V, NV>>,
    transposed: &mut Array<Vector<T, NT>>,
    batch_size: u32,
    rows: u32,
    cols: u32,
    #[comptime] read: usize,
    #[comptime] tile: StagedTile,
    #[define(V)] _values_dtype: StorageType,
    #[define(T)] _transposed_dtype: StorageType,
) {
    let side = comptime!(TILE as u32);
    let grid_cols = cols.div_ceil(side);
    let grid = rows.div_ceil(side) * grid_cols;
    let index = CUBE_POS as u32;
    let batch = index / grid;
    if batch >= batch_size {
        terminate!();
    }
    let first_row = index % grid / grid_cols * side;
    let first_col = index % grid_cols * side;
    let tile_row = UNIT_POS / comptime!(CHUNKS as u32) * 4;
    let tile_col = UNIT_POS % comptime!(CHUNKS as u32) * comptime!(CHUNK as u32);

    let mut staged = SharedMemory::<u32>::new_aligned(STAGED_WORDS, 16usize);
    let mut lines = Array::<u32>::new(16usize);
    #[unroll]
    for line in 0..4u32 {
        let row = first_row + tile_row + line;
        #[unroll]
        for word in 0..4u32 {
            lines[comptime!((line * 4 + word) as usize)] = 0u32;
        }
        if row < rows {
            let start = (batch * rows + row) * cols;
            read_chunk::<V, NV>(
                values,
                &mut lines,
                start,
                first_col + tile_col,
                cols,
                comptime!(line as usize * 4),
                read,
            );
        }
    }
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
                &mut staged,
                columns[col],
                tile_row / 4,
                tile_col,
                comptime!((word * 4 + col) as u32),
                tile,
            );
        }
    }
    sync_cube();
    read_staged::<T, NT>(
        transposed, &staged, rows, cols, batch, first_row, first_col, tile,
    );
}

/// The even bytes of two words by turns, and their odd bytes.
#[cube]
fn interleave(a: u32, b: u32) -> (u32, u32) {
    (
        (a & 0x00ff_00ff) | ((b & 0x00ff_00ff) << 8),
        ((a >> 8) & 0x00ff_00ff) | (b & 0xff00_ff00u32),
    )
}

/// Reads the 16 bytes of a row from column `col` into `words[first..first + 4]`, those that lie inside it.
#[cube]
fn read_chunk<V: Numeric, N: Size>(
    values: &Array<Vector<V, N>>,
    words: &mut Array<u32>,
    row_start: u32,
    col: u32,
    cols: u32,
    #[comptime] first: usize,
    #[comptime] read: usize,
) {
    #[unroll]
    for piece in 0..comptime!(CHUNK / read) {
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
