//! Attention without saved scores: the softmax is one kernel between two products.

pub(super) mod kernels;
mod operations;

pub use cubecl_kernels::softmax::AttentionScores;
pub use kernels::{Attention, AttentionBackward, AttentionInputs, AttentionKernels};
pub(crate) use operations::{AttentionForward, AttentionGradients};
