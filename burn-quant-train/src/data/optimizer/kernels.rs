//! The kernels of AdamW, and the tensors of a step.

use burn_backend::{
    Backend,
    tensor::{FloatTensor, IntTensor},
};
use cubecl_kernels::{
    adamw::Hyperparameters,
    loss_scaling::LossScaling,
    optimizer_state::{Moment, StateFormat},
    rounding::StochasticKey,
};

use super::{loss_scale::LossScale, moment::MomentState};
use crate::data::tensors::{Bundle, Change, Outline, Tensors};

/// A parameter with what AdamW reads and writes of it.
#[derive(Debug, Clone)]
pub struct AdamWItem<T: Tensors> {
    /// FP32 or BF16.
    pub parameter: T::Float,
    /// Any float dtype, of the parameter's shape.
    pub gradient: T::Float,
    /// The mean of the gradients.
    pub first: MomentState<T>,
    /// The mean of their squares.
    pub second: MomentState<T>,
    /// Rounds a BF16 parameter stochastically; `None`: to nearest. The step is a coordinate of the random numbers, so
    /// one key serves a whole run.
    pub key: Option<StochasticKey>,
    /// Rounds the codes of both moments stochastically; `None`: to nearest. It may be the parameter's key: the random
    /// numbers differ all the same.
    pub state_key: Option<StochasticKey>,
}

impl Bundle for AdamWItem<Outline> {
    type On<T: Tensors> = AdamWItem<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        item: AdamWItem<S>,
        change: &mut impl Change<S, T>,
    ) -> AdamWItem<T> {
        AdamWItem {
            parameter: change.float(item.parameter),
            gradient: change.float(item.gradient),
            first: MomentState::rebuild(item.first, change),
            second: MomentState::rebuild(item.second, change),
            key: item.key,
            state_key: item.state_key,
        }
    }
}

/// The result of a step on an [`AdamWItem`].
#[derive(Debug, Clone)]
pub struct AdamWUpdate<T: Tensors> {
    /// The updated parameter.
    pub parameter: T::Float,
    /// The updated first moment.
    pub first: MomentState<T>,
    /// The updated second moment.
    pub second: MomentState<T>,
}

impl Bundle for AdamWUpdate<Outline> {
    type On<T: Tensors> = AdamWUpdate<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        update: AdamWUpdate<S>,
        change: &mut impl Change<S, T>,
    ) -> AdamWUpdate<T> {
        AdamWUpdate {
            parameter: change.float(update.parameter),
            first: MomentState::rebuild(update.first, change),
            second: MomentState::rebuild(update.second, change),
        }
    }
}

/// AdamW on a backend that holds data.
pub trait OptimizerKernels: Backend {
    /// One AdamW step of all these parameters, without a host read where there are kernels. Buffers that nothing else
    /// holds are updated in place.
    ///
    /// - `clock`: INT32 `[2]`, the steps taken and skipped, this one counted: see [`tick`](Self::tick)
    /// - `nonfinite`: INT32 `[1]`; if it is not 0, nothing changes
    /// - `loss_scale`: FP32 `[1]`, the scale that the gradients have and are divided by; `None`: they have none
    ///
    /// # Panics
    ///
    /// If shapes do not fit, if a dtype is not as [`AdamWItem`] says, if the groups of two moments are not a power of
    /// two apart, or if a hyperparameter is out of its range.
    fn adamw(
        items: Vec<AdamWItem<Self>>,
        clock: &IntTensor<Self>,
        nonfinite: Option<&IntTensor<Self>>,
        loss_scale: Option<&FloatTensor<Self>>,
        hyperparameters: &Hyperparameters,
    ) -> Vec<AdamWUpdate<Self>>;

    /// Counts a step on the device: as taken, or as skipped if `nonfinite` is not 0.
    ///
    /// # Panics
    ///
    /// If `clock` does not have two elements or `nonfinite` not one; on devices also if they are not INT32.
    fn tick(clock: IntTensor<Self>, nonfinite: Option<&IntTensor<Self>>) -> IntTensor<Self>;

    /// INT32 `[1]`: one more than the index of a gradient that holds NaN or Inf, 0 if none does. There is at least one
    /// gradient.
    ///
    /// # Panics
    ///
    /// If there is none, or one has a dtype that the device does not support.
    fn find_nonfinite(gradients: &[FloatTensor<Self>]) -> IntTensor<Self>;

    /// Moves the scale of losses at the end of a step, without a host read: down if `nonfinite`, INT32 `[1]`, is not 0,
    /// up after so many steps in which it was.
    ///
    /// # Panics
    ///
    /// If a tensor does not have one element; on devices also if a dtype is not as [`LossScale`] says, or a setting is
    /// out of its range: see [`LossScaling::check`].
    fn update_loss_scale(
        state: LossScale<Self>,
        nonfinite: &IntTensor<Self>,
        config: &LossScaling,
    ) -> LossScale<Self>;

    /// A moment of zeros of a parameter, as before the first step, in this format; `None`: FP32.
    ///
    /// # Panics
    ///
    /// If the kernels have no groups of the format's size.
    fn initial_moment(
        parameter: &FloatTensor<Self>,
        format: Option<StateFormat>,
        moment: Moment,
    ) -> MomentState<Self>;

    /// Compresses one moment of an optimizer (coat-fp8, section 4).
    ///
    /// # Panics
    ///
    /// If `x` is not FP32, or the kernels have no groups of the format's size.
    fn compress_moment(
        x: FloatTensor<Self>,
        format: StateFormat,
        moment: Moment,
    ) -> MomentState<Self>;

    /// The FP32 values of a moment.
    ///
    /// # Panics
    ///
    /// If the tensors of the moment are not those of its format.
    fn decompress_moment(state: MomentState<Self>, moment: Moment) -> FloatTensor<Self>;
}
