//! The sums of a matrix's columns: what a backward pass leaves in parts, added up.

use cubecl::{prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{array, check_contiguous, check_dtype, cube_grid, empty, storage},
    error::KernelError,
};

const OPERATION: &str = "column_sum";
const UNITS: usize = 256;
/// Columns of a cube: neighbours, 32 bytes, which is what memory moves at once. More of them would have a unit read
/// more rows, one after the other.
const COLS_OF_CUBE: usize = 8;
/// Units that share a column.
const UNITS_OF_COL: usize = UNITS / COLS_OF_CUBE;
/// Rows that a unit reads in one turn, of which none waits for another.
const READS: usize = 8;

/// The sum of each column, f32 `[1, cols]`.
///
/// - `x`: f32 `[rows, cols]`, contiguous.
///
/// Every sum has one order, so that a repetition gives the same bits: of rows that are 32 apart first, then of these
/// sums.
///
/// # Errors
///
/// When `x` is no matrix, not f32, not contiguous, or of more than 2^31 elements.
pub fn column_sum<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
) -> Result<TensorHandle<R>, KernelError> {
    check_dtype(OPERATION, "x", x, storage::<f32>(), "cast it to f32")?;
    check_contiguous(OPERATION, x)?;
    let &[rows, cols] = &x.shape()[..] else {
        return Err(KernelError::Shape {
            operation: OPERATION,
            got: format!("{:?}", x.shape()),
            remedy: "pass a matrix [rows, cols]",
        });
    };
    let out = empty(client, vec![1, cols], storage::<f32>());
    if cols > 0 {
        // SAFETY: columns are guarded by their number, for which the output was allocated, and rows by theirs.
        #[allow(unsafe_code)]
        unsafe {
            column_sum_kernel::launch_unchecked::<R>(
                client,
                cube_grid(cols.div_ceil(COLS_OF_CUBE)),
                CubeDim::new_1d(UNITS as u32),
                array(x.clone()),
                array(out.clone()),
                rows as u32,
                cols as u32,
            );
        }
    }
    Ok(out)
}

#[cube(launch_unchecked)]
fn column_sum_kernel(x: &Array<f32>, out: &mut Array<f32>, rows: u32, cols: u32) {
    let width = comptime!(COLS_OF_CUBE as u32);
    let step = comptime!(UNITS_OF_COL as u32);
    let col = CUBE_POS as u32 * width + UNIT_POS % width;
    let mut sum = 0.0f32;
    let mut first = UNIT_POS / width;
    while first < rows {
        #[unroll]
        for read in 0..comptime!(READS as u32) {
            let row = first + comptime!(read * UNITS_OF_COL as u32);
            if row < rows && col < cols {
                sum += x[(row * cols + col) as usize];
            }
        }
        first += step * comptime!(READS as u32);
    }
    let mut shared = SharedMemory::<f32>::new(UNITS);
    shared[UNIT_POS as usize] = sum;
    sync_cube();
    if UNIT_POS < width && col < cols {
        #[unroll]
        for unit in 1..comptime!(UNITS_OF_COL) {
            sum += shared[UNIT_POS as usize + comptime!(unit * COLS_OF_CUBE)];
        }
        out[col as usize] = sum;
    }
}
