//! The gate of a SwiGLU layer (Shazeer, "GLU Variants Improve Transformer", 2020, equation 6, without its matrices),
//! and its gradients, each in one launch.
//!
//! ```text
//! s = 1 / (1 + exp(-gate))       h = gate s up
//! dgate = dh up s (1 + gate (1 - s))       dup = dh gate s
//! ```
//!
//! Each input is read once, as floats or as [numbers with scales](mod@crate::operator_input), and each output written
//! once; the copies in which inputs wait for the backward pass, where they are wanted, in the same launch. All
//! arithmetic is FP32, rounded once at the end.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{array, cube_grid, empty, vector_width},
    error::KernelError,
    fast,
    number::storage::RUN,
    operator_input::{
        OperatorInput, Pieces, check_alike, prepare_alike, read_input, read_piece, write_piece,
    },
    quantize::{
        QuantizeSpec, Quantized,
        beside::{Beside, CopyArgs, CubePieces, GroupCopy, write_group_copy},
        whole_runs::RunGrid,
    },
};

pub(crate) mod block;
pub(crate) mod matrix_scale;
mod quantized;
mod quantized_gradients;

pub use quantized::quantize_swiglu;
pub use quantized_gradients::{
    WithMaximum, quantize_swiglu_gradients, quantize_swiglu_gradients_delayed,
};

const OPERATION: &str = "swiglu";
const OPERATION_COMPRESSING: &str = "swiglu_compressing";
const OPERATION_BACKWARD: &str = "swiglu_backward";
const UNITS: usize = 256;
/// A run in each unit.
const RUNS: CubePieces = CubePieces {
    len: RUN,
    units: UNITS,
    side_by_side: UNITS,
};

/// `silu(gate) * up`.
///
/// - `gate`, `up`: f32, f16 or bf16, contiguous, or [quantized matrices](mod@crate::operator_input), of one shape and
///   type. The result is like them.
///
/// `silu` is good to about `1e-7 (10 + |gate|)` of its value, and may be 0 where `s` is below the normal `f32`. It is
/// NaN of NaN and of negative infinity.
///
/// # Errors
///
/// When the inputs are no float tensors, differ in shape or type, or are not contiguous, or a quantized one is not what
/// [`quantize`](crate::quantize::quantize) makes.
pub fn swiglu<'a, R: Runtime>(
    client: &ComputeClient<R>,
    gate: impl Into<OperatorInput<'a, R>>,
    up: impl Into<OperatorInput<'a, R>>,
) -> Result<TensorHandle<R>, KernelError> {
    let (gate, up) = (gate.into(), up.into());
    let len = check_alike(client, OPERATION, &[("gate", gate), ("up", up)])?;
    let (shape, dtype) = (gate.shape(), gate.dtype());
    let output = empty(client, shape, dtype);
    if len > 0 {
        let [gate, up] = prepare_alike(client, OPERATION, [gate, up])?;
        let pieces = Pieces::of(&[&gate, &up], len, &[&output]);
        let count = len / pieces.len;
        // SAFETY: accesses are guarded by the number of pieces, which is that of all tensors; scales lie inside of
        // their buffers, whose shapes were compared with the matrix, and stand-ins are not read.
        #[allow(unsafe_code)]
        unsafe {
            swiglu_kernel::launch_unchecked::<R>(
                client,
                cube_grid(count.div_ceil(UNITS)),
                CubeDim::new_1d(UNITS as u32),
                pieces.read,
                pieces.width,
                array(gate.values().clone()),
                array(gate.scales()),
                array(gate.tensor_scales()),
                array(up.values().clone()),
                array(up.scales()),
                array(up.tensor_scales()),
                array(output.clone()),
                gate.grid(),
                count as u32,
                pieces,
                gate.values().dtype,
                gate.scales().dtype,
                dtype,
            );
        }
    }
    Ok(output)
}

