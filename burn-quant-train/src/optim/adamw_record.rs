//! The record of [`QuantAdamW`](super::QuantAdamW): moments as bytes, as small in the file as on the device.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use burn::{
    module::ParamId,
    record::{PrecisionSettings, Record},
};
use burn_backend::{Backend, Shape, tensor::Device};
use cubecl_kernels::reference::optimizer_state::HostState;
use serde::{Deserialize, Serialize};

use super::{
    loss_scaling::LossScaleRecord,
    moments::Moments,
    versioned::{VERSION, versioned_item},
};
use crate::data::{
    DataBackend,
    optimizer::{HostMoment, Moment, StateFormat},
};

/// The state of an AdamW optimizer, in host memory.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AdamWRecord {
    /// Steps taken.
    pub steps: u64,
    /// Steps skipped because a gradient held NaN or Inf.
    pub skipped: u64,
    /// The seed of stochastic rounding, of BF16 parameters and of moments; none before the first step.
    pub seed: Option<u64>,
    /// Both moments of each parameter.
    pub parameters: HashMap<ParamId, Arc<ParameterRecord>>,
    /// Steps taken by each parameter that had no gradient in some. Adam's bias correction counts for each parameter.
    pub fewer_steps: HashMap<ParamId, u64>,
    /// The scale of losses; none where they are not scaled.
    pub loss_scale: Option<LossScaleRecord>,
}

impl AdamWRecord {
    /// Steps that this parameter took part in.
    pub(super) fn taken(&self, id: &ParamId) -> u64 {
        self.fewer_steps.get(id).copied().unwrap_or(self.steps)
    }
}

/// The moments of one parameter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ParameterRecord {
    shape: Vec<usize>,
    first: MomentRecord,
    second: MomentRecord,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct MomentRecord {
    /// `None`: the values are FP32.
    format: Option<StateFormat>,
    /// Codes, or FP32 as bytes.
    #[serde(with = "serde_bytes")]
    values: Vec<u8>,
    /// FP32 as bytes: text formats have no NaN, and not every one reads the bits that it wrote.
    #[serde(with = "serde_bytes")]
    scales: Vec<u8>,
    #[serde(with = "serde_bytes")]
    exponents: Vec<u8>,
}

fn to_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn from_bytes(bytes: &[u8]) -> Vec<f32> {
    let (values, _) = bytes.as_chunks();
    values.iter().map(|x| f32::from_le_bytes(*x)).collect()
}

impl From<HostMoment> for MomentRecord {
    fn from(moment: HostMoment) -> Self {
        match moment {
            HostMoment::Full(values) => Self {
                format: None,
                values: to_bytes(&values),
                scales: Vec::new(),
                exponents: Vec::new(),
            },
            HostMoment::Coded { format, state } => Self {
                format: Some(format),
                values: state.codes,
                scales: to_bytes(&state.scales),
                exponents: state.exponents,
            },
        }
    }
}

impl From<MomentRecord> for HostMoment {
    fn from(record: MomentRecord) -> Self {
        match record.format {
            None => Self::Full(from_bytes(&record.values)),
            Some(format) => Self::Coded {
                format,
                state: HostState {
                    codes: record.values,
                    scales: from_bytes(&record.scales),
                    exponents: record.exponents,
                },
            },
        }
    }
}

impl MomentRecord {
    fn is_complete(&self, elements: usize) -> bool {
        match self.format {
            None => self.values.len() == 4 * elements,
            Some(format) if format.group == 0 => false,
            Some(format) => {
                let groups = format.groups(elements);
                let exponents = if format.expand { groups } else { 0 };
                (self.values.len(), self.scales.len(), self.exponents.len())
                    == (elements, 4 * groups, exponents)
            }
        }
    }
}

impl ParameterRecord {
    /// The record of a parameter's moments. Waits for the device.
    pub(super) fn read<B: DataBackend>(moments: Moments<B>) -> Self {
        let Moments { first, second } = moments;
        Self {
            shape: first.shape().to_vec(),
            first: HostMoment::read(first).into(),
            second: HostMoment::read(second).into(),
        }
    }

    /// Panics unless both moments are complete.
    pub(super) fn check(&self, name: &str) {
        let elements = self.shape.iter().product();
        assert!(
            self.first.is_complete(elements) && self.second.is_complete(elements),
            "adamw: the optimizer record of {name}, {:?}, does not hold all of its moments; the file is damaged",
            self.shape
        );
    }

    /// The shape of the parameter.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The values of both moments, FP32.
    pub fn values(&self) -> [Vec<f32>; 2] {
        [
            HostMoment::from(self.first.clone()).values(Moment::First),
            HostMoment::from(self.second.clone()).values(Moment::Second),
        ]
    }

    pub(super) fn upload<B: DataBackend>(self, device: &Device<B>) -> Moments<B> {
        let shape = Shape::from(self.shape);
        Moments {
            first: HostMoment::from(self.first).write(shape.clone(), device),
            second: HostMoment::from(self.second).write(shape, device),
        }
    }
}

versioned_item! {
    /// Serialized form of [`AdamWRecord`].
    AdamWRecordItem {
        steps: u64,
        skipped: u64,
        seed: Option<u64>,
        /// By parameter id, in order, so that equal states make equal files.
        parameters: BTreeMap<u64, ParameterRecord>,
    }
    since 2 {
        fewer_steps: BTreeMap<u64, u64>,
    }
    since 3 {
        loss_scale: Option<LossScaleRecord>,
    }
}

/// The precision settings do not apply: the moments are stored as they are.
impl<B: Backend> Record<B> for AdamWRecord {
    type Item<S: PrecisionSettings> = AdamWRecordItem;

    fn into_item<S: PrecisionSettings>(self) -> AdamWRecordItem {
        AdamWRecordItem {
            version: VERSION,
            steps: self.steps,
            skipped: self.skipped,
            seed: self.seed,
            parameters: self
                .parameters
                .into_iter()
                .map(|(id, record)| (id.val(), Arc::unwrap_or_clone(record)))
                .collect(),
            fewer_steps: self
                .fewer_steps
                .into_iter()
                .map(|(id, steps)| (id.val(), steps))
                .collect(),
            loss_scale: self.loss_scale,
        }
    }

    /// # Panics
    ///
    /// If one of the parameters is incomplete, or the scale of losses none that an optimizer can go on with.
    fn from_item<S: PrecisionSettings>(item: AdamWRecordItem, _device: &B::Device) -> Self {
        for (id, record) in &item.parameters {
            record.check(&format!("parameter {id}"));
        }
        if let Some(record) = &item.loss_scale {
            record.check();
        }
        Self {
            steps: item.steps,
            skipped: item.skipped,
            seed: item.seed,
            parameters: item
                .parameters
                .into_iter()
                .map(|(id, record)| (ParamId::from(id), Arc::new(record)))
                .collect(),
            fewer_steps: item
                .fewer_steps
                .into_iter()
                .map(|(id, steps)| (ParamId::from(id), steps))
                .collect(),
            loss_scale: item.loss_scale,
        }
    }
}
