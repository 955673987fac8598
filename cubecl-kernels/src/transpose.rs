//! The transposition of matrices of INT8 or FP8 codes: one read, one write, 16 bytes at a time.
//!
//! Square blocks quantize the same way in either layout, so a weight is kept once, row-major, and gets its other layout
//! for the time of one product.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{MatrixView, array, check_dtype, cube_grid, empty, is_contiguous, storage},
    error::KernelError,
    quantize::staged::{
        CHUNK, StagedTile, TILE, byte_dtype, byte_read_width, byte_width, read_bytes, read_staged,
        stage_patch,
    },
};

const OPERATION: &str = "transpose_bytes";
const UNITS: usize = 256;
/// Chunks of a row of a tile.
const CHUNKS: usize = TILE / CHUNK;
const STAGED_WORDS: usize = TILE * TILE / 4;

/// The transposed copy of a batch of matrices of a byte an element.
///
/// - `values`: i8 or u8 `[rows, cols]` or `[batch, rows, cols]`, contiguous.
/// - returns as many `[cols, rows]` or `[batch, cols, rows]`, of the same type, contiguous.
///
/// # Errors
///
/// When `values` is no matrix, neither of i8 nor of u8, or not contiguous.
pub fn transpose_bytes<R: Runtime>(
    client: &ComputeClient<R>,
    values: &TensorHandle<R>,
) -> Result<TensorHandle<R>, KernelError> {
    let view = MatrixView::new(OPERATION, values)?;
    if values.dtype != storage::<u8>() {
        check_dtype(OPERATION, "values", values, storage::<i8>(), "use i8 or u8")?;
    }
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
        values.dtype,
    );
    if shape.num_elements() == 0 {
        return Ok(out);
    }
    let read = byte_read_width(values, shape.cols, CHUNK);
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
            read_bytes::<V, NV>(
                values,
                &mut lines,
                start,
                first_col + tile_col,
                cols,
                comptime!(line as usize * 4),
                4usize,
                read,
            );
        }
    }
    stage_patch(&mut staged, &lines, tile_row, tile_col, tile);
    sync_cube();
    read_staged::<T, NT>(
        transposed, &staged, rows, cols, batch, first_row, first_col, tile,
    );
}
