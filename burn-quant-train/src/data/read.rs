//! State of layers and optimizers, read back to the host. All of it waits for the device: for records and metrics, and
//! for backends that compute on the host.
//!
//! # Panics
//!
//! Every function here panics if the device is lost or an earlier operation failed on it, and on targets without
//! blocking reads, such as WebAssembly.

use burn_backend::{
    Backend, TensorData,
    tensor::{BoolTensor, FloatTensor, IntTensor},
};

/// The values of a float tensor, as FP32.
pub(crate) fn floats<B: Backend>(tensor: FloatTensor<B>) -> Vec<f32> {
    burn_backend::try_read_sync(B::float_into_data(tensor))
        .expect("state is read where blocking reads are possible")
        .expect("the device returns the state")
        .convert::<f32>()
        .into_vec()
        .expect("converted to FP32")
}

/// The values of an integer tensor.
pub(crate) fn integers<B: Backend>(tensor: IntTensor<B>) -> Vec<i32> {
    int_data::<B>(tensor)
        .convert::<i32>()
        .into_vec()
        .expect("converted to INT32")
}

/// The values of a tensor of U8.
///
/// # Panics
///
/// Also if the tensor has another dtype.
pub(crate) fn bytes<B: Backend>(tensor: IntTensor<B>) -> Vec<u8> {
    int_data::<B>(tensor).into_vec().expect("a tensor of U8")
}

/// The values of a tensor of truth values.
pub(crate) fn bools<B: Backend>(tensor: BoolTensor<B>) -> Vec<bool> {
    burn_backend::try_read_sync(B::bool_into_data(tensor))
        .expect("state is read where blocking reads are possible")
        .expect("the device returns the state")
        .iter::<bool>()
        .collect()
}

/// The data of an integer tensor, in its dtype.
pub(crate) fn int_data<B: Backend>(tensor: IntTensor<B>) -> TensorData {
    burn_backend::try_read_sync(B::int_into_data(tensor))
        .expect("state is read where blocking reads are possible")
        .expect("the device returns the state")
}
