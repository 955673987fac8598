//! Measurements, and the way from their result files to the tables of the book and the README.
//!
//! | program | what it measures |
//! | --- | --- |
//! | `qt-bench` | the speed of kernels, on an NVIDIA GPU; feature `cuda` |
//! | `states` | the error of compressed optimizer states, on those of a checkpoint |
//! | `report` | nothing: it writes the tables, also those of `pretrain --json` |

pub mod format;
pub mod markers;
#[cfg(feature = "cuda")]
pub mod optimizer;
pub mod peers;
pub mod speed;
pub mod state_error;
pub mod table;
#[cfg(feature = "cuda")]
pub mod timing;
