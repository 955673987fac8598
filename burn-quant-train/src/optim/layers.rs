//! The layers of a model as its optimizer knows them: the decision for each, and its state.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex},
};

use burn::{
    module::{ModuleVisitor, Param, ParamId},
    tensor::Tensor,
};
use burn_backend::tensor::Device;

use super::backend::LayerBackend;
use crate::{
    data::{
        DataBackend,
        product::{ExpectedLayer, LayerOperands},
    },
    health::{HealthConfig, HealthReport},
    layer::{
        self, Bank, Controllers, Decision, DelayThreshold, DelayedScaling, Layer, LayerPolicy,
        LayerRecord, LayersRecord, LearnedSteps, MomentSample, Now, PRODUCTS, ScaledStep,
        SlotValues, Watch,
    },
    lock::lock,
    recipe::{LinearRow, Row, Slot},
};

/// How a [`QuantOptimizer`](super::QuantOptimizer) treats layers.
#[derive(Debug, Clone, Default)]
pub struct LayerConfig {
    /// Which layers are quantized.
    pub policy: LayerPolicy,
    /// How thresholds follow fallback rates.
    pub threshold: DelayThreshold,
    /// How learned step sizes move.
    pub steps: LearnedSteps,
    /// How scales follow histories of maxima.
    pub scaling: DelayedScaling,
    /// The measurements, and how often they are made; `None`: nothing.
    pub health: Option<HealthConfig>,
    /// The seed of stochastic rounding; `None`: the seed last given to `Backend::seed`.
    pub seed: Option<u64>,
}

/// The policy's decision for one linear layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerReport {
    /// The module path, such as `layers.3.mlp.down`.
    pub path: String,
    /// The paths of further modules that share the layer's weight.
    pub shared_by: Vec<String>,
    /// The weight's shape.
    pub shape: [usize; 2],
    /// Quantized, or why not.
    pub decision: Decision,
    /// True if [products of activations behind the layer](LayerPolicy::products) are quantized, each a layer of its own,
    /// should there be some.
    pub products: bool,
    /// True if [attention behind the layer](LayerPolicy::products) has INT8 products, should there be one.
    pub int8_attention: bool,
}

impl fmt::Display for LayerReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [rows, cols] = self.shape;
        write!(f, "{}", self.path)?;
        for path in &self.shared_by {
            write!(f, " = {path}")?;
        }
        write!(f, " [{rows}, {cols}]: {}", self.decision)?;
        if self.products {
            write!(f, ", and up to {PRODUCTS} products behind it")?;
        }
        match self.int8_attention {
            true => write!(f, ", and the forward products of attention behind it"),
            false => Ok(()),
        }
    }
}

impl LayerReport {
    /// The paths of the products behind the layer.
    fn product_paths(&self) -> impl Iterator<Item = String> + use<'_> {
        let count = if self.products { PRODUCTS } else { 0 };
        (0..count).map(|index| format!("{}.products.{index}", self.path))
    }
}

/// The layers of the model that the optimizer steps.
pub(super) struct Layers<B: DataBackend> {
    bank: Arc<Bank<B>>,
    /// Dies with the optimizer and its clones.
    owner: Arc<()>,
    /// In module order.
    layers: Vec<Known<B>>,
    by_id: HashMap<ParamId, usize>,
}

/// A layer of the model.
struct Known<B: DataBackend> {
    id: ParamId,
    report: LayerReport,
    layer: Arc<Layer<B>>,
}

impl<B: DataBackend> Clone for Known<B> {
    fn clone(&self) -> Self {
        Self {
            id: self.id,
            report: self.report.clone(),
            layer: self.layer.clone(),
        }
    }
}

