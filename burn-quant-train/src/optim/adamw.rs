//! AdamW with moments in 8 bits or FP32, one kernel a parameter.

use std::{
    collections::HashMap,
    iter,
    marker::PhantomData,
    sync::{Arc, Mutex, PoisonError},
};

use burn::{
    config::Config,
    grad_clipping::{GradientClipping, GradientClippingConfig},
    module::{AutodiffModule, ModuleMapper, Param, ParamId},
    optim::{GradientsParams, LearningRate, MultiGradientsParams, Optimizer, adaptor::GradAdaptor},
    tensor::{Shape, Tensor, TensorPrimitive},
};
use burn_backend::{
    AutodiffBackend, DType, TensorMetadata,
    ops::{FloatTensorOps, IntTensorOps},
    tensor::{Device, FloatTensor, IntTensor},
};
use serde::{Deserialize, Serialize};

use super::{
    LayerBackend, LayerConfig, QuantOptimizer,
    clocks::{Clock, Clocks},
    moments::{AdamWRecord, ParameterRecord},
    simple::SimpleQuantAdamW,
};
use crate::{
    layer::{self, DelayThreshold},
    ops::{
        DataBackend, QuantOps, StochasticKey,
        adamw::{
            AdamWItem, AdamWUpdate, Hyperparameters, MAX_GROUP, Moment, MomentState, StateFormat,
            zeros,
        },
    },
    policy::{LayerPolicy, covers},
    read::integers,
};

/// What a step does about gradients that hold NaN or Inf.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum OnNonfinite {
    /// Changes nothing, neither parameters nor moments nor step counts, and counts the step as skipped. Decided on the
    /// device.
    Skip,
    /// Panics, naming the parameter. Waits for the device at every step.
    Error,
    /// Takes the step as it is.
    Propagate,
}

impl OnNonfinite {
    /// The flag of these gradients; `name` is asked for the parameter of one.
    pub(super) fn find<B: QuantOps>(
        self,
        gradients: impl FnOnce() -> Vec<FloatTensor<B>>,
        device: &Device<B>,
        name: impl FnOnce(usize) -> String,
    ) -> Option<IntTensor<B>> {
        if self == Self::Propagate {
            return None;
        }
        let gradients = gradients();
        let flag = B::find_nonfinite(&gradients, device);
        if self == Self::Error {
            let found = integers::<B>(flag.clone())[0] as usize;
            assert!(
                found == 0,
                "adamw: the gradient of {}, {:?}, holds NaN or Inf; lower the learning rate or clip gradients, or let \
                 such steps pass with OnNonfinite::Skip",
                name(found - 1),
                gradients[found - 1].shape()
            );
        }
        Some(flag)
    }
}

/// Panics unless AdamW can step a parameter of this dtype.
pub(super) fn check_dtype(name: &str, parameter: &impl TensorMetadata) {
    let (shape, dtype) = (parameter.shape(), parameter.dtype());
    assert!(
        matches!(dtype, DType::F32 | DType::Flex32 | DType::BF16),
        "adamw: {name} {shape:?} is of dtype {dtype:?}; use FP32 or BF16 parameters"
    );
}

/// How the codes of 8-bit moments are rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StateRounding {
    /// To the nearest code, as COAT (coat-fp8, section 3) and Dettmers' 8-bit optimizers do. A moment whose change in a
    /// step is less than half the distance to the next code stays where it is.
    Nearest,
    /// Up or down at random, so that the mean is right and small changes add up. The random numbers follow from the
    /// seed, the parameter and the step: a resumed run takes the same, and so does every device.
    Stochastic,
}

/// Parameters that a pattern names, and how their step differs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ParameterGroup {
    /// A pattern for parameter paths such as `layers.3.norm.gamma`, of the kind that [`LayerPolicy`] takes.
    pub pattern: String,
    /// Weight decay of the group; `None`: the optimizer's.
    pub weight_decay: Option<f32>,
    /// Multiplies the learning rate.
    pub learning_rate: f32,
}

