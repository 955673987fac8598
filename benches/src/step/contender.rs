//! How a training loop treats a layer's weights, by backend.

use std::sync::Arc;

use burn::{
    backend::Autodiff,
    module::{AutodiffModule, Module, ModuleMapper, Param},
    optim::{GradientsParams, Optimizer, SgdConfig},
    tensor::{Tensor, TensorPrimitive, backend::AutodiffBackend, ops::FloatTensor},
};
use burn_quant_train::{
    QuantTrain,
    data::DataBackend,
    optim::{LayerBackend, LayerConfig, QuantOptimizer},
    recipe::Recipe,
    saved::{Held, HeldTensor, scope},
};

use super::upstream;
use crate::results::Subject;

/// A backend whose passes are measured.
pub trait Contender: LayerBackend {
    /// Its name in results.
    fn subject() -> Subject {
        Self::row().map_or(Subject::Burn, |row| Subject::recipe(row.name))
    }

    /// The gradients of all that `y` was computed from, where `gradient` is its own.
    fn backward_from(
        y: FloatTensor<Self>,
        gradient: FloatTensor<Self::InnerBackend>,
    ) -> Self::Gradients;
}

impl<B: DataBackend> Contender for Autodiff<B> {
    fn backward_from(y: FloatTensor<Self>, gradient: FloatTensor<B>) -> Self::Gradients {
        upstream::backward::<B>(y, gradient)
    }
}

impl<B: DataBackend, R: Recipe> Contender for QuantTrain<Autodiff<B>, R> {
    fn backward_from(
        y: FloatTensor<Self>,
        gradient: FloatTensor<Self::InnerBackend>,
    ) -> Self::Gradients {
        scope::compress_pending();
        let gradient = HeldTensor::new(gradient.into_primitive());
        upstream::backward::<Held<B>>(y.into_primitive(), gradient)
    }
}

/// Enough for a threshold to go from 1 to 1 / 30 or to 30.
const STEPS: usize = 16;

/// Attaches the state of quantized layers to a model and takes as many steps as its thresholds need to settle; the
/// weights stay what they are. Returns the mean fallback rate of the last step, if there is one.
pub fn settle<B: Contender, M: AutodiffModule<B>>(
    model: M,
    gradients: impl Fn(&M) -> <B as AutodiffBackend>::Gradients,
) -> (M, Option<f64>) {
    let mut optimizer =
        QuantOptimizer::new(SgdConfig::new().init::<B, M>(), LayerConfig::default());
    let mut model = optimizer.attach(model);
    for _ in 0..STEPS {
        let gradients = GradientsParams::from_grads(gradients(&model), &model);
        model = optimizer.step(0.0, model, gradients);
    }
    let rates = optimizer.fallback_rates();
    let sum: f64 = rates.iter().map(|(_, rate)| f64::from(*rate)).sum();
    (model, (!rates.is_empty()).then(|| sum / rates.len() as f64))
}

/// The model as after an optimizer step: without quantized copies of its weights.
pub fn renew<B: Contender, M: Module<B>>(model: M) -> M {
    match B::row() {
        Some(_) => model.map(&mut DropCopies),
        None => model,
    }
}

/// Takes the quantized copies of weights away.
struct DropCopies;

impl<B: LayerBackend> ModuleMapper<B> for DropCopies {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        param.map(|tensor| {
            let TensorPrimitive::Float(primitive) = tensor.into_primitive() else {
                unreachable!("a float parameter holds a float primitive while it is trained");
            };
            let tag = B::tag(&primitive).map(|tag| Arc::new(tag.without_copies()));
            let renewed = match tag {
                Some(tag) => B::with_tag(primitive, tag),
                None => primitive,
            };
            Tensor::from_primitive(TensorPrimitive::Float(renewed))
        })
    }
}
