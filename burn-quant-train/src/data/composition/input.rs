//! The input of an operator: floats, or numbers with scales.

use burn_backend::{Backend, DType, FloatDType, Shape, TensorMetadata, tensor::FloatTensor};

use crate::data::{
    quantize::{QuantizeKernels, Quantized},
    tensors::{Bundle, Change, FloatMeta, Outline, Tensors},
};

/// A tensor of floats, or a matrix that stands for one. Kernels decode the numbers of a matrix as they read them.
#[derive(Debug, Clone)]
pub enum OperatorInput<T: Tensors> {
    /// The floats.
    Floats(T::Float),
    /// The matrix, whose elements are those of the tensor in their order.
    Quantized {
        /// The numbers.
        matrix: Quantized<T>,
        /// The shape of the tensor.
        shape: Shape,
        /// Its dtype, to which the values of the matrix are rounded.
        dtype: FloatDType,
    },
}

impl Bundle for OperatorInput<Outline> {
    type On<T: Tensors> = OperatorInput<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        input: OperatorInput<S>,
        change: &mut impl Change<S, T>,
    ) -> OperatorInput<T> {
        match input {
            OperatorInput::Floats(tensor) => OperatorInput::Floats(change.float(tensor)),
            OperatorInput::Quantized {
                matrix,
                shape,
                dtype,
            } => OperatorInput::Quantized {
                matrix: Quantized::rebuild(matrix, change),
                shape,
                dtype,
            },
        }
    }
}

impl<T: Tensors> OperatorInput<T> {
    /// The shape of the tensor.
    pub fn shape(&self) -> Shape {
        match self {
            Self::Floats(tensor) => tensor.shape(),
            Self::Quantized { shape, .. } => shape.clone(),
        }
    }

    /// Its dtype.
    pub fn dtype(&self) -> DType {
        match self {
            Self::Floats(tensor) => tensor.dtype(),
            Self::Quantized { dtype, .. } => (*dtype).into(),
        }
    }

    /// Its outline.
    pub(super) fn outline(&self) -> FloatMeta {
        FloatMeta::new(self.shape(), self.dtype())
    }
}

impl<B: QuantizeKernels> OperatorInput<B> {
    /// The same elements as a matrix.
    pub(crate) fn reshaped(self, matrix: [usize; 2]) -> Self {
        match self {
            Self::Floats(tensor) => Self::Floats(B::float_reshape(tensor, Shape::new(matrix))),
            Self::Quantized {
                matrix: numbers,
                dtype,
                ..
            } => Self::Quantized {
                matrix: numbers,
                shape: Shape::new(matrix),
                dtype,
            },
        }
    }

    /// The floats.
    pub fn into_floats(self) -> FloatTensor<B> {
        match self {
            Self::Floats(tensor) => tensor,
            Self::Quantized {
                matrix,
                shape,
                dtype,
            } => B::float_reshape(B::dequantize_matrix(&matrix, dtype), shape),
        }
    }
}

impl<B: Backend> OperatorInput<B> {
    /// The device of the tensor.
    pub fn device(&self) -> B::Device {
        match self {
            Self::Floats(tensor) => B::float_device(tensor),
            Self::Quantized { matrix, .. } => matrix.device(),
        }
    }
}
