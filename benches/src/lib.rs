//! Measurements, and the way from their result files to the tables of the book and the README.
//!
//! | program | what it measures |
//! | --- | --- |
//! | `qt-bench` | the speed of kernels, layers and optimizers, on an NVIDIA GPU; feature `cuda` |
//! | `peers/peers.py` | the same in PyTorch and Triton |
//! | `cargo bench` | the CPU path |
//! | `states` | the error of compressed optimizer states, on those of a checkpoint |
//! | `errors` | what quantization does to the tensors of a checkpoint |
//! | `report` | nothing: it writes the tables, also those of `pretrain --json`, names old logs, and compares forks step by step |

#[cfg(feature = "cuda")]
pub mod attention;
pub mod difference;
pub mod errors;
pub mod format;
#[cfg(feature = "cuda")]
pub mod gemm;
#[cfg(feature = "cuda")]
pub mod gpu;
#[cfg(feature = "cuda")]
pub mod int4;
pub mod logs;
pub mod markers;
#[cfg(feature = "cuda")]
pub mod operators;
#[cfg(feature = "cuda")]
pub mod optimizer;
pub mod paired;
pub mod peers;
pub mod plot;
#[cfg(feature = "cuda")]
pub mod quantize;
pub mod random;
pub mod recipe_results;
pub mod results;
pub mod state_error;
pub mod step;
pub mod table;
pub mod timing;
