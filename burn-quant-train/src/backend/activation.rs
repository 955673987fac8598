//! Activation functions: forwarded, softmax and its kin in FP32.

use burn_backend::{Scalar, ops::ActivationOps, tensor::FloatTensor};

use super::{QuantTrain, forward::forward};
use crate::{data::recorded::QuantBackend, recipe::Recipe};

impl<B: QuantBackend, R: Recipe> ActivationOps<Self> for QuantTrain<B, R> {
    forward! {
    leaky_relu(tensor: Float, negative_slope: (Scalar)) -> Float;
    relu(tensor: Float) -> Float;
    relu_backward(output: Float, grad: Float) -> Float => Promote;
    gelu(tensor: Float) -> Float;
    prelu(tensor: Float, alpha: Float) -> Float => Promote;
    gelu_backward(x: Float, grad: Float) -> Float => Promote;
    sigmoid(tensor: Float) -> Float;
    sigmoid_backward(output: Float, grad: Float) -> Float => Promote;
    hard_sigmoid(tensor: Float, alpha: (Scalar), beta: (Scalar)) -> Float;
    log_sigmoid(tensor: Float) -> Float => Full;
    softmax(tensor: Float, dim: (usize)) -> Float => Full;
    log_softmax(tensor: Float, dim: (usize)) -> Float => Full;
    softmin(tensor: Float, dim: (usize)) -> Float => Full;
    log_sigmoid_backward(x: Float, grad: Float) -> Float => Promote;
    }
}
