//! GELU (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016, section 2), and its gradient, each in one launch.
//!
//! With `P` the distribution function of the standard normal distribution, and `p` its density:
//!
//! ```text
//! y = x P(x)       dx = dy (P(x) + x p(x))
//! ```
//!
//! The input is read once, as floats or as [numbers with scales](mod@crate::operator_input), and the output written
//! once. All arithmetic is FP32, rounded once at the end.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{array, cube_grid, empty},
    error::KernelError,
    fast,
    operator_input::{OperatorInput, Pieces, check_alike, read_input, read_piece, write_piece},
    quantize::whole_runs::RunGrid,
};

mod quantized;

pub use quantized::{quantize_gelu, quantize_gelu_gradient};

const OPERATION: &str = "gelu";
const OPERATION_BACKWARD: &str = "gelu_backward";
const UNITS: usize = 256;

/// `1 / sqrt(2 pi)`.
const DENSITY_OF_0: f32 = 0.398_942_3;
/// `P(-a) exp(a² / 2) / t` for `a >= 0`, as a polynomial in `t = 1 / (1 + STEEPNESS a)`, lowest power first: fitted to
/// within 5e-8 of it up to a = 14.5, from where on `P(-a)` is 0 in FP32.
const TAIL: [f32; 9] = [
    0.139_621_3,
    0.139_863_52,
    0.119_821_295,
    0.105_552_49,
    -0.023_212_32,
    0.159_319_65,
    -0.255_839,
    0.144_030_93,
    -0.029_157_888,
];
const STEEPNESS: f32 = 0.35;
/// Magnitudes from here on have the tail of this one.
const MAX_MAGNITUDE: f32 = 20.0;

/// `x P(x)`.
///
/// - `x`: f32, f16 or bf16, contiguous, or a [quantized matrix](mod@crate::operator_input). The result has its shape
///   and type.
///
/// `P(x)` is good to about `1.2e-7 (6 + x²)` of its value, and may be 0 where it is below the normal `f32`. The result
/// is NaN of NaN and of negative infinity.
///
/// # Errors
///
/// When `x` is no float tensor or not contiguous, or a quantized one is not what
/// [`quantize`](crate::quantize::quantize) makes.
pub fn gelu<'a, R: Runtime>(
    client: &ComputeClient<R>,
    x: impl Into<OperatorInput<'a, R>>,
) -> Result<TensorHandle<R>, KernelError> {
    let x = x.into();
    let len = x.check(client, OPERATION, "x")?;
    let dtype = x.dtype();
    let output = empty(client, x.shape(), dtype);
    if len > 0 {
        let x = x.prepare(client, OPERATION)?;
        let pieces = Pieces::of(&[&x], len, &[&output]);
        let count = len / pieces.len;
        // SAFETY: accesses are guarded by the number of pieces, which is that of both tensors; scales lie inside of
        // their buffers, whose shapes were compared with the matrix, and stand-ins are not read.
        #[allow(unsafe_code)]
        unsafe {
            gelu_kernel::launch_unchecked::<R>(
                client,
                cube_grid(count.div_ceil(UNITS)),
                CubeDim::new_1d(UNITS as u32),
                pieces.read,
                pieces.width,
                array(x.values().clone()),
                array(x.scales()),
                array(x.tensor_scales()),
                array(output.clone()),
                x.grid(),
                count as u32,
                pieces,
                x.values().dtype,
                x.scales().dtype,
                dtype,
            );
        }
    }
    Ok(output)
}

