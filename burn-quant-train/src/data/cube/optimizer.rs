//! AdamW by kernels, in place.

use burn_backend::{
    DType, Shape,
    tensor::{FloatTensor, IntTensor},
};
use burn_cubecl::{
    CubeBackend, CubeRuntime, FloatElement, IntElement, element::BoolElement,
    kernel::into_contiguous, ops::numeric::empty_device_contiguous_dtype, tensor::CubeTensor,
};
use cubecl_kernels::{
    adamw::{self, AdamWTensors},
    loss_scaling,
    optimizer_state::{StateTensor, dequantize_state, initial_state, quantize_state},
    rounding::{Rounding, StochasticKey},
};

use super::tensors::{Cube, handle, own, tensor};
use crate::data::{
    kernels::checked,
    optimizer::{
        AdamWItem, AdamWUpdate, Hyperparameters, LossScale, LossScaling, Moment, MomentState,
        OptimizerKernels, StateFormat,
    },
    tensors::{Bundle, Change},
};

impl<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement> OptimizerKernels
    for CubeBackend<R, F, I, BT>
where
    Self: Cube<R>,
{
    fn adamw(
        items: Vec<AdamWItem<Self>>,
        clock: &IntTensor<Self>,
        nonfinite: Option<&IntTensor<Self>>,
        loss_scale: Option<&FloatTensor<Self>>,
        hyperparameters: &Hyperparameters,
    ) -> Vec<AdamWUpdate<Self>> {
        let items: Vec<(AdamWItem<Self>, _)> = items.into_iter().map(owned).collect();
        let tensors: Vec<_> = items
            .iter()
            .map(|(item, updated)| adamw_tensors(item, updated.as_ref()))
            .collect();
        checked(adamw::adamw(
            &clock.client,
            &tensors,
            &handle(&into_contiguous(clock.clone())),
            nonfinite.map(handle).as_ref(),
            loss_scale.map(handle).as_ref(),
            hyperparameters,
        ));
        items
            .into_iter()
            .map(|(item, updated)| AdamWUpdate {
                parameter: updated.unwrap_or(item.parameter),
                first: item.first,
                second: item.second,
            })
            .collect()
    }

    fn tick(clock: IntTensor<Self>, nonfinite: Option<&IntTensor<Self>>) -> IntTensor<Self> {
        let clock = own(clock);
        checked(adamw::tick(
            &clock.client,
            &handle(&clock),
            nonfinite.map(handle).as_ref(),
        ));
        clock
    }

    fn find_nonfinite(gradients: &[FloatTensor<Self>]) -> IntTensor<Self> {
        let like = &gradients[0];
        let flag = CubeTensor::new_contiguous(
            like.client.clone(),
            like.device.clone(),
            Shape::new([1]),
            adamw::initial_flag(&like.client).handle,
            DType::I32,
        );
        let gradients: Vec<_> = gradients
            .iter()
            .map(|gradient| handle(&into_contiguous(gradient.clone())))
            .collect();
        checked(adamw::find_nonfinite(
            &flag.client,
            &gradients,
            &handle(&flag),
        ));
        flag
    }

    fn update_loss_scale(
        state: LossScale<Self>,
        nonfinite: &IntTensor<Self>,
        config: &LossScaling,
    ) -> LossScale<Self> {
        let state: LossScale<Self> = LossScale {
            scale: own(state.scale),
            good_steps: own(state.good_steps),
        };
        checked(loss_scaling::update_loss_scale(
            &state.scale.client,
            &handle(&state.scale),
            &handle(&state.good_steps),
            &handle(nonfinite),
            config,
        ));
        state
    }

    fn initial_moment(
        parameter: &FloatTensor<Self>,
        format: Option<StateFormat>,
        moment: Moment,
    ) -> MomentState<Self> {
        let state = initial_state(
            &parameter.client,
            parameter.meta.shape().as_slice(),
            format,
            moment,
        );
        moment_state(parameter, checked(state))
    }

    fn compress_moment(
        x: FloatTensor<Self>,
        format: StateFormat,
        moment: Moment,
    ) -> MomentState<Self> {
        let x = into_contiguous(x);
        let state = checked(quantize_state(&x.client, &handle(&x), format, moment));
        moment_state(&x, state)
    }

    fn decompress_moment(state: MomentState<Self>, moment: Moment) -> FloatTensor<Self> {
        // Tensors that were just uploaded may have padded rows.
        let state = MomentState::rebuild::<Self, Self>(state, &mut Each(into_contiguous));
        let (MomentState::Full(like) | MomentState::Coded { codes: like, .. }) = &state;
        let values = checked(dequantize_state(
            &like.client,
            &state_tensor(&state, moment),
        ));
        tensor(like, values, DType::F32)
    }
}