/// Configuration of AdamW for quantized training: Burn's `AdamWConfig` with its defaults, the format of each moment,
/// and the settings of the layers.
///
/// With both moments in FP32 and no layer quantized it steps as Burn's `AdamW`: bit for bit on the CPU, to rounding on
/// a GPU. For AMSGrad wrap Burn's own in a [`QuantOptimizer`].
///
/// ```
/// use burn_quant_train::optim::{QuantAdamWConfig, StateFormat};
///
/// let coat = QuantAdamWConfig::fp8();
/// let best = QuantAdamWConfig::fp8().with_first(Some(StateFormat::DYNAMIC_EXPONENT.expanded()));
/// let plain = QuantAdamWConfig::new().no_decay("norm").no_decay("bias");
/// ```
#[derive(Config, Debug)]
pub struct QuantAdamWConfig {
    /// Decay of the first moment.
    #[config(default = 0.9)]
    pub beta_1: f32,
    /// Decay of the second moment.
    #[config(default = 0.999)]
    pub beta_2: f32,
    /// Added to the denominator.
    #[config(default = 1e-5)]
    pub epsilon: f32,
    /// Decoupled weight decay.
    #[config(default = 1e-4)]
    pub weight_decay: f32,
    /// Gradient clipping.
    pub grad_clipping: Option<GradientClippingConfig>,
    /// Format of the first moment; none: FP32.
    pub first: Option<StateFormat>,
    /// Format of the second moment; none: FP32.
    pub second: Option<StateFormat>,
    /// How the codes of 8-bit moments are rounded.
    #[config(default = "StateRounding::Nearest")]
    pub state_rounding: StateRounding,
    /// Parameters with fewer elements keep FP32 moments.
    #[config(default = 4096)]
    pub min_elements: usize,
    /// Parameters that step differently; the first pattern that matches counts.
    #[config(default = "Vec::new()")]
    pub groups: Vec<ParameterGroup>,
    /// What a step does about gradients that hold NaN or Inf.
    #[config(default = "OnNonfinite::Skip")]
    pub on_nonfinite: OnNonfinite,
    /// Which layers are quantized.
    #[config(default = "LayerPolicy::default()")]
    pub policy: LayerPolicy,
    /// How the fallback threshold of a layer follows its fallback rate.
    #[config(default = "DelayThreshold::default()")]
    pub threshold: DelayThreshold,
    /// The seed of stochastic rounding; by default the seed last given to `Backend::seed` of a `QuantTrain`, or 0.
    pub seed: Option<u64>,
}

impl QuantAdamWConfig {
    /// FP8 AdamW: E4M3 with dynamic range expansion, 1 x 128, for both moments (coat-fp8, section 4). 2.08 bytes a
    /// parameter.
    pub fn fp8() -> Self {
        Self::new()
            .with_first(Some(StateFormat::E4M3.expanded()))
            .with_second(Some(StateFormat::E4M3.expanded()))
    }

    /// 8-bit AdamW with the dynamic exponent format in groups of 256 (Dettmers et al., "8-bit Optimizers via Block-wise
    /// Quantization"). 2.03 bytes a parameter.
    pub fn dynamic_8bit() -> Self {
        let format = StateFormat::DYNAMIC_EXPONENT.with_group(256);
        Self::new()
            .with_first(Some(format))
            .with_second(Some(format))
    }

    /// INT8 AdamW in blocks of 2048 (training-precision guide), the second moment by its root. 2.004 bytes a parameter.
    pub fn int8() -> Self {
        Self::new()
            .with_first(Some(StateFormat::INT8))
            .with_second(Some(StateFormat::INT8))
    }

    /// No weight decay for the parameters that `pattern` names.
    pub fn no_decay(mut self, pattern: impl Into<String>) -> Self {
        self.groups.push(ParameterGroup {
            pattern: pattern.into(),
            weight_decay: Some(0.0),
            learning_rate: 1.0,
        });
        self
    }

    /// Makes the optimizer, which owns the state of the model's layers.
    ///
    /// # Panics
    ///
    /// If the threshold's settings are out of range (see [`DelayThreshold::validate`]), or the groups of the moments
    /// are.
    pub fn init<B: LayerBackend, M: AutodiffModule<B>>(
        &self,
    ) -> QuantOptimizer<QuantAdamW<M, B>, B> {
        let config = LayerConfig {
            policy: self.policy.clone(),
            threshold: self.threshold,
            seed: self.seed,
        };
        QuantOptimizer::new(self.adamw(), config)
    }

