//! The moments of AdamW, on a device and in host memory.

use burn_backend::{
    Backend, DType, Shape, TensorData, TensorMetadata,
    tensor::{BoolTensor, Device, FloatTensor, IntTensor},
};
use cubecl_kernels::{
    optimizer_state::{Moment, StateFormat},
    reference::optimizer_state::{HostState, dequantize_state},
};

use crate::data::{
    read::{bytes, floats},
    tensors::{Bundle, Change, FloatMeta, IntMeta, Outline, Tensors},
};

/// One moment of one parameter.
#[derive(Debug, Clone)]
pub enum MomentState<T: Tensors> {
    /// FP32, of the parameter's shape.
    Full(T::Float),
    /// 8 bits an element.
    Coded {
        /// The meaning of the codes.
        format: StateFormat,
        /// U8, of the parameter's shape.
        codes: T::Int,
        /// FP32 `[groups]`.
        scales: T::Float,
        /// U8 `[groups]`, in eighths; present with dynamic range expansion.
        exponents: Option<T::Int>,
    },
}

impl Bundle for MomentState<Outline> {
    type On<T: Tensors> = MomentState<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        state: MomentState<S>,
        change: &mut impl Change<S, T>,
    ) -> MomentState<T> {
        match state {
            MomentState::Full(values) => MomentState::Full(change.float(values)),
            MomentState::Coded {
                format,
                codes,
                scales,
                exponents,
            } => MomentState::Coded {
                format,
                codes: change.int(codes),
                scales: change.float(scales),
                exponents: exponents.map(|exponents| change.int(exponents)),
            },
        }
    }
}

impl MomentState<Outline> {
    /// The outline of a moment of a parameter of this shape.
    pub(super) fn outline(shape: Shape, format: Option<StateFormat>) -> Self {
        let Some(format) = format else {
            return Self::Full(FloatMeta::new(shape, DType::F32));
        };
        let groups = Shape::new([format.groups(shape.num_elements())]);
        Self::Coded {
            format,
            codes: IntMeta::new(shape, DType::U8),
            scales: FloatMeta::new(groups.clone(), DType::F32),
            exponents: format.expand.then(|| IntMeta::new(groups, DType::U8)),
        }
    }
}

impl<T: Tensors> MomentState<T> {
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
}

impl<B: Backend> MomentState<B> {
    /// Moves to a device.
    pub fn moved_to(self, device: &Device<B>) -> Self {
        MomentState::rebuild::<B, B>(self, &mut MoveTo::<B>(device))
    }
}

struct MoveTo<'a, B: Backend>(&'a Device<B>);

impl<B: Backend> Change<B, B> for MoveTo<'_, B> {
    fn float(&mut self, tensor: FloatTensor<B>) -> FloatTensor<B> {
        B::float_to_device(tensor, self.0)
    }

    fn int(&mut self, tensor: IntTensor<B>) -> IntTensor<B> {
        B::int_to_device(tensor, self.0)
    }

    fn bool(&mut self, tensor: BoolTensor<B>) -> BoolTensor<B> {
        B::bool_to_device(tensor, self.0)
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
    /// Reads a moment. Waits for the device.
    pub fn read<B: Backend>(moment: MomentState<B>) -> Self {
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

    /// Uploads the moment of a parameter of this shape.
    pub fn write<B: Backend>(self, shape: Shape, device: &Device<B>) -> MomentState<B> {
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
    pub fn values(self, moment: Moment) -> Vec<f32> {
        match self {
            Self::Full(values) => values,
            Self::Coded { format, state } => dequantize_state(&state, format, moment),
        }
    }
}
