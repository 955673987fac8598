//! The kernels of compositions.

use burn_backend::{
    Backend, DType,
    tensor::{Device, FloatTensor, IntTensor},
};

/// Compositions on a backend that holds data.
pub trait CompositionKernels: Backend {
    /// The kernels of the device, where it has some; without them Burn's operations run one by one.
    fn composition_kernels(device: &Device<Self>) -> Option<Compositions<Self>>;
}

/// Two tensors of floats.
pub type Pair<B> = (FloatTensor<B>, FloatTensor<B>);

/// Compositions by kernels.
pub struct Compositions<B: Backend> {
    /// True where `rms_norm` and its backward pass take rows of this dtype and of so many elements.
    pub has_rms_norm: fn(DType, usize) -> bool,
    /// The output, in the dtype of x `[.., columns]`, and the inverse of each row's root mean square, f32 `[rows, 1]`, of x,
    /// the gain, of so many elements as a row and any float dtype, and epsilon.
    pub rms_norm: fn(Pair<B>, f32) -> Pair<B>,
    /// The gradient of x, and that of the gain in parts, f32 `[parts, columns]`: of x, the gain, the inverse root mean
    /// squares and the gradient of the output.
    pub rms_norm_backward: fn([FloatTensor<B>; 4]) -> Pair<B>,
    /// `silu(gate) up`, of tensors of one shape and dtype.
    pub swiglu: fn(Pair<B>) -> FloatTensor<B>,
    /// The gradients of gate and up: of both, and of the gradient of the output.
    pub swiglu_backward: fn([FloatTensor<B>; 3]) -> Pair<B>,
    /// The gradient `[rows, columns]` of a table of so many rows: of that of the rows that were gathered,
    /// `[.., columns]`, and of their indices.
    pub embedding_gradient: fn(FloatTensor<B>, IntTensor<B>, usize) -> FloatTensor<B>,
}
