//! Quantized matrices of the reference.

use crate::{scale::ScaleNumber, shape::MatrixShape};

use super::number::Definition;

/// A quantized batch of matrices: each value is the number of `values[i]`, times the scale of its region.
#[derive(Debug, Clone, PartialEq)]
pub struct ReferenceQuantized {
    /// Shape of the values.
    pub shape: MatrixShape,
    /// The definition of the values.
    pub number: Definition,
    /// The integers, or the codes of floats, row-major.
    pub values: Vec<i32>,
    /// The factors of values: one for each region, row-major.
    pub scales: Vec<f32>,
    /// The scales as they are stored, where that is in bytes; else empty.
    pub scale_bytes: Vec<u8>,
    /// One scale for each matrix where [`ScaleNumber::has_tensor_scale`]; else empty.
    pub tensor_scales: Vec<f32>,
    /// How scales are stored.
    pub scale_number: ScaleNumber,
    /// Rows and columns of a region, in elements.
    pub scale_block: (usize, usize),
}

impl ReferenceQuantized {
    /// Number of rows and columns of regions of one matrix.
    pub fn scale_grid(&self) -> (usize, usize) {
        (
            self.shape.rows.div_ceil(self.scale_block.0),
            self.shape.cols.div_ceil(self.scale_block.1),
        )
    }

    /// The integer or code at these coordinates.
    pub fn value(&self, batch: usize, row: usize, col: usize) -> i32 {
        self.values[(batch * self.shape.rows + row) * self.shape.cols + col]
    }

    /// The number at these coordinates, in units of its scale.
    pub fn number(&self, batch: usize, row: usize, col: usize) -> f64 {
        self.number.value(self.value(batch, row, col))
    }

    /// Index of the region of an element, into `scales`.
    pub fn block_of(&self, batch: usize, row: usize, col: usize) -> usize {
        let (rows, cols) = self.scale_grid();
        (batch * rows + row / self.scale_block.0) * cols + col / self.scale_block.1
    }

    /// The scale of the element at these coordinates.
    pub fn scale(&self, batch: usize, row: usize, col: usize) -> f32 {
        self.scales[self.block_of(batch, row, col)]
    }

    /// The same matrices transposed, values, regions and scales.
    pub fn transposed(&self) -> Self {
        let (rows, cols) = self.scale_grid();
        let grid = MatrixShape::batched(self.shape.batch, rows, cols);
        Self {
            shape: self.shape.transposed(),
            values: transpose(&self.values, self.shape),
            scales: transpose(&self.scales, grid),
            scale_bytes: match self.scale_bytes.is_empty() {
                true => Vec::new(),
                false => transpose(&self.scale_bytes, grid),
            },
            scale_block: (self.scale_block.1, self.scale_block.0),
            ..self.clone()
        }
    }
}

/// A batch of matrices transposed.
pub fn transpose<T: Copy>(x: &[T], shape: MatrixShape) -> Vec<T> {
    coordinates(shape.transposed())
        .map(|(batch, row, col)| x[(batch * shape.rows + col) * shape.cols + row])
        .collect()
}

/// All coordinates `(batch, row, col)` in row-major order.
pub(super) fn coordinates(shape: MatrixShape) -> impl Iterator<Item = (usize, usize, usize)> {
    (0..shape.batch).flat_map(move |batch| {
        (0..shape.rows).flat_map(move |row| (0..shape.cols).map(move |col| (batch, row, col)))
    })
}
