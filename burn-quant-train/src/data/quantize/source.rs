//! The matrix that is quantized: floats, or what kernels compute in the launch that quantizes it.

use burn_backend::{Shape, TensorMetadata, tensor::FloatTensor};
use cubecl_kernels::quantize::QuantizeSpec;

use crate::data::{
    composition::{
        GeluForward, GeluGradient, OperatorInput, SwigluCompressing, SwigluForward,
        layer_normalized, normalized,
    },
    kernels::Kernels,
    operation::Operation,
    product::ProductInputs,
    quantize::Quantized,
    tensors::{Bundle, Change, Outline, Tensors, flatten, flattened},
};

/// A tensor, or what it is computed from. The dimensions but the last are rows.
#[derive(Debug, Clone)]
pub enum MatrixSource<T: Tensors> {
    /// The tensor.
    Floats(T::Float),
    /// `silu(gate) up`, of tensors of one shape and dtype.
    Swiglu {
        /// The gate.
        gate: OperatorInput<T>,
        /// What it lets through.
        up: OperatorInput<T>,
    },
    /// The same of floats, for who makes the copies too in which both wait for the backward pass.
    SwigluCompressing {
        /// The gate.
        gate: T::Float,
        /// What it lets through.
        up: T::Float,
        /// These copies: groups of which rows are whole ones.
        contexts: QuantizeSpec,
    },
    /// GELU of a tensor.
    Gelu(OperatorInput<T>),
    /// The gradient of its input.
    GeluGradient {
        /// The input.
        x: OperatorInput<T>,
        /// The gradient of the output, of its shape and dtype.
        gradient: OperatorInput<T>,
    },
    /// A product of quantized matrices.
    Product(ProductInputs<T>),
    /// `x inverse_rms gain`, in the dtype of x: RMSNorm's output.
    RmsNorm {
        /// The input, `[.., columns]`.
        x: OperatorInput<T>,
        /// A number for each column, of any float dtype.
        gain: T::Float,
        /// What the norm gave of each row, f32 `[rows, 1]`.
        inverse_rms: T::Float,
    },
    /// `(x - mean) inverse_deviation gain + bias`, in the dtype of x: the output of layer normalization.
    LayerNorm {
        /// The input, `[.., columns]`.
        x: OperatorInput<T>,
        /// A number for each column, of any float dtype.
        gain: T::Float,
        /// The same, where there is one.
        bias: Option<T::Float>,
        /// What the norm gave of each row, f32 `[rows, 1]`: the mean, and the inverse deviation.
        rows: (T::Float, T::Float),
    },
}

impl<T: Tensors> MatrixSource<T> {
    /// The shape of the tensor.
    pub(crate) fn shape(&self) -> Shape {
        match self {
            Self::Floats(tensor) | Self::SwigluCompressing { gate: tensor, .. } => tensor.shape(),
            Self::Swiglu { gate: x, .. }
            | Self::Gelu(x)
            | Self::GeluGradient { x, .. }
            | Self::RmsNorm { x, .. }
            | Self::LayerNorm { x, .. } => x.shape(),
            Self::Product(factors) => factors.shape(),
        }
    }
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
            MatrixSource::Swiglu { gate, up } => MatrixSource::Swiglu {
                gate: OperatorInput::rebuild(gate, change),
                up: OperatorInput::rebuild(up, change),
            },
            MatrixSource::SwigluCompressing { gate, up, contexts } => {
                MatrixSource::SwigluCompressing {
                    gate: change.float(gate),
                    up: change.float(up),
                    contexts,
                }
            }
            MatrixSource::Gelu(x) => MatrixSource::Gelu(OperatorInput::rebuild(x, change)),
            MatrixSource::GeluGradient { x, gradient } => MatrixSource::GeluGradient {
                x: OperatorInput::rebuild(x, change),
                gradient: OperatorInput::rebuild(gradient, change),
            },
            MatrixSource::Product(factors) => {
                MatrixSource::Product(ProductInputs::rebuild(factors, change))
            }
            MatrixSource::RmsNorm {
                x,
                gain,
                inverse_rms,
            } => MatrixSource::RmsNorm {
                x: OperatorInput::rebuild(x, change),
                gain: change.float(gain),
                inverse_rms: change.float(inverse_rms),
            },
            MatrixSource::LayerNorm {
                x,
                gain,
                bias,
                rows: (mean, inverse_deviation),
            } => MatrixSource::LayerNorm {
                x: OperatorInput::rebuild(x, change),
                gain: change.float(gain),
                bias: bias.map(|bias| change.float(bias)),
                rows: (change.float(mean), change.float(inverse_deviation)),
            },
        }
    }
}

