//! AdamW on a backend that holds data: the tensors and the kernels of a step.

pub(super) mod kernels;
mod loss_scale;
mod moment;
mod operations;

pub use cubecl_kernels::{
    adamw::Hyperparameters,
    loss_scaling::{LossScaling, is_scale},
    optimizer_state::{Encoding, MAX_GROUP, Moment, StateFormat},
};
pub use kernels::{AdamWItem, AdamWUpdate, OptimizerKernels};
pub use loss_scale::LossScale;
pub(crate) use moment::HostMoment;
pub use moment::MomentState;
pub use operations::{
    adamw, compress_moment, decompress_moment, find_nonfinite, initial_moment, tick,
    update_loss_scale,
};
