//! Small constants that are uploaded again and again.
//!
//! Burn's modules upload constants in each forward pass: `RotaryEncoding` the signs of its rotation. On a GPU the next
//! kernel then waits for the copy, 13 microseconds for 16 bytes (CUPTI, one NVIDIA H200, 2026-11-30). So what a thread has
//! uploaded lately is given again.

use std::{
    any::Any,
    sync::Mutex,
    thread::{self, ThreadId},
};

use burn_backend::{
    TensorData,
    tensor::{Device, FloatTensor},
};

use crate::{data::DataBackend, lock::lock};

/// Bytes of a constant at most: larger tensors are data, and few of them are the same.
const MAX_BYTES: usize = 64;

/// How many are kept, of all threads and devices.
const KEPT: usize = 16;

/// A constant on a device. Of the thread that uploaded it, since CubeCL and fusion order what a thread does, and wait for
/// each other's.
struct Constant<B: DataBackend> {
    thread: ThreadId,
    device: Device<B>,
    data: TensorData,
    tensor: FloatTensor<B>,
}

impl<B: DataBackend> Constant<B> {
    fn is_of(&self, data: &TensorData, device: &Device<B>) -> bool {
        self.thread == thread::current().id() && self.data == *data && self.device == *device
    }
}

/// Constants of all backends, the one that was asked for last behind the others.
struct Constants(Mutex<Vec<Box<dyn Any + Send>>>);

static CONSTANTS: Constants = Constants::new();

/// The tensor of these numbers. Others may hold it, so that no operation writes into it.
pub(super) fn upload<B: DataBackend>(data: TensorData, device: &Device<B>) -> FloatTensor<B> {
    CONSTANTS.upload::<B>(data, device)
}

impl Constants {
    const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    fn upload<B: DataBackend>(&self, data: TensorData, device: &Device<B>) -> FloatTensor<B> {
        if data.bytes.len() > MAX_BYTES {
            return B::float_from_data(data, device);
        }
        self.find::<B>(&data, device).unwrap_or_else(|| {
            let tensor = B::float_from_data(data.clone(), device);
            self.keep(Constant::<B> {
                thread: thread::current().id(),
                device: device.clone(),
                data,
                tensor: tensor.clone(),
            });
            tensor
        })
    }

    fn find<B: DataBackend>(
        &self,
        data: &TensorData,
        device: &Device<B>,
    ) -> Option<FloatTensor<B>> {
        let mut constants = lock(&self.0);
        let (index, tensor) = constants.iter().enumerate().find_map(|(index, it)| {
            let constant = it.downcast_ref::<Constant<B>>()?;
            let is_it = constant.is_of(data, device);
            is_it.then(|| (index, constant.tensor.clone()))
        })?;
        constants[index..].rotate_left(1);
        Some(tensor)
    }

    fn keep<B: DataBackend>(&self, constant: Constant<B>) {
        let mut constants = lock(&self.0);
        let oldest = (constants.len() == KEPT).then(|| constants.remove(0));
        constants.push(Box::new(constant));
        drop(constants);
        // Its tensor may ask for locks of its backend.
        drop(oldest);
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn_backend::{Scalar, ops::FloatTensorOps, read_sync};
    use burn_flex::Flex;

    use super::*;

    fn signs(first: f32) -> TensorData {
        TensorData::new(vec![first, -1.0], [2])
    }

    fn values(tensor: FloatTensor<Flex>) -> Vec<f32> {
        let data = read_sync(Flex::float_into_data(tensor)).expect("a read");
        data.iter().collect()
    }

    fn is_kept(constants: &Constants, data: &TensorData) -> bool {
        constants.find::<Flex>(data, &Default::default()).is_some()
    }

    #[test]
    fn a_constant_is_given_again_as_it_was() {
        let (constants, data, device) = (Constants::new(), signs(1.0), Default::default());
        let first = constants.upload::<Flex>(data.clone(), &device);
        assert!(is_kept(&constants, &data));
        // In place where nobody else holds it.
        let more = Flex::float_add_scalar(first, Scalar::from(1.0));
        assert_eq!(values(more), [2.0, 0.0]);
        let again = constants.upload::<Flex>(data, &device);
        assert_eq!(values(again), [1.0, -1.0]);
        assert_eq!(lock(&constants.0).len(), 1);
    }

    #[test]
    fn others_have_their_own() {
        let (constants, data, device) = (Constants::new(), signs(1.0), Default::default());
        let _kept = constants.upload::<Flex>(data.clone(), &device);
        let words = [1.0f32, -1.0].map(|it| it.to_bits() as i32);
        for other in [
            signs(2.0),
            TensorData::new(vec![1.0f32, -1.0], [1, 2]),
            TensorData::new(words.to_vec(), [2]),
        ] {
            assert!(!is_kept(&constants, &other), "{other:?}");
        }
        thread::scope(|scope| {
            let elsewhere = scope.spawn(|| is_kept(&constants, &data));
            assert!(!elsewhere.join().expect("a thread"));
        });
    }

    #[test]
    fn few_and_small_ones_are_kept() {
        let (constants, device) = (Constants::new(), Default::default());
        let large = TensorData::new(vec![1.0f32; MAX_BYTES / 4 + 1], [MAX_BYTES / 4 + 1]);
        let _large = constants.upload::<Flex>(large.clone(), &device);
        assert!(!is_kept(&constants, &large));
        for new in 0..=KEPT {
            let _new = constants.upload::<Flex>(signs(new as f32), &device);
            // Asked for in between, it stays.
            assert!(is_kept(&constants, &signs(0.0)));
        }
        assert_eq!(lock(&constants.0).len(), KEPT);
        assert!(!is_kept(&constants, &signs(1.0)));
    }
}