impl<B: DataBackend> Layers<B> {
    /// New layers for these weights, with the values that a record has for them.
    pub fn new(
        weights: Vec<Weight<B>>,
        row: Option<&Row>,
        config: &LayerConfig,
        record: Option<&LayersRecord>,
    ) -> Self {
        let linear = row.and_then(|row| row.linear.as_ref());
        let rounds_rows = row.is_some_and(|row| row.embedding.is_some());
        let slots: &'static [Slot] = linear.map_or(&[], |row| row.slots);
        let home = weights.first().map(|weight| weight.device.clone());
        let learns = linear.is_some_and(|row| row.learned().is_some());
        let attends = linear.is_some_and(LinearRow::has_int8_attention);
        let reports: Vec<(ParamId, LayerReport)> = weights
            .into_iter()
            .map(|weight| {
                let decision = match linear {
                    None => Decision::Recipe,
                    Some(_) => weight.decide(&config.policy, rounds_rows),
                };
                let named = |path: &String| config.policy.has_products(path);
                let behind = decision.is_quantized() && weight.paths.iter().all(named);
                let mut paths = weight.paths.into_iter();
                let report = LayerReport {
                    path: paths.next().unwrap_or_default(),
                    shared_by: paths.collect(),
                    shape: weight.shape,
                    decision,
                    products: learns && behind,
                    int8_attention: attends && behind,
                };
                (weight.id, report)
            })
            .collect();
        let with_state = reports
            .iter()
            .filter(|(_, report)| report.decision.has_state());
        let products = reports
            .iter()
            .flat_map(|(_, report)| report.product_paths());
        let products: Vec<String> = products.collect();
        let paths = with_state.clone().map(|(_, report)| report.path.clone());
        let paths = paths.chain(products.iter().cloned());
        let watch = config.health.clone();
        let all: Vec<_> = reports.iter().map(|(_, it)| it.path.as_str()).collect();
        let watch = watch.map(|it| Watch::new(it, config.threshold, &all, paths.collect()));
        let values = with_state
            .clone()
            .map(|(id, report)| values_of(record, Some(*id), &report.path))
            .chain(products.iter().map(|path| values_of(record, None, path)))
            .collect();
        let seed = config.seed.unwrap_or_else(layer::seed);
        let (seed, step) = record.map_or((seed, 0), |record| (record.seed, record.step));
        let controllers = Controllers {
            threshold: config.threshold,
            steps: config.steps.clone(),
            scaling: config.scaling,
            gradient_history: linear.map_or("", |row| row.histories()[2]),
        };
        let owner = Arc::new(());
        let of = Arc::downgrade(&owner);
        let bank =
            Arc::new(Bank::new(seed, step, slots, controllers, values, home, of).with_watch(watch));
        // Products come behind all weights, so that these have the same random numbers with and without them.
        let mut product_index = with_state.count();
        let mut index = 0;
        let layers: Vec<_> = reports
            .into_iter()
            .map(|(id, report)| {
                let products = report.product_paths().map(|path| {
                    let (index, bank) = (product_index, bank.clone());
                    product_index += 1;
                    Arc::new(Layer::new(path, index, Decision::Quantized, bank))
                });
                let products = products.collect();
                let attends = report.int8_attention;
                let decision = report.decision.clone();
                let has_state = decision.has_state();
                let layer = Layer::new(report.path.clone(), index, decision, bank.clone());
                index += usize::from(has_state);
                Known {
                    id,
                    report,
                    layer: Arc::new(layer.with_products(products).with_int8_attention(attends)),
                }
            })
            .collect();
        let mut layers = Self {
            bank,
            owner,
            layers,
            by_id: HashMap::new(),
        };
        layers.index();
        layers
    }

    fn index(&mut self) {
        let by_id = self.layers.iter().enumerate();
        self.by_id = by_id.map(|(index, layer)| (layer.id, index)).collect();
    }

    /// True if these are the layers of a model with these weights, by path, shape and id.
    pub fn are_of(&self, weights: &[Weight<B>]) -> bool {
        let mut ids = weights.iter().map(|weight| weight.id);
        self.are_like(weights) && self.layers.iter().all(|known| ids.next() == Some(known.id))
    }

    /// True if these are the layers of a model with these weights, by path and shape.
    fn are_like(&self, weights: &[Weight<B>]) -> bool {
        weights.len() == self.layers.len()
            && weights.iter().zip(&self.layers).all(|(weight, known)| {
                let report = &known.report;
                let paths = std::iter::once(&report.path).chain(&report.shared_by);
                weight.shape == report.shape && weight.paths.iter().eq(paths)
            })
    }

    /// The same layers with the ids of these weights, if paths and shapes are the same: a loaded model has those of its
    /// file.
    pub fn with_ids(&self, weights: &[Weight<B>]) -> Option<Self> {
        if !self.are_like(weights) {
            return None;
        }
        let known = weights.iter().zip(&self.layers);
        let mut layers = Self {
            bank: self.bank.clone(),
            owner: self.owner.clone(),
            layers: known
                .map(|(weight, known)| Known {
                    id: weight.id,
                    ..known.clone()
                })
                .collect(),
            by_id: HashMap::new(),
        };
        layers.index();
        Some(layers)
    }

    /// Those that keep state between steps.
    fn with_state(&self) -> impl Iterator<Item = &Known<B>> {
        let layers = self.layers.iter();
        layers.filter(|known| known.report.decision.has_state())
    }

