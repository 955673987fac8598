//! The matrix that is quantized: floats, or what kernels compute in the launch that quantizes it.

use burn_backend::tensor::FloatTensor;

use crate::data::{
    composition::{OperatorInput, SwigluForward},
    kernels::Kernels,
    operation::Operation,
    tensors::{Bundle, Change, Outline, Tensors},
};

/// A tensor, or what it is computed from. The dimensions but the last are rows.
#[derive(Debug, Clone)]
pub enum MatrixSource<T: Tensors> {
    /// The tensor.
    Floats(T::Float),
    /// `silu(gate) up`, of tensors of one shape and dtype.
    Swiglu {
        /// The gate.
        gate: T::Float,
        /// What it lets through.
        up: T::Float,
    },
}

impl Bundle for MatrixSource<Outline> {
    type On<T: Tensors> = MatrixSource<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        source: MatrixSource<S>,
        change: &mut impl Change<S, T>,
    ) -> MatrixSource<T> {
        match source {
            MatrixSource::Floats(tensor) => MatrixSource::Floats(change.float(tensor)),
            MatrixSource::Swiglu { gate, up } => MatrixSource::Swiglu {
                gate: change.float(gate),
                up: change.float(up),
            },
        }
    }
}

impl<K: Kernels> MatrixSource<K> {
    /// The tensor.
    pub fn into_floats(self) -> FloatTensor<K> {
        match self {
            Self::Floats(tensor) => tensor,
            Self::Swiglu { gate, up } => {
                let inputs = (OperatorInput::Floats(gate), OperatorInput::Floats(up));
                SwigluForward.run::<K>(inputs)
            }
        }
    }

    /// The same of what `change` makes of each tensor.
    pub(crate) fn map(self, change: impl Fn(FloatTensor<K>) -> FloatTensor<K>) -> Self {
        match self {
            Self::Floats(tensor) => Self::Floats(change(tensor)),
            Self::Swiglu { gate, up } => Self::Swiglu {
                gate: change(gate),
                up: change(up),
            },
        }
    }
}