    /// Makes the optimizer without layers, for `Autodiff` over any backend with [`QuantOps`]: 8-bit moments for a model
    /// that is not quantized.
    ///
    /// # Panics
    ///
    /// If a group is not a multiple of 4 up to 2048, or the groups of the two moments are not a power of two, at most
    /// 128, apart.
    pub fn adamw<B, M>(&self) -> QuantAdamW<M, B>
    where
        B: AutodiffBackend<InnerBackend: DataBackend>,
        M: AutodiffModule<B>,
    {
        self.validate();
        QuantAdamW {
            config: Arc::new(self.clone()),
            clipping: self.grad_clipping.as_ref().map(|it| it.init()),
            state: State {
                moments: HashMap::new(),
                restored: HashMap::new(),
                clocks: Clocks::new([0, 0], iter::empty()),
                seed: None,
            },
            published: Arc::new(Mutex::new(Clock::Host([0, 0]))),
            module: PhantomData,
        }
    }

    /// Makes the optimizer as a `SimpleOptimizer`, for Burn's `OptimizerAdaptor`.
    ///
    /// # Panics
    ///
    /// As [`adamw`](Self::adamw), and if there are groups, which need paths, or clipping, which is the adaptor's.
    pub fn simple(&self) -> SimpleQuantAdamW {
        self.validate();
        assert!(
            self.groups.is_empty() && self.grad_clipping.is_none(),
            "adamw: a SimpleOptimizer sees no parameter paths, so it has no groups, and OptimizerAdaptor does the \
             clipping; use `adamw` or `init`, or take both out of the configuration"
        );
        SimpleQuantAdamW::new(self.clone())
    }

    fn validate(&self) {
        let groups: Vec<usize> = [self.first, self.second]
            .into_iter()
            .flatten()
            .map(|format| format.group)
            .collect();
        for &group in &groups {
            assert!(
                (4..=MAX_GROUP).contains(&group) && group.is_multiple_of(4),
                "adamw: a group of {group} elements; use a multiple of 4 up to {MAX_GROUP}, such as 128"
            );
        }
        if let &[first, second] = &groups[..] {
            let (small, large) = (first.min(second), first.max(second));
            assert!(
                large.is_multiple_of(small)
                    && (large / small).is_power_of_two()
                    && large / small <= 128,
                "adamw: groups of {first} and {second} elements; use groups a power of two apart, at most 128, such as \
                 128 and 256"
            );
        }
    }

    /// The hyperparameters of a parameter that no group names.
    pub(super) fn ungrouped(&self, lr: LearningRate) -> Hyperparameters {
        Hyperparameters {
            learning_rate: lr,
            beta_1: self.beta_1,
            beta_2: self.beta_2,
            epsilon: self.epsilon,
            weight_decay: self.weight_decay,
        }
    }

    fn hyperparameters(&self, lr: LearningRate, path: &str) -> Hyperparameters {
        let ungrouped = self.ungrouped(lr);
        let Some(group) = self.groups.iter().find(|it| covers(&it.pattern, path)) else {
            return ungrouped;
        };
        Hyperparameters {
            learning_rate: lr * f64::from(group.learning_rate),
            weight_decay: group.weight_decay.unwrap_or(self.weight_decay),
            ..ungrouped
        }
    }

    /// The key that rounds the codes of a parameter's moments.
    pub(super) fn state_key(&self, parameter: StochasticKey) -> Option<StochasticKey> {
        (self.state_rounding == StateRounding::Stochastic).then_some(parameter)
    }

    pub(super) fn formats(&self, elements: usize) -> [Option<StateFormat>; 2] {
        match elements < self.min_elements {
            true => [None, None],
            false => [self.first, self.second],
        }
    }
}

type Base<B> = <<B as AutodiffBackend>::InnerBackend as DataBackend>::Base;

/// The moments of one parameter.
#[derive(Debug, Clone)]
pub(super) struct Moments<B: QuantOps> {
    pub(super) first: MomentState<B>,
    pub(super) second: MomentState<B>,
}

impl<B: QuantOps> Moments<B> {
    pub(super) fn zeros(
        shape: &Shape,
        formats: [Option<StateFormat>; 2],
        device: &Device<B>,
    ) -> Self {
        let [first, second] = formats;
        Self {
            first: zeros::<B>(shape.clone(), first, Moment::First, device),
            second: zeros::<B>(shape.clone(), second, Moment::Second, device),
        }
    }

    /// Panics unless the moments are those of a parameter of this shape.
    pub(super) fn check_shape(&self, name: &str, shape: &Shape) {
        let found = self.first.shape();
        assert!(
            found == *shape,
            "adamw: {name} has shape {shape:?}, but its optimizer state {found:?}; was the record loaded for another \
             model?"
        );
    }

