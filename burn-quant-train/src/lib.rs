//! Low-precision training for [Burn](https://burn.dev): change one type and one optimizer, and any Burn model trains
//! with quantized matrix products and compressed saved activations.
//!
//! ```
//! use burn::backend::{Autodiff, Flex};
//! use burn_quant_train::{QuantTrain, recipe::FallbackInt8};
//!
//! // was: type Backend = Autodiff<Flex>;
//! type Backend = QuantTrain<Autodiff<Flex>, FallbackInt8<f32>>;
//! ```
//!
//! - [`recipe`] holds the recipes, which are rows of data.
//! - [`data`] holds the quantized operations, as functions of tensors, and the backends that run them.
//! - [`health`] has the figures of what quantization does to a model.
//! - [`layer`] says which layers are quantized, and keeps their state between steps.
//! - [`saved`] holds what waits for the backward pass, and says how it is compressed.
//! - [`backend`] is the decorator, [`QuantTrain`]: it forwards every operation of Burn's backend traits to the inner
//!   backend, applies the [precision policy](backend::precision), and runs linear layers quantized.
//! - [`attention`](mod@attention) is attention with a window and dropout, and for Burn's `MultiHeadAttention`.
//! - [`optim`] holds the optimizers, which own the state of the layers.
//!
//! [`CompileAhead`] shortens the first step on a GPU.
//!
//! Each knows those above it, and none below.

pub mod attention;
pub mod backend;
pub mod data;
pub mod health;
pub mod layer;
pub mod optim;
pub mod recipe;
pub mod saved;

mod device_failure;
mod lock;
mod operations;
mod ops;
mod warning;

pub use backend::QuantTrain;
pub use cubecl_kernels::compile_ahead::CompileAhead;