/// [`swiglu`] of two matrices, and the copies of gate and of up, in this order, each that of
/// [`quantize`](crate::quantize::quantize()) to the bit.
///
/// - `gate`, `up`: f32, f16 or bf16 `[rows, cols]`, contiguous, of one shape and type. The output is like them.
/// - `spec`: groups of which rows are whole ones, to nearest, row-major, with scales that do not depend on the matrix.
///
/// # Errors
///
/// When inputs or `spec` are none of these.
pub fn swiglu_compressing<R: Runtime>(
    client: &ComputeClient<R>,
    gate: &TensorHandle<R>,
    up: &TensorHandle<R>,
    spec: &QuantizeSpec,
) -> Result<(TensorHandle<R>, [Quantized<R>; 2]), KernelError> {
    let inputs = [("gate", gate.into()), ("up", up.into())];
    let len = check_alike(client, OPERATION_COMPRESSING, &inputs)?;
    let beside = |factor| {
        let copy = Beside::of(client, OPERATION_COMPRESSING, factor, spec, RUNS)?;
        copy.ok_or_else(|| KernelError::Unsupported {
            operation: OPERATION_COMPRESSING,
            reason: format!("a copy by {spec:?} of {:?}", gate.shape()),
            remedy: "ask for groups that rows are whole ones of, row-major, to nearest, or quantize by itself",
        })
    };
    let copies = [beside(gate)?, beside(up)?];
    let output = empty(client, gate.shape().to_vec(), gate.dtype);
    let runs = len / RUN;
    if runs > 0 {
        let width = vector_width(RUN, &[gate, up, &output]);
        let [of_gate, of_up] = copies
            .each_ref()
            .map(|it| CopyArgs::to(it.copy, &it.output));
        // SAFETY: accesses are guarded by the number of runs, which is that of all tensors.
        #[allow(unsafe_code)]
        unsafe {
            swiglu_compressing_kernel::launch_unchecked::<R>(
                client,
                cube_grid(runs.div_ceil(UNITS)),
                CubeDim::new_1d(UNITS as u32),
                width,
                of_gate.words,
                array(gate.clone()),
                array(up.clone()),
                array(output.clone()),
                of_gate.values,
                array(of_gate.scales.clone()),
                of_up.values,
                array(of_up.scales),
                of_gate.largest,
                0,
                runs as u32,
                width,
                copies[0].copy,
                gate.dtype,
                of_gate.scales.dtype,
            );
        }
    }
    Ok((output, copies.map(|it| it.output)))
}

