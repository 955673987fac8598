//! Products of small matrices, on one thread.

use gemm::Parallelism;

/// A matrix in a slice: rows and columns, and the steps from one to the next.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a> {
    data: &'a [f32],
    shape: [usize; 2],
    strides: [usize; 2],
}

impl<'a> Matrix<'a> {
    /// Contiguous rows.
    pub(super) fn rows(data: &'a [f32], [rows, cols]: [usize; 2]) -> Self {
        assert_eq!(
            data.len(),
            rows * cols,
            "elements of a matrix {rows} x {cols}"
        );
        Self {
            data,
            shape: [rows, cols],
            strides: [cols, 1],
        }
    }

    /// The matrix transposed.
    pub(super) fn t(self) -> Self {
        let [rows, cols] = self.shape;
        let [row_stride, col_stride] = self.strides;
        Self {
            data: self.data,
            shape: [cols, rows],
            strides: [col_stride, row_stride],
        }
    }
}

/// `out = factor * left * right`, with contiguous rows, or that added to `out`.
pub(super) fn product(
    out: &mut [f32],
    left: Matrix<'_>,
    right: Matrix<'_>,
    factor: f32,
    add: bool,
) {
    let ([m, k], [right_k, n]) = (left.shape, right.shape);
    assert_eq!(
        k, right_k,
        "columns of the left matrix and rows of the right one"
    );
    assert_eq!(out.len(), m * n, "elements of the product");
    // SAFETY: `Matrix` holds slices of all their elements, and `out` has those of an m x n matrix.
    #[allow(unsafe_code)]
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            n as isize,
            add,
            left.data.as_ptr(),
            left.strides[1] as isize,
            left.strides[0] as isize,
            right.data.as_ptr(),
            right.strides[1] as isize,
            right.strides[0] as isize,
            1.0,
            factor,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}
