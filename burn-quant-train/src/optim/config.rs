//! The configuration of AdamW.

use burn::{config::Config, grad_clipping::GradientClippingConfig, optim::LearningRate};
use burn_backend::{DType, TensorMetadata};
use serde::{Deserialize, Serialize};

use super::nonfinite::OnNonfinite;
use crate::{
    data::{
        StochasticKey,
        optimizer::{Hyperparameters, LossScaling, MAX_GROUP, StateFormat},
    },
    health::HealthConfig,
    layer::{DelayThreshold, DelayedScaling, LayerPolicy, LearnedSteps, covers},
};

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

/// Configuration of AdamW for quantized training.
///
/// It has the settings of Burn's `AdamWConfig` with their defaults, but for AMSGrad and cautious weight decay, and adds
/// the format of each moment and the settings of the layers.
///
/// With both moments in FP32 and no layer quantized it steps as Burn's `AdamW`: bit for bit on the CPU, to rounding on
/// a GPU. For AMSGrad wrap Burn's own in a
/// [`QuantOptimizer`](super::QuantOptimizer).
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
    /// Gradient clipping: by value, or by the norm of each parameter's gradient, as in Burn. Norms are computed in FP32,
    /// as part of the step.
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
    /// How a step treats gradients that hold NaN or Inf.
    #[config(default = "OnNonfinite::Skip")]
    pub on_nonfinite: OnNonfinite,
    /// How losses are scaled, for FP16; none: they are not. With it every loss goes through
    /// [`QuantOptimizer::scale`](super::QuantOptimizer::scale).
    pub loss_scaling: Option<LossScaling>,
    /// Which layers are quantized.
    #[config(default = "LayerPolicy::default()")]
    pub policy: LayerPolicy,
    /// How the fallback threshold of a layer follows its fallback rate.
    #[config(default = "DelayThreshold::default()")]
    pub threshold: DelayThreshold,
    /// How learned step sizes move.
    #[config(default = "LearnedSteps::default()")]
    pub steps: LearnedSteps,
    /// How scales follow the maxima of earlier steps.
    #[config(default = "DelayedScaling::default()")]
    pub scaling: DelayedScaling,
    /// The measurements of the layers, and how often they are made; `None`: nothing.
    pub health: Option<HealthConfig>,
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

    /// Panics unless all settings are in range.
    pub(super) fn validate(&self) {
        check("beta_1", self.beta_1, is_decay, DECAY);
        check("beta_2", self.beta_2, is_decay, DECAY);
        check(
            "epsilon",
            self.epsilon,
            is_positive,
            "a positive number, such as 1e-8",
        );
        check("weight_decay", self.weight_decay, is_factor, FACTOR);
        if let Some(GradientClippingConfig::Norm(bound) | GradientClippingConfig::Value(bound)) =
            self.grad_clipping
        {
            check("grad_clipping", bound, is_factor, FACTOR);
        }
        for group in &self.groups {
            let of_group = |field| format!("{field} of the group `{}`", group.pattern);
            check(
                &of_group("learning_rate"),
                group.learning_rate,
                is_factor,
                FACTOR,
            );
            if let Some(decay) = group.weight_decay {
                check(&of_group("weight_decay"), decay, is_factor, FACTOR);
            }
        }
        self.validate_moments();
        self.validate_loss_scaling();
    }

    fn validate_loss_scaling(&self) {
        let Some(scaling) = &self.loss_scaling else {
            return;
        };
        if let Err(error) = scaling.check() {
            panic!("adamw: {error}");
        }
        assert!(
            self.on_nonfinite == OnNonfinite::Skip,
            "adamw: losses are to be scaled with OnNonfinite::{:?}; use OnNonfinite::Skip: gradients that hold Inf \
             show that the scale is too large",
            self.on_nonfinite
        );
    }

    fn validate_moments(&self) {
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
            clip_norm: match self.grad_clipping {
                Some(GradientClippingConfig::Norm(norm)) => Some(norm),
                Some(GradientClippingConfig::Value(_)) | None => None,
            },
        }
    }

    /// The hyperparameters of the parameter at this path.
    pub(super) fn hyperparameters(&self, lr: LearningRate, path: &str) -> Hyperparameters {
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

    /// The bound of clipping by value; clipping by norm is a hyperparameter.
    pub(super) fn bound(&self) -> Option<f32> {
        match self.grad_clipping {
            Some(GradientClippingConfig::Value(bound)) => Some(bound),
            Some(GradientClippingConfig::Norm(_)) | None => None,
        }
    }

    /// The key that rounds the codes of a parameter's moments.
    pub(super) fn state_key(&self, parameter: StochasticKey) -> Option<StochasticKey> {
        (self.state_rounding == StateRounding::Stochastic).then_some(parameter)
    }

    /// The formats of the moments of a parameter with so many elements.
    pub(super) fn formats(&self, elements: usize) -> [Option<StateFormat>; 2] {
        match elements < self.min_elements {
            true => [None, None],
            false => [self.first, self.second],
        }
    }
}

