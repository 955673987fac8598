//! Optimizers that own the quantization state of the model's layers.
//!
//! [`QuantOptimizer`] wraps any Burn optimizer. At each step it hands every weight's layer on to the updated weight and
//! moves the thresholds, on the device; its record holds the thresholds beside the wrapped optimizer's states.
//! [`QuantAdamWConfig`] makes AdamW with that wrapper, its moments in FP32 or in 8 bits.

mod adamw;
mod clocks;
mod moments;
mod record;
mod simple;
mod versioned;

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use burn::{
    module::{AutodiffModule, Module, ModuleMapper, ModuleVisitor, Param, ParamId},
    optim::{GradientsParams, LearningRate, MultiGradientsParams, Optimizer},
    tensor::{Tensor, TensorPrimitive},
};
use burn_autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn_backend::{AutodiffBackend, tensor::FloatTensor};

pub use crate::ops::adamw::{Encoding, StateFormat};
pub use adamw::{OnNonfinite, ParameterGroup, QuantAdamW, QuantAdamWConfig, StateRounding};
pub use moments::{AdamWRecord, ParameterRecord};
pub use record::{LayerRecord, LayersRecord, QuantRecord};
pub use simple::{SimpleQuantAdamW, SimpleState};

use crate::{
    QuantTrain,
    layer::{self, Bank, BankValues, DelayThreshold, Layer},
    ops::{DataBackend, QuantOps},
    policy::{Decision, LayerPolicy},
    recipe::{Recipe, Row},
    tag::Tag,
    tensor::QuantTensor,
};

/// A backend whose weights carry layers: [`QuantTrain`] over `Autodiff`.
pub trait LayerBackend:
    AutodiffBackend<InnerBackend: DataBackend<Base = <Self as LayerBackend>::Base>>
{
    /// The backend that holds the data.
    type Base: QuantOps;

    /// The recipe's row.
    const ROW: Row;

    /// The tag of a float primitive.
    fn tag(tensor: &FloatTensor<Self>) -> &Arc<Tag<Self::Base>>;

    /// The same value with another tag.
    fn with_tag(tensor: FloatTensor<Self>, tag: Arc<Tag<Self::Base>>) -> FloatTensor<Self>;
}

impl<B: QuantOps, C: CheckpointStrategy, R: Recipe> LayerBackend for QuantTrain<Autodiff<B, C>, R> {
    type Base = B;

    const ROW: Row = R::ROW;

    fn tag(tensor: &FloatTensor<Self>) -> &Arc<Tag<B>> {
        tensor.tag()
    }

    fn with_tag(tensor: FloatTensor<Self>, tag: Arc<Tag<B>>) -> FloatTensor<Self> {
        QuantTensor::with_tag(tensor.into_primitive(), tag)
    }
}

/// What a [`QuantOptimizer`] does about layers.
#[derive(Debug, Clone, Default)]
pub struct LayerConfig {
    /// Which layers are quantized.
    pub policy: LayerPolicy,
    /// How thresholds follow fallback rates.
    pub threshold: DelayThreshold,
    /// The seed of stochastic rounding; `None`: the seed last given to `Backend::seed`.
    pub seed: Option<u64>,
}

/// What a linear layer got.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerReport {
    /// The module path, such as `layers.3.mlp.down`.
    pub path: String,
    /// The weight's shape.
    pub shape: [usize; 2],
    /// Quantized, or why not.
    pub decision: Decision,
}

impl fmt::Display for LayerReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [rows, cols] = self.shape;
        write!(f, "{} [{rows}, {cols}]: {}", self.path, self.decision)
    }
}

/// The layers of the model that the optimizer steps.
struct Layers<B: QuantOps> {
    bank: Arc<Bank<B>>,
    by_id: HashMap<ParamId, Arc<Layer<B>>>,
    /// In module order, one for each entry of `by_id`.
    order: Vec<(ParamId, LayerReport)>,
}

