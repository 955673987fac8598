//! Products in the compute dtype by a kernel of our own.

use burn_backend::{DType, FloatDType, TensorMetadata, tensor::FloatTensor};

use crate::data::{
    DataBackend, Kernels, Operation, cast_to,
    product::float_product,
    tensors::{FloatMeta, On, Tensors},
};
use crate::saved::{HeldTensor, recorded::Recorded};

/// `left [.., M, K]` times `right [.., K, N]`, with the same leading dimensions, in the dtype of `left`.
///
/// `right` may have another one, as a parameter has in mixed precision: it waits as it is, is cast for the time of a
/// product, and has its gradient in its own dtype, straight from the accumulators.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matmul;

/// What the gradients need.
#[derive(Debug, Clone)]
pub(crate) struct Saved<B: DataBackend> {
    /// For the gradient of `right`.
    left: Option<HeldTensor<B>>,
    /// For that of `left`.
    right: Option<HeldTensor<B>>,
    of_right: DType,
}

impl<B: DataBackend> Recorded<B, 2> for Matmul {
    type Saved = Saved<B>;

    fn again(&mut self, _inputs: &[HeldTensor<B>; 2]) -> Option<Self> {
        Some(*self)
    }

    fn forward(
        self,
        [left, right]: [HeldTensor<B>; 2],
        [wants_left, wants_right]: [bool; 2],
    ) -> (HeldTensor<B>, Self::Saved) {
        let saved = Saved {
            left: wants_right.then(|| left.clone()),
            right: wants_left.then(|| right.clone()),
            of_right: right.dtype(),
        };
        let left = left.into_value();
        let right = like::<B>(right.into_value(), &left);
        let product = B::run(FloatProduct::of(left.dtype()), (left, right));
        (HeldTensor::of("matmul", product), saved)
    }

    fn backward(
        saved: Self::Saved,
        gradient: FloatTensor<B>,
        [wants_left, wants_right]: [bool; 2],
    ) -> [Option<FloatTensor<B>>; 2] {
        let right = saved.right.filter(|_| wants_left);
        let of_left = right.map(HeldTensor::into_value).map(|right| {
            let right = B::float_transpose(like::<B>(right, &gradient));
            B::run(
                FloatProduct::of(gradient.dtype()),
                (gradient.clone(), right),
            )
        });
        let left = saved.left.filter(|_| wants_right);
        let of_right = left.map(HeldTensor::into_value).map(|left| {
            let product = FloatProduct::of(saved.of_right);
            B::run(product, (B::float_transpose(left), gradient))
        });
        [of_left, of_right]
    }
}

/// A tensor in the dtype of another one.
fn like<B: DataBackend>(tensor: FloatTensor<B>, other: &FloatTensor<B>) -> FloatTensor<B> {
    cast_to::<B>(tensor, Some(other.dtype().into()))
}

/// The product of two float tensors of one dtype.
#[derive(Debug, Clone)]
struct FloatProduct {
    /// That of the result.
    dtype: FloatDType,
}

impl FloatProduct {
    fn of(dtype: DType) -> Self {
        Self {
            dtype: dtype.into(),
        }
    }
}

impl Operation for FloatProduct {
    const NAME: &'static str = "matmul";
    type Inputs = (FloatMeta, FloatMeta);
    type Outputs = FloatMeta;

    fn outline<T: Tensors>(&self, (left, right): &On<Self::Inputs, T>) -> FloatMeta {
        let mut shape = left.shape();
        let last = shape.num_dims() - 1;
        shape[last] = right.shape()[last];
        FloatMeta::new(shape, DType::from(self.dtype))
    }

    fn run<K: Kernels>(self, (left, right): On<Self::Inputs, K>) -> FloatTensor<K> {
        float_product::<K>(left, right, self.dtype)
    }
}
