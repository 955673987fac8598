//! The loss by rounding of moments of layers' weights, in steps that are measured.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    thread::{self, ThreadId},
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
    layer::MomentSample,
    lock::lock,
    ops::probe::compare,
};

/// Between an AdamW and the optimizer around it, which knows the layers. Clones share it, and each sees the questions
/// of its own thread: an optimizer asks and steps in one, and clones may step side by side.
pub(super) struct MomentWatch<B: DataBackend> {
    questions: Arc<Mutex<HashMap<ThreadId, Vec<Question<B>>>>>,
}

/// Weights whose moments are asked for, and the findings on them.
struct Question<B: DataBackend> {
    /// The paths of layers by their weights.
    paths: Arc<HashMap<ParamId, String>>,
    found: Vec<MomentSample<B>>,
}

impl<B: DataBackend> Default for MomentWatch<B> {
    fn default() -> Self {
        Self {
            questions: Arc::default(),
        }
    }
}

impl<B: DataBackend> Clone for MomentWatch<B> {
    fn clone(&self) -> Self {
        Self {
            questions: self.questions.clone(),
        }
    }
}

/// A question that is open until this goes.
pub(super) struct Asked<B: DataBackend> {
    watch: MomentWatch<B>,
}

impl<B: DataBackend> Asked<B> {
    /// The findings since.
    pub fn answer(self) -> Vec<MomentSample<B>> {
        let found = |question: &mut Question<B>| std::mem::take(&mut question.found);
        self.watch.last(found).unwrap_or_default()
    }
}

impl<B: DataBackend> Drop for Asked<B> {
    fn drop(&mut self) {
        let mut questions = lock(&self.watch.questions);
        let thread = thread::current().id();
        if let Some(of_thread) = questions.get_mut(&thread) {
            of_thread.pop();
            if of_thread.is_empty() {
                questions.remove(&thread);
            }
        }
    }
}

/// The tensors and settings of a step beside its items.
pub(super) struct StepInputs<'a, B: DataBackend> {
    pub clock: &'a IntTensor<B>,
    pub nonfinite: Option<&'a IntTensor<B>>,
    pub loss_scale: Option<&'a FloatTensor<B>>,
    pub hyperparameters: &'a Hyperparameters,
}

impl<B: DataBackend> StepInputs<'_, B> {
    /// Steps these items.
    pub fn step(&self, items: Vec<AdamWItem<B>>) -> Vec<AdamWUpdate<B>> {
        let (clock, nonfinite) = (self.clock.clone(), self.nonfinite.cloned());
        let loss_scale = self.loss_scale.cloned();
        adamw::<B>(items, clock, nonfinite, loss_scale, self.hyperparameters)
    }

    fn step_one(&self, item: AdamWItem<B>) -> AdamWUpdate<B> {
        let updates = <[_; 1]>::try_from(self.step(vec![item]));
        let [update] =
            updates.unwrap_or_else(|_| unreachable!("a step gives an update for each item"));
        update
    }
}

impl<B: DataBackend> MomentWatch<B> {
    /// Asks for the moments of these weights, of layers at these paths, in a step that this thread takes next.
    pub fn ask(&self, paths: HashMap<ParamId, String>) -> Asked<B> {
        let question = Question {
            paths: Arc::new(paths),
            found: Vec::new(),
        };
        let mut questions = lock(&self.questions);
        let of_thread = questions.entry(thread::current().id()).or_default();
        of_thread.push(question);
        Asked {
            watch: self.clone(),
        }
    }

    /// Works on the last question of this thread. One that waits for others may meanwhile take another step of theirs,
    /// so that there are several.
    fn last<A>(&self, work: impl FnOnce(&mut Question<B>) -> A) -> Option<A> {
        let mut questions = lock(&self.questions);
        let of_thread = questions.get_mut(&thread::current().id())?;
        of_thread.last_mut().map(work)
    }

    /// The weights whose moments are asked for, by the paths of their layers.
    pub fn asked(&self) -> Arc<HashMap<ParamId, String>> {
        self.last(|question| question.paths.clone())
            .unwrap_or_default()
    }

    /// Steps the item of a weight of the layer at this path, and compares the moments with those that the step would
    /// make if it stored them in FP32. Of moments in FP32 there are magnitudes.
    pub fn step(
        &self,
        path: &str,
        item: AdamWItem<B>,
        inputs: &StepInputs<'_, B>,
    ) -> AdamWUpdate<B> {
        let formats = [&item.first, &item.second].map(MomentState::format);
        let is_rounded = formats.iter().any(Option::is_some);
        let exact = is_rounded.then(|| {
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
            let update = inputs.step_one(item);
            [update.first, update.second]
        });
        let update = inputs.step_one(item);
        let [exact_first, exact_second] = exact.map_or([None, None], |exact| exact.map(Some));
        // Not under the lock: kernels of a host wait for other work.
        let samples = [
            (Moment::First, &update.first, exact_first),
            (Moment::Second, &update.second, exact_second),
        ]
        .map(|(moment, stored, exact)| sample(path, moment, stored, exact));
        self.last(|question| question.found.extend(samples));
        update
    }
}

/// The findings on a moment as it is stored, beside the exact one.
fn sample<B: DataBackend>(
    path: &str,
    moment: Moment,
    stored: &MomentState<B>,
    exact: Option<MomentState<B>>,
) -> MomentSample<B> {
    let format = stored.format();
    let values = |state| decompress_moment::<B>(state, moment);
    let stored = values(stored.clone());
    let (exact, rounded) = match exact.filter(|_| format.is_some()) {
        Some(exact) => (values(exact), Some(stored)),
        None => (stored, None),
    };
    let elements = exact.shape().num_elements() as u64;
    let findings = compare::<B>(exact, rounded);
    MomentSample {
        layer: path.to_owned(),
        moment,
        format,
        elements,
        findings,
    }
}