impl<B: QuantOps> Layers<B> {
    fn record(&self) -> LayersRecord {
        let BankValues { thresholds, rates } = self.bank.read();
        let layers = self
            .order
            .iter()
            .filter_map(|(id, _)| self.by_id.get(id).map(|layer| (id, layer)))
            .filter(|(_, layer)| layer.is_quantized())
            .map(|(id, layer)| LayerRecord {
                id: id.val(),
                path: layer.path().to_owned(),
                threshold: thresholds[layer.index()],
                rate: Some(rates[layer.index()]).filter(|rate| !rate.is_nan()),
            })
            .collect();
        LayersRecord {
            seed: self.bank.seed(),
            step: self.bank.step(),
            layers,
        }
    }
}

/// Any Burn optimizer `O`, owning the state of the quantized layers of the model it steps.
///
/// It implements Burn's `Optimizer`, so a `Learner`, gradient clipping, gradient accumulation and learning-rate
/// schedulers work as they do with `O`.
///
/// # Attaching a model
///
/// A layer's state rides on its weight's tag; [`attach`](Self::attach) puts it there: it names the layers by module
/// path, applies the policy, and restores the thresholds of a loaded record. `step` attaches a model that is not
/// attached yet. Until then parameters of at least [`MIN_ELEMENTS`](crate::policy::MIN_ELEMENTS) weights are quantized
/// with initial thresholds, so only the first step differs; call `attach` before the first forward pass for exact
/// resumption and for the policy to hold from the start.
///
/// Clones share the layers' state and hold the wrapped optimizer's; [`view`](Self::view) is for whoever only looks.
pub struct QuantOptimizer<O, B: LayerBackend> {
    inner: O,
    config: LayerConfig,
    shared: Arc<Mutex<Shared<B::Base>>>,
}

struct Shared<B: QuantOps> {
    layers: Option<Layers<B>>,
    restored: Option<LayersRecord>,
}

/// What the layers of an optimizer's model got and have learned so far, shared with the optimizer and its clones. It
/// holds no moments, as a clone does. Made by [`QuantOptimizer::view`].
pub struct LayersView<B: QuantOps> {
    shared: Arc<Mutex<Shared<B>>>,
}

impl<B: QuantOps> Clone for LayersView<B> {
    fn clone(&self) -> Self {
        Self {
            shared: self.shared.clone(),
        }
    }
}

impl<B: QuantOps> LayersView<B> {
    /// Every linear layer of the attached model, and what it got; empty before a model is attached.
    pub fn layers(&self) -> Vec<LayerReport> {
        let shared = lock(&self.shared);
        let layers = shared.layers.as_ref();
        layers.map_or_else(Vec::new, |layers| {
            layers
                .order
                .iter()
                .map(|(_, report)| report.clone())
                .collect()
        })
    }

    /// Path and fallback rate, in the last step, of every quantized layer; empty before the first step, and for recipes
    /// without fallback. Waits for the device.
    pub fn fallback_rates(&self) -> Vec<(String, f32)> {
        let rated = |layer: LayerRecord| layer.rate.map(|rate| (layer.path, rate));
        self.record().layers.into_iter().filter_map(rated).collect()
    }

    /// The state of the layers, as the optimizer's record holds it. Waits for the device.
    pub fn record(&self) -> LayersRecord {
        let shared = lock(&self.shared);
        match (&shared.layers, &shared.restored) {
            (Some(layers), _) => layers.record(),
            (None, Some(restored)) => restored.clone(),
            (None, None) => LayersRecord::default(),
        }
    }
}

impl<O: Clone, B: LayerBackend> Clone for QuantOptimizer<O, B> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            config: self.config.clone(),
            shared: self.shared.clone(),
        }
    }
}

impl<O, B: LayerBackend> QuantOptimizer<O, B> {
    /// Wraps `inner`.
    ///
    /// # Panics
    ///
    /// If the threshold's settings are out of range: see [`DelayThreshold::validate`].
    pub fn new(inner: O, config: LayerConfig) -> Self {
        config.threshold.validate();
        Self {
            inner,
            config,
            shared: Arc::new(Mutex::new(Shared {
                layers: None,
                restored: None,
            })),
        }
    }

