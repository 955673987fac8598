//! The kernel that joins tensors.

use burn_backend::{
    Backend,
    tensor::{FloatTensor, IntTensor},
};

/// Short tensors joined on a backend that holds data.
pub trait ConcatKernels: Backend {
    /// The elements of all tensors, FP32 and of one dimension, in their order.
    ///
    /// # Panics
    ///
    /// If there are none.
    fn concat_floats(tensors: Vec<FloatTensor<Self>>) -> FloatTensor<Self>;

    /// The elements of all tensors, INT32 and of one dimension, in their order.
    ///
    /// # Panics
    ///
    /// If there are none.
    fn concat_ints(tensors: Vec<IntTensor<Self>>) -> IntTensor<Self>;
}
