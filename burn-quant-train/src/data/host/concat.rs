//! Short tensors joined by the backend's own operation.

use burn_backend::tensor::{FloatTensor, IntTensor};

use super::HostBackend;
use crate::data::concat::ConcatKernels;

impl<B: HostBackend> ConcatKernels for B {
    fn concat_floats(tensors: Vec<FloatTensor<B>>) -> FloatTensor<B> {
        B::float_cat(tensors, 0)
    }

    fn concat_ints(tensors: Vec<IntTensor<B>>) -> IntTensor<B> {
        B::int_cat(tensors, 0)
    }
}