    /// The wrapped optimizer.
    pub fn inner(&self) -> &O {
        &self.inner
    }

    /// Puts the layers' state on the weights of `model`, with the values of a loaded record if there is one.
    pub fn attach<M: Module<B>>(&self, model: M) -> M {
        let mut shared = self.lock();
        let layers = self.adopt(&mut shared, &model);
        model.map(&mut Attach { layers })
    }

    /// The layers' state without the moments: for a metric, or for a look at the layers when a `Learner` has taken the
    /// optimizer.
    pub fn view(&self) -> LayersView<B::Base> {
        LayersView {
            shared: self.shared.clone(),
        }
    }

    /// [`LayersView::layers`].
    pub fn layers(&self) -> Vec<LayerReport> {
        self.view().layers()
    }

    /// [`LayersView::fallback_rates`].
    pub fn fallback_rates(&self) -> Vec<(String, f32)> {
        self.view().fallback_rates()
    }

    /// [`LayersView::record`].
    pub fn layers_record(&self) -> LayersRecord {
        self.view().record()
    }

    /// The layers of `model`: those known, if it has no other weights, else new ones with the values known for each
    /// weight.
    fn adopt<'a, M: Module<B>>(
        &self,
        shared: &'a mut Shared<B::Base>,
        model: &M,
    ) -> &'a Layers<B::Base> {
        let mut survey = Survey::default();
        model.visit(&mut survey);
        let known = |layers: &Layers<B::Base>| {
            survey.weights.len() == layers.order.len()
                && survey
                    .weights
                    .iter()
                    .zip(&layers.order)
                    .all(|(weight, (id, _))| weight.id == *id)
        };
        let layers = match shared.layers.take() {
            Some(layers) if known(&layers) => layers,
            changed => {
                let values = shared
                    .restored
                    .take()
                    .or_else(|| changed.map(|layers| layers.record()));
                self.layers_of(survey.weights, values)
            }
        };
        shared.layers.insert(layers)
    }

    fn layers_of(&self, weights: Vec<Weight>, restored: Option<LayersRecord>) -> Layers<B::Base> {
        let fresh = restored.is_none();
        let restored = restored.unwrap_or_default();
        let seed = if fresh {
            self.config.seed.unwrap_or_else(layer::seed)
        } else {
            restored.seed
        };
        let known: HashMap<u64, &LayerRecord> = restored
            .layers
            .iter()
            .map(|layer| (layer.id, layer))
            .collect();

        let order: Vec<(ParamId, LayerReport)> = weights
            .into_iter()
            .map(|weight| {
                let decision = match B::ROW.linear {
                    None => Decision::Recipe,
                    Some(_) if weight.embedding => self
                        .config
                        .policy
                        .decide_embedding(&weight.path, weight.shape),
                    Some(_) => self.config.policy.decide(&weight.path, weight.shape),
                };
                let report = LayerReport {
                    path: weight.path,
                    shape: weight.shape,
                    decision,
                };
                (weight.id, report)
            })
            .collect();
        let quantized = || {
            order
                .iter()
                .filter(|(_, report)| report.decision.is_quantized())
        };
        let initial = BankValues {
            thresholds: quantized()
                .map(|(id, _)| {
                    known
                        .get(&id.val())
                        .map_or(self.config.threshold.initial, |layer| layer.threshold)
                })
                .collect(),
            rates: quantized()
                .map(|(id, _)| {
                    known
                        .get(&id.val())
                        .and_then(|layer| layer.rate)
                        .unwrap_or(f32::NAN)
                })
                .collect(),
        };
        let bank = Arc::new(Bank::new(seed, restored.step, initial));
        let mut index = 0;
        let by_id = order
            .iter()
            .map(|(id, report)| {
                let quantized = report.decision.is_quantized();
                let layer = Layer::new(report.path.clone(), index, quantized, bank.clone());
                index += usize::from(quantized);
                (*id, Arc::new(layer))
            })
            .collect();
        Layers { bank, by_id, order }
    }

    fn stepped<M: AutodiffModule<B>>(&mut self, model: M, step: impl FnOnce(&mut O, M) -> M) -> M {
        let shared = self.shared.clone();
        let mut shared = lock(&shared);
        let layers = self.adopt(&mut shared, &model);
        let model = step(&mut self.inner, model).map(&mut Attach { layers });
        layers.bank.advance(&self.config.threshold);
        model
    }

    fn lock(&self) -> MutexGuard<'_, Shared<B::Base>> {
        lock(&self.shared)
    }
}

