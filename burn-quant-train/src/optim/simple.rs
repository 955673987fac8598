//! AdamW one tensor at a time, for Burn's `OptimizerAdaptor`.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use burn::{
    optim::{LearningRate, SimpleOptimizer},
    record::{PrecisionSettings, Record},
    tensor::{Tensor, TensorPrimitive},
};
use burn_backend::{
    TensorData, TensorMetadata,
    ops::{FloatTensorOps, IntTensorOps},
    tensor::{Device, IntTensor},
};
use serde::{Deserialize, Serialize};

use super::{
    adamw::{Moments, QuantAdamWConfig, check_dtype},
    moments::{ParameterRecord, check_version},
};
use crate::{
    layer,
    ops::{
        DataBackend, QuantOps, StochasticKey,
        adamw::{AdamWItem, AdamWUpdate},
    },
    read::integers,
};

/// [`QuantAdamW`](super::QuantAdamW) as Burn's `SimpleOptimizer`: the same step, for each tensor by itself. Made by
/// [`QuantAdamWConfig::simple`].
///
/// Seeing one tensor at a time it knows no paths, so there are no parameter groups, and each tensor whose gradient is not
/// finite is skipped, or reported, by itself.
#[derive(Debug, Clone)]
pub struct SimpleQuantAdamW {
    config: Arc<QuantAdamWConfig>,
    streams: Arc<AtomicU64>,
}

impl SimpleQuantAdamW {
    pub(super) fn new(config: QuantAdamWConfig) -> Self {
        Self {
            config: Arc::new(config),
            streams: Arc::default(),
        }
    }
}

/// The state of one tensor.
#[derive(Debug, Clone)]
pub struct SimpleState<B: DataBackend> {
    moments: Moments<B::Base>,
    /// INT32 `[2]`: steps taken and skipped.
    clock: IntTensor<B::Base>,
    key: StochasticKey,
}

impl<B: DataBackend> SimpleOptimizer<B> for SimpleQuantAdamW {
    type State<const D: usize> = SimpleState<B>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<B, D>,
        grad: Tensor<B, D>,
        state: Option<SimpleState<B>>,
    ) -> (Tensor<B, D>, Option<SimpleState<B>>) {
        let [parameter, gradient] = [tensor, grad].map(|tensor| match tensor.into_primitive() {
            TensorPrimitive::Float(primitive) => B::into_base(primitive),
            TensorPrimitive::QFloat(_) => {
                unreachable!("a parameter holds a float primitive while it is trained")
            }
        });
        let (shape, device) = (parameter.shape(), B::Base::float_device(&parameter));
        check_dtype("a parameter", &parameter);
        let formats = self.config.formats(shape.num_elements());
        let SimpleState {
            moments,
            clock,
            key,
        } = state.unwrap_or_else(|| SimpleState {
            moments: Moments::zeros(&shape, formats, &device),
            clock: B::Base::int_from_data(TensorData::new(vec![0i32, 0], [2]), &device),
            key: StochasticKey {
                seed: self.config.seed.unwrap_or_else(layer::seed),
                stream: self.streams.fetch_add(1, Ordering::Relaxed),
            },
        });
        moments.check_shape("a parameter", &shape);
        let moments = moments.converted(formats);
        let gradients = || vec![gradient.clone()];
        let name = |_| String::from("a parameter");
        let nonfinite = self
            .config
            .on_nonfinite
            .find::<B::Base>(gradients, &device, name);
        let clock = B::Base::tick(clock, nonfinite.as_ref());
        let item = AdamWItem {
            parameter,
            gradient,
            first: moments.first,
            second: moments.second,
            key: Some(key),
            state_key: self.config.state_key(key),
        };
        let hyperparameters = self.config.ungrouped(lr);
        let mut updates = B::Base::adamw(vec![item], &clock, nonfinite.as_ref(), &hyperparameters);
        let AdamWUpdate {
            parameter,
            first,
            second,
        } = updates.pop().expect("an update for each item");
        let state = SimpleState {
            moments: Moments { first, second },
            clock,
            key,
        };
        let parameter = TensorPrimitive::Float(B::from_base(parameter));
        (Tensor::from_primitive(parameter), Some(state))
    }

    fn to_device<const D: usize>(state: SimpleState<B>, device: &Device<B>) -> SimpleState<B> {
        SimpleState {
            moments: state.moments.moved_to(device),
            clock: B::Base::int_to_device(state.clock, device),
            key: state.key,
        }
    }
}

/// Serialized form of [`SimpleState`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SimpleStateItem {
    version: u32,
    clock: [i32; 2],
    seed: u64,
    stream: u64,
    moments: ParameterRecord,
}

/// The precision settings do not apply: the moments are stored as they are.
impl<B: DataBackend> Record<B> for SimpleState<B> {
    type Item<S: PrecisionSettings> = SimpleStateItem;

    fn into_item<S: PrecisionSettings>(self) -> SimpleStateItem {
        SimpleStateItem {
            version: super::moments::VERSION,
            clock: integers::<B::Base>(self.clock)
                .try_into()
                .expect("a clock holds two counts"),
            seed: self.key.seed,
            stream: self.key.stream,
            moments: ParameterRecord::read(self.moments),
        }
    }

    /// # Panics
    ///
    /// If the record is of another version or incomplete.
    fn from_item<S: PrecisionSettings>(item: SimpleStateItem, device: &Device<B>) -> Self {
        check_version(item.version);
        item.moments.check("a parameter");
        Self {
            moments: item.moments.upload(device),
            clock: B::Base::int_from_data(TensorData::new(item.clock.to_vec(), [2]), device),
            key: StochasticKey {
                seed: item.seed,
                stream: item.stream,
            },
        }
    }
}
