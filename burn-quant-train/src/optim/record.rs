//! The optimizer's record: the wrapped optimizer's, and the state of the layers.

use burn::record::{PrecisionSettings, Record};
use burn_backend::Backend;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// The state of one quantized layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerRecord {
    /// The weight's `ParamId`.
    pub id: u64,
    /// The module path, for the reader of a record.
    pub path: String,
    /// The fallback threshold.
    pub threshold: f32,
    /// The fallback rate of the last step; none before the first.
    pub rate: Option<f32>,
}

/// The state of all quantized layers.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct LayersRecord {
    /// The seed of stochastic rounding.
    pub seed: u64,
    /// Optimizer steps taken: the position in the stream of random numbers.
    pub step: u64,
    /// One entry for each quantized layer, in module order.
    pub layers: Vec<LayerRecord>,
}

/// Record of a [`QuantOptimizer`](super::QuantOptimizer) around an optimizer with record `R`.
#[derive(Debug, Clone)]
pub struct QuantRecord<R> {
    /// The wrapped optimizer's record.
    pub optimizer: R,
    /// The state of the layers.
    pub layers: LayersRecord,
}

/// Serialized form of [`QuantRecord`].
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(bound = "I: Serialize + DeserializeOwned")]
pub struct QuantRecordItem<I> {
    optimizer: I,
    layers: LayersRecord,
}

impl<B: Backend, R: Record<B>> Record<B> for QuantRecord<R> {
    type Item<S: PrecisionSettings> = QuantRecordItem<R::Item<S>>;

    fn into_item<S: PrecisionSettings>(self) -> Self::Item<S> {
        QuantRecordItem {
            optimizer: self.optimizer.into_item(),
            layers: self.layers,
        }
    }

    fn from_item<S: PrecisionSettings>(item: Self::Item<S>, device: &B::Device) -> Self {
        Self {
            optimizer: R::from_item(item.optimizer, device),
            layers: item.layers,
        }
    }
}
