//! The state of layers as records hold it: names and values.

use std::{collections::BTreeMap, fmt};

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{Error, IgnoredAny, MapAccess, SeqAccess, Visitor},
    ser::SerializeStruct,
};

use super::slot::{SlotValues, rate_of};
use crate::recipe::THRESHOLD;

/// The first field of a record since version 2. In formats that name no fields, version 1 has its seed there.
const VERSION_2: u64 = 0x7175_616e_7400_0002;
/// The part of the first field that is the same in all versions.
const MARK: u64 = !0xffff;
const FIELDS: [&str; 4] = ["version", "seed", "step", "layers"];

/// The state of one quantized layer, of an embedding whose rows are rounded, or of a product of activations.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerRecord {
    /// The weight's `ParamId`; [`NO_WEIGHT`](Self::NO_WEIGHT) of a product of activations.
    pub id: u64,
    /// The module path.
    pub path: String,
    /// The values of the layer's slots, by name.
    pub slots: SlotValues,
}

impl LayerRecord {
    /// In the place of the id of a weight.
    pub const NO_WEIGHT: u64 = 0;

    /// The fallback threshold, of recipes that have one.
    pub fn threshold(&self) -> Option<f32> {
        self.slots.get(THRESHOLD)?.first().copied()
    }

    /// The fallback rate of the last step; none before the first, and for recipes without fallback.
    pub fn rate(&self) -> Option<f32> {
        self.slots.get(&rate_of(THRESHOLD))?.first().copied()
    }
}

/// The state of all layers that keep some: quantized ones, embeddings whose rows are rounded, and products of
/// activations.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LayersRecord {
    /// The seed of stochastic rounding.
    pub seed: u64,
    /// Optimizer steps taken: the position in the stream of random numbers.
    pub step: u64,
    /// One entry for each, in module order, products of activations last.
    pub layers: Vec<LayerRecord>,
}

impl Serialize for LayersRecord {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("LayersRecord", FIELDS.len())?;
        fields.serialize_field("version", &VERSION_2)?;
        fields.serialize_field("seed", &self.seed)?;
        fields.serialize_field("step", &self.step)?;
        fields.serialize_field("layers", &self.layers)?;
        fields.end()
    }
}

impl<'de> Deserialize<'de> for LayersRecord {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_struct("LayersRecord", &FIELDS, Fields)
    }
}

/// A layer of version 1: its threshold, and the rate of the last step.
#[derive(Deserialize)]
struct LayerOfVersion1 {
    id: u64,
    path: String,
    threshold: f32,
    rate: Option<f32>,
}

impl From<LayerOfVersion1> for LayerRecord {
    fn from(layer: LayerOfVersion1) -> Self {
        let threshold = (THRESHOLD.to_owned(), vec![layer.threshold]);
        let rate = layer.rate.map(|rate| (rate_of(THRESHOLD), vec![rate]));
        Self {
            id: layer.id,
            path: layer.path,
            slots: [Some(threshold), rate].into_iter().flatten().collect(),
        }
    }
}

/// A layer of either version, where fields have names.
#[derive(Deserialize)]
#[serde(untagged)]
enum NamedLayer {
    Version2(LayerRecord),
    Version1(LayerOfVersion1),
}

impl From<NamedLayer> for LayerRecord {
    fn from(layer: NamedLayer) -> Self {
        match layer {
            NamedLayer::Version2(layer) => layer,
            NamedLayer::Version1(layer) => layer.into(),
        }
    }
}

struct Fields;

impl<'de> Visitor<'de> for Fields {
    type Value = LayersRecord;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the state of quantized layers")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut fields: A) -> Result<LayersRecord, A::Error> {
        let first: u64 = next(&mut fields)?;
        if first & MARK == VERSION_2 & MARK && first != VERSION_2 {
            return Err(unknown_version(first));
        }
        if first != VERSION_2 {
            let (step, layers): (u64, Vec<LayerOfVersion1>) =
                (next(&mut fields)?, next(&mut fields)?);
            return Ok(LayersRecord {
                seed: first,
                step,
                layers: layers.into_iter().map(LayerRecord::from).collect(),
            });
        }
        Ok(LayersRecord {
            seed: next(&mut fields)?,
            step: next(&mut fields)?,
            layers: next(&mut fields)?,
        })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<LayersRecord, A::Error> {
        let mut numbers = BTreeMap::<String, u64>::new();
        let mut layers = None;
        while let Some(name) = fields.next_key::<String>()? {
            match name.as_str() {
                "layers" => layers = Some(fields.next_value::<Vec<NamedLayer>>()?),
                "version" | "seed" | "step" => {
                    numbers.insert(name, fields.next_value()?);
                }
                _ => {
                    fields.next_value::<IgnoredAny>()?;
                }
            }
        }
        if let Some(version) = numbers.get("version").filter(|it| **it != VERSION_2) {
            return Err(unknown_version(*version));
        }
        let number = |name: &'static str| {
            let number = numbers.get(name).copied();
            number.ok_or_else(|| A::Error::missing_field(name))
        };
        let layers = layers.ok_or_else(|| A::Error::missing_field("layers"))?;
        Ok(LayersRecord {
            seed: number("seed")?,
            step: number("step")?,
            layers: layers.into_iter().map(LayerRecord::from).collect(),
        })
    }
}