/// Does the same to every tensor.
struct Each<R: CubeRuntime>(fn(CubeTensor<R>) -> CubeTensor<R>);

impl<B: Cube<R>, R: CubeRuntime> Change<B, B> for Each<R> {
    fn float(&mut self, tensor: CubeTensor<R>) -> CubeTensor<R> {
        self.0(tensor)
    }

    fn int(&mut self, tensor: CubeTensor<R>) -> CubeTensor<R> {
        self.0(tensor)
    }

    fn bool(&mut self, tensor: CubeTensor<R>) -> CubeTensor<R> {
        self.0(tensor)
    }
}

/// An item with moments and gradient as the kernel takes them; beside it, for a parameter that others hold, such as the
/// model that a `Learner` steps, a tensor for its new value.
fn owned<B: Cube<R>, R: CubeRuntime>(item: AdamWItem<B>) -> (AdamWItem<B>, Option<CubeTensor<R>>) {
    let parameter = into_contiguous(item.parameter);
    let is_shared = !parameter.can_mut() && parameter.meta.num_elements() > adamw::MAX_SHARED_LEN;
    let updated = is_shared.then(|| {
        let (client, device) = (parameter.client.clone(), parameter.device.clone());
        empty_device_contiguous_dtype(
            client,
            device,
            parameter.meta.shape().clone(),
            parameter.dtype,
        )
    });
    let item = AdamWItem {
        parameter: if is_shared { parameter } else { own(parameter) },
        gradient: into_contiguous(item.gradient),
        first: MomentState::rebuild::<B, B>(item.first, &mut Each(own)),
        second: MomentState::rebuild::<B, B>(item.second, &mut Each(own)),
        key: item.key,
        state_key: item.state_key,
    };
    (item, updated)
}

fn rounding(key: Option<StochasticKey>) -> Rounding {
    key.map_or(Rounding::Nearest, Rounding::Stochastic)
}

fn adamw_tensors<B: Cube<R>, R: CubeRuntime>(
    item: &AdamWItem<B>,
    updated: Option<&CubeTensor<R>>,
) -> AdamWTensors<R> {
    AdamWTensors {
        parameter: handle(&item.parameter),
        updated: updated.map(handle),
        gradient: handle(&item.gradient),
        first: state_tensor(&item.first, Moment::First),
        second: state_tensor(&item.second, Moment::Second),
        rounding: rounding(item.key),
        state_rounding: rounding(item.state_key),
    }
}

/// A state on the device of `like`.
fn moment_state<B: Cube<R>, R: CubeRuntime>(
    like: &CubeTensor<R>,
    state: StateTensor<R>,
) -> MomentState<B> {
    let StateTensor {
        values,
        scales,
        exponents,
        format,
        ..
    } = state;
    match (format, scales) {
        (Some(format), Some(scales)) => MomentState::Coded {
            format,
            codes: tensor(like, values, DType::U8),
            scales: tensor(like, scales, DType::F32),
            exponents: exponents.map(|it| tensor(like, it, DType::U8)),
        },
        _ => MomentState::Full(tensor(like, values, DType::F32)),
    }
}

fn state_tensor<B: Cube<R>, R: CubeRuntime>(
    state: &MomentState<B>,
    moment: Moment,
) -> StateTensor<R> {
    match state {
        MomentState::Full(values) => StateTensor {
            values: handle(values),
            scales: None,
            exponents: None,
            format: None,
            moment,
        },
        MomentState::Coded {
            format,
            codes,
            scales,
            exponents,
        } => StateTensor {
            values: handle(codes),
            scales: Some(handle(scales)),
            exponents: exponents.as_ref().map(handle),
            format: Some(*format),
            moment,
        },
    }
}
