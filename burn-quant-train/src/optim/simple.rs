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

use super::{
    adamw::{Moments, QuantAdamWConfig, check_dtype},
    moments::ParameterRecord,
    versioned::{VERSION, versioned_item},
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
/// Seeing one tensor at a time it knows no paths, so there are no parameter groups, and each tensor whose gradient is
/// not finite is skipped, or reported, by itself.
///
/// A tensor's first step rounds to nearest where the others round stochastically. Which random numbers are taken is
/// known after a step only: in a resumed run from the states of the other tensors.
#[derive(Debug, Clone)]
pub struct SimpleQuantAdamW {
    config: Arc<QuantAdamWConfig>,
    /// Random streams given to tensors.
    streams: Arc<AtomicU64>,
}

impl SimpleQuantAdamW {
    pub(super) fn new(config: QuantAdamWConfig) -> Self {
        Self {
            config: Arc::new(config),
            streams: Arc::default(),
        }
    }

    /// The state of a tensor in its second step or a later one, when all states of a resumed run, those of this step at
    /// least, have told which streams are taken.
    fn with_stream<B: DataBackend>(&self, state: SimpleState<B>) -> SimpleState<B> {
        let taken = state.streams.load(Ordering::Relaxed);
        self.streams.fetch_max(taken, Ordering::Relaxed);
        let stream = state
            .stream
            .unwrap_or_else(|| self.streams.fetch_add(1, Ordering::Relaxed));
        SimpleState {
            stream: Some(stream),
            ..state
        }
    }
}

/// The state of one tensor.
#[derive(Debug, Clone)]
pub struct SimpleState<B: DataBackend> {
    moments: Moments<B::Base>,
    /// INT32 `[2]`: steps taken and skipped.
    clock: IntTensor<B::Base>,
    seed: u64,
    /// Of the random numbers; none before the second step.
    stream: Option<u64>,
    /// Of the optimizer that stepped it last, or as many as that had given out when the state was recorded.
    streams: Arc<AtomicU64>,
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
            seed,
            stream,
            ..
        } = match state {
            Some(state) => self.with_stream(state),
            None => SimpleState {
                moments: Moments::zeros(&shape, formats, &device),
                clock: B::Base::int_from_data(TensorData::new(vec![0i32, 0], [2]), &device),
                seed: self.config.seed.unwrap_or_else(layer::seed),
                stream: None,
                streams: self.streams.clone(),
            },
        };
        let key = stream.map(|stream| StochasticKey { seed, stream });
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
            key,
            state_key: key.and_then(|key| self.config.state_key(key)),
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
            seed,
            stream,
            streams: self.streams.clone(),
        };
        let parameter = TensorPrimitive::Float(B::from_base(parameter));
        (Tensor::from_primitive(parameter), Some(state))
    }

    fn to_device<const D: usize>(state: SimpleState<B>, device: &Device<B>) -> SimpleState<B> {
        SimpleState {
            moments: state.moments.moved_to(device),
            clock: B::Base::int_to_device(state.clock, device),
            ..state
        }
    }
}

versioned_item! {
    /// Serialized form of [`SimpleState`].
    SimpleStateItem {
        clock: [i32; 2],
        seed: u64,
        /// Not given to any tensor yet, if it is that of the number `streams`.
        stream: u64,
        moments: ParameterRecord,
    }
    since 2 {
        /// Streams given out. None in version 1, which gave them out in the first step.
        streams: Option<u64>,
    }
}

/// The precision settings do not apply: the moments are stored as they are.
impl<B: DataBackend> Record<B> for SimpleState<B> {
    type Item<S: PrecisionSettings> = SimpleStateItem;

    fn into_item<S: PrecisionSettings>(self) -> SimpleStateItem {
        let streams = self.streams.load(Ordering::Relaxed);
        SimpleStateItem {
            version: VERSION,
            clock: integers::<B::Base>(self.clock)
                .try_into()
                .expect("a clock holds two counts"),
            seed: self.seed,
            stream: self.stream.unwrap_or(streams),
            moments: ParameterRecord::read(self.moments),
            streams: Some(streams),
        }
    }

    /// # Panics
    ///
    /// If the record is incomplete.
    fn from_item<S: PrecisionSettings>(item: SimpleStateItem, device: &Device<B>) -> Self {
        item.moments.check("a parameter");
        let streams = item.streams.unwrap_or(item.stream + 1);
        Self {
            moments: item.moments.upload(device),
            clock: B::Base::int_from_data(TensorData::new(item.clock.to_vec(), [2]), device),
            seed: item.seed,
            stream: Some(item.stream).filter(|stream| *stream < streams),
            streams: Arc::new(AtomicU64::new(streams)),
        }
    }
}
