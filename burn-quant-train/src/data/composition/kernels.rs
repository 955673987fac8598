//! The kernels of compositions.

use burn_backend::{
    Backend, DType,
    tensor::{Device, FloatTensor, IntTensor},
};

use cubecl_kernels::{
    dropout::Draw, granularity::Granularity, quantize::QuantizeSpec, rotary::RotaryPass,
    sum::Reduction,
};

use super::OperatorInput;
use crate::data::quantize::Quantized;

/// Compositions on a backend that holds data.
pub trait CompositionKernels: Backend {
    /// The kernels of the device, where it has some; without them Burn's operations run one by one.
    fn composition_kernels(device: &Device<Self>) -> Option<Compositions<Self>>;
}

/// Two tensors of floats.
pub type Pair<B> = (FloatTensor<B>, FloatTensor<B>);

/// x and the gain of a norm.
pub type NormInput<B> = (OperatorInput<B>, FloatTensor<B>);

/// x and the gain of a norm, and a bias, of the gain's size and dtype, if it has one.
pub type NormInputs<B> = (NormInput<B>, Option<FloatTensor<B>>);

/// gate and up, of one shape and dtype.
pub type GateInputs<B> = (OperatorInput<B>, OperatorInput<B>);

/// x, and a residual of its shape and dtype, if there is one.
pub type Branch<B> = (OperatorInput<B>, Option<FloatTensor<B>>);

/// What becomes of a pair of neighbours, `[1, 1, 2, 4]`, and the factors of what became of it, `[1, positions, features,
/// 2]`, of one float dtype: the operands of Burn's `RotaryEncoding`.
pub type RotaryTables<B> = Pair<B>;

/// The gradient of an output, and what is added to that of the input: see
/// [`OutputGradient`](cubecl_kernels::output_gradient::OutputGradient).
pub type OutputGradient<B> = (Vec<OperatorInput<B>>, Option<FloatTensor<B>>);

/// The output of a pass in the shape of its input, and two rows or columns of numbers.
pub type WithPair<B> = (FloatTensor<B>, Pair<B>);

/// The copy of a tensor, if it was asked for.
pub type Copied<B> = Option<Quantized<B>>;

/// An output and a number a row, and the copy of the input.
pub type PairWithCopy<B> = (Pair<B>, Copied<B>);

/// The same with two numbers a row.
pub type WithPairAndCopy<B> = (WithPair<B>, Copied<B>);

/// An output and its copy.
pub type FloatWithCopy<B> = (FloatTensor<B>, Copied<B>);

/// How a tensor's copy is made, and the columns of the matrix that it is quantized as.
pub type CopyOfMatrix<'a> = Option<(&'a QuantizeSpec, usize)>;

/// An output, and the copies of two inputs.
pub type WithCopies<B> = (FloatTensor<B>, (Quantized<B>, Quantized<B>));

/// Compositions by kernels.
pub struct Compositions<B: Backend> {
    /// True where both norms and their backward passes take rows of this dtype and of so many elements.
    pub has_norms: fn(DType, usize) -> bool,
    /// The output, in the dtype of x `[.., columns]`, and the inverse of each row's root mean square, f32 `[rows, 1]`,
    /// of x, the gain, of so many elements as a row and any float dtype, and epsilon. With a specification also the copy
    /// of x, which is floats, as rows and columns.
    pub rms_norm: fn(NormInput<B>, f32, Option<&QuantizeSpec>) -> PairWithCopy<B>,
    /// The inverse of each row's root mean square alone, f32 `[rows, 1]`: of x, and epsilon.
    pub inverse_rms: fn(OperatorInput<B>, f32) -> FloatTensor<B>,
    /// The mean and the inverse deviation of each row alone, f32 `[rows, 1]`: of x, and epsilon.
    pub row_deviations: fn(OperatorInput<B>, f32) -> Pair<B>,
    /// True where a norm's output, of numbers, is computed in the launch that quantizes it in this granularity.
    pub quantizes_norms: fn(&Device<B>, Granularity) -> bool,
    /// The gradient of x, and that of the gain, f32 `[1, columns]`: of x and the gain; of the inverse root mean
    /// squares; of the gradient of the output.
    pub rms_norm_backward: fn(NormInput<B>, FloatTensor<B>, OutputGradient<B>) -> Pair<B>,
    /// The output, in the dtype of x `[.., columns]`, and the mean and the inverse deviation of each row, f32 `[rows,
    /// 1]`: of the inputs, and epsilon. With a specification also the copy of x, as of [`rms_norm`](Self::rms_norm).
    pub layer_norm: fn(NormInputs<B>, f32, Option<&QuantizeSpec>) -> WithPairAndCopy<B>,
    /// The gradient of x, and those of the gain and of the bias, f32 `[1, columns]`: of x and the gain; of the
    /// gradient of the output; of the means and the inverse deviations.
    pub layer_norm_backward: fn(NormInput<B>, OutputGradient<B>, Pair<B>) -> WithPair<B>,
    /// `x Φ(x)`, in the shape and dtype of x.
    pub gelu: fn(OperatorInput<B>) -> FloatTensor<B>,
    /// The gradient of x: of x, and of the gradient of the output, of its shape and dtype.
    pub gelu_backward: fn(OperatorInput<B>, OperatorInput<B>) -> FloatTensor<B>,
    /// Dropout of x, and its sum with a residual of the shape and dtype of x, if there is one.
    pub dropout: fn(Branch<B>, &Draw) -> FloatTensor<B>,
    /// The sum of x and of a residual of its shape and dtype.
    pub residual_sum: fn(OperatorInput<B>, FloatTensor<B>) -> FloatTensor<B>,
    /// `silu(gate) up`.
    pub swiglu: fn(GateInputs<B>) -> FloatTensor<B>,
    /// The same of two matrices of floats, and their copies by a specification, whose rows are whole groups of it.
    pub swiglu_compressing: fn(Pair<B>, &QuantizeSpec) -> WithCopies<B>,
    /// The gradients of gate and up: of both, and of the gradient of the output.
    pub swiglu_backward: fn(GateInputs<B>, OperatorInput<B>) -> Pair<B>,
    /// The logarithm of the softmax of each row, FP32, of x `[.., columns]`, of any float dtype.
    pub log_softmax: fn(FloatTensor<B>) -> FloatTensor<B>,
    /// The gradient of x, of this dtype: of what [`log_softmax`](Self::log_softmax) gave, and of its gradient, FP32.
    pub log_softmax_backward: fn(Pair<B>, DType) -> FloatTensor<B>,
    /// The sum or the mean of all elements, FP32 `[1]`, of a tensor of any float dtype.
    pub sum: fn(FloatTensor<B>, Reduction) -> FloatTensor<B>,
    /// A tensor without padding between its rows.
    pub dense: fn(FloatTensor<B>) -> FloatTensor<B>,
    /// A tensor `[matrices, rows, columns]` less the means over each so many rows of its columns. With a specification
    /// also the copy of the difference, in rows of so many neighbours.
    pub centred: fn(FloatTensor<B>, usize, CopyOfMatrix) -> FloatWithCopy<B>,
    /// Rotary positions of x `[.., positions, features]`, of up to four dimensions, or of a gradient back to that of x.
    pub rotary: fn(FloatTensor<B>, RotaryTables<B>, RotaryPass) -> FloatTensor<B>,
    /// The gradient `[rows, columns]` of a table of so many rows: of that of the rows that were gathered,
    /// `[.., columns]`, and of their indices.
    pub embedding_gradient: fn(FloatTensor<B>, IntTensor<B>, usize) -> FloatTensor<B>,
}
