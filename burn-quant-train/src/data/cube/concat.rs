//! Short tensors joined by a kernel.

use burn_backend::{
    DType,
    tensor::{FloatTensor, IntTensor},
};
use burn_cubecl::{
    CubeBackend, CubeRuntime, FloatElement, IntElement, element::BoolElement,
    kernel::into_contiguous, tensor::CubeTensor,
};
use cubecl_kernels::concatenate::concatenate;

use super::tensors::{Cube, handle, tensor};
use crate::data::{concat::ConcatKernels, kernels::checked};

impl<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement> ConcatKernels
    for CubeBackend<R, F, I, BT>
where
    Self: Cube<R>,
{
    fn concat_floats(tensors: Vec<FloatTensor<Self>>) -> FloatTensor<Self> {
        concat(tensors, DType::F32)
    }

    fn concat_ints(tensors: Vec<IntTensor<Self>>) -> IntTensor<Self> {
        concat(tensors, DType::I32)
    }
}

fn concat<R: CubeRuntime>(tensors: Vec<CubeTensor<R>>, dtype: DType) -> CubeTensor<R> {
    let tensors: Vec<_> = tensors.into_iter().map(into_contiguous).collect();
    let handles: Vec<_> = tensors.iter().map(handle).collect();
    let like = tensors.first().expect("concat: at least one tensor");
    tensor(like, checked(concatenate(&like.client, &handles)), dtype)
}