    /// Those of products of activations, in the order of the bank.
    fn products(&self) -> impl Iterator<Item = &Arc<Layer<B>>> {
        let layers = self.layers.iter();
        layers.flat_map(|known| known.layer.products())
    }

    /// Goes on from a record.
    pub fn restore(&self, record: &LayersRecord) {
        let of_weights = self
            .with_state()
            .map(|known| values_of(Some(record), Some(known.id), &known.report.path));
        let of_products = self
            .products()
            .map(|layer| values_of(Some(record), None, layer.path()));
        let values = of_weights.chain(of_products).collect();
        self.bank.restore(record.seed, record.step, values);
    }

    /// The layer of a parameter.
    pub fn of(&self, id: &ParamId) -> Option<&Arc<Layer<B>>> {
        let index = self.by_id.get(id)?;
        Some(&self.layers[*index].layer)
    }

    /// The present and the layers that are measured, if this step is: their paths by their weights. Not for a clone of
    /// the optimizer that has seen fewer steps than have ended: another one has reported the step that it takes.
    pub fn measured_now(&self, seen: u64) -> Option<(Now, HashMap<ParamId, String>)> {
        let watch = self.bank.watch()?;
        let now = self.bank.now();
        if now.step > seen || !watch.is_due(now.step) {
            return None;
        }
        let paths = self
            .layers
            .iter()
            .map(|known| (known.id, &known.report.path));
        let measured = paths.filter(|(_, path)| watch.watches(path, now.step));
        let measured = measured.map(|(id, path)| (id, path.clone()));
        Some((now, measured.collect()))
    }

    /// Adds the findings on the layers' moments in the step that `now` is in, in the order of the layers.
    pub fn add_moments(&self, now: Now, mut samples: Vec<MomentSample<B>>) {
        let paths = self.layers.iter().map(|known| known.report.path.as_str());
        let places: HashMap<&str, usize> = paths.zip(0..).collect();
        samples.sort_by_key(|sample| places.get(sample.layer.as_str()).copied());
        if let Some(watch) = self.bank.watch() {
            watch.add_moments(now, samples);
        }
    }

    /// See [`Bank::end_step`].
    pub fn end_step(&self, seen: u64, scaled: Option<&ScaledStep<B>>) -> u64 {
        self.bank.end_step(seen, scaled)
    }

    fn reports(&self) -> Vec<LayerReport> {
        let reports = self.layers.iter().map(|known| known.report.clone());
        reports.collect()
    }

    /// Waits for the device.
    pub fn record(&self) -> LayersRecord {
        let of_weights = self
            .with_state()
            .map(|known| (known.id.val(), known.report.path.clone()));
        let of_products = self
            .products()
            .map(|layer| (LayerRecord::NO_WEIGHT, layer.path().to_owned()));
        let layers = of_weights
            .chain(of_products)
            .zip(self.bank.read())
            .map(|((id, path), slots)| LayerRecord { id, path, slots });
        LayersRecord {
            seed: self.bank.seed(),
            step: self.bank.step(),
            layers: layers.collect(),
        }
    }
}

/// A record's values for a layer, found by the weight's id, if it has a weight, or else by its path.
///
/// A model that was loaded from the same run has the record's ids. One that is loaded later has others.
fn values_of(record: Option<&LayersRecord>, id: Option<ParamId>, path: &str) -> SlotValues {
    let layers = record.map_or(&[][..], |record| &record.layers);
    let by_id = id.and_then(|id| layers.iter().find(|layer| layer.id == id.val()));
    let found = by_id.or_else(|| layers.iter().find(|layer| layer.path == path));
    found.map(|layer| layer.slots.clone()).unwrap_or_default()
}

/// The layers of an optimizer, and a record that waits for them.
pub(super) struct Shared<B: DataBackend> {
    pub layers: Option<Arc<Layers<B>>>,
    pub restored: Option<LayersRecord>,
}

/// A view of the layers of an optimizer's model: the decision for each, and its state.
///
/// It is shared with the optimizer and its clones. It holds no moments, as a clone would. Made by
/// [`QuantOptimizer::view`](super::QuantOptimizer::view).
pub struct LayersView<B: DataBackend> {
    pub(super) shared: Arc<Mutex<Shared<B>>>,
}

impl<B: DataBackend> Clone for LayersView<B> {
    fn clone(&self) -> Self {
        Self {
            shared: self.shared.clone(),
        }
    }
}

impl<B: DataBackend> LayersView<B> {
    /// The decision for every linear layer of the attached model; empty before a model is attached.
    pub fn layers(&self) -> Vec<LayerReport> {
        let shared = lock(&self.shared);
        shared
            .layers
            .as_ref()
            .map_or_else(Vec::new, |layers| layers.reports())
    }

