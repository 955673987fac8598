//! Many short tensors, one behind the other in a new one.
//!
//! Burn copies each in a launch of its own; layers leave hundreds of numbers a step.

pub(super) mod kernels;
mod operation;

pub use kernels::ConcatKernels;
pub use operation::{concat_floats, concat_ints};
