//! The time of a forward and a backward pass of layers, beside that of the same layers without quantization.
//!
//! [`architecture`] holds the layers, plain Burn; [`contender`] says what a training loop does about their weights;
//! [`measure`] takes a layer on one backend: [`check`] compares outputs and gradients with a float reference, and
//! [`passes`] times both passes; [`breakdown`] times the parts of a layer; [`training`] times whole training steps, and
//! [`memory`] has each measured in a process of its own.
//! None of them knows of a device: `linear`, `layer` and `pretrain`, built with feature `cuda`, run them on a GPU.

pub mod architecture;
pub mod breakdown;
pub mod check;
pub mod contender;
pub mod input;
#[cfg(feature = "cuda")]
pub mod layer;
#[cfg(feature = "cuda")]
pub mod linear;
pub mod measure;
pub mod memory;
pub mod passes;
#[cfg(feature = "cuda")]
pub mod pretrain;
#[cfg(feature = "cuda")]
pub mod recipes;
pub mod training;
mod upstream;