    /// Path and fallback rate, in the last step, of every quantized layer.
    ///
    /// Empty before the first step, and for recipes without fallback. Waits for the device.
    pub fn fallback_rates(&self) -> Vec<(String, f32)> {
        let rated = |layer: LayerRecord| layer.rate().map(|rate| (layer.path, rate));
        self.record().layers.into_iter().filter_map(rated).collect()
    }

    /// The reports of the steps that were measured since they were last taken; of the last 64 if there were more.
    pub fn take_health(&self) -> Vec<HealthReport> {
        self.with_watch(|watch| watch.map_or_else(Vec::new, Watch::take))
    }

    /// Works on the report of the last step that was measured, taken or not.
    pub fn with_last_health<A>(&self, work: impl FnOnce(Option<&HealthReport>) -> A) -> A {
        self.with_watch(|watch| match watch {
            Some(watch) => watch.with_last(work),
            None => work(None),
        })
    }

    /// Measures from now on, or does not: products of a model that are evaluated with gradients would else count for a
    /// measured step.
    pub fn measure_health(&self, on: bool) {
        self.with_watch(|watch| {
            if let Some(watch) = watch {
                watch.switch(on);
            }
        });
    }

    fn with_watch<A>(&self, work: impl FnOnce(Option<&Watch<B>>) -> A) -> A {
        let shared = lock(&self.shared);
        work(
            shared
                .layers
                .as_ref()
                .and_then(|layers| layers.bank.watch()),
        )
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

/// A two-dimensional weight of a model.
pub(super) struct Weight<B: DataBackend> {
    pub id: ParamId,
    /// The paths of the modules that have it.
    paths: Vec<String>,
    shape: [usize; 2],
    embedding: bool,
    device: Device<B>,
}

impl<B: DataBackend> Weight<B> {
    /// The policy's decision. A weight that several modules share is quantized only if it would be in each.
    /// `rounds_rows`: the recipe rounds the rows of embeddings.
    fn decide(&self, policy: &LayerPolicy, rounds_rows: bool) -> Decision {
        let decisions = self.paths.iter().map(|path| match self.embedding {
            true => policy.decide_embedding(path, self.shape, rounds_rows),
            false => policy.decide(path, self.shape),
        });
        decisions
            .max_by_key(|decision| !decision.has_state())
            .unwrap_or(Decision::NotSelected)
    }
}

/// The layers among these weights whose products are going to be computed, of X with so many rows, each kind once.
pub(super) fn expected<B: DataBackend>(
    weights: &[Weight<B>],
    row: &Row,
    policy: &LayerPolicy,
    rows: usize,
) -> Vec<ExpectedLayer> {
    let mut layers = Vec::new();
    for weight in weights.iter().filter(|weight| !weight.embedding) {
        let linear = row
            .linear
            .filter(|_| weight.decide(policy, false).is_quantized());
        let operands = linear.map_or(Some(LayerOperands::Floats), |it| it.layer_operands());
        let Some(operands) = operands else { continue };
        let layer = ExpectedLayer {
            rows,
            weight: weight.shape,
            operands,
            compute: row.compute,
        };
        if !layers.contains(&layer) {
            layers.push(layer);
        }
    }
    layers
}

/// Finds the two-dimensional weights of a module, with their paths. Draws no lazy parameter.
pub(super) struct Survey<B: LayerBackend> {
    path: Vec<String>,
    containers: Vec<String>,
    pub weights: Vec<Weight<B::Base>>,
}

impl<B: LayerBackend> Default for Survey<B> {
    fn default() -> Self {
        Self {
            path: Vec::new(),
            containers: Vec::new(),
            weights: Vec::new(),
        }
    }
}

impl<B: LayerBackend> Survey<B> {
    /// Where the weights are; `None` if there are none.
    pub fn device(&self) -> Option<Device<B>> {
        self.weights.first().map(|weight| weight.device.clone())
    }
}

impl<B: LayerBackend> ModuleVisitor<B> for Survey<B> {
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
        let path = module.join(".");
        let container = self.containers.last();
        let embedding = container.is_some_and(|container| container == "Struct:Embedding");
        match self.weights.iter_mut().find(|weight| weight.id == param.id) {
            Some(weight) => {
                weight.paths.push(path);
                weight.embedding |= embedding;
            }
            None => self.weights.push(Weight {
                id: param.id,
                paths: vec![path],
                shape,
                embedding,
                device: param.lazy_device(),
            }),
        }
    }
}
