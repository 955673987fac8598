//! Learned step sizes (int4-hq-lss, Appendices A.3 and A.4).

use burn_backend::{
    FloatDType, Scalar, Shape, Slice, TensorData, TensorMetadata, get_device_settings,
    tensor::{Device, FloatTensor},
};
use cubecl_kernels::quantize::learned_step::is_step;
use serde::{Deserialize, Serialize};

use super::{ScaledStep, SlotValues};
use crate::data::{DataBackend, read::floats};

/// How learned step sizes move, and how the sizes of their Hadamard transforms are chosen (int4-hq-lss, Appendices A.3
/// to A.5).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LearnedSteps {
    /// The learning rate of the logarithm of a step size, by Adam: so a step stays positive, and one rate fits steps of
    /// any magnitude. A gradient that is not finite leaves its step alone; steps of other layers go on, also where the
    /// optimizer skips the weights' step.
    pub learning_rate: f32,
    /// The number of optimizer steps at the start during which a step size is not learned, but set anew for each matrix
    /// by its mean magnitude. A layer without a step size, as in a model that was trained without quantization, begins
    /// so whenever it first runs. A matrix that is zero has no such step size, so weights that begin at zero need a
    /// cold start of two steps at least. Where several runs of a layer share a cold step, the last one sets its step
    /// size.
    pub cold_start: u64,
    /// Optimizer steps during which step sizes are set so again, and the transforms' sizes chosen.
    pub restarts: Vec<u64>,
    /// How the sizes of transforms are chosen.
    pub hadamard: HadamardChoice,
    /// True if linear layers and rows of embeddings are quantized in evaluation too, once they have step sizes. A model
    /// that was trained through the clamps of its step sizes may be far from what it is without them. They are no
    /// function of the data, so no token learns of others by them. Products of activations stay exact.
    #[serde(default)]
    pub evaluation: bool,
}

/// How the size of a layer's Hadamard transform is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum HadamardChoice {
    /// The smallest size for which the product of the quantization errors of X and W is within 5% of the best size's
    /// (int4-hq-lss, Appendix A.5, where it is the best; larger ones cost more): chosen when the
    /// layer first runs, when the cold start ends, and at restarts. Only then does the step wait for the device.
    SmallestError,
    /// Blocks of 2^k elements, or of as many as divide the layer's inputs.
    Order(u32),
}

impl Default for LearnedSteps {
    /// A learning rate of 1e-3, a cold start of 100 steps, no restarts, sizes by their error, evaluation without
    /// quantization.
    fn default() -> Self {
        Self {
            learning_rate: 1e-3,
            cold_start: 100,
            restarts: Vec::new(),
            hadamard: HadamardChoice::SmallestError,
            evaluation: false,
        }
    }
}

impl LearnedSteps {
    /// Checks the settings.
    ///
    /// # Panics
    ///
    /// If the learning rate is negative or not finite, or a transform's k above 7.
    pub fn validate(&self) {
        assert!(
            self.learning_rate >= 0.0 && self.learning_rate.is_finite(),
            "learned steps: the learning rate must be finite and not negative, got {}",
            self.learning_rate
        );
        if let HadamardChoice::Order(order) = self.hadamard {
            assert!(
                order <= 7,
                "learned steps: Hadamard transforms have a k from 0 to 7, got {order}"
            );
        }
    }

    /// True in steps in which step sizes are set and not learned.
    pub(crate) fn is_cold(&self, step: u64) -> bool {
        step < self.cold_start || self.restarts.contains(&step)
    }

    /// True in steps in which a layer whose transform has a size chooses again.
    pub(crate) fn chooses_again(&self, step: u64) -> bool {
        self.cold_start > 1 && step + 1 == self.cold_start || self.restarts.contains(&step)
    }
}

/// Well within what [`is_step`] allows.
const SMALLEST: f32 = 1e-28;
const LARGEST: f32 = 1e28;
/// Of Adam's.
const BETAS: [f32; 2] = [0.9, 0.999];
/// Below every gradient that says something, whose square FP32 can still hold.
const EPSILON: f32 = 1e-15;

/// The step sizes of all layers on one device. Tensors are FP32 `[layers]`.
#[derive(Debug, Clone)]
pub(in crate::layer) struct StepSizes<B: DataBackend> {
    steps: FloatTensor<B>,
    /// The layers that have a step size.
    known: Vec<bool>,
    /// Those that a run on this device set in the present step.
    set_now: Vec<bool>,
    gradients: FloatTensor<B>,
    adam: Adam<B>,
}

