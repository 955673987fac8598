//! The operations that have a backward pass of their own: forward beside backward, a file each.

pub(crate) mod attention;
pub(crate) mod dropout;
pub(crate) mod flow;
pub(crate) mod gelu;
pub(crate) mod layer_norm;
pub(crate) mod learned_embedding;
pub(crate) mod learned_linear;
pub(crate) mod learned_product;
pub(crate) mod linear;
pub(crate) mod log_softmax;
pub(crate) mod matmul;
mod matrix;
mod operand;
pub(crate) mod probe;
pub(crate) mod relu;
pub(crate) mod rms_norm;
pub(crate) mod rotary;
pub(crate) mod run;
pub(crate) mod softmax;
mod stand_in;
pub(crate) mod sum;
pub(crate) mod swiglu;
pub(crate) mod watch;
