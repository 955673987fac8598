//! The gate of a SwiGLU layer and its gradients in `f64`, of one element, from the equations of
//! [`swiglu`](mod@crate::swiglu).

/// `silu(gate) * up`.
pub fn swiglu(gate: f64, up: f64) -> f64 {
    gate * sigmoid(gate) * up
}

/// The gradients of `gate` and of `up`.
pub fn swiglu_backward(gate: f64, up: f64, gradient: f64) -> [f64; 2] {
    let s = sigmoid(gate);
    // 1 - s, which must not be a difference: beside a large negative gate none of it may be lost.
    let rest = sigmoid(-gate);
    [gradient * up * s * (1.0 + gate * rest), gradient * gate * s]
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}
