//! Optimizers that own the quantization state of the model's layers.
//!
//! [`QuantOptimizer`] wraps any Burn optimizer. At each step it hands every weight's layer on to the updated weight and
//! moves the layers' state, on the device; its record holds that state beside the wrapped optimizer's.
//! [`QuantAdamWConfig`] makes AdamW with that wrapper, its moments in FP32 or in 8 bits.

mod adamw;
mod adamw_record;
pub mod advice;
mod attach;
mod backend;
mod clocks;
mod config;
mod layers;
mod loss_scaling;
#[cfg(feature = "train")]
pub mod metric;
mod moment_health;
mod moments;
mod nonfinite;
mod parameters;
mod record;
mod simple;
mod versioned;
mod wrapper;

pub use crate::data::optimizer::{Encoding, LossScaling, Moment, StateFormat};
pub use adamw::QuantAdamW;
pub use adamw_record::{AdamWRecord, ParameterRecord};
pub use backend::{LayerBackend, ParameterBackend};
pub use config::{ParameterGroup, QuantAdamWConfig, StateRounding};
pub use layers::{LayerConfig, LayerReport, LayersView};
pub use loss_scaling::{LossScaleRecord, LossScaler};
pub use nonfinite::OnNonfinite;
pub use record::QuantRecord;
pub use simple::{SimpleQuantAdamW, SimpleState};
pub use wrapper::QuantOptimizer;
