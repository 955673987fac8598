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
    adamw_record::ParameterRecord,
    backend::ParameterBackend,
    config::{QuantAdamWConfig, check_dtype},
    moments::Moments,
    versioned::{VERSION, versioned_item},
};
use crate::{
    data::{
        StochasticKey,
        optimizer::{AdamWItem, AdamWUpdate, adamw, tick},
        read::integers,
    },
    layer,
};

/// [`QuantAdamW`](super::QuantAdamW) as Burn's `SimpleOptimizer`: the same step, for each tensor by itself. Made by
/// [`QuantAdamWConfig::simple`].
///
/// It sees one tensor at a time and knows no paths. So there are no parameter groups, and a tensor whose gradient is
/// not finite is skipped, or reported, by itself.
///
/// A tensor's first step rounds to nearest, also where later steps round stochastically. The tensor gets its stream of
/// random numbers in its second step: by then the states of a resumed run have told which streams are taken.
#[derive(Debug, Clone)]
pub struct SimpleQuantAdamW {
    config: Arc<QuantAdamWConfig>,
    /// The number of random streams given to tensors.
    streams: Arc<AtomicU64>,
}

impl SimpleQuantAdamW {
    fn new(config: QuantAdamWConfig) -> Self {
        Self {
            config: Arc::new(config),
            streams: Arc::default(),
        }
    }

    /// The state with a stream of random numbers, from a tensor's second step on. By then all states of a resumed run,
    /// those of this step at least, have told which streams are taken.
    fn with_stream<B: ParameterBackend>(&self, state: SimpleState<B>) -> SimpleState<B> {
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

impl QuantAdamWConfig {
    /// Makes the optimizer as a `SimpleOptimizer`, for Burn's `OptimizerAdaptor`.
    ///
    /// # Panics
    ///
    /// If a setting is out of its range, as [`adamw`](Self::adamw) says, and if there are groups, which need paths,
    /// clipping, which is the adaptor's, or loss scaling, whose scale moves with a step of all tensors.
    pub fn simple(&self) -> SimpleQuantAdamW {
        self.validate();
        assert!(
            self.groups.is_empty() && self.grad_clipping.is_none(),
            "adamw: a SimpleOptimizer sees no parameter paths, so it has no groups, and OptimizerAdaptor does the \
             clipping; use `adamw` or `init`, or take both out of the configuration"
        );
        assert!(
            self.loss_scaling.is_none(),
            "adamw: a SimpleOptimizer does not see the gradients of a step together, by which a loss scale moves; use \
             `adamw` or `init`, or take `loss_scaling` out of the configuration"
        );
        SimpleQuantAdamW::new(self.clone())
    }
}

/// The state of one tensor.
#[derive(Debug, Clone)]
pub struct SimpleState<B: ParameterBackend> {
    moments: Moments<B::Base>,
    /// INT32 `[2]`: steps taken and skipped.
    clock: IntTensor<B::Base>,
    seed: u64,
    /// The stream of random numbers; none before the second step.
    stream: Option<u64>,
    /// The number of streams given out: the count of the optimizer that stepped this tensor last, or that count as it
    /// was recorded.
    streams: Arc<AtomicU64>,
}

impl<B: ParameterBackend> SimpleOptimizer<B> for SimpleQuantAdamW {
    type State<const D: usize> = SimpleState<B>;

    /// # Panics
    ///
    /// - If the gradient holds NaN or Inf, with [`OnNonfinite::Error`](super::OnNonfinite::Error).
    /// - If the tensor is neither FP32 nor BF16.
    /// - If it has another shape than its state, that of a loaded record.
    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<B, D>,
        grad: Tensor<B, D>,
        state: Option<SimpleState<B>>,
    ) -> (Tensor<B, D>, Option<SimpleState<B>>) {
        let [parameter, gradient] = [tensor, grad].map(|tensor| match tensor.into_primitive() {
            TensorPrimitive::Float(primitive) => primitive,
            TensorPrimitive::QFloat(_) => {
                unreachable!("a parameter holds a float primitive while it is trained")
            }
        });
        let lineage = B::lineage(&parameter);
        let [parameter, gradient] = [parameter, gradient].map(B::into_base);
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
                moments: Moments::initial(&parameter, formats),
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
        let clock = tick::<B::Base>(clock, nonfinite.clone());
        let item = AdamWItem {
            parameter,
            gradient,
            first: moments.first,
            second: moments.second,
            key,
            state_key: key.and_then(|key| self.config.state_key(key)),
        };
        let hyperparameters = self.config.ungrouped(lr);
        let mut updates =
            adamw::<B::Base>(vec![item], clock.clone(), nonfinite, None, &hyperparameters);
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
        let parameter = TensorPrimitive::Float(B::successor(parameter, lineage));
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
        /// The tensor's stream; equal to `streams` if it has none yet.
        stream: u64,
        moments: ParameterRecord,
    }
    since 2 {
        /// Streams given out. None in version 1, which gave them out in the first step.
        streams: Option<u64>,
    }
}

/// The precision settings do not apply: the moments are stored as they are.
impl<B: ParameterBackend> Record<B> for SimpleState<B> {
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
