//! Attention without saved scores: by a kernel that has them in registers only, else by a softmax that is one kernel
//! between two products.

pub(super) mod kernels;
mod operations;

pub use cubecl_kernels::softmax::AttentionScores;
pub use kernels::{
    Attention, AttentionBackward, AttentionGradients, AttentionInputs, AttentionKernels,
    FlashBackward, FlashOutput,
};
pub(crate) use operations::{
    AttentionForward, ComposedGradients, FlashForward, FlashGradients, Gradients, is_flash,
};
