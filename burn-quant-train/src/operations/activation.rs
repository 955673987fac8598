//! Operations of activation functions.

/// Gives the operations to a macro: see [`operations`](crate::operations).
macro_rules! activation_operations {
    ($forward:ident) => {
        $forward! {
            leaky_relu(tensor: Float, negative_slope: (Scalar)) -> Float;
            relu_backward(output: Float, grad: Float) -> Float => Promote;
            prelu(tensor: Float, alpha: Float) -> Float => Promote;
            gelu_backward(x: Float, grad: Float) -> Float => Promote;
            sigmoid_backward(output: Float, grad: Float) -> Float => Promote;
            hard_sigmoid(tensor: Float, alpha: (Scalar), beta: (Scalar)) -> Float;
            log_sigmoid(tensor: Float) -> Float => Full [exact output];
            softmin(tensor: Float, dim: (usize)) -> Float => Full;
            log_sigmoid_backward(x: Float, grad: Float) -> Float => Promote;
        }
    };
}

/// The same of those that are compositions, or with which compositions begin: see
/// [`composition`](crate::backend::composition).
macro_rules! composed_activation_operations {
    ($forward:ident) => {
        $forward! {
            gelu(tensor: Float) -> Float;
            sigmoid(tensor: Float) -> Float [again];
            log_softmax(tensor: Float, dim: (usize)) -> Float => Full [exact output];
        }
    };
}

pub(crate) use activation_operations;
pub(crate) use composed_activation_operations;
