//! Which elements share a scale.

use crate::shape::MatrixShape;

/// Which elements of a matrix share a scale. Blocks at the right and lower edges are smaller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Granularity {
    /// Square blocks of this size: 16, 32, 64 or 128.
    Block(usize),
    /// This many consecutive elements of a row, `1 x G`: a power of two from 16 to 1024.
    Group(usize),
    /// A whole row.
    Token,
    /// A whole column.
    Channel,
    /// A whole matrix; each matrix of a batch has its own scale.
    Tensor,
}

impl Granularity {
    /// Rows and columns of the region of one scale, in elements, for matrices of this shape. At least 1 x 1, but for a
    /// block or a group of size 0, which no operation accepts.
    pub fn scale_block(&self, shape: MatrixShape) -> (usize, usize) {
        let (rows, cols) = (shape.rows.max(1), shape.cols.max(1));
        match *self {
            Granularity::Block(size) => (size, size),
            Granularity::Group(size) => (1, size),
            Granularity::Token => (1, cols),
            Granularity::Channel => (rows, 1),
            Granularity::Tensor => (rows, cols),
        }
    }

    /// The shape of the scales of matrices of this shape.
    pub fn scales_shape(&self, shape: MatrixShape) -> MatrixShape {
        let (rows, cols) = self.scale_block(shape);
        MatrixShape::batched(
            shape.batch,
            shape.rows.div_ceil(rows),
            shape.cols.div_ceil(cols),
        )
    }
}