/// The state of Adam for all step sizes: moments, and updates since they were zero.
#[derive(Debug, Clone)]
struct Adam<B: DataBackend> {
    first: FloatTensor<B>,
    second: FloatTensor<B>,
    updates: FloatTensor<B>,
}

impl<B: DataBackend> Adam<B> {
    /// Does the same with each tensor.
    fn map(self, mut f: impl FnMut(FloatTensor<B>) -> FloatTensor<B>) -> Self {
        Self {
            first: f(self.first),
            second: f(self.second),
            updates: f(self.updates),
        }
    }
}

/// The names of the values beside a step size.
fn names_of(slot: &str) -> [String; 3] {
    ["first", "second", "updates"].map(|name| format!("{slot}.{name}"))
}

/// Checks the step size in a record.
///
/// # Panics
///
/// If layer number `index` has one that no quantizer takes, or moments that Adam never has.
pub(super) fn complete(slot: &str, index: usize, layer: &SlotValues) {
    let has_only = |name: &str, valid: fn(f32) -> bool| {
        let values = layer.get(name).map_or(&[][..], Vec::as_slice);
        assert!(
            matches!(values, [] | [_]) && values.iter().all(|value| valid(*value)),
            "layers: slot `{name}` of quantized layer {index} has {values:?} in the record, where one positive finite step size, \
             or a moment of its gradient, belongs; the record is damaged, load another one",
        );
    };
    let [first, second, updates] = names_of(slot);
    has_only(slot, is_step);
    has_only(&first, f32::is_finite);
    has_only(&second, |value| value >= 0.0 && value.is_finite());
    has_only(&updates, |value| value >= 0.0 && value.is_finite());
}

impl<B: DataBackend> StepSizes<B> {
    pub(super) fn new(slot: &str, layers: &[SlotValues], device: &Device<B>) -> Self {
        let column = |name: &str, missing: f32| {
            let value = |layer: &SlotValues| layer.get(name)?.first().copied();
            let values = layers.iter().map(|layer| value(layer).unwrap_or(missing));
            upload::<B>(values.collect(), device)
        };
        let [first, second, updates] = names_of(slot).map(|name| column(&name, 0.0));
        Self {
            steps: column(slot, 1.0),
            known: layers
                .iter()
                .map(|layer| layer.contains_key(slot))
                .collect(),
            set_now: vec![false; layers.len()],
            gradients: column("", 0.0),
            adam: Adam {
                first,
                second,
                updates,
            },
        }
    }

    /// The step sizes, and true if the layer has one.
    pub fn get(&self, layer: usize) -> (FloatTensor<B>, bool) {
        (self.steps.clone(), self.known[layer])
    }

    /// Takes the step size of one layer from `steps`.
    pub fn set(&mut self, layer: usize, steps: FloatTensor<B>) {
        self.known[layer] = true;
        self.set_now[layer] = true;
        self.steps = assigned::<B>(self.steps.clone(), layer, at::<B>(steps, layer));
    }

    /// Adds a gradient, FP32 `[1]`, of the step size of one layer.
    pub fn add_gradient(&mut self, layer: usize, gradient: FloatTensor<B>) {
        let sum = B::float_add(at::<B>(self.gradients.clone(), layer), gradient);
        self.gradients = assigned::<B>(self.gradients.clone(), layer, sum);
    }

    /// Waits for the device.
    pub(super) fn read(&self, slot: &str, layers: &mut [SlotValues]) {
        let steps = floats::<B>(self.steps.clone());
        let Adam {
            first,
            second,
            updates,
        } = self.adam.clone();
        let adam = [first, second, updates].map(floats::<B>);
        for (index, layer) in layers.iter_mut().enumerate() {
            if self.known[index] {
                layer.insert(slot.to_owned(), vec![steps[index]]);
            }
            for (name, values) in names_of(slot).into_iter().zip(&adam) {
                // Without an update there is nothing to go on from, also where the record that was loaded had some.
                match adam[2][index] > 0.0 {
                    true => layer.insert(name, vec![values[index]]),
                    false => layer.remove(&name),
                };
            }
        }
    }

