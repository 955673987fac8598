//! Tensors whose dimensions but the last are rows: what both linear layers do with them.

use burn_backend::{Backend, DType, FloatDType, Shape, TensorMetadata, tensor::FloatTensor};

use crate::data::{
    cast_to,
    quantize::{MatrixSource, Quantized},
    tensors::{Bundle, Change, Outline, Tensors},
};

pub(super) use crate::data::tensors::{flatten, flattened};

/// Shape and dtype of a gradient, which are those of its tensor.
#[derive(Debug, Clone)]
pub(super) struct Form {
    pub shape: Shape,
    pub dtype: FloatDType,
}

impl Form {
    pub fn of(tensor: &impl TensorMetadata) -> Self {
        Self {
            shape: tensor.shape(),
            dtype: tensor.dtype().into(),
        }
    }
}

/// A matrix that a pass reads: as it came, or quantized before.
#[derive(Debug, Clone)]
pub(super) enum Source<T: Tensors> {
    Float(T::Float),
    Copy(Quantized<T>),
}

impl Bundle for Source<Outline> {
    type On<T: Tensors> = Source<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        source: Source<S>,
        change: &mut impl Change<S, T>,
    ) -> Source<T> {
        match source {
            Source::Float(tensor) => Source::Float(change.float(tensor)),
            Source::Copy(matrix) => Source::Copy(Quantized::rebuild(matrix, change)),
        }
    }
}

/// X as a forward pass reads it: as it came, or what it is computed from, or quantized before.
#[derive(Debug, Clone)]
pub(super) enum InputSource<T: Tensors> {
    Floats(MatrixSource<T>),
    Copy(Quantized<T>),
}

impl Bundle for InputSource<Outline> {
    type On<T: Tensors> = InputSource<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        source: InputSource<S>,
        change: &mut impl Change<S, T>,
    ) -> InputSource<T> {
        match source {
            InputSource::Floats(source) => {
                InputSource::Floats(MatrixSource::rebuild(source, change))
            }
            InputSource::Copy(matrix) => InputSource::Copy(Quantized::rebuild(matrix, change)),
        }
    }
}

impl<T: Tensors> Source<T> {
    /// Rows and columns, the leading dimensions being rows.
    pub fn shape(&self) -> [usize; 2] {
        match self {
            Self::Float(tensor) => flattened(&tensor.shape()),
            Self::Copy(matrix) => matrix.shape,
        }
    }
}

/// A shape with the last dimension of another one.
pub(super) fn with_last(shape: &Shape, last: &Shape) -> Shape {
    let mut shape = shape.clone();
    let index = shape.num_dims() - 1;
    shape[index] = last[last.num_dims() - 1];
    shape
}

/// The gradient of a bias, `[N]`, from that of the output, `[.., N]`: summed up in FP32.
pub(super) fn bias_gradient<B: Backend>(gradient: &FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    let gradient = cast_to::<B>(gradient.clone(), Some(FloatDType::F32));
    cast_to::<B>(B::linear_bias_backward(gradient), Some(dtype.into()))
}