/// The gradient of `x`, from that of `x P(x)`.
///
/// - `x`: as [`gelu`] takes it.
/// - `gradient`: of its shape and type, contiguous, or such a matrix in numbers. The result is floats of these.
///
/// It is NaN where `x` is NaN or infinite.
///
/// # Errors
///
/// As [`gelu`], and when the gradient differs from `x` in shape or type.
pub fn gelu_backward<'a, R: Runtime>(
    client: &ComputeClient<R>,
    x: impl Into<OperatorInput<'a, R>>,
    gradient: impl Into<OperatorInput<'a, R>>,
) -> Result<TensorHandle<R>, KernelError> {
    let (x, gradient) = (x.into(), gradient.into());
    let inputs = [("x", x), ("gradient", gradient)];
    let len = check_alike(client, OPERATION_BACKWARD, &inputs)?;
    let gradient = &gradient.floats(client)?;
    let of_x = empty(client, gradient.shape().to_vec(), gradient.dtype);
    if len > 0 {
        let x = x.prepare(client, OPERATION_BACKWARD)?;
        let pieces = Pieces::of(&[&x], len, &[gradient]);
        let count = len / pieces.len;
        // SAFETY: accesses are guarded by the number of pieces, which is that of all tensors; scales lie inside of
        // their buffers, whose shapes were compared with the matrix, and stand-ins are not read.
        #[allow(unsafe_code)]
        unsafe {
            gelu_backward_kernel::launch_unchecked::<R>(
                client,
                cube_grid(count.div_ceil(UNITS)),
                CubeDim::new_1d(UNITS as u32),
                pieces.read,
                pieces.width,
                array(x.values().clone()),
                array(x.scales()),
                array(x.tensor_scales()),
                array(gradient.clone()),
                array(of_x.clone()),
                x.grid(),
                count as u32,
                pieces,
                x.values().dtype,
                x.scales().dtype,
                gradient.dtype,
            );
        }
    }
    Ok(of_x)
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn gelu_kernel<X: Numeric, S: Numeric, F: Numeric, NX: Size, N: Size>(
    x: &Array<Vector<X, NX>>,
    scales: &Array<S>,
    tensor_scales: &Array<f32>,
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
    let mut values = read_input::<X, NX, S, F>(x, scales, tensor_scales, &grid, at, pieces);
    #[unroll]
    for index in 0..comptime!(pieces.len) {
        let (distribution, _) = normal(values[index]);
        values[index] *= distribution;
    }
    write_piece::<F, N>(output, &values, at, pieces.len, pieces.width);
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn gelu_backward_kernel<X: Numeric, S: Numeric, F: Numeric, NX: Size, N: Size>(
    x: &Array<Vector<X, NX>>,
    scales: &Array<S>,
    tensor_scales: &Array<f32>,
    gradient: &Array<Vector<F, N>>,
    of_x: &mut Array<Vector<F, N>>,
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
    let values = read_input::<X, NX, S, F>(x, scales, tensor_scales, &grid, at, pieces);
    let mut gradients = read_piece::<F, N>(gradient, at, pieces.len, pieces.width);
    #[unroll]
    for index in 0..comptime!(pieces.len) {
        let x = values[index];
        let (distribution, density) = normal(x);
        gradients[index] *= distribution + x * density;
    }
    write_piece::<F, N>(of_x, &gradients, at, pieces.len, pieces.width);
}

/// The distribution function of the standard normal distribution, and its density.
///
/// The exponential of both is at most 1 and the divisor at most 8. A negative number's value is no difference, so that
/// it is good in relation to itself.
#[cube]
fn normal(x: f32) -> (f32, f32) {
    let magnitude = x.abs();
    let power = fast::exp(-0.5f32 * magnitude * magnitude);
    let t = fast::quotient(1.0f32, 1.0f32 + STEEPNESS * min(magnitude, MAX_MAGNITUDE));
    let mut polynomial = f32::new(comptime!(TAIL[8]));
    #[unroll]
    for index in 0..8usize {
        polynomial = polynomial * t + f32::new(comptime!(TAIL[7 - index]));
    }
    let tail = polynomial * t * power;
    (
        select(x >= 0.0f32, 1.0f32 - tail, tail),
        DENSITY_OF_0 * power,
    )
}