    /// Ends a step: learns the step sizes from the gradients of this device and of others, unless the step was cold.
    /// Those of a scaled loss are divided by its scale: Adam's moments outlive it.
    pub(super) fn advance(
        mut self,
        others: impl Iterator<Item = Self>,
        device: &Device<B>,
        config: &LearnedSteps,
        step: u64,
        scaled: Option<&ScaledStep<B>>,
    ) -> Self {
        for other in others {
            for layer in 0..self.known.len() {
                if other.set_now[layer] && !self.set_now[layer] {
                    self.set(layer, B::float_to_device(other.steps.clone(), device));
                }
            }
            let gradients = B::float_to_device(other.gradients, device);
            self.gradients = B::float_add(self.gradients, gradients);
        }
        self.set_now.fill(false);
        let gradients = zeros_like::<B>(&self.gradients);
        let gradients = std::mem::replace(&mut self.gradients, gradients);
        let gradients = match scaled {
            Some(scaled) => {
                B::float_div(gradients, B::float_to_device(scaled.used.clone(), device))
            }
            None => gradients,
        };
        match config.is_cold(step) {
            true => {
                self.adam = self.adam.map(|tensor| zeros_like::<B>(&tensor));
                self
            }
            false => self.learn(gradients, config),
        }
    }

    /// One step of Adam on the logarithms. Layers whose gradient is zero, which did not run or began with a step size
    /// of their data, or is not finite, stay as they are.
    fn learn(mut self, gradient: FloatTensor<B>, config: &LearnedSteps) -> Self {
        let by = |tensor, factor: f32| B::float_mul_scalar(tensor, Scalar::from(factor));
        let bools = get_device_settings::<B>(&B::float_device(&gradient)).bool_dtype;
        let zero = || Scalar::from(0.0f32);
        let gradient = B::float_mul(gradient, self.steps.clone());
        let squared = B::float_mul(gradient.clone(), gradient.clone());
        let finite = B::float_equal_elem(by(squared.clone(), 0.0), zero(), bools);
        let ran = B::float_not_equal_elem(gradient.clone(), zero(), bools);
        let learns = B::bool_and(finite, ran);

        let moved = |moment: &FloatTensor<B>, power, beta: f32| {
            B::float_add(by(moment.clone(), beta), by(power, 1.0 - beta))
        };
        let adam: Adam<B> = Adam {
            first: moved(&self.adam.first, gradient, BETAS[0]),
            second: moved(&self.adam.second, squared, BETAS[1]),
            updates: B::float_add_scalar(self.adam.updates.clone(), Scalar::from(1.0f32)),
        };
        // moment / (1 - beta^t)
        let corrected = |moment: &FloatTensor<B>, beta: f32| {
            let power = B::float_exp(by(adam.updates.clone(), beta.ln()));
            let rest = B::float_add_scalar(B::float_neg(power), Scalar::from(1.0f32));
            B::float_div(moment.clone(), rest)
        };
        let root = B::float_sqrt(corrected(&adam.second, BETAS[1]));
        let root = B::float_add_scalar(root, Scalar::from(EPSILON));
        let direction = B::float_div(corrected(&adam.first, BETAS[0]), root);
        let factor = B::float_exp(by(direction, -config.learning_rate));
        let steps = B::float_mul(self.steps.clone(), factor);
        let steps = B::float_clamp(steps, Scalar::from(SMALLEST), Scalar::from(LARGEST));

        let choose = |old, new| B::float_mask_where(old, learns.clone(), new);
        self.steps = choose(self.steps, steps);
        self.adam = Adam {
            first: choose(self.adam.first, adam.first),
            second: choose(self.adam.second, adam.second),
            updates: choose(self.adam.updates, adam.updates),
        };
        self
    }

    /// The same on another device, with gradients at zero.
    pub(super) fn to_device(&self, device: &Device<B>) -> Self {
        let on = |tensor| B::float_to_device(tensor, device);
        let steps = on(self.steps.clone());
        Self {
            gradients: zeros_like::<B>(&steps),
            steps,
            known: self.known.clone(),
            set_now: self.set_now.clone(),
            adam: self.adam.clone().map(on),
        }
    }
}

/// One element, `[1]`.
fn at<B: DataBackend>(tensor: FloatTensor<B>, layer: usize) -> FloatTensor<B> {
    B::float_slice(tensor, &[Slice::from(layer..layer + 1)])
}

fn assigned<B: DataBackend>(
    tensor: FloatTensor<B>,
    layer: usize,
    value: FloatTensor<B>,
) -> FloatTensor<B> {
    B::float_slice_assign(tensor, &[Slice::from(layer..layer + 1)], value)
}

fn upload<B: DataBackend>(values: Vec<f32>, device: &Device<B>) -> FloatTensor<B> {
    let layers = Shape::new([values.len()]);
    B::float_from_data(TensorData::new(values, layers), device)
}

fn zeros_like<B: DataBackend>(tensor: &FloatTensor<B>) -> FloatTensor<B> {
    B::float_zeros(tensor.shape(), &B::float_device(tensor), FloatDType::F32)
}
