//! Activation functions: forwarded, softmax and its kin in FP32.

use burn_backend::{Scalar, TensorMetadata, ops::ActivationOps, tensor::FloatTensor};

use super::{
    QuantTrain,
    composition::{self, compose},
    forward::forward,
    precision::{Class, in_class},
    tensor::QuantTensor,
};
use crate::{
    operations::{activation_operations, composed_activation_operations},
    ops::{relu::Relu, softmax::Softmax},
    recipe::Recipe,
    saved::{
        MIN_COMPRESSED,
        recorded::{InsideTensor, QuantBackend},
        scope,
    },
};

/// True if what an operation on this tensor saves is compressed.
fn compresses<B: QuantBackend>(tensor: &InsideTensor<B>) -> bool {
    let is_large = tensor.shape().num_elements() >= MIN_COMPRESSED;
    B::is_tracked(tensor) && is_large && scope::context().is_some()
}

impl<B: QuantBackend, R: Recipe> ActivationOps<Self> for QuantTrain<B, R> {
    activation_operations! { forward }
    composed_activation_operations! { compose }

    /// Where values wait compressed, a bit an element is saved in place of X.
    fn relu(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        let _scope = Self::scope();
        let tensor = tensor.into_primitive();
        QuantTensor::new(match compresses::<B>(&tensor) {
            true => B::record(Relu, [tensor]),
            false => <B::Inside>::relu(tensor),
        })
    }

    fn softmax(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self> {
        composition::softmax::<B, R>(&tensor, &dim)
            .unwrap_or_else(|| Self::softmax_alone(tensor, dim))
    }
}

impl<B: QuantBackend, R: Recipe> QuantTrain<B, R> {
    /// A softmax that is part of no composition: in FP32. Where values wait compressed, P is saved in place of what
    /// Burn's composition saves.
    pub(super) fn softmax_alone(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self> {
        let _scope = Self::scope();
        let tensor = in_class::<B, R>(Class::Full, tensor.into_primitive());
        QuantTensor::new(match compresses::<B>(&tensor) {
            true => B::record(Softmax { dim }, [tensor]),
            false => <B::Inside>::softmax(tensor, dim),
        })
    }
}
