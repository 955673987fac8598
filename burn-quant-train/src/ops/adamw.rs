//! AdamW on a backend that holds data: what one step reads and writes, and how it runs on the host.

use burn_backend::{
    Backend, DType, FloatDType, IntDType, Shape, TensorData, TensorMetadata, bf16,
    tensor::{Device, FloatTensor, IntTensor},
};
pub use cubecl_kernels::{
    adamw::Hyperparameters,
    optimizer_state::{Encoding, MAX_GROUP, Moment, StateFormat},
};
use cubecl_kernels::{
    host,
    reference::{
        adamw::{MomentChunk, StateDither, Step, round_to_bf16},
        optimizer_state::{HostState, dequantize_state, quantize_state},
    },
};

use super::{QuantOps, StochasticKey};
use crate::read::{bytes, floats, integers};

/// One moment of one parameter.
#[derive(Debug, Clone)]
pub enum MomentState<B: Backend> {
    /// FP32, of the parameter's shape.
    Full(FloatTensor<B>),
    /// 8 bits an element.
    Coded {
        /// What the codes mean.
        format: StateFormat,
        /// U8, of the parameter's shape.
        codes: IntTensor<B>,
        /// FP32 `[groups]`.
        scales: FloatTensor<B>,
        /// U8 `[groups]`, in eighths; present with dynamic range expansion.
        exponents: Option<IntTensor<B>>,
    },
}

impl<B: Backend> MomentState<B> {
    /// How the moment is stored; `None`: FP32.
    pub fn format(&self) -> Option<StateFormat> {
        match self {
            Self::Full(_) => None,
            Self::Coded { format, .. } => Some(*format),
        }
    }

    /// The parameter's shape.
    pub fn shape(&self) -> Shape {
        match self {
            Self::Full(values) => values.shape(),
            Self::Coded { codes, .. } => codes.shape(),
        }
    }

    /// The device that the moment is on.
    pub fn device(&self) -> Device<B> {
        match self {
            Self::Full(values) => B::float_device(values),
            Self::Coded { codes, .. } => B::int_device(codes),
        }
    }

    /// Moves to a device.
    pub fn moved_to(self, device: &Device<B>) -> Self {
        self.map(
            |values| B::float_to_device(values, device),
            |codes| B::int_to_device(codes, device),
        )
    }

    /// Replaces every tensor.
    pub(crate) fn map(
        self,
        float: impl Fn(FloatTensor<B>) -> FloatTensor<B>,
        int: impl Fn(IntTensor<B>) -> IntTensor<B>,
    ) -> Self {
        match self {
            Self::Full(values) => Self::Full(float(values)),
            Self::Coded {
                format,
                codes,
                scales,
                exponents,
            } => Self::Coded {
                format,
                codes: int(codes),
                scales: float(scales),
                exponents: exponents.map(int),
            },
        }
    }
}

/// A parameter with what AdamW reads and writes of it.
#[derive(Debug)]
pub struct AdamWItem<B: Backend> {
    /// FP32 or BF16.
    pub parameter: FloatTensor<B>,
    /// Any float dtype, of the parameter's shape.
    pub gradient: FloatTensor<B>,
    /// The mean of the gradients.
    pub first: MomentState<B>,
    /// The mean of their squares.
    pub second: MomentState<B>,
    /// Rounds a BF16 parameter stochastically; `None`: to nearest. The step is a coordinate of the random numbers, so
    /// one key serves a whole run.
    pub key: Option<StochasticKey>,
    /// Rounds the codes of both moments stochastically; `None`: to nearest. It may be the key of the parameter: the
    /// random numbers are others.
    pub state_key: Option<StochasticKey>,
}

/// What a step leaves of an [`AdamWItem`].
#[derive(Debug)]
pub struct AdamWUpdate<B: Backend> {
    /// The updated parameter.
    pub parameter: FloatTensor<B>,
    /// The updated first moment.
    pub first: MomentState<B>,
    /// The updated second moment.
    pub second: MomentState<B>,
}

/// A moment of zeros.
pub(crate) fn zeros<B: QuantOps>(
    shape: Shape,
    format: Option<StateFormat>,
    moment: Moment,
    device: &Device<B>,
) -> MomentState<B> {
    let Some(format) = format else {
        return MomentState::Full(B::float_zeros(shape, device, FloatDType::F32));
    };
    let groups = Shape::new([format.groups(shape.num_elements())]);
    // Scales of zero make zeros of any code.
    MomentState::Coded {
        format,
        codes: B::int_full(
            shape,
            burn_backend::Scalar::from(format.encoding.zero(moment)),
            device,
            IntDType::U8,
        ),
        scales: B::float_zeros(groups.clone(), device, FloatDType::F32),
        exponents: format
            .expand
            .then(|| B::int_zeros(groups, device, IntDType::U8)),
    }
}

/// One moment in host memory.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum HostMoment {
    Full(Vec<f32>),
    Coded {
        format: StateFormat,
        state: HostState,
    },
}

impl HostMoment {
    /// Waits for the device.
    pub(crate) fn read<B: QuantOps>(moment: MomentState<B>) -> Self {
        match moment {
            MomentState::Full(values) => Self::Full(floats::<B>(values)),
            MomentState::Coded {
                format,
                codes,
                scales,
                exponents,
            } => Self::Coded {
                format,
                state: HostState {
                    codes: bytes::<B>(codes),
                    scales: floats::<B>(scales),
                    exponents: exponents.map(bytes::<B>).unwrap_or_default(),
                },
            },
        }
    }

