//! Compositions of Burn's operations that are one operation: RMSNorm, SwiGLU's gate, GELU, layer normalization, keys less
//! a mean, the logarithm of a softmax, sums, rotary positions, and the gradient of an embedding. Without a kernel all but
//! the last four are computed from float operations, in FP32 but for keys.
//!
//! One kernel reads each tensor once. Operation by operation, a norm of a decoder layer of width 768 takes seven times
//! as long on an H200, and leaves more for the backward pass. It decodes what waits in few bits as it
//! reads it, where a row is whole runs of 16.

mod floats;
mod input;
pub(super) mod kernels;
pub(crate) mod operations;

pub use cubecl_kernels::{dropout::Draw, rotary::RotaryPass};
pub(crate) use floats::{layer_normalized, normalized};
pub use input::OperatorInput;
pub use kernels::{
    Branch, CompositionKernels, Compositions, CopyOfMatrix, FloatWithCopy, GateInputs, NormInput,
    NormInputs, OutputGradient, Pair, PairWithCopy, RotaryTables, WithCopies, WithPair,
    WithPairAndCopy,
};
pub(crate) use operations::{
    Centred, Dense, DropoutForward, GeluForward, GeluGradient, InverseRms, LayerNormForward,
    LayerNormGradients, LogSoftmaxForward, LogSoftmaxGradient, ResidualSum, RmsNormForward,
    RmsNormGradients, RotaryPositions, RowDeviations, SumOfElements, SwigluCompressing,
    SwigluForward, SwigluGradients, embedding_gradient, gradient_of_terms, has_quantizing_kernels,
    quantizes_norms, with_other,
};