fn unknown_version<E: Error>(version: u64) -> E {
    E::custom(format!(
        "layers: the record has version {version:#x}, this build reads {VERSION_2:#x} and those without a version; load \
         it with the build that wrote it"
    ))
}

fn next<'de, T: Deserialize<'de>, A: SeqAccess<'de>>(fields: &mut A) -> Result<T, A::Error> {
    let field = fields.next_element()?;
    field.ok_or_else(|| A::Error::custom("layers: the record ends too early; the file is damaged"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Serialize)]
    struct OldLayer {
        id: u64,
        path: &'static str,
        threshold: f32,
        rate: Option<f32>,
    }

    /// The record as version 1 wrote it.
    #[derive(Serialize)]
    struct OldLayers {
        seed: u64,
        step: u64,
        layers: Vec<OldLayer>,
    }

    fn old() -> OldLayers {
        let layer = |id, path, threshold, rate| OldLayer {
            id,
            path,
            threshold,
            rate,
        };
        OldLayers {
            seed: 3,
            step: 70,
            layers: vec![
                layer(11, "up", 1.3, Some(0.25)),
                layer(12, "down", 0.1, None),
            ],
        }
    }

    fn slots(slots: &[(&str, f32)]) -> SlotValues {
        let slots = slots
            .iter()
            .map(|(name, value)| (String::from(*name), vec![*value]));
        slots.collect()
    }

    fn new() -> LayersRecord {
        let layer = |id, path: &str, slots| LayerRecord {
            id,
            path: path.to_owned(),
            slots,
        };
        LayersRecord {
            seed: 3,
            step: 70,
            layers: vec![
                layer(
                    11,
                    "up",
                    slots(&[("threshold", 1.3), ("threshold.rate", 0.25)]),
                ),
                layer(12, "down", slots(&[("threshold", 0.1)])),
            ],
        }
    }

    #[test]
    fn formats_with_names_and_without_keep_it() {
        let record = new();
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(serde_json::from_str::<LayersRecord>(&text).unwrap(), record);
        for bytes in [
            rmp_serde::to_vec(&record).unwrap(),
            rmp_serde::to_vec_named(&record).unwrap(),
        ] {
            assert_eq!(
                rmp_serde::from_slice::<LayersRecord>(&bytes).unwrap(),
                record
            );
        }
        assert_eq!(record.layers[0].threshold(), Some(1.3));
        assert_eq!(record.layers[0].rate(), Some(0.25));
        assert_eq!(record.layers[1].rate(), None);
    }

    #[test]
    fn version_1_is_read() {
        let text = serde_json::to_string(&old()).unwrap();
        assert_eq!(serde_json::from_str::<LayersRecord>(&text).unwrap(), new());
        for bytes in [
            rmp_serde::to_vec(&old()).unwrap(),
            rmp_serde::to_vec_named(&old()).unwrap(),
        ] {
            assert_eq!(
                rmp_serde::from_slice::<LayersRecord>(&bytes).unwrap(),
                new()
            );
        }
    }

    #[test]
    fn what_cannot_be_read_is_said() {
        let later = r#"{"version": 99, "seed": 1, "step": 2, "layers": []}"#;
        let error = serde_json::from_str::<LayersRecord>(later).unwrap_err();
        assert!(error.to_string().contains("version 0x63"), "{error}");
        let error = serde_json::from_str::<LayersRecord>(r#"{"seed": 1, "step": 2}"#).unwrap_err();
        assert!(error.to_string().contains("layers"), "{error}");
    }
}
