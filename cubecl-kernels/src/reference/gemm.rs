//! The product of two quantized matrices.

use crate::shape::MatrixShape;

use super::{
    fallback::{ReferenceFallbackQuantized, fallback_value},
    matrix::{ReferenceQuantized, coordinates},
};

/// `C[M, N] = A[M, K] B[N, K]^T + bias[N]` over the quantized values, in `f64` (fallback-int8, Algorithm 1).
///
/// Both operands have K along their rows. With a fallback, `a` is its base and the residual blocks are added. A batch
/// of one in `b` is shared by all matrices of `a`.
///
/// # Panics
///
/// When the depths or the batches do not fit.
pub fn gemm(
    a: &ReferenceQuantized,
    b: &ReferenceQuantized,
    fallback: Option<&ReferenceFallbackQuantized>,
    bias: Option<&[f32]>,
) -> Vec<f64> {
    assert_eq!(a.shape.cols, b.shape.cols, "depth of a and b");
    assert!(
        b.shape.batch == 1 || b.shape.batch == a.shape.batch,
        "batch of b: {}, of a: {}",
        b.shape.batch,
        a.shape.batch
    );
    let (m, n, depth) = (a.shape.rows, b.shape.rows, a.shape.cols);
    let a_values: Vec<f64> = coordinates(a.shape)
        .map(|(batch, row, col)| fallback_value(a, fallback, batch, row, col))
        .collect();
    let b_values: Vec<f64> = coordinates(b.shape)
        .map(|(batch, row, col)| fallback_value(b, None, batch, row, col))
        .collect();
    coordinates(MatrixShape::batched(a.shape.batch, m, n))
        .map(|(batch, row, col)| {
            let a_row = &a_values[(batch * m + row) * depth..][..depth];
            let b_row = &b_values[((batch % b.shape.batch) * n + col) * depth..][..depth];
            let sum: f64 = a_row.iter().zip(b_row).map(|(a, b)| a * b).sum();
            sum + bias.map_or(0.0, |bias| f64::from(bias[col]))
        })
        .collect()
}
