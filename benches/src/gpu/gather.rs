//! Some rows of a matrix.

use anyhow::Result;
use cubecl::{cuda::CudaRuntime, prelude::*};
use half::bf16;

use super::Gpu;

const UNITS: u32 = 256;

/// The rows `rows` of a contiguous tensor `[.., cols]` of element type `T`, as `[rows.len(), cols]`.
pub fn gather_rows<T: Numeric + CubePrimitive>(
    gpu: &Gpu,
    x: &super::Tensor,
    rows: &[usize],
) -> super::Tensor {
    let cols = x.shape()[x.shape().len() - 1];
    let out = gpu.empty::<T>(&[rows.len(), cols]);
    let rows: Vec<u32> = rows.iter().map(|&row| row as u32).collect();
    gather_kernel::launch::<T, CudaRuntime>(
        &gpu.client,
        CubeCount::Static(cols.div_ceil(UNITS as usize) as u32, rows.len() as u32, 1),
        CubeDim::new_1d(UNITS),
        x.clone().into_arg(),
        gpu.upload(&rows).into_arg(),
        out.clone().into_arg(),
        cols as u32,
    );
    out
}

/// The rows `rows` of a contiguous BF16 tensor `[.., cols]`, on the host.
///
/// # Errors
///
/// The device failed.
pub fn bf16_rows(gpu: &Gpu, x: &super::Tensor, rows: &[usize]) -> Result<Vec<f32>> {
    let bits: Vec<u16> = gpu.download(&gather_rows::<u16>(gpu, x, rows))?;
    let values = bits.into_iter().map(|bits| bf16::from_bits(bits).to_f32());
    Ok(values.collect())
}

#[cube(launch)]
fn gather_kernel<T: Numeric>(x: &Tensor<T>, rows: &Tensor<u32>, out: &mut Tensor<T>, cols: u32) {
    let col = CUBE_POS_X * comptime!(UNITS) + UNIT_POS_X;
    if col < cols {
        let row = rows[CUBE_POS_Y as usize];
        out[(CUBE_POS_Y * cols + col) as usize] = x[(row * cols + col) as usize];
    }
}
