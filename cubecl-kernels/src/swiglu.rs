//! The gate of a SwiGLU layer (Shazeer, "GLU Variants Improve Transformer", 2020, equation 6, without its matrices),
//! and its gradients, each in one launch.
//!
//! ```text
//! s = 1 / (1 + exp(-gate))       h = gate s up
//! dgate = dh up s (1 + gate (1 - s))       dup = dh gate s
//! ```
//!
//! Each input is read once and each output written once. All arithmetic is FP32, rounded once at the end.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{array, check_contiguous, check_float, cube_grid, empty, vector_width},
    error::KernelError,
    fast,
};

const OPERATION: &str = "swiglu";
const OPERATION_BACKWARD: &str = "swiglu_backward";
const UNITS: usize = 256;

/// `silu(gate) * up`.
///
/// - `gate`, `up`: f32, f16 or bf16, of one shape and type, contiguous. The result is like them.
///
/// `silu` is good to about `1e-7 (10 + |gate|)` of its value, and may be 0 where `s` is below the normal `f32`. It is
/// NaN of NaN and of negative infinity.
///
/// # Errors
///
/// When the inputs are no float tensors, differ in shape or type, or are not contiguous.
pub fn swiglu<R: Runtime>(
    client: &ComputeClient<R>,
    gate: &TensorHandle<R>,
    up: &TensorHandle<R>,
) -> Result<TensorHandle<R>, KernelError> {
    let len = check(client, OPERATION, &[("gate", gate), ("up", up)])?;
    let output = empty(client, gate.shape().to_vec(), gate.dtype);
    if len > 0 {
        let width = vector_width(len, &[gate, up]);
        let vectors = len / width;
        // SAFETY: accesses are guarded by the number of vectors, which is that of all tensors.
        #[allow(unsafe_code)]
        unsafe {
            swiglu_kernel::launch_unchecked::<R>(
                client,
                cube_grid(vectors.div_ceil(UNITS)),
                CubeDim::new_1d(UNITS as u32),
                width,
                array(gate.clone()),
                array(up.clone()),
                array(output.clone()),
                vectors as u32,
                width,
                gate.dtype,
            );
        }
    }
    Ok(output)
}

/// The gradients of `gate` and of `up`, in this order, from that of `silu(gate) * up`.
///
/// - `gate`, `up`, `gradient`: f32, f16 or bf16, of one shape and type, contiguous. The results are like them.
///
/// # Errors
///
/// When the inputs are no float tensors, differ in shape or type, or are not contiguous.
pub fn swiglu_backward<R: Runtime>(
    client: &ComputeClient<R>,
    gate: &TensorHandle<R>,
    up: &TensorHandle<R>,
    gradient: &TensorHandle<R>,
) -> Result<[TensorHandle<R>; 2], KernelError> {
    let inputs = [("gate", gate), ("up", up), ("gradient", gradient)];
    let len = check(client, OPERATION_BACKWARD, &inputs)?;
    let output = || empty(client, gate.shape().to_vec(), gate.dtype);
    let [of_gate, of_up] = [output(), output()];
    if len > 0 {
        let width = vector_width(len, &[gate, up, gradient]);
        let vectors = len / width;
        // SAFETY: accesses are guarded by the number of vectors, which is that of all tensors.
        #[allow(unsafe_code)]
        unsafe {
            swiglu_backward_kernel::launch_unchecked::<R>(
                client,
                cube_grid(vectors.div_ceil(UNITS)),
                CubeDim::new_1d(UNITS as u32),
                width,
                array(gate.clone()),
                array(up.clone()),
                array(gradient.clone()),
                array(of_gate.clone()),
                array(of_up.clone()),
                vectors as u32,
                width,
                gate.dtype,
            );
        }
    }
    Ok([of_gate, of_up])
}

/// The number of elements of contiguous float tensors that are all like the first.
fn check<R: Runtime>(
    client: &ComputeClient<R>,
    operation: &'static str,
    inputs: &[(&'static str, &TensorHandle<R>)],
) -> Result<usize, KernelError> {
    let (_, first) = inputs[0];
    for (name, tensor) in inputs {
        check_float(client, operation, name, tensor.dtype)?;
        if tensor.shape() != first.shape() || tensor.dtype != first.dtype {
            let described = inputs
                .iter()
                .map(|(name, tensor)| format!("{name} {:?} of {}", tensor.shape(), tensor.dtype));
            return Err(KernelError::Shape {
                operation,
                got: described.collect::<Vec<_>>().join(", "),
                remedy: "pass tensors of one shape and type",
            });
        }
        check_contiguous(operation, tensor)?;
    }
    check_contiguous(operation, first)
}

#[cube(launch_unchecked)]
fn swiglu_kernel<F: Numeric, N: Size>(
    gate: &Array<Vector<F, N>>,
    up: &Array<Vector<F, N>>,
    output: &mut Array<Vector<F, N>>,
    vectors: u32,
    #[comptime] width: usize,
    #[define(F)] _dtype: StorageType,
) {
    let at = CUBE_POS as u32 * comptime!(UNITS as u32) + UNIT_POS;
    if at >= vectors {
        terminate!();
    }
    let at = at as usize;
    let (gates, ups) = (gate[at], up[at]);
    let mut out = Vector::<F, N>::empty();
    #[unroll]
    for lane in 0..width {
        let gate = f32::cast_from(gates[lane]);
        let (sigmoid, _) = sigmoids(gate);
        out[lane] = F::cast_from(gate * sigmoid * f32::cast_from(ups[lane]));
    }
    output[at] = out;
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn swiglu_backward_kernel<F: Numeric, N: Size>(
    gate: &Array<Vector<F, N>>,
    up: &Array<Vector<F, N>>,
    gradient: &Array<Vector<F, N>>,
    of_gate: &mut Array<Vector<F, N>>,
    of_up: &mut Array<Vector<F, N>>,
    vectors: u32,
    #[comptime] width: usize,
    #[define(F)] _dtype: StorageType,
) {
    let at = CUBE_POS as u32 * comptime!(UNITS as u32) + UNIT_POS;
    if at >= vectors {
        terminate!();
    }
    let at = at as usize;
    let (gates, ups, gradients) = (gate[at], up[at], gradient[at]);
    let mut out_gate = Vector::<F, N>::empty();
    let mut out_up = Vector::<F, N>::empty();
    #[unroll]
    for lane in 0..width {
        let gate = f32::cast_from(gates[lane]);
        let gradient = f32::cast_from(gradients[lane]);
        let (sigmoid, rest) = sigmoids(gate);
        let slope = sigmoid * (1.0f32 + gate * rest);
        out_gate[lane] = F::cast_from(gradient * f32::cast_from(ups[lane]) * slope);
        out_up[lane] = F::cast_from(gradient * (gate * sigmoid));
    }
    of_gate[at] = out_gate;
    of_up[at] = out_up;
}

/// `1 / (1 + exp(-x))`, and what it lacks to 1.
///
/// Of the magnitude of `x`, so that the exponential is at most 1 and the divisor at most 2: nothing overflows, and
/// neither result is a difference.
#[cube]
fn sigmoids(x: f32) -> (f32, f32) {
    let power = exp(-x.abs());
    let larger = fast::quotient(1.0f32, 1.0f32 + power);
    let smaller = power * larger;
    (
        select(x >= 0.0f32, larger, smaller),
        select(x >= 0.0f32, smaller, larger),
    )
}

/// The device's own exponential; NaN stays NaN.
#[cube(fast_math = FastMath::ReducedPrecision.into())]
fn exp(x: f32) -> f32 {
    x.exp()
}
