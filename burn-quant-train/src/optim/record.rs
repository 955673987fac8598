//! The optimizer's record: the wrapped optimizer's, and the state of the layers.

use burn::record::{PrecisionSettings, Record};
use burn_backend::Backend;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::layer::LayersRecord;

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
