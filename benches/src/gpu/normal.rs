//! Matrices of normal numbers, drawn on the device.

use cubecl::{cuda::CudaRuntime, prelude::*};

use super::Gpu;

/// The outlier of a block: far above all normal numbers.
pub const OUTLIER: f32 = 100.0;

const UNITS: u32 = 256;

/// A tensor of standard normal numbers. In the blocks of the matrix `[.., cols]` whose entry in `outliers`, row-major,
/// is 1, the first element is [`OUTLIER`].
pub fn normal_matrix<F: Float + CubePrimitive>(
    gpu: &Gpu,
    shape: &[usize],
    block: usize,
    outliers: &[u32],
    seed: u32,
) -> super::Tensor {
    let out = gpu.empty::<F>(shape);
    let elements = shape.iter().product::<usize>();
    let cols = shape[shape.len() - 1];
    normal_kernel::launch::<F, CudaRuntime>(
        &gpu.client,
        CubeCount::Static(elements.div_ceil(UNITS as usize) as u32, 1, 1),
        CubeDim::new_1d(UNITS),
        out.clone().into_arg(),
        gpu.upload(outliers).into_arg(),
        elements as u32,
        cols as u32,
        block as u32,
        cols.div_ceil(block) as u32,
        seed,
    );
    out
}

/// The Box-Muller transform of two hashes of the position.
#[cube(launch)]
// An `if` within an `if` is what a kernel does: its conditions are not short-circuited.
#[allow(clippy::collapsible_if)]
fn normal_kernel<F: Float>(
    out: &mut Tensor<F>,
    outliers: &Tensor<u32>,
    elements: u32,
    cols: u32,
    block: u32,
    blocks_across: u32,
    seed: u32,
) {
    let position = CUBE_POS_X * comptime!(UNITS) + UNIT_POS_X;
    if position < elements {
        let hash_0 = mix(position ^ mix(seed));
        let hash_1 = mix(hash_0 + 0x9E37_79B9u32);
        let scale = comptime!(1.0f32 / (1u32 << 24) as f32);
        let first = (f32::cast_from(hash_0 >> 8u32) + 1.0f32) * scale;
        let second = f32::cast_from(hash_1 >> 8u32) * scale;
        let radius = f32::sqrt(-2.0f32 * f32::ln(first));
        let mut value = radius * f32::cos(second * comptime!(std::f32::consts::TAU));
        let (row, col) = (position / cols, position % cols);
        let (block_row, block_col) = (row / block, col / block);
        if row == block_row * block && col == block_col * block {
            if outliers[(block_row * blocks_across + block_col) as usize] == 1u32 {
                value = f32::new(OUTLIER);
            }
        }
        out[position as usize] = F::cast_from(value);
    }
}

/// A bijection of 32 bits in which each bit depends on all others (the finalizer of MurmurHash3).
#[cube]
fn mix(x: u32) -> u32 {
    let a = (x ^ (x >> 16u32)) * 0x85EB_CA6Bu32;
    let b = (a ^ (a >> 13u32)) * 0xC2B2_AE35u32;
    b ^ (b >> 16u32)
}
