//! Dynamic loss scaling: what multiplies the loss, and the optimizer's share of it.
//!
//! The optimizer holds the scale, on the device, and divides by it as it reads the gradients. A [`LossScaler`] is a
//! handle on the scale for whoever has the loss. So the two go together: a step of which no loss was scaled is refused.

use std::{
    any::{Any, type_name},
    fmt,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
};

use burn::tensor::{DType, ElementConversion, FloatDType, Tensor, TensorPrimitive};
use burn_backend::{
    AutodiffBackend, Backend, TensorData,
    tensor::{Device, IntTensor},
};
use serde::{Deserialize, Serialize};

use super::{backend::ParameterBackend, parameters::Base};
use crate::{
    data::{
        DataBackend,
        optimizer::{LossScale, LossScaling, is_scale, update_loss_scale},
    },
    layer::ScaledStep,
    lock::lock,
};

/// Multiplies losses by the scale of an optimizer, which divides the gradients by it.
///
/// Made by [`QuantAdamW::loss_scaler`](super::QuantAdamW::loss_scaler); clones have the same scale. The default one,
/// and that of an optimizer without loss scaling, leaves losses as they are. It names no backend, so that a model that
/// computes its gradients in Burn's `TrainStep` can hold it, in a field with `#[module(skip)]`.
#[derive(Clone, Default)]
pub struct LossScaler {
    /// A [`Shared`] of the backend that the optimizer steps.
    shared: Option<Arc<dyn Any + Send + Sync>>,
}

impl LossScaler {
    /// The loss, of any shape, by which `backward` gets gradients for the optimizer's next step: multiplied by the
    /// scale, on the loss' device, without waiting for it. An FP16 or BF16 loss becomes FP32, which holds the product.
    ///
    /// With gradient accumulation every loss of a step is to be scaled: the scale moves in `step`, so all have the
    /// same.
    ///
    /// # Panics
    ///
    /// If the optimizer steps a model of another backend.
    pub fn scale<B: AutodiffBackend, const D: usize>(&self, loss: Tensor<B, D>) -> Tensor<B, D> {
        let Some(shared) = self.shared::<B>() else {
            return loss;
        };
        shared.scaled.fetch_add(1, Ordering::Relaxed);
        let loss = match loss.dtype() {
            DType::F16 | DType::BF16 => loss.cast(FloatDType::F32),
            _ => loss,
        };
        let scale = shared.published().next.on(&loss.device());
        let scale = scale.cast(FloatDType::from(loss.dtype()));
        loss * Tensor::from_inner(scale).reshape([1; D])
    }

    /// The scale of the next step; none if losses are not scaled. Waits for the device.
    ///
    /// # Panics
    ///
    /// If the optimizer steps a model of another backend.
    pub fn read<B: AutodiffBackend>(&self) -> Option<f32> {
        let shared = self.shared::<B>()?;
        // A training step takes the lock, and does not wait for the device.
        let scale = match &shared.published().next {
            Scale::Host(scale) => return Some(*scale),
            Scale::Device(scale) => scale.clone(),
        };
        Some(scale.into_scalar().elem())
    }

    fn shared<B: AutodiffBackend>(&self) -> Option<&Shared<B>> {
        self.shared.as_ref().map(|shared| {
            shared.downcast_ref().unwrap_or_else(|| {
                panic!(
                    "loss scaling: a loss on {}, but the optimizer of this `LossScaler` steps a model of another \
                     backend; take the one of the optimizer that steps the model",
                    type_name::<B>()
                )
            })
        })
    }

    /// The scales around the step that the optimizer has just taken; none if it took none since the last call.
    pub(super) fn take_step<B>(&self) -> Option<ScaledStep<Base<B>>>
    where
        B: AutodiffBackend<InnerBackend: ParameterBackend>,
    {
        let mut published = self.shared::<B>()?.published();
        let used = published.used.take()?;
        let next = published.next.on(&used.device());
        let [used, next] = [used, next].map(|scale| match scale.into_primitive() {
            TensorPrimitive::Float(primitive) => B::InnerBackend::into_base(primitive),
            TensorPrimitive::QFloat(_) => unreachable!("a scale is a float"),
        });
        Some(ScaledStep { used, next })
    }
}

impl fmt::Debug for LossScaler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_on = self.shared.is_some();
        f.debug_struct("LossScaler").field("is_on", &is_on).finish()
    }
}

/// The state that the clones of an optimizer and their scalers share.
struct Shared<B: AutodiffBackend> {
    /// Losses scaled so far.
    scaled: AtomicU64,
    published: Mutex<Published<B::InnerBackend>>,
}

struct Published<B: Backend> {
    /// The scale of losses to come.
    next: Scale<B>,
    /// The scale that the gradients of the last step had, FP32 `[1]`.
    used: Option<Tensor<B, 1>>,
}

enum Scale<B: Backend> {
    /// Before the first step, or as loaded.
    Host(f32),
    /// FP32 `[1]`.
    Device(Tensor<B, 1>),
}

