//! The scale of losses on a device.

use burn_backend::{Backend, TensorData, tensor::Device};

use crate::data::{
    read::{floats, integers},
    tensors::{Bundle, Change, Outline, Tensors},
};

/// The factor by which losses are multiplied before the backward pass, and how long it has stood.
#[derive(Debug, Clone)]
pub struct LossScale<T: Tensors> {
    /// FP32 `[1]`: a power of two.
    pub scale: T::Float,
    /// INT32 `[1]`: good steps since the scale last fell or was due to grow.
    pub good_steps: T::Int,
}

impl Bundle for LossScale<Outline> {
    type On<T: Tensors> = LossScale<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        state: LossScale<S>,
        change: &mut impl Change<S, T>,
    ) -> LossScale<T> {
        LossScale {
            scale: change.float(state.scale),
            good_steps: change.int(state.good_steps),
        }
    }
}

impl<B: Backend> LossScale<B> {
    /// Uploads a scale, and a count of good steps below 2^31.
    pub fn new(scale: f32, good_steps: u32, device: &Device<B>) -> Self {
        let good_steps = vec![good_steps as i32];
        Self {
            scale: B::float_from_data(TensorData::new(vec![scale], [1]), device),
            good_steps: B::int_from_data(TensorData::new(good_steps, [1]), device),
        }
    }

    /// Scale and good steps. Waits for the device.
    pub fn read(self) -> (f32, u32) {
        let good_steps = integers::<B>(self.good_steps)[0];
        (floats::<B>(self.scale)[0], good_steps as u32)
    }

    /// Moves to a device.
    pub fn moved_to(self, device: &Device<B>) -> Self {
        Self {
            scale: B::float_to_device(self.scale, device),
            good_steps: B::int_to_device(self.good_steps, device),
        }
    }
}
