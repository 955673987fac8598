//! Attention on all cores, tile by tile: the numbers of [`reference::attention`](mod@crate::reference::attention) with
//! FP32 sums and FP32 statistics of the softmax.
//!
//! The shape alone says how the work is cut and in which order sums are taken, so the bits of a result do not depend on
//! the number of threads. Beside inputs and outputs a thread needs a few tiles, and the backward pass gradients of the
//! queries for each part of the keys that is worked on at once.

mod backward;
mod exponential;
mod forward;
mod product;
mod tile;

pub use backward::attention_backward;
pub use forward::attention;

/// Output and log-sum-exp.
#[derive(Debug, Clone, PartialEq)]
pub struct HostAttention {
    /// O, `[batch, heads, queries, value_width]`.
    pub output: Vec<f32>,
    /// L, `[batch, heads, queries]`; negative infinity for a row that sees nothing.
    pub log_sum_exp: Vec<f32>,
}