    pub(crate) fn write<B: QuantOps>(self, shape: Shape, device: &Device<B>) -> MomentState<B> {
        match self {
            Self::Full(values) => {
                MomentState::Full(B::float_from_data(TensorData::new(values, shape), device))
            }
            Self::Coded { format, state } => {
                let groups = [state.scales.len()];
                MomentState::Coded {
                    format,
                    codes: B::int_from_data(TensorData::new(state.codes, shape), device),
                    scales: B::float_from_data(TensorData::new(state.scales, groups), device),
                    exponents: format.expand.then(|| {
                        B::int_from_data(TensorData::new(state.exponents, groups), device)
                    }),
                }
            }
        }
    }

    /// The values, FP32.
    pub(crate) fn values(self, moment: Moment) -> Vec<f32> {
        match self {
            Self::Full(values) => values,
            Self::Coded { format, state } => dequantize_state(&state, format, moment),
        }
    }

    fn slices(&mut self) -> MomentChunk<'_> {
        match self {
            Self::Full(values) => MomentChunk::Full(values),
            Self::Coded { format, state } => MomentChunk::Compressed {
                format: *format,
                codes: &mut state.codes,
                scales: &mut state.scales,
                exponents: &mut state.exponents,
            },
        }
    }
}

pub(super) fn step<B: QuantOps>(
    items: Vec<AdamWItem<B>>,
    clock: &IntTensor<B>,
    nonfinite: Option<&IntTensor<B>>,
    hyperparameters: &Hyperparameters,
) -> Vec<AdamWUpdate<B>> {
    let skip = is_raised::<B>(nonfinite);
    let t = integers::<B>(clock.clone())[0] as u32;
    let step = Step::new(hyperparameters, t).unwrap_or_else(|error| panic!("{error}"));
    items
        .into_iter()
        .map(|item| match skip {
            true => AdamWUpdate {
                parameter: item.parameter,
                first: item.first,
                second: item.second,
            },
            false => update::<B>(&step, t, item),
        })
        .collect()
}

fn update<B: QuantOps>(step: &Step, t: u32, item: AdamWItem<B>) -> AdamWUpdate<B> {
    let device = B::float_device(&item.parameter);
    let (shape, dtype) = (item.parameter.shape(), item.parameter.dtype());
    let gradient = floats::<B>(item.gradient);
    let mut parameter = floats::<B>(item.parameter);
    let mut first = HostMoment::read::<B>(item.first);
    let mut second = HostMoment::read::<B>(item.second);
    host::adamw(
        step,
        &mut parameter,
        &gradient,
        first.slices(),
        second.slices(),
        item.state_key.map(|key| StateDither { key, t, start: 0 }),
    );
    let data = match (dtype, item.key) {
        (DType::BF16, Some(key)) => {
            let mut rounded = vec![bf16::ZERO; parameter.len()];
            round_to_bf16(&parameter, key, t, 0, &mut rounded);
            TensorData::new(rounded, shape.clone())
        }
        _ => TensorData::new(parameter, shape.clone()).convert_dtype(dtype),
    };
    AdamWUpdate {
        parameter: B::float_from_data(data, &device),
        first: first.write(shape.clone(), &device),
        second: second.write(shape, &device),
    }
}

pub(super) fn tick<B: QuantOps>(
    clock: IntTensor<B>,
    nonfinite: Option<&IntTensor<B>>,
) -> IntTensor<B> {
    let device = B::int_device(&clock);
    let mut counts = integers::<B>(clock);
    counts[usize::from(is_raised::<B>(nonfinite))] += 1;
    B::int_from_data(TensorData::new(counts, [2]), &device)
}

fn is_raised<B: QuantOps>(nonfinite: Option<&IntTensor<B>>) -> bool {
    nonfinite.is_some_and(|flag| integers::<B>(flag.clone())[0] != 0)
}

pub(super) fn find_nonfinite<B: QuantOps>(
    gradients: &[FloatTensor<B>],
    device: &Device<B>,
) -> IntTensor<B> {
    let found = gradients
        .iter()
        .position(|gradient| floats::<B>(gradient.clone()).iter().any(|x| !x.is_finite()));
    let flag = found.map_or(0, |index| index as i32 + 1);
    B::int_from_data(TensorData::new(vec![flag], [1]), device)
}

pub(super) fn compress<B: QuantOps>(
    x: FloatTensor<B>,
    format: StateFormat,
    moment: Moment,
) -> MomentState<B> {
    let (shape, device) = (x.shape(), B::float_device(&x));
    let state = quantize_state(&floats::<B>(x), format, moment);
    HostMoment::Coded { format, state }.write(shape, &device)
}

pub(super) fn decompress<B: QuantOps>(state: MomentState<B>, moment: Moment) -> FloatTensor<B> {
    if let MomentState::Full(values) = state {
        return values;
    }
    let shape = state.shape();
    let device = state.device();
    let values = HostMoment::read(state).values(moment);
    B::float_from_data(TensorData::new(values, shape), &device)
}
