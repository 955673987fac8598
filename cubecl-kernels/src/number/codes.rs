//! Tensors of codes, one in a byte, without scales.

use cubecl::{prelude::*, std::tensor::TensorHandle};

use super::minifloat::{self, Minifloat};
use crate::{
    device::{check_contiguous, check_dtype, cube_grid, empty, storage},
    error::KernelError,
};

const UNITS: usize = 256;

/// The codes of `x`, as [`Minifloat::encode`] gives them, one in a byte: u8, of the shape of `x`.
///
/// - `x`: f32, contiguous.
///
/// # Errors
///
/// When `x` is of another element type or not contiguous.
pub fn encode<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    format: Minifloat,
) -> Result<TensorHandle<R>, KernelError> {
    const OPERATION: &str = "codes::encode";
    check_dtype(OPERATION, "x", x, storage::<f32>(), "cast it to f32")?;
    let len = check_contiguous(OPERATION, x)?;
    let out = empty(client, x.shape().to_vec(), storage::<u8>());
    if len > 0 {
        // SAFETY: the kernel guards its index with the number of elements of both tensors.
        #[allow(unsafe_code)]
        unsafe {
            encode_kernel::launch_unchecked::<R>(
                client,
                cube_grid(len.div_ceil(UNITS)),
                CubeDim::new_1d(UNITS as u32),
                x.clone().into_arg(),
                out.clone().into_arg(),
                len as u32,
                format,
            );
        }
    }
    Ok(out)
}

/// The numbers of `codes`, as [`Minifloat::decode`] gives them: f32, of the shape of `codes`.
///
/// - `codes`: u8, contiguous.
///
/// # Errors
///
/// When `codes` is of another element type or not contiguous.
pub fn decode<R: Runtime>(
    client: &ComputeClient<R>,
    codes: &TensorHandle<R>,
    format: Minifloat,
) -> Result<TensorHandle<R>, KernelError> {
    const OPERATION: &str = "codes::decode";
    check_dtype(OPERATION, "codes", codes, storage::<u8>(), "pass u8 codes")?;
    let len = check_contiguous(OPERATION, codes)?;
    let out = empty(client, codes.shape().to_vec(), storage::<f32>());
    if len > 0 {
        // SAFETY: the kernel guards its index with the number of elements of both tensors.
        #[allow(unsafe_code)]
        unsafe {
            decode_kernel::launch_unchecked::<R>(
                client,
                cube_grid(len.div_ceil(UNITS)),
                CubeDim::new_1d(UNITS as u32),
                codes.clone().into_arg(),
                out.clone().into_arg(),
                len as u32,
                format,
            );
        }
    }
    Ok(out)
}

#[cube(launch_unchecked)]
fn encode_kernel(x: &Tensor<f32>, out: &mut Tensor<u8>, len: u32, #[comptime] format: Minifloat) {
    if (ABSOLUTE_POS as u32) < len {
        out[ABSOLUTE_POS] = u8::cast_from(minifloat::encode(x[ABSOLUTE_POS], format));
    }
}

#[cube(launch_unchecked)]
fn decode_kernel(
    codes: &Tensor<u8>,
    out: &mut Tensor<f32>,
    len: u32,
    #[comptime] format: Minifloat,
) {
    if (ABSOLUTE_POS as u32) < len {
        out[ABSOLUTE_POS] = minifloat::decode(u32::cast_from(codes[ABSOLUTE_POS]), format);
    }
}
