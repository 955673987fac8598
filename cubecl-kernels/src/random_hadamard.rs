//! The random Hadamard transform of the rows of a matrix (NVFP4, arXiv 2509.25149): one read, one write.
//!
//! A unit has a block of 16 elements in its registers. Units side by side have blocks side by side, or where neighbours
//! of a column are neighbours in memory, as in a transposed view, blocks of one column below each other.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{MatrixGeometry, MatrixView, array, check_float, cube_grid, empty, storage},
    error::KernelError,
    hadamard::{RANDOM_SIGNS, RANDOM_SIZE, butterflies},
};

const OPERATION: &str = "random_hadamard";
const UNITS: usize = 256;
const BLOCK: usize = RANDOM_SIZE.block();
/// Elements that are written at once.
const WIDTH: usize = 4;

/// The transform of each row, in FP32, where the columns are filled up with zeros to whole blocks of 16.
///
/// - `x`: f32, f16 or bf16 `[rows, cols]` or `[batch, rows, cols]`, any strides.
/// - returns f32 `[rows, whole]` or `[batch, rows, whole]`, contiguous, as
///   [`reference`](crate::reference::hadamard::random_hadamard) has it, to the bit but for subnormal numbers.
///
/// # Errors
///
/// When `x` is no matrix, of another type, or larger than 32 bits index.
pub fn random_hadamard<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
) -> Result<TensorHandle<R>, KernelError> {
    let view = MatrixView::new(OPERATION, x)?;
    check_float(client, OPERATION, "x", x.dtype)?;
    let shape = view.shape;
    let blocks_of_row = shape.cols.div_ceil(BLOCK);
    let blocks = shape.batch * shape.rows * blocks_of_row;
    if blocks > u32::MAX as usize / BLOCK {
        return Err(KernelError::Shape {
            operation: OPERATION,
            got: format!("{shape:?}"),
            remedy: "transform it in parts whose results have less than 2^32 elements",
        });
    }
    let out = empty(
        client,
        view.tensor_shape(shape.rows, blocks_of_row * BLOCK),
        storage::<f32>(),
    );
    if blocks == 0 {
        return Ok(out);
    }
    // SAFETY: reads are guarded by the shape, and the output was allocated for all blocks.
    #[allow(unsafe_code)]
    unsafe {
        random_hadamard_kernel::launch_unchecked::<R>(
            client,
            cube_grid(blocks.div_ceil(UNITS)),
            CubeDim::new_1d(UNITS as u32),
            WIDTH,
            array(x.clone()),
            array(out.clone()),
            blocks as u32,
            view.geometry(),
            view.row_stride < view.col_stride,
            x.dtype,
        );
    }
    Ok(out)
}

// CubeCL unrolls ranges, and no iterators.
#[allow(clippy::needless_range_loop)]
#[cube(launch_unchecked)]
fn random_hadamard_kernel<F: Numeric, N: Size>(
    x: &Array<F>,
    out: &mut Array<Vector<f32, N>>,
    blocks: u32,
    geometry: MatrixGeometry,
    #[comptime] by_columns: bool,
    #[define(F)] _dtype: StorageType,
) {
    let index = CUBE_POS as u32 * comptime!(UNITS as u32) + UNIT_POS;
    if index >= blocks {
        terminate!();
    }
    let blocks_of_row = geometry.cols.div_ceil(comptime!(BLOCK as u32));
    let of_batch = geometry.rows * blocks_of_row;
    let batch = index / of_batch;
    let within = index % of_batch;
    let (row, block) = if comptime!(by_columns) {
        (within % geometry.rows, within / geometry.rows)
    } else {
        (within / blocks_of_row, within % blocks_of_row)
    };
    let start = batch * geometry.batch_stride + row * geometry.row_stride;
    let first = block * comptime!(BLOCK as u32);
    let mut run = Array::<f32>::new(BLOCK);
    #[unroll]
    for element in 0..BLOCK {
        let col = first + comptime!(element as u32);
        let mut value = 0.0f32;
        if col < geometry.cols {
            let read = f32::cast_from(x[(start + col * geometry.col_stride) as usize]);
            value = read * comptime!(RANDOM_SIGNS[element]);
        }
        run[element] = value;
    }
    butterflies(&mut run, 0usize, BLOCK);
    let to = (batch * geometry.rows + row) * blocks_of_row + block;
    #[unroll]
    for write in 0..comptime!(BLOCK / WIDTH) {
        let mut vector = Vector::<f32, N>::empty();
        #[unroll]
        for lane in 0..WIDTH {
            vector[lane] = run[comptime!(write * WIDTH + lane)] * comptime!(RANDOM_SIZE.factor());
        }
        out[to as usize * comptime!(BLOCK / WIDTH) + write] = vector;
    }
}
