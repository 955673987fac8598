//! Backends that hold data, and the operations that they run.
//!
//! An [`Operation`] takes tensors and gives tensors: the state that it reads goes in, and comes out changed. It is
//! written once, in terms of the [`Kernels`] of a backend. [`DataBackend::run`] runs it: at once, or as one custom
//! operation of a fused stream, which does not see the tensors that the operation makes for itself.
//!
//! | file | what it has |
//! | --- | --- |
//! | [`tensors`] | values built of tensors, on any kind of tensors |
//! | [`quantize`], [`learned_step`], [`sampling`], [`product`], [`attention`], [`composition`], [`optimizer`], [`threshold`], [`amax_history`], [`concat`](mod@concat), [`health`] | a concern each: kernels and operations |
//! | `kernels`, `operation` | the kernels of all concerns; operations, and the backends that run them |
//! | `host`, `cube`, `fusion` | the backends: in host memory, on CubeCL's runtimes, in a fused stream |
//! | `cast`, `random_hadamard` | casts between float dtypes; a transform by Burn's operations |
//! | `read` | state read back to the host |

pub mod amax_history;
pub mod attention;
pub mod composition;
pub mod concat;
pub mod health;
pub mod learned_step;
pub mod optimizer;
pub mod product;
pub mod quantize;
pub mod sampling;
pub mod tensors;
pub mod threshold;

mod cast;
#[cfg(feature = "cubecl")]
mod cube;
#[cfg(feature = "fusion")]
mod fusion;
#[cfg(any(feature = "flex", feature = "ndarray"))]
pub mod host;
mod kernels;
mod operation;
pub(crate) mod random_hadamard;
pub(crate) mod read;

pub use cast::cast_to;
pub use cubecl_kernels::{layout::Layout, rounding::StochasticKey};
pub use kernels::Kernels;
pub use operation::{DataBackend, Operation};
