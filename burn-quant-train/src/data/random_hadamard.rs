//! The random Hadamard transform of a matrix on the host, and its inverse on any backend, by operations that all compute
//! to the same bits.

use burn_backend::{Backend, FloatDType, Scalar, Shape, Slice, TensorData, tensor::FloatTensor};
use cubecl_kernels::hadamard::{HadamardSize, RANDOM_SIGNS, RANDOM_SIZE};

use super::{cast::cast_to, tensors::matrix_shape};

/// The columns of the transform of a matrix of so many columns.
pub(crate) fn transformed_cols(cols: usize) -> usize {
    cols.next_multiple_of(RANDOM_SIZE.block())
}

/// The random Hadamard transform of each row of `matrix`, of any float dtype: FP32 `[rows, cols]`, where the columns
/// are filled up with zeros to whole blocks. Equal to
/// [`reference::hadamard::random_hadamard`](cubecl_kernels::reference::hadamard::random_hadamard), bit for bit, but for
/// subnormal numbers.
///
/// # Panics
///
/// If `matrix` does not have two dimensions.
pub(crate) fn random_hadamard<B: Backend>(matrix: FloatTensor<B>) -> FloatTensor<B> {
    let [rows, cols] = matrix_shape(&matrix, "random_hadamard");
    let device = B::float_device(&matrix);
    let matrix = cast_to::<B>(matrix, Some(FloatDType::F32));
    let block = RANDOM_SIZE.block();
    let whole = transformed_cols(cols);
    let matrix = match whole - cols {
        0 => matrix,
        missing => {
            let zeros = B::float_zeros(Shape::new([rows, missing]), &device, FloatDType::F32);
            B::float_cat(vec![matrix, zeros], 1)
        }
    };
    let signed = signed::<B>(matrix, rows * whole / block);
    hadamard::<B>(
        B::float_reshape(signed, Shape::new([rows, whole])),
        RANDOM_SIZE,
    )
}

/// The matrix, FP32 `[rows, cols]`, whose [`random_hadamard`] `values` is, FP32 `[rows, whole]`: the transform is
/// orthogonal and symmetric but for its signs.
pub(crate) fn inverse_random_hadamard<B: Backend>(
    values: FloatTensor<B>,
    cols: usize,
) -> FloatTensor<B> {
    let [rows, whole] = matrix_shape(&values, "inverse_random_hadamard");
    let blocks = rows * whole / RANDOM_SIZE.block();
    let signed = signed::<B>(hadamard::<B>(values, RANDOM_SIZE), blocks);
    let matrix = B::float_reshape(signed, Shape::new([rows, whole]));
    B::float_slice(matrix, &[Slice::from(0..rows), Slice::from(0..cols)])
}

/// Values times the signs of the random transform, `[blocks, 16]`.
fn signed<B: Backend>(values: FloatTensor<B>, blocks: usize) -> FloatTensor<B> {
    let block = RANDOM_SIZE.block();
    let signs = TensorData::new(RANDOM_SIGNS.to_vec(), [1, block]);
    let signs = B::float_from_data(signs, &B::float_device(&values));
    B::float_mul(B::float_reshape(values, Shape::new([blocks, block])), signs)
}

/// The block-diagonal Hadamard transform of each row of `matrix`, FP32 `[rows, cols]`, whose columns are whole blocks.
/// It is its own inverse.
pub(crate) fn hadamard<B: Backend>(matrix: FloatTensor<B>, size: HadamardSize) -> FloatTensor<B> {
    let [rows, cols] = matrix_shape(&matrix, "hadamard");
    let mut values = matrix;
    for pass in 0..size.order() {
        let distance = 1 << pass;
        let pairs = rows * cols / (2 * distance);
        let whole_pairs = B::float_reshape(values, Shape::new([pairs, 2, distance]));
        let half = |side: usize| {
            let side = Slice::from(side..side + 1);
            let slices = [Slice::from(0..pairs), side, Slice::from(0..distance)];
            B::float_slice(whole_pairs.clone(), &slices)
        };
        let sum = B::float_add(half(0), half(1));
        let difference = B::float_sub(half(0), half(1));
        values = B::float_cat(vec![sum, difference], 1);
    }
    let values = B::float_reshape(values, Shape::new([rows, cols]));
    B::float_mul_scalar(values, Scalar::from(size.factor()))
}
