//! Matrix shapes.

/// The shape of a batch of matrices, in elements. A rank-2 tensor is a batch of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MatrixShape {
    /// Number of matrices.
    pub batch: usize,
    /// Rows of each.
    pub rows: usize,
    /// Columns of each.
    pub cols: usize,
}

impl MatrixShape {
    /// One matrix of `rows` x `cols`.
    pub fn new(rows: usize, cols: usize) -> Self {
        Self {
            batch: 1,
            rows,
            cols,
        }
    }

    /// `batch` matrices of `rows` x `cols`.
    pub fn batched(batch: usize, rows: usize, cols: usize) -> Self {
        Self { batch, rows, cols }
    }

    /// Number of elements of the whole batch.
    pub fn num_elements(&self) -> usize {
        self.batch * self.rows * self.cols
    }

    /// The same batch with rows and columns exchanged.
    pub fn transposed(&self) -> Self {
        Self {
            batch: self.batch,
            rows: self.cols,
            cols: self.rows,
        }
    }
}