    pub(super) fn moved_to(self, device: &Device<B>) -> Self {
        Self {
            first: self.first.moved_to(device),
            second: self.second.moved_to(device),
        }
    }

    /// In these formats: moments of a record may be in others.
    pub(super) fn converted(self, formats: [Option<StateFormat>; 2]) -> Self {
        let [first, second] = formats;
        Self {
            first: convert(self.first, first, Moment::First),
            second: convert(self.second, second, Moment::Second),
        }
    }
}

fn convert<B: QuantOps>(
    state: MomentState<B>,
    format: Option<StateFormat>,
    moment: Moment,
) -> MomentState<B> {
    if state.format() == format {
        return state;
    }
    let values = B::decompress_moment(state, moment);
    match format {
        None => MomentState::Full(values),
        Some(format) => B::compress_moment(values, format, moment),
    }
}

#[derive(Debug, Clone)]
struct State<B: QuantOps> {
    moments: HashMap<ParamId, Moments<B>>,
    /// Of a loaded record, until the parameter is stepped.
    restored: HashMap<ParamId, Arc<ParameterRecord>>,
    clocks: Clocks<B>,
    seed: Option<u64>,
}

/// AdamW with moments in any format. It implements Burn's `Optimizer`; inside a [`QuantOptimizer`] it also serves
/// quantized layers. Configured by [`QuantAdamWConfig`].
pub struct QuantAdamW<M, B: AutodiffBackend<InnerBackend: DataBackend>> {
    config: Arc<QuantAdamWConfig>,
    clipping: Option<GradientClipping>,
    state: State<Base<B>>,
    /// The clock of every step, which clones of the optimizer see.
    published: Arc<Mutex<Clock<Base<B>>>>,
    module: PhantomData<fn(M) -> M>,
}

impl<M, B: AutodiffBackend<InnerBackend: DataBackend>> Clone for QuantAdamW<M, B> {
    fn clone(&self) -> Self {
        Self {
            config: self.config.clone(),
            clipping: self.clipping.clone(),
            state: self.state.clone(),
            published: self.published.clone(),
            module: PhantomData,
        }
    }
}

/// A parameter taken out of the module for the step.
struct Taken<B: QuantOps> {
    id: ParamId,
    place: Place,
    parameter: FloatTensor<B>,
    gradient: FloatTensor<B>,
}

fn skipped<B: QuantOps>(clock: &Mutex<Clock<B>>) -> u64 {
    let clock = clock.lock().unwrap_or_else(PoisonError::into_inner);
    let [_, skipped] = clock.read();
    skipped as u64
}

/// Parameters of one device, one group and one clock: one call of the kernels' launcher.
struct Call<B: QuantOps> {
    device: Device<B>,
    /// Its index.
    clock: usize,
    hyperparameters: Hyperparameters,
    ids: Vec<ParamId>,
    items: Vec<AdamWItem<B>>,
}