impl<K: Kernels> MatrixSource<K> {
    /// The tensor. Copies of what it is computed from are not made.
    pub fn into_floats(self) -> FloatTensor<K> {
        match self {
            Self::Floats(tensor) => tensor,
            Self::Swiglu { gate, up } => SwigluForward.run::<K>((gate, up)),
            Self::SwigluCompressing { gate, up, .. } => {
                let inputs = (OperatorInput::Floats(gate), OperatorInput::Floats(up));
                SwigluForward.run::<K>(inputs)
            }
            Self::Gelu(x) => GeluForward.run::<K>(x),
            Self::GeluGradient { x, gradient } => GeluGradient.run::<K>((x, gradient)),
            Self::Product(factors) => factors.into_floats(),
            Self::RmsNorm {
                x,
                gain,
                inverse_rms,
            } => {
                let shape = x.shape();
                let x = flatten::<K>(x.into_floats());
                K::float_reshape(normalized::<K>(x, gain, inverse_rms), shape)
            }
            Self::LayerNorm {
                x,
                gain,
                bias,
                rows,
            } => {
                let shape = x.shape();
                let x = flatten::<K>(x.into_floats());
                K::float_reshape(layer_normalized::<K>(x, gain, bias, rows), shape)
            }
        }
    }

    /// The same for who makes no copies of what it is computed from, and these copies.
    pub fn with_contexts(self) -> (Self, SwigluContexts<K>) {
        match self {
            Self::SwigluCompressing { gate, up, contexts } => {
                let compressing = SwigluCompressing::of_rows(contexts, &gate.shape());
                let (product, copies) = compressing.run::<K>((gate, up));
                (Self::Floats(product), Some(copies))
            }
            source @ (Self::Floats(_)
            | Self::Swiglu { .. }
            | Self::Gelu(_)
            | Self::GeluGradient { .. }
            | Self::Product(_)
            | Self::RmsNorm { .. }
            | Self::LayerNorm { .. }) => (source, None),
        }
    }

    /// The same as a matrix.
    pub(crate) fn flattened(self) -> Self {
        match self {
            Self::Floats(tensor) => Self::Floats(flatten::<K>(tensor)),
            Self::Swiglu { gate, up } => {
                let matrix = flattened(&gate.shape());
                let [gate, up] = [gate, up].map(|it| it.reshaped(matrix));
                Self::Swiglu { gate, up }
            }
            Self::SwigluCompressing { gate, up, contexts } => Self::SwigluCompressing {
                gate: flatten::<K>(gate),
                up: flatten::<K>(up),
                contexts,
            },
            Self::Gelu(x) => {
                let matrix = flattened(&x.shape());
                Self::Gelu(x.reshaped(matrix))
            }
            Self::GeluGradient { x, gradient } => {
                let matrix = flattened(&x.shape());
                let [x, gradient] = [x, gradient].map(|it| it.reshaped(matrix));
                Self::GeluGradient { x, gradient }
            }
            Self::Product(factors) => {
                let matrix = flattened(&factors.shape());
                Self::Product(factors.reshaped(Shape::new(matrix)))
            }
            Self::RmsNorm {
                x,
                gain,
                inverse_rms,
            } => {
                let matrix = flattened(&x.shape());
                Self::RmsNorm {
                    x: x.reshaped(matrix),
                    gain,
                    inverse_rms,
                }
            }
            Self::LayerNorm {
                x,
                gain,
                bias,
                rows,
            } => {
                let matrix = flattened(&x.shape());
                Self::LayerNorm {
                    x: x.reshaped(matrix),
                    gain,
                    bias,
                    rows,
                }
            }
        }
    }
}
