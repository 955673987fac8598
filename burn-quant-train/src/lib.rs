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
//! - [`QuantTrain`] is the backend decorator: it forwards every operation of Burn's backend traits to the inner
//!   backend, applies the [precision policy](precision), and runs linear layers quantized.
//! - [`recipe`] holds the recipes, which are rows of data.
//! - [`optim`] holds the optimizers, which own the state of the layers; [`policy`] says which layers are quantized.
//! - [`ops`] is the extension trait with the quantized operations; any backend gets them from float tensor operations,
//!   CubeCL's backends and Flex from `cubecl-kernels`.

pub mod backend;
pub mod layer;
#[cfg(feature = "train")]
pub mod metric;
pub mod ops;
pub mod optim;
pub mod policy;
pub mod precision;
pub mod recipe;
pub mod tag;
pub mod tensor;

mod linear;
mod read;

pub use backend::QuantTrain;
