//! The operations of AdamW.

use burn_backend::{
    DType, IntDType, Shape, TensorMetadata,
    tensor::{Device, FloatTensor, IntTensor},
};
use cubecl_kernels::{
    adamw::Hyperparameters,
    loss_scaling::LossScaling,
    optimizer_state::{Moment, StateFormat},
};

use super::{
    kernels::{AdamWItem, AdamWUpdate},
    loss_scale::LossScale,
    moment::MomentState,
};
use crate::data::{
    kernels::Kernels,
    operation::{DataBackend, Operation},
    tensors::{FloatMeta, IntMeta, On, Outline, Tensors},
};

/// One AdamW step of all these parameters: see [`OptimizerKernels::adamw`](super::OptimizerKernels::adamw).
///
/// # Panics
///
/// If shapes do not fit, if a dtype is not as [`AdamWItem`] says, if the groups of two moments are not a power of two
/// apart, or if a hyperparameter is out of its range.
pub fn adamw<B: DataBackend>(
    items: Vec<AdamWItem<B>>,
    clock: IntTensor<B>,
    nonfinite: Option<IntTensor<B>>,
    loss_scale: Option<FloatTensor<B>>,
    hyperparameters: &Hyperparameters,
) -> Vec<AdamWUpdate<B>> {
    let operation = AdamW {
        hyperparameters: *hyperparameters,
    };
    B::run(operation, ((clock, nonfinite), (loss_scale, items)))
}

#[derive(Debug, Clone)]
struct AdamW {
    hyperparameters: Hyperparameters,
}

impl Operation for AdamW {
    const NAME: &'static str = "adamw";
    /// Clock and flag, and the scale of the gradients with the parameters.
    type Inputs = (
        (IntMeta, Option<IntMeta>),
        (Option<FloatMeta>, Vec<AdamWItem<Outline>>),
    );
    type Outputs = Vec<AdamWUpdate<Outline>>;

    fn outline<T: Tensors>(&self, (_, (_, items)): &On<Self::Inputs, T>) -> Self::Outputs {
        let of = |state: &MomentState<T>| MomentState::outline(state.shape(), state.format());
        items
            .iter()
            .map(|item| AdamWUpdate {
                parameter: FloatMeta::of(&item.parameter),
                first: of(&item.first),
                second: of(&item.second),
            })
            .collect()
    }

    fn run<K: Kernels>(
        self,
        ((clock, nonfinite), (loss_scale, items)): On<Self::Inputs, K>,
    ) -> Vec<AdamWUpdate<K>> {
        K::adamw(
            items,
            &clock,
            nonfinite.as_ref(),
            loss_scale.as_ref(),
            &self.hyperparameters,
        )
    }
}

/// Counts a step on the device: see [`OptimizerKernels::tick`](super::OptimizerKernels::tick).
///
/// # Panics
///
/// If `clock` does not have two elements or `nonfinite` not one; on devices also if they are not INT32.
pub fn tick<B: DataBackend>(clock: IntTensor<B>, nonfinite: Option<IntTensor<B>>) -> IntTensor<B> {
    B::run(Tick, (clock, nonfinite))
}

#[derive(Debug, Clone)]
struct Tick;

impl Operation for Tick {
    const NAME: &'static str = "tick";
    type Inputs = (IntMeta, Option<IntMeta>);
    type Outputs = IntMeta;

    fn outline<T: Tensors>(&self, (clock, _): &On<Self::Inputs, T>) -> IntMeta {
        IntMeta::of(clock)
    }

    fn run<K: Kernels>(self, (clock, nonfinite): On<Self::Inputs, K>) -> IntTensor<K> {
        K::tick(clock, nonfinite.as_ref())
    }
}

/// INT32 `[1]`, on `device`: one more than the index of a gradient that holds NaN or Inf, 0 if none does.
///
/// # Panics
///
/// If a gradient has a dtype that the device does not support, or is on another device.
pub fn find_nonfinite<B: DataBackend>(
    gradients: Vec<FloatTensor<B>>,
    device: &Device<B>,
) -> IntTensor<B> {
    match gradients.is_empty() {
        true => B::int_zeros(Shape::new([1]), device, IntDType::I32),
        false => B::run(FindNonfinite, gradients),
    }
}

#[derive(Debug, Clone)]
struct FindNonfinite;

impl Operation for FindNonfinite {
    const NAME: &'static str = "find_nonfinite";
    type Inputs = Vec<FloatMeta>;
    type Outputs = IntMeta;

    fn outline<T: Tensors>(&self, _gradients: &Vec<T::Float>) -> IntMeta {
        IntMeta::new([1], DType::I32)
    }