impl<M, B> QuantAdamW<M, B>
where
    B: AutodiffBackend<InnerBackend: DataBackend>,
    M: AutodiffModule<B>,
{
    /// Steps that were skipped because a gradient held NaN or Inf, seen by all clones. Waits for the device.
    pub fn skipped_steps(&self) -> u64 {
        skipped(&self.published)
    }

    /// [`skipped_steps`](Self::skipped_steps) for whoever need not hold the moments, as a clone does.
    pub fn skipped_steps_reader(&self) -> impl Fn() -> u64 + Send + Sync + 'static {
        let published = self.published.clone();
        move || skipped(&published)
    }

    fn stepped(&mut self, lr: LearningRate, module: M, grads: GradAdaptor) -> M {
        let mut take = Take::<B> {
            grads,
            path: Vec::new(),
            parameters: 0,
            taken: Vec::new(),
        };
        let module = module.map(&mut take);
        if take.taken.is_empty() {
            return module;
        }
        let updated = self.update(lr, take.taken);
        module.map(&mut PutBack::<B> { updated })
    }

    /// Steps all parameters: those of one group, one device and one clock in one call.
    fn update(
        &mut self,
        lr: LearningRate,
        taken: Vec<Taken<Base<B>>>,
    ) -> HashMap<ParamId, FloatTensor<Base<B>>> {
        let home = Base::<B>::float_device(&taken[0].parameter);
        // The gradients before clipping, which may hide an infinity.
        let gradients = || {
            let gradients = taken.iter().map(|taken| taken.gradient.clone());
            gradients
                .map(|gradient| Base::<B>::float_to_device(gradient, &home))
                .collect()
        };
        let name = |index: usize| taken[index].place.name();
        let on_nonfinite = self.config.on_nonfinite;
        let nonfinite = on_nonfinite.find::<Base<B>>(gradients, &home, name);
        let stepping = taken.iter().map(|taken| taken.id).collect();
        let clocks = &mut self.state.clocks;
        clocks.tick(&stepping, &home, nonfinite.as_ref());

        let mut calls: Vec<Call<Base<B>>> = Vec::new();
        for taken in taken {
            let device = Base::<B>::float_device(&taken.parameter);
            let hyperparameters = self.config.hyperparameters(lr, &taken.place.path);
            let clock = self.state.clocks.index_of(&taken.id);
            let (id, item) = self.item(taken, &device);
            let found = calls.iter().position(|call| {
                call.device == device
                    && call.clock == clock
                    && call.hyperparameters == hyperparameters
            });
            let index = found.unwrap_or_else(|| {
                calls.push(Call {
                    device,
                    clock,
                    hyperparameters,
                    ids: Vec::new(),
                    items: Vec::new(),
                });
                calls.len() - 1
            });
            calls[index].ids.push(id);
            calls[index].items.push(item);
        }
        let mut updated = HashMap::new();
        for call in calls {
            let Call {
                device,
                clock,
                hyperparameters,
                ids,
                items,
            } = call;
            let clock = self.state.clocks.on(clock, &device);
            let nonfinite = nonfinite
                .clone()
                .map(|flag| Base::<B>::int_to_device(flag, &device));
            let updates = Base::<B>::adamw(items, &clock, nonfinite.as_ref(), &hyperparameters);
            for (id, update) in ids.into_iter().zip(updates) {
                let AdamWUpdate {
                    parameter,
                    first,
                    second,
                } = update;
                self.state.moments.insert(id, Moments { first, second });
                updated.insert(id, parameter);
            }
        }
        *self
            .published
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = self.state.clocks.every_step().clone();
        updated
    }

    fn item(
        &mut self,
        taken: Taken<Base<B>>,
        device: &Device<Base<B>>,
    ) -> (ParamId, AdamWItem<Base<B>>) {
        let Taken {
            id,
            place,
            parameter,
            gradient,
        } = taken;
        let shape = parameter.shape();
        let name = place.name();
        check_dtype(&name, &parameter);
        let gradient = match &self.clipping {
            Some(clipping) => clip::<B>(clipping, gradient),
            None => gradient,
        };
        let formats = self.config.formats(shape.num_elements());
        let state = &mut self.state;
        let restored = state
            .restored
            .remove(&id)
            .map(|record| Arc::unwrap_or_clone(record).upload::<Base<B>>(device));
        let moments = match state.moments.remove(&id).or(restored) {
            Some(moments) => {
                moments.check_shape(&name, &shape);
                moments.moved_to(device).converted(formats)
            }
            None => Moments::zeros(&shape, formats, device),
        };
        let seed = *state
            .seed
            .get_or_insert_with(|| self.config.seed.unwrap_or_else(layer::seed));
        let key = StochasticKey {
            seed,
            stream: PARAMETER_STREAMS | place.index,
        };
        let item = AdamWItem {
            parameter,
            gradient,
            first: moments.first,
            second: moments.second,
            key: Some(key),
            state_key: self.config.state_key(key),
        };
        (id, item)
    }
}

impl<M, B> Optimizer<M, B> for QuantAdamW<M, B>
where
    B: AutodiffBackend<InnerBackend: DataBackend>,
    M: AutodiffModule<B>,
{
    type Record = AdamWRecord;

    fn step(&mut self, lr: LearningRate, module: M, grads: GradientsParams) -> M {
        self.stepped(lr, module, grads.into())
    }

    fn step_multi(&mut self, lr: LearningRate, module: M, grads: MultiGradientsParams) -> M {
        self.stepped(lr, module, grads.into())
    }

    /// Waits for the device, to read the moments.
    fn to_record(&self) -> AdamWRecord {
        let [steps, skipped] = self.state.clocks.every_step().read();
        let [steps, skipped] = [steps as u64, skipped as u64];
        let mut parameters = self.state.restored.clone();
        parameters.extend(self.state.moments.iter().map(|(id, moments)| {
            let record = ParameterRecord::read(moments.clone());
            (*id, Arc::new(record))
        }));
        AdamWRecord {
            steps,
            skipped,
            seed: self.state.seed,
            parameters,
            fewer_steps: self
                .state
                .clocks
                .taken()
                .filter(|(_, taken)| *taken != steps)
                .collect(),
        }
    }

    fn load_record(self, record: AdamWRecord) -> Self {
        let counts = [record.steps as i32, record.skipped as i32];
        let taken = record.parameters.keys().map(|id| (*id, record.taken(id)));
        let clocks = Clocks::new(counts, taken);
        *self
            .published
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = clocks.every_step().clone();
        Self {
            state: State {
                moments: HashMap::new(),
                restored: record.parameters,
                clocks,
                seed: record.seed,
            },
            ..self
        }
    }
}