impl<B: Backend> Scale<B> {
    fn on(&self, device: &Device<B>) -> Tensor<B, 1> {
        match self {
            Self::Host(scale) => {
                let data = TensorData::new(vec![*scale], [1]);
                let scale = B::float_from_data(data, device);
                Tensor::from_primitive(TensorPrimitive::Float(scale))
            }
            Self::Device(scale) => scale.clone().to_device(device),
        }
    }
}

impl<B: AutodiffBackend> Shared<B> {
    fn published(&self) -> MutexGuard<'_, Published<B::InnerBackend>> {
        lock(&self.published)
    }
}

/// The scale in an optimizer's record.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LossScaleRecord {
    /// The scale of the next step.
    pub scale: f32,
    /// Good steps since it last fell or was due to grow.
    pub good_steps: u32,
}

impl LossScaleRecord {
    /// Panics unless an optimizer can go on with it.
    pub(super) fn check(&self) {
        assert!(
            is_scale(self.scale) && i32::try_from(self.good_steps).is_ok(),
            "adamw: the optimizer record has a loss scale of {} after {} good steps, where a power of two from 2^-126 \
             to 2^126 and a count below 2^31 belong; the file is damaged",
            self.scale,
            self.good_steps
        );
    }
}

#[derive(Debug, Clone)]
enum State<B: DataBackend> {
    /// Before the first step, or as loaded.
    Host(LossScaleRecord),
    Device(LossScale<B>),
}

/// The loss scaling of one optimizer.
pub(super) struct Scaling<B: AutodiffBackend<InnerBackend: ParameterBackend>> {
    config: LossScaling,
    state: State<Base<B>>,
    shared: Arc<Shared<B>>,
    /// Losses that were scaled when this clone last stepped.
    seen: u64,
}

impl<B: AutodiffBackend<InnerBackend: ParameterBackend>> Clone for Scaling<B> {
    fn clone(&self) -> Self {
        Self {
            config: self.config,
            state: self.state.clone(),
            shared: self.shared.clone(),
            seen: self.seen,
        }
    }
}

impl<B: AutodiffBackend<InnerBackend: ParameterBackend>> Scaling<B> {
    pub fn new(config: LossScaling) -> Self {
        Self {
            config,
            state: State::Host(LossScaleRecord {
                scale: config.initial,
                good_steps: 0,
            }),
            shared: Arc::new(Shared {
                scaled: AtomicU64::new(0),
                published: Mutex::new(Published {
                    next: Scale::Host(config.initial),
                    used: None,
                }),
            }),
            seen: 0,
        }
    }

    pub fn scaler(&self) -> LossScaler {
        LossScaler {
            shared: Some(self.shared.clone()),
        }
    }

    /// The scale that the gradients of a step have, on `device`.
    ///
    /// # Panics
    ///
    /// If no loss was scaled since the last step.
    pub fn begin_step(&mut self, device: &Device<Base<B>>) -> LossScale<Base<B>> {
        let scaled = self.shared.scaled.load(Ordering::Relaxed);
        assert!(
            scaled > self.seen,
            "adamw: losses are to be scaled, but none was since the last step; write \
             `optim.scale(loss).backward()`, or take `loss_scaling` out of the configuration"
        );
        self.seen = scaled;
        match self.state.clone() {
            State::Host(LossScaleRecord { scale, good_steps }) => {
                LossScale::new(scale, good_steps, device)
            }
            State::Device(state) => state.moved_to(device),
        }
    }

    /// Moves the scale at the end of a step that began with `used`: down if `nonfinite` is not 0.
    pub fn end_step(&mut self, used: LossScale<Base<B>>, nonfinite: IntTensor<Base<B>>) {
        let lifted = |state: &LossScale<Base<B>>| {
            let scale = B::InnerBackend::from_base(state.scale.clone());
            Tensor::from_primitive(TensorPrimitive::Float(scale))
        };
        let used_scale = lifted(&used);
        let next = update_loss_scale::<Base<B>>(used, nonfinite, &self.config);
        *self.shared.published() = Published {
            next: Scale::Device(lifted(&next)),
            used: Some(used_scale),
        };
        self.state = State::Device(next);
    }

    /// Waits for the device.
    pub fn record(&self) -> LossScaleRecord {
        match self.state.clone() {
            State::Host(record) => record,
            State::Device(state) => {
                let (scale, good_steps) = state.read();
                LossScaleRecord { scale, good_steps }
            }
        }
    }

    /// Goes on from a record, within the range of the configuration; begins anew where that has no scale.
    pub fn restored(self, record: Option<LossScaleRecord>) -> Self {
        let LossScaling {
            initial,
            minimum,
            maximum,
            ..
        } = self.config;
        let record = match record {
            Some(record) => LossScaleRecord {
                scale: record.scale.clamp(minimum, maximum),
                ..record
            },
            None => LossScaleRecord {
                scale: initial,
                good_steps: 0,
            },
        };
        *self.shared.published() = Published {
            next: Scale::Host(record.scale),
            used: None,
        };
        Self {
            state: State::Host(record),
            ..self
        }
    }
}