    fn run<K: Kernels>(self, gradients: Vec<FloatTensor<K>>) -> IntTensor<K> {
        K::find_nonfinite(&gradients)
    }
}

/// Moves the scale of losses at the end of a step: see
/// [`OptimizerKernels::update_loss_scale`](super::OptimizerKernels::update_loss_scale).
///
/// # Panics
///
/// If a tensor does not have one element; on devices also if a dtype is not as [`LossScale`] says, or a setting is out
/// of its range: see [`LossScaling::check`].
pub fn update_loss_scale<B: DataBackend>(
    state: LossScale<B>,
    nonfinite: IntTensor<B>,
    config: &LossScaling,
) -> LossScale<B> {
    B::run(UpdateLossScale { config: *config }, (state, nonfinite))
}

#[derive(Debug, Clone)]
struct UpdateLossScale {
    config: LossScaling,
}

impl Operation for UpdateLossScale {
    const NAME: &'static str = "update_loss_scale";
    type Inputs = (LossScale<Outline>, IntMeta);
    type Outputs = LossScale<Outline>;

    fn outline<T: Tensors>(&self, (state, _): &On<Self::Inputs, T>) -> LossScale<Outline> {
        LossScale {
            scale: FloatMeta::of(&state.scale),
            good_steps: IntMeta::of(&state.good_steps),
        }
    }

    fn run<K: Kernels>(self, (state, nonfinite): On<Self::Inputs, K>) -> LossScale<K> {
        K::update_loss_scale(state, &nonfinite, &self.config)
    }
}

/// A moment of zeros of a parameter: see [`OptimizerKernels::initial_moment`](super::OptimizerKernels::initial_moment).
///
/// # Panics
///
/// If the kernels have no groups of the format's size.
pub fn initial_moment<B: DataBackend>(
    parameter: FloatTensor<B>,
    format: Option<StateFormat>,
    moment: Moment,
) -> MomentState<B> {
    B::run(InitialMoment { format, moment }, parameter)
}

#[derive(Debug, Clone)]
struct InitialMoment {
    format: Option<StateFormat>,
    moment: Moment,
}

impl Operation for InitialMoment {
    const NAME: &'static str = "initial_moment";
    type Inputs = FloatMeta;
    type Outputs = MomentState<Outline>;

    fn outline<T: Tensors>(&self, parameter: &T::Float) -> MomentState<Outline> {
        MomentState::outline(parameter.shape(), self.format)
    }

    fn run<K: Kernels>(self, parameter: FloatTensor<K>) -> MomentState<K> {
        K::initial_moment(&parameter, self.format, self.moment)
    }
}

/// Compresses one moment of an optimizer: see
/// [`OptimizerKernels::compress_moment`](super::OptimizerKernels::compress_moment).
///
/// # Panics
///
/// If `x` is not FP32, or the kernels have no groups of the format's size.
pub fn compress_moment<B: DataBackend>(
    x: FloatTensor<B>,
    format: StateFormat,
    moment: Moment,
) -> MomentState<B> {
    B::run(CompressMoment { format, moment }, x)
}

#[derive(Debug, Clone)]
struct CompressMoment {
    format: StateFormat,
    moment: Moment,
}

impl Operation for CompressMoment {
    const NAME: &'static str = "compress_moment";
    type Inputs = FloatMeta;
    type Outputs = MomentState<Outline>;

    fn outline<T: Tensors>(&self, x: &T::Float) -> MomentState<Outline> {
        assert!(
            self.format.group > 0,
            "compress_moment: {:?}; use a group of at least one element",
            self.format
        );
        MomentState::outline(x.shape(), Some(self.format))
    }

    fn run<K: Kernels>(self, x: FloatTensor<K>) -> MomentState<K> {
        K::compress_moment(x, self.format, self.moment)
    }
}

/// The FP32 values of a moment: see
/// [`OptimizerKernels::decompress_moment`](super::OptimizerKernels::decompress_moment).
///
/// # Panics
///
/// If the tensors of the moment are not those of its format.
pub fn decompress_moment<B: DataBackend>(state: MomentState<B>, moment: Moment) -> FloatTensor<B> {
    B::run(DecompressMoment { moment }, state)
}

#[derive(Debug, Clone)]
struct DecompressMoment {
    moment: Moment,
}

impl Operation for DecompressMoment {
    const NAME: &'static str = "decompress_moment";
    type Inputs = MomentState<Outline>;
    type Outputs = FloatMeta;

    fn outline<T: Tensors>(&self, state: &MomentState<T>) -> FloatMeta {
        FloatMeta::new(state.shape(), DType::F32)
    }

    fn run<K: Kernels>(self, state: MomentState<K>) -> FloatTensor<K> {
        K::decompress_moment(state, self.moment)
    }
}
