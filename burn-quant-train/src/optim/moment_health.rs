//! What rounding does to the moments of layers' weights, in steps that are measured.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use burn::module::ParamId;
use burn_backend::{
    TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};

use super::moments::Moments;
use crate::{
    data::{
        DataBackend,
        optimizer::{
            AdamWItem, AdamWUpdate, Hyperparameters, Moment, MomentState, adamw, decompress_moment,
        },
    },
    layer::{Findings, MomentSample},
    lock::lock,
    ops::probe::{Probed, compare},
};

/// Between an AdamW and the optimizer around it, which knows the layers: clones share it.
pub(super) struct MomentWatch<B: DataBackend> {
    shared: Arc<Mutex<Asked<B>>>,
}

/// The moments that are asked for, and what was found of them.
struct Asked<B: DataBackend> {
    /// The paths of layers by their weights.
    paths: HashMap<ParamId, String>,
    found: Vec<MomentSample<B>>,
}

impl<B: DataBackend> Default for MomentWatch<B> {
    fn default() -> Self {
        let asked = Asked {
            paths: HashMap::new(),
            found: Vec::new(),
        };
        Self {
            shared: Arc::new(Mutex::new(asked)),
        }
    }
}

impl<B: DataBackend> Clone for MomentWatch<B> {
    fn clone(&self) -> Self {
        Self {
            shared: self.shared.clone(),
        }
    }
}

impl<B: DataBackend> MomentWatch<B> {
    /// Asks for the moments of these weights, of layers at these paths, in the step that follows.
    pub fn ask(&self, paths: HashMap<ParamId, String>) {
        let mut asked = lock(&self.shared);
        asked.paths = paths;
        asked.found.clear();
    }

    /// What was found since it was asked for; asks no longer.
    pub fn take(&self) -> Vec<MomentSample<B>> {
        let mut asked = lock(&self.shared);
        asked.paths.clear();
        std::mem::take(&mut asked.found)
    }

    /// What a step, before it is taken, would make of moments that are asked for if it stored them in FP32; none for
    /// other items, and where it does.
    pub fn exact(
        &self,
        ids: &[ParamId],
        items: &[AdamWItem<B>],
        clock: &IntTensor<B>,
        nonfinite: Option<&IntTensor<B>>,
        loss_scale: Option<&FloatTensor<B>>,
        hyperparameters: &Hyperparameters,
    ) -> Vec<Option<Moments<B>>> {
        let asked = lock(&self.shared);
        let pairs = ids.iter().zip(items);
        let exact = pairs.map(|(id, item)| {
            let is_rounded = [&item.first, &item.second]
                .iter()
                .any(|state| state.format().is_some());
            (is_rounded && asked.paths.contains_key(id)).then(|| {
                let moments = Moments {
                    first: item.first.clone(),
                    second: item.second.clone(),
                };
                let Moments { first, second } = moments.converted([None, None]);
                let item = AdamWItem {
                    first,
                    second,
                    ..item.clone()
                };
                let (clock, nonfinite) = (clock.clone(), nonfinite.cloned());
                let stepped = adamw::<B>(
                    vec![item],
                    clock,
                    nonfinite,
                    loss_scale.cloned(),
                    hyperparameters,
                );
                let [AdamWUpdate { first, second, .. }] = <[_; 1]>::try_from(stepped)
                    .unwrap_or_else(|_| unreachable!("a step gives an update for each item"));
                Moments { first, second }
            })
        });
        exact.collect()
    }

    /// Compares the moments of a parameter, if they are asked for, with the exact ones; without those they are exact.
    pub fn compare(&self, id: ParamId, exact: Option<Moments<B>>, stored: [&MomentState<B>; 2]) {
        let mut asked = lock(&self.shared);
        let Some(layer) = asked.paths.get(&id).cloned() else {
            return;
        };
        let [first, second] = stored;
        let [exact_first, exact_second] = match exact {
            Some(Moments { first, second }) => [Some(first), Some(second)],
            None => [None, None],
        };
        for (moment, stored, exact) in [
            (Moment::First, first, exact_first),
            (Moment::Second, second, exact_second),
        ] {
            let is_rounded = stored.format().is_some();
            let stored_values = decompress_moment::<B>(stored.clone(), moment);
            let (exact, rounded) = match exact.filter(|_| is_rounded) {
                Some(exact) => (decompress_moment::<B>(exact, moment), Some(stored_values)),
                None => (stored_values, None),
            };
            let elements = exact.shape().num_elements() as u64;
            let Probed { numbers, counts } = compare::<B>(exact, rounded);
            asked.found.push(MomentSample {
                layer: layer.clone(),
                moment,
                format: stored.format(),
                elements,
                findings: Findings { numbers, counts },
            });
        }
    }
}
