//! What a training loop does about a layer's weights, by backend.

use std::sync::Arc;

use burn::{
    backend::Autodiff,
    module::{AutodiffModule, Module, ModuleMapper, Param},
    optim::{GradientsParams, Optimizer, SgdConfig},
    tensor::{Tensor, TensorPrimitive, backend::AutodiffBackend, ops::FloatTensor},
};
use burn_quant_train::{
    QuantTrain,
    ops::QuantOps,
    optim::{LayerBackend, LayerConfig, QuantOptimizer},
    recipe::{ComputeDtype, FallbackInt8, MixedPrecision, Recipe},
};

use super::upstream;
use crate::results::Subject;

/// A backend whose passes are measured.
pub trait Contender: AutodiffBackend {
    /// Its name in results.
    const SUBJECT: Subject;

    /// Attaches the state of quantized layers to a model and takes as many steps as its thresholds need to settle; the
    /// weights stay what they are. Returns the mean fallback rate of the last step, if there is one.
    fn settle<M: AutodiffModule<Self>>(
        model: M,
        gradients: impl Fn(&M) -> Self::Gradients,
    ) -> (M, Option<f64>);

    /// The gradients of all that `y` was computed from, where `gradient` is its own.
    fn backward_from(
        y: FloatTensor<Self>,
        gradient: FloatTensor<Self::InnerBackend>,
    ) -> Self::Gradients;

    /// The model as after an optimizer step: without quantized copies of its weights.
    fn renew<M: Module<Self>>(model: M) -> M;
}

impl<B: QuantOps> Contender for Autodiff<B> {
    const SUBJECT: Subject = Subject::Burn;

    fn settle<M: AutodiffModule<Self>>(
        model: M,
        _gradients: impl Fn(&M) -> Self::Gradients,
    ) -> (M, Option<f64>) {
        (model, None)
    }

    fn backward_from(y: FloatTensor<Self>, gradient: FloatTensor<B>) -> Self::Gradients {
        upstream::backward::<B>(y, gradient)
    }

    fn renew<M: Module<Self>>(model: M) -> M {
        model
    }
}

/// A recipe that is measured.
pub trait Candidate: Recipe {
    /// Its name in results.
    const SUBJECT: Subject;
}

impl<E: ComputeDtype> Candidate for MixedPrecision<E> {
    const SUBJECT: Subject = Subject::MixedPrecision;
}

impl<E: ComputeDtype> Candidate for FallbackInt8<E> {
    const SUBJECT: Subject = Subject::FallbackInt8;
}

/// Enough for a threshold to go from 1 to 1 / 30 or to 30.
const STEPS: usize = 16;

impl<B: QuantOps, R: Candidate> Contender for QuantTrain<Autodiff<B>, R> {
    const SUBJECT: Subject = R::SUBJECT;

    fn settle<M: AutodiffModule<Self>>(
        model: M,
        gradients: impl Fn(&M) -> Self::Gradients,
    ) -> (M, Option<f64>) {
        let mut optimizer =
            QuantOptimizer::new(SgdConfig::new().init::<Self, M>(), LayerConfig::default());
        let mut model = optimizer.attach(model);
        for _ in 0..STEPS {
            let gradients = GradientsParams::from_grads(gradients(&model), &model);
            model = optimizer.step(0.0, model, gradients);
        }
        let rates = optimizer.fallback_rates();
        let sum: f64 = rates.iter().map(|(_, rate)| f64::from(*rate)).sum();
        (model, (!rates.is_empty()).then(|| sum / rates.len() as f64))
    }

    fn backward_from(
        y: FloatTensor<Self>,
        gradient: FloatTensor<Self::InnerBackend>,
    ) -> Self::Gradients {
        upstream::backward::<B>(y.into_primitive(), gradient.into_primitive())
    }

    fn renew<M: Module<Self>>(model: M) -> M {
        model.map(&mut DropCopies)
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
            let tag = Arc::new(B::tag(&primitive).without_copies());
            Tensor::from_primitive(TensorPrimitive::Float(B::with_tag(primitive, tag)))
        })
    }
}