/// Marks the random streams of parameters; those of layers are hashes.
const PARAMETER_STREAMS: u64 = 1 << 63;

/// Where a parameter is in its module.
struct Place {
    path: String,
    /// Among all float parameters, in module order.
    index: u64,
}

impl Place {
    fn name(&self) -> String {
        format!("`{}`", self.path)
    }
}

/// Takes the parameters that have gradients out of a module, so that nothing else holds their buffers.
struct Take<B: AutodiffBackend<InnerBackend: DataBackend>> {
    grads: GradAdaptor,
    /// Of the module that is being mapped.
    path: Vec<String>,
    /// Seen so far.
    parameters: u64,
    taken: Vec<Taken<Base<B>>>,
}

impl<B: AutodiffBackend<InnerBackend: DataBackend>> ModuleMapper<B> for Take<B> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        let index = self.parameters;
        self.parameters += 1;
        let Some((gradient, device)) = self.grads.remove::<B::InnerBackend, D>(id) else {
            return Param::from_mapped_value(id, tensor, mapper);
        };
        // A moved tensor is no leaf any more: ask before.
        let trained = tensor.is_require_grad();
        let tensor = match tensor.device() == device {
            true => tensor,
            false => tensor.to_device(&device),
        };
        self.taken.push(Taken {
            id,
            place: Place {
                path: self.path.join("."),
                index,
            },
            parameter: primitive::<B, D>(tensor.inner()),
            gradient: primitive::<B, D>(gradient),
        });
        // Keeps the place, and whether the parameter is trained.
        let mut empty = Tensor::<B, D>::empty([1; D], &device);
        if trained {
            empty = empty.require_grad();
        }
        Param::from_mapped_value(id, empty, mapper)
    }
}

/// The clipped gradient; clipping does not depend on the rank.
fn clip<B: AutodiffBackend<InnerBackend: DataBackend>>(
    clipping: &GradientClipping,
    gradient: FloatTensor<Base<B>>,
) -> FloatTensor<Base<B>> {
    let shape = gradient.shape();
    let flat = Shape::new([shape.num_elements()]);
    let gradient = B::InnerBackend::from_base(Base::<B>::float_reshape(gradient, flat));
    let gradient = Tensor::<B::InnerBackend, 1>::from_primitive(TensorPrimitive::Float(gradient));
    let clipped = primitive::<B, 1>(clipping.clip_gradient(gradient));
    Base::<B>::float_reshape(clipped, shape)
}

fn primitive<B: AutodiffBackend<InnerBackend: DataBackend>, const D: usize>(
    tensor: Tensor<B::InnerBackend, D>,
) -> FloatTensor<Base<B>> {
    let TensorPrimitive::Float(primitive) = tensor.into_primitive() else {
        unreachable!(
            "a float parameter and its gradient hold float primitives while it is trained"
        );
    };
    B::InnerBackend::into_base(primitive)
}

/// Puts the updated parameters back.
struct PutBack<B: AutodiffBackend<InnerBackend: DataBackend>> {
    updated: HashMap<ParamId, FloatTensor<Base<B>>>,
}

impl<B: AutodiffBackend<InnerBackend: DataBackend>> ModuleMapper<B> for PutBack<B> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let Some(updated) = self.updated.remove(&param.id) else {
            return param;
        };
        let (id, place, mapper) = param.consume();
        let primitive = TensorPrimitive::Float(B::InnerBackend::from_base(updated));
        let mut tensor = Tensor::from_inner(Tensor::from_primitive(primitive));
        if place.is_require_grad() {
            tensor = tensor.require_grad();
        }
        Param::from_mapped_value(id, tensor, mapper)
    }
}
