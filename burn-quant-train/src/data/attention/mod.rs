//! Attention without saved scores: by a kernel that has them in registers only or, on CPUs, a tile at a time; else by a
//! softmax that is one kernel between two products.

pub(super) mod kernels;
mod operations;

pub use cubecl_kernels::attention::{
    AttentionGradients, AttentionOptions, AttentionProducts, AttentionShape, Band, Dropout, Dropped,
};
pub use kernels::{
    Attention, AttentionBackward, AttentionInputs, AttentionKernels, AttentionProblem,
    AttentionWay, Composed, Flash, FlashOutput, OfInputs,
};
pub(crate) use operations::{
    ComposedForward, ComposedGradients, FlashForward, FlashGradients, Gradients, way,
};
