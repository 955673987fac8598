//! Joining tensors as an operation.

use burn_backend::{
    DType, TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};

use crate::data::{
    kernels::Kernels,
    operation::{DataBackend, Operation},
    tensors::{FloatMeta, IntMeta, On, Tensors},
};

/// The elements of all tensors, FP32 and of one dimension, in their order.
///
/// # Panics
///
/// If there are none.
pub fn concat_floats<B: DataBackend>(tensors: Vec<FloatTensor<B>>) -> FloatTensor<B> {
    B::run(ConcatFloats, tensors)
}

/// The elements of all tensors, INT32 and of one dimension, in their order.
///
/// # Panics
///
/// If there are none.
pub fn concat_ints<B: DataBackend>(tensors: Vec<IntTensor<B>>) -> IntTensor<B> {
    B::run(ConcatInts, tensors)
}

/// The number of elements of all tensors.
fn elements<T: TensorMetadata>(tensors: &[T]) -> usize {
    let shapes = tensors.iter().map(TensorMetadata::shape);
    shapes.map(|shape| shape.num_elements()).sum()
}

#[derive(Debug, Clone)]
struct ConcatFloats;

impl Operation for ConcatFloats {
    const NAME: &'static str = "concat_floats";
    type Inputs = Vec<FloatMeta>;
    type Outputs = FloatMeta;

    fn outline<T: Tensors>(&self, tensors: &On<Self::Inputs, T>) -> FloatMeta {
        FloatMeta::new([elements(tensors)], DType::F32)
    }

    fn run<K: Kernels>(self, tensors: On<Self::Inputs, K>) -> On<Self::Outputs, K> {
        K::concat_floats(tensors)
    }
}

#[derive(Debug, Clone)]
struct ConcatInts;

impl Operation for ConcatInts {
    const NAME: &'static str = "concat_ints";
    type Inputs = Vec<IntMeta>;
    type Outputs = IntMeta;

    fn outline<T: Tensors>(&self, tensors: &On<Self::Inputs, T>) -> IntMeta {
        IntMeta::new([elements(tensors)], DType::I32)
    }

    fn run<K: Kernels>(self, tensors: On<Self::Inputs, K>) -> On<Self::Outputs, K> {
        K::concat_ints(tensors)
    }
}