/// The gradients of `gate` and of `up`, in this order, from that of `silu(gate) * up`.
///
/// - `gate`, `up`: as [`swiglu`] takes them.
/// - `gradient`: of their shape and type, contiguous, or such a matrix in numbers. The results are floats of these.
///
/// # Errors
///
/// As [`swiglu`], and when the gradient differs from the inputs in shape or type.
pub fn swiglu_backward<'a, R: Runtime>(
    client: &ComputeClient<R>,
    gate: impl Into<OperatorInput<'a, R>>,
    up: impl Into<OperatorInput<'a, R>>,
    gradient: impl Into<OperatorInput<'a, R>>,
) -> Result<[TensorHandle<R>; 2], KernelError> {
    let (gate, up, gradient) = (gate.into(), up.into(), gradient.into());
    let inputs = [("gate", gate), ("up", up), ("gradient", gradient)];
    let len = check_alike(client, OPERATION_BACKWARD, &inputs)?;
    let gradient = &gradient.floats(client)?;
    let dtype = gradient.dtype;
    let output = || empty(client, gradient.shape().to_vec(), dtype);
    let [of_gate, of_up] = [output(), output()];
    if len > 0 {
        let [gate, up] = prepare_alike(client, OPERATION_BACKWARD, [gate, up])?;
        let pieces = Pieces::of(&[&gate, &up], len, &[gradient]);
        let count = len / pieces.len;
        // SAFETY: accesses are guarded by the number of pieces, which is that of all tensors; scales lie inside of
        // their buffers, whose shapes were compared with the matrix, and stand-ins are not read.
        #[allow(unsafe_code)]
        unsafe {
            swiglu_backward_kernel::launch_unchecked::<R>(
                client,
                cube_grid(count.div_ceil(UNITS)),
                CubeDim::new_1d(UNITS as u32),
                pieces.read,
                pieces.width,
                array(gate.values().clone()),
                array(gate.scales()),
                array(gate.tensor_scales()),
                array(up.values().clone()),
                array(up.scales()),
                array(up.tensor_scales()),
                array(gradient.clone()),
                array(of_gate.clone()),
                array(of_up.clone()),
                gate.grid(),
                count as u32,
                pieces,
                gate.values().dtype,
                gate.scales().dtype,
                dtype,
            );
        }
    }
    Ok([of_gate, of_up])
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn swiglu_kernel<X: Numeric, S: Numeric, F: Numeric, NX: Size, N: Size>(
    gate: &Array<Vector<X, NX>>,
    gate_scales: &Array<S>,
    gate_tensor_scales: &Array<f32>,
    up: &Array<Vector<X, NX>>,
    up_scales: &Array<S>,
    up_tensor_scales: &Array<f32>,
    output: &mut Array<Vector<F, N>>,
    grid: RunGrid,
    count: u32,
    #[comptime] pieces: Pieces,
    #[define(X)] _values_dtype: StorageType,
    #[define(S)] _scales_dtype: StorageType,
    #[define(F)] _dtype: StorageType,
) {
    let at = CUBE_POS as u32 * comptime!(UNITS as u32) + UNIT_POS;
    if at >= count {
        terminate!();
    }
    let gates = read_input::<X, NX, S, F>(gate, gate_scales, gate_tensor_scales, &grid, at, pieces);
    let ups = read_input::<X, NX, S, F>(up, up_scales, up_tensor_scales, &grid, at, pieces);
    let out = gated(&gates, &ups, pieces.len);
    write_piece::<F, N>(output, &out, at, pieces.len, pieces.width);
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn swiglu_compressing_kernel<F: Numeric, N: Size, NV: Size, S: Numeric>(
    gate: &Array<Vector<F, N>>,
    up: &Array<Vector<F, N>>,
    output: &mut Array<Vector<F, N>>,
    gate_values: &mut Array<Vector<u32, NV>>,
    gate_scales: &mut Array<S>,
    up_values: &mut Array<Vector<u32, NV>>,
    up_scales: &mut Array<S>,
    largest: f32,
    zero: u32,
    runs: u32,
    #[comptime] width: usize,
    #[comptime] copy: GroupCopy,
    #[define(F)] _dtype: StorageType,
    #[define(S)] _scales_dtype: StorageType,
) {
    let at = CUBE_POS as u32 * comptime!(UNITS as u32) + UNIT_POS;
    // Units past the last run wait with the others.
    let from = min(at, runs - 1);
    let gates = read_piece::<F, N>(gate, from, RUN, width);
    let ups = read_piece::<F, N>(up, from, RUN, width);
    if at < runs {
        let out = gated(&gates, &ups, RUN);
        write_piece::<F, N>(output, &out, at, RUN, width);
    }
    write_group_copy::<NV, S>(
        gate_values,
        gate_scales,
        &gates,
        at,
        runs,
        largest,
        zero,
        copy,
    );
    write_group_copy::<NV, S>(up_values, up_scales, &ups, at, runs, largest, zero, copy);
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn swiglu_backward_kernel<X: Numeric, S: Numeric, F: Numeric, NX: Size, N: Size>(
    gate: &Array<Vector<X, NX>>,
    gate_scales: &Array<S>,
    gate_tensor_scales: &Array<f32>,
    up: &Array<Vector<X, NX>>,
    up_scales: &Array<S>,
    up_tensor_scales: &Array<f32>,
    gradient: &Array<Vector<F, N>>,
    of_gate: &mut Array<Vector<F, N>>,
    of_up: &mut Array<Vector<F, N>>,
    grid: RunGrid,
    count: u32,
    #[comptime] pieces: Pieces,
    #[define(X)] _values_dtype: StorageType,
    #[define(S)] _scales_dtype: StorageType,
    #[define(F)] _dtype: StorageType,
) {
    let at = CUBE_POS as u32 * comptime!(UNITS as u32) + UNIT_POS;
    if at >= count {
        terminate!();
    }
    let mut gates =
        read_input::<X, NX, S, F>(gate, gate_scales, gate_tensor_scales, &grid, at, pieces);
    let mut ups = read_input::<X, NX, S, F>(up, up_scales, up_tensor_scales, &grid, at, pieces);
    let gradients = read_piece::<F, N>(gradient, at, pieces.len, pieces.width);
    #[unroll]
    for index in 0..comptime!(pieces.len) {
        let (gate, up) = (gates[index], ups[index]);
        let (sigmoid, rest) = sigmoids(gate);
        let gradient = gradients[index];
        // At most 0.55, and of the larger factor: no product on the way is beyond the result.
        let half_slope = 0.5f32 * (1.0f32 + gate * rest) * sigmoid;
        let is_up = up.abs() > gradient.abs();
        let larger = select(is_up, up, gradient);
        let smaller = select(is_up, gradient, up);
        gates[index] = 2.0f32 * (smaller * (larger * half_slope));
        ups[index] = gradient * (gate * sigmoid);
    }
    write_piece::<F, N>(of_gate, &gates, at, pieces.len, pieces.width);
    write_piece::<F, N>(of_up, &ups, at, pieces.len, pieces.width);
}

/// `silu(gate) up` of so many elements.
#[cube]
fn gated(gates: &Array<f32>, ups: &Array<f32>, #[comptime] len: usize) -> Array<f32> {
    let mut out = Array::<f32>::new(len);
    #[unroll]
    for index in 0..len {
        let (sigmoid, _) = sigmoids(gates[index]);
        out[index] = gates[index] * sigmoid * ups[index];
    }
    out
}

/// `1 / (1 + exp(-x))`, and what it lacks to 1.
///
/// Of the magnitude of `x`, so that the exponential is at most 1 and the divisor at most 2: nothing overflows, and
/// neither result is a difference.
#[cube]
fn sigmoids(x: f32) -> (f32, f32) {
    let power = fast::exp(-x.abs());
    let larger = fast::quotient(1.0f32, 1.0f32 + power);
    let smaller = power * larger;
    (
        select(x >= 0.0f32, larger, smaller),
        select(x >= 0.0f32, smaller, larger),
    )
}
