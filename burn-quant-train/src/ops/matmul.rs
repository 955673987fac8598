//! Products in the compute dtype by a kernel of our own.

use burn_backend::{TensorMetadata, tensor::FloatTensor};

use crate::data::{
    DataBackend, Kernels, Operation,
    product::float_product,
    tensors::{FloatMeta, On, Tensors},
};
use crate::saved::{HeldTensor, recorded::Recorded};

/// `left [.., M, K]` times `right [.., K, N]`, of one dtype and the same leading dimensions, in that dtype.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matmul;

impl<B: DataBackend> Recorded<B, 2> for Matmul {
    /// Each operand, if the other one needs a gradient.
    type Saved = [Option<HeldTensor<B>>; 2];

    fn again(&mut self, _inputs: &[HeldTensor<B>; 2]) -> Option<Self> {
        Some(*self)
    }

    fn forward(
        self,
        [left, right]: [HeldTensor<B>; 2],
        [wants_left, wants_right]: [bool; 2],
    ) -> (HeldTensor<B>, Self::Saved) {
        let saved = [
            wants_right.then(|| left.clone()),
            wants_left.then(|| right.clone()),
        ];
        let product = B::run(FloatProduct, (left.into_value(), right.into_value()));
        (HeldTensor::of("matmul", product), saved)
    }

    fn backward(
        [left, right]: Self::Saved,
        gradient: FloatTensor<B>,
        [wants_left, wants_right]: [bool; 2],
    ) -> [Option<FloatTensor<B>>; 2] {
        let of_left = right
            .filter(|_| wants_left)
            .map(HeldTensor::into_value)
            .map(|right| B::run(FloatProduct, (gradient.clone(), B::float_transpose(right))));
        let of_right = left
            .filter(|_| wants_right)
            .map(HeldTensor::into_value)
            .map(|left| B::run(FloatProduct, (B::float_transpose(left), gradient)));
        [of_left, of_right]
    }
}

/// The product of two float tensors of one dtype, in that dtype.
#[derive(Debug, Clone)]
struct FloatProduct;

impl Operation for FloatProduct {
    const NAME: &'static str = "matmul";
    type Inputs = (FloatMeta, FloatMeta);
    type Outputs = FloatMeta;

    fn outline<T: Tensors>(&self, (left, right): &On<Self::Inputs, T>) -> FloatMeta {
        let mut shape = left.shape();
        let last = shape.num_dims() - 1;
        shape[last] = right.shape()[last];
        FloatMeta::new(shape, left.dtype())
    }

    fn run<K: Kernels>(self, (left, right): On<Self::Inputs, K>) -> FloatTensor<K> {
        let dtype = left.dtype().into();
        float_product::<K>(left, right, dtype)
    }
}
