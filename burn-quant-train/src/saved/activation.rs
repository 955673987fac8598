//! Activation functions on cells.

use burn_backend::{Scalar, ops::ActivationOps, tensor::FloatTensor};

use super::{Held, forward::forward};
use crate::{
    data::DataBackend,
    operations::{activation_operations, composed_activation_operations},
};

impl<B: DataBackend> ActivationOps<Self> for Held<B> {
    activation_operations! { forward }
    composed_activation_operations! { forward }

    forward! {
    relu(tensor: Float) -> Float;
    softmax(tensor: Float, dim: (usize)) -> Float;
    }
}
