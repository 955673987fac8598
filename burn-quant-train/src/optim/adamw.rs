//! AdamW with quantized layers (FP32 states).

use burn::{
    config::Config,
    grad_clipping::GradientClippingConfig,
    module::AutodiffModule,
    optim::{AdamW, AdamWConfig, adaptor::OptimizerAdaptor},
};

use super::{LayerBackend, LayerConfig, QuantOptimizer};
use crate::{layer::DelayThreshold, policy::LayerPolicy};

/// Configuration of AdamW for quantized training: the fields of Burn's `AdamWConfig`, with its defaults, and those of the
/// layers. With no layer quantized it steps as Burn's `AdamW`, bit for bit.
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
    /// Decays only where decay and update agree in sign.
    #[config(default = false)]
    pub cautious_weight_decay: bool,
    /// Uses the AMSGrad variant.
    #[config(default = false)]
    pub amsgrad: bool,
    /// Gradient clipping.
    pub grad_clipping: Option<GradientClippingConfig>,
    /// Which layers are quantized.
    #[config(default = "LayerPolicy::default()")]
    pub policy: LayerPolicy,
    /// How the fallback threshold of a layer follows its fallback rate.
    #[config(default = "DelayThreshold::default()")]
    pub threshold: DelayThreshold,
    /// The seed of stochastic rounding; by default the seed last given to `Backend::seed`.
    pub seed: Option<u64>,
}

impl QuantAdamWConfig {
    /// Makes the optimizer.
    ///
    /// # Panics
    ///
    /// If the threshold's settings are out of range: see [`DelayThreshold::validate`].
    pub fn init<B: LayerBackend, M: AutodiffModule<B>>(
        &self,
    ) -> QuantOptimizer<OptimizerAdaptor<AdamW, M, B>, B> {
        let adamw = AdamWConfig::new()
            .with_beta_1(self.beta_1)
            .with_beta_2(self.beta_2)
            .with_epsilon(self.epsilon)
            .with_weight_decay(self.weight_decay)
            .with_cautious_weight_decay(self.cautious_weight_decay)
            .with_amsgrad(self.amsgrad)
            .with_grad_clipping(self.grad_clipping.clone());
        let config = LayerConfig {
            policy: self.policy.clone(),
            threshold: self.threshold,
            seed: self.seed,
        };
        QuantOptimizer::new(adamw.init(), config)
    }
}