impl QuantAdamWConfig {
    /// Bytes of both moments of a parameter with so many elements, scales included.
    pub fn state_bytes(&self, elements: usize) -> usize {
        let of_format = |format: Option<StateFormat>| match format {
            None => elements * size_of::<f32>(),
            Some(format) => format.bytes(elements),
        };
        self.formats(elements).map(of_format).into_iter().sum()
    }
}

const DECAY: &str = "a decay in [0, 1), such as 0.9";
const FACTOR: &str = "a finite number that is not negative, such as 0.1";

fn is_decay(value: f32) -> bool {
    (0.0..1.0).contains(&value)
}

fn is_positive(value: f32) -> bool {
    value.is_finite() && value > 0.0
}

fn is_factor(value: f32) -> bool {
    value.is_finite() && value >= 0.0
}

/// Panics unless the value of a setting is in its range.
fn check(name: &str, value: f32, is_in_range: fn(f32) -> bool, remedy: &str) {
    assert!(is_in_range(value), "adamw: {name} is {value}; use {remedy}");
}

/// Panics unless AdamW can step a parameter of this dtype.
pub(super) fn check_dtype(name: &str, parameter: &impl TensorMetadata) {
    let (shape, dtype) = (parameter.shape(), parameter.dtype());
    assert!(
        matches!(dtype, DType::F32 | DType::Flex32 | DType::BF16),
        "adamw: {name} {shape:?} is of dtype {dtype:?}; use FP32 or BF16 parameters"
    );
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use burn::{
        backend::{Autodiff, Flex},
        nn::Linear,
    };
    use rstest::rstest;

    use super::*;

    type Backend = Autodiff<Flex>;
    type Set = fn(&mut QuantAdamWConfig, f32);

    /// The message with which `f` panics.
    fn refusal(f: impl FnOnce()) -> String {
        let payload = catch_unwind(AssertUnwindSafe(f)).expect_err("a setting out of range");
        *payload.downcast::<String>().expect("a formatted message")
    }

    /// A configuration with one parameter group, for weight decay and learning rate.
    fn grouped() -> QuantAdamWConfig {
        QuantAdamWConfig::new().no_decay("norm")
    }

    #[rstest]
    #[case::beta_1("beta_1", |it: &mut QuantAdamWConfig, value| it.beta_1 = value, &[-0.1, 1.0, 1.5])]
    #[case::beta_2("beta_2", |it: &mut QuantAdamWConfig, value| it.beta_2 = value, &[-0.1, 1.0, 1.5])]
    #[case::epsilon("epsilon", |it: &mut QuantAdamWConfig, value| it.epsilon = value, &[0.0, -1e-8])]
    #[case::weight_decay("weight_decay", |it: &mut QuantAdamWConfig, value| it.weight_decay = value, &[-0.1])]
    #[case::norm(
        "grad_clipping",
        |it: &mut QuantAdamWConfig, value| it.grad_clipping = Some(GradientClippingConfig::Norm(value)),
        &[-1.0]
    )]
    #[case::value(
        "grad_clipping",
        |it: &mut QuantAdamWConfig, value| it.grad_clipping = Some(GradientClippingConfig::Value(value)),
        &[-1.0]
    )]
    #[case::decay_of_a_group(
        "weight_decay of the group `norm`",
        |it: &mut QuantAdamWConfig, value| it.groups[0].weight_decay = Some(value),
        &[-0.1]
    )]
    #[case::rate_of_a_group(
        "learning_rate of the group `norm`",
        |it: &mut QuantAdamWConfig, value| it.groups[0].learning_rate = value,
        &[-0.1]
    )]
    fn settings_out_of_range_are_refused(
        #[case] field: &str,
        #[case] set: Set,
        #[case] refused: &[f32],
    ) {
        let never = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        for value in never.iter().chain(refused) {
            let mut config = grouped();
            set(&mut config, *value);
            let messages = [
                refusal(|| drop(config.init::<Backend, Linear<Backend>>())),
                refusal(|| drop(config.adamw::<Backend, Linear<Backend>>())),
                refusal(|| drop(config.simple())),
            ];
            for message in messages {
                let expected = format!("adamw: {field} is {value}; use ");
                assert!(message.starts_with(&expected), "{message}");
            }
        }
    }

    #[test]
    fn the_ends_of_the_ranges_are_taken() {
        let mut config = grouped()
            .with_beta_1(0.0)
            .with_beta_2(1.0f32.next_down())
            .with_epsilon(f32::MIN_POSITIVE)
            .with_weight_decay(0.0);
        config.groups[0].learning_rate = 0.0;
        config.init::<Backend, Linear<Backend>>();
        config.adamw::<Backend, Linear<Backend>>();
        config.groups.clear();
        config.simple();
    }
}
