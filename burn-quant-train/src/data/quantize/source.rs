//! The matrix that is quantized: floats, or what kernels compute in the launch that quantizes it.

use burn_backend::{TensorMetadata, tensor::FloatTensor};
use cubecl_kernels::quantize::QuantizeSpec;

use crate::data::{
    composition::{OperatorInput, SwigluCompressing, SwigluForward},
    kernels::Kernels,
    operation::Operation,
    quantize::Quantized,
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
        /// The copies in which both wait for the backward pass, if who reads them is to make these too: groups of which
        /// rows are whole ones.
        contexts: Option<QuantizeSpec>,
    },
}

/// The copies of gate and of up in which they wait for the backward pass, where they were asked for.
pub type SwigluContexts<T> = Option<(Quantized<T>, Quantized<T>)>;

impl Bundle for MatrixSource<Outline> {
    type On<T: Tensors> = MatrixSource<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        source: MatrixSource<S>,
        change: &mut impl Change<S, T>,
    ) -> MatrixSource<T> {
        match source {
            MatrixSource::Floats(tensor) => MatrixSource::Floats(change.float(tensor)),
            MatrixSource::Swiglu { gate, up, contexts } => MatrixSource::Swiglu {
                gate: change.float(gate),
                up: change.float(up),
                contexts,
            },
        }
    }
}

impl<K: Kernels> MatrixSource<K> {
    /// The tensor. Copies of what it is computed from are not made.
    pub fn into_floats(self) -> FloatTensor<K> {
        match self {
            Self::Floats(tensor) => tensor,
            Self::Swiglu { gate, up, .. } => {
                let inputs = (OperatorInput::Floats(gate), OperatorInput::Floats(up));
                SwigluForward.run::<K>(inputs)
            }
        }
    }

    /// The same for who makes no copies of what it is computed from, and these copies.
    pub fn with_contexts(self) -> (Self, SwigluContexts<K>) {
        match self {
            Self::Swiglu {
                gate,
                up,
                contexts: Some(spec),
            } => {
                let compressing = SwigluCompressing::of_rows(spec, &gate.shape());
                let (product, copies) = compressing.run::<K>((gate, up));
                (Self::Floats(product), Some(copies))
            }
            source => (source, None),
        }
    }

    /// The same of what `change` makes of each tensor.
    pub(crate) fn map(self, change: impl Fn(FloatTensor<K>) -> FloatTensor<K>) -> Self {
        match self {
            Self::Floats(tensor) => Self::Floats(change(tensor)),
            Self::Swiglu { gate, up, contexts } => Self::Swiglu {
                gate: change(gate),
                up: change(up),
                contexts,
            },
        }
    }
}