fn lock<B: QuantOps>(shared: &Mutex<Shared<B>>) -> MutexGuard<'_, Shared<B>> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<O, M, B> Optimizer<M, B> for QuantOptimizer<O, B>
where
    O: Optimizer<M, B>,
    M: AutodiffModule<B>,
    B: LayerBackend,
{
    type Record = QuantRecord<O::Record>;

    fn step(&mut self, lr: LearningRate, module: M, grads: GradientsParams) -> M {
        self.stepped(module, |inner, module| inner.step(lr, module, grads))
    }

    fn step_multi(&mut self, lr: LearningRate, module: M, grads: MultiGradientsParams) -> M {
        self.stepped(module, |inner, module| inner.step_multi(lr, module, grads))
    }

    /// Waits for the device, to read the thresholds.
    fn to_record(&self) -> Self::Record {
        QuantRecord {
            optimizer: self.inner.to_record(),
            layers: self.layers_record(),
        }
    }

    /// All clones share the state of the layers: those made before, a metric's for instance, have the loaded one from
    /// then on.
    fn load_record(self, record: Self::Record) -> Self {
        *self.lock() = Shared {
            layers: None,
            restored: Some(record.layers),
        };
        Self {
            inner: self.inner.load_record(record.optimizer),
            config: self.config,
            shared: self.shared,
        }
    }
}

/// A two-dimensional weight of a model.
struct Weight {
    id: ParamId,
    path: String,
    shape: [usize; 2],
    embedding: bool,
}

/// Finds the two-dimensional weights of a module, with their paths.
#[derive(Default)]
struct Survey {
    path: Vec<String>,
    containers: Vec<String>,
    weights: Vec<Weight>,
}

impl<B: LayerBackend> ModuleVisitor<B> for Survey {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.push(name.to_owned());
        self.containers.push(container.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
        self.containers.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let shape = param.lazy_shape();
        let Ok(shape) = <[usize; 2]>::try_from(shape.as_slice()) else {
            return;
        };
        // The layer's name is its module's: `mlp.down`, not `mlp.down.weight`.
        let module = match self.path.split_last() {
            Some((last, module)) if last == "weight" && !module.is_empty() => module,
            _ => &self.path,
        };
        self.weights.push(Weight {
            id: param.id,
            path: module.join("."),
            shape,
            embedding: self
                .containers
                .last()
                .is_some_and(|container| container == "Struct:Embedding"),
        });
    }
}

/// Puts layers on the tags of a module's weights.
struct Attach<'a, B: QuantOps> {
    layers: &'a Layers<B>,
}

impl<B: LayerBackend> ModuleMapper<B> for Attach<'_, B::Base> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let Some(layer) = self.layers.by_id.get(&param.id) else {
            return param;
        };
        let (id, tensor, mapper) = param.consume();
        let TensorPrimitive::Float(primitive) = tensor.into_primitive() else {
            unreachable!("a float parameter holds a float primitive while it is trained");
        };
        // A weight that the step left alone keeps its tag, and with it its quantized copy.
        let attached = B::tag(&primitive)
            .layer()
            .is_some_and(|known| Arc::ptr_eq(known, layer));
        let primitive = match attached {
            true => primitive,
            false => B::with_tag(primitive, Arc::new(Tag::with_layer(layer.clone()))),
        };
        Param::from_mapped_value(
            id,
            Tensor::from_primitive(TensorPrimitive::Float(primitive)),
            mapper,
        )
    }
}
