//! From float tensors to contexts and back.

use burn_backend::{FloatDType, Shape, TensorMetadata, tensor::FloatTensor};
use cubecl_kernels::{
    granularity::Granularity, layout::Layout, quantize::QuantizeSpec, rounding::Rounding,
};

use crate::{
    data::{
        Kernels, Operation,
        composition::operations::rows_and_columns,
        quantize::Quantized,
        tensors::{self, FloatMeta, On, Outline, Tensors},
    },
    recipe::Context,
};

/// Compresses a tensor of any shape: groups of neighbours share a scale.
#[derive(Debug, Clone)]
pub struct Compress {
    /// The format.
    pub context: Context,
}

impl Compress {
    /// How the matrix is quantized.
    pub(crate) fn spec(&self) -> QuantizeSpec {
        QuantizeSpec::new(self.context.number, Granularity::Group(self.context.group))
            .with_rounding(Rounding::Nearest)
            .with_layout(Layout::RowMajor)
    }

    /// Rows and columns of the matrix that a tensor of this shape is quantized as.
    pub(crate) fn matrix(&self, shape: &Shape) -> [usize; 2] {
        matrix_form(shape, self.context.group)
    }

    /// How a tensor of this shape is quantized, if its own rows are those of the matrix, and whole groups.
    pub(crate) fn of_rows(&self, shape: &Shape) -> Option<QuantizeSpec> {
        let matrix = rows_and_columns(shape);
        let is_of_rows =
            self.matrix(shape) == matrix && matrix[1].is_multiple_of(self.context.group);
        is_of_rows.then(|| self.spec())
    }
}

impl Operation for Compress {
    const NAME: &'static str = "compress";
    type Inputs = FloatMeta;
    type Outputs = Quantized<Outline>;

    fn outline<T: Tensors>(&self, tensor: &T::Float) -> Quantized<Outline> {
        Quantized::outline(self.matrix(&tensor.shape()), &self.spec())
    }

    fn run<K: Kernels>(self, tensor: FloatTensor<K>) -> Quantized<K> {
        let shape = Shape::new(self.matrix(&tensor.shape()));
        let matrix = K::float_reshape(tensor, shape);
        K::quantize_matrix(matrix, &self.spec())
    }
}

/// The tensor of this shape and dtype that a compressed one stands for.
#[derive(Debug, Clone)]
pub struct Decompress {
    /// Its shape.
    pub shape: Shape,
    /// Its dtype.
    pub dtype: FloatDType,
}

impl Operation for Decompress {
    const NAME: &'static str = "decompress";
    type Inputs = Quantized<Outline>;
    type Outputs = FloatMeta;

    fn outline<T: Tensors>(&self, _matrix: &On<Self::Inputs, T>) -> FloatMeta {
        FloatMeta::new(self.shape.clone(), self.dtype)
    }

    fn run<K: Kernels>(self, matrix: Quantized<K>) -> FloatTensor<K> {
        K::float_reshape(K::dequantize_matrix(&matrix, self.dtype), self.shape)
    }
}

/// Rows and columns of a tensor as a matrix: so many of its last dimensions are columns that they fill a group.
fn matrix_form(shape: &Shape, group: usize) -> [usize; 2] {
    let mut cols = 1;
    for &dim in shape.as_slice().iter().rev() {
        if cols >= group {
            break;
        }
        cols *= dim;
    }
    [shape.num_elements() / cols.max(1), cols]
}

impl Context {
    /// Bytes of a tensor of this shape that waits in this format, scales included.
    pub fn bytes(self, shape: impl Into<Shape>) -> usize {
        let compress = Compress { context: self };
        let outline = Quantized::outline(compress.matrix(&shape.into()), &compress.spec());
        tensors::bytes::<Quantized<Outline>>(outline)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_filled_from_as_many_dimensions_as_it_takes() {
        assert_eq!(matrix_form(&Shape::new([4, 128, 256]), 128), [512, 256]);
        assert_eq!(matrix_form(&Shape::new([2, 4, 8, 64]), 128), [8, 512]);
        assert_eq!(matrix_form(&Shape::new([4096, 1]), 128), [1, 4096]);
        assert_eq!(matrix_form(&Shape::new([7, 3, 3]), 128), [1, 63]);
        assert_eq!(matrix_form(&Shape::new([0, 8]), 128), [0, 0]);
    }
}
