//! Compositions of Burn's operations that have a kernel as a whole: RMSNorm, SwiGLU's gate, and the gradient of an
//! embedding.
//!
//! One kernel reads each tensor once. Operation by operation, a norm of a decoder layer of width 768 takes seven times as
//! long on an H200, and leaves more for the backward pass.

pub(super) mod kernels;
mod operations;

pub use kernels::{CompositionKernels, Compositions, Pair};
pub(crate) use operations::{
    EmbeddingGradient, RmsNormForward, RmsNormGradients, SwigluForward, SwigluGradients,
};
