//! The rate of a copy on the device: what a kernel that reads and writes can reach.

use anyhow::{Result, ensure};
use cubecl::{cuda::CudaRuntime, prelude::*};

use super::{Gpu, gather_rows, normal_matrix};
use crate::{results::Spread, timing::Sampling};

const UNITS: u32 = 256;
/// Elements that a unit moves at once, 16 bytes.
const WIDTH: usize = 4;
/// Vectors of a unit, all loaded before the first is stored.
const VECTORS_OF_UNIT: usize = 4;
/// Elements of a cube.
const CUBE: usize = UNITS as usize * WIDTH * VECTORS_OF_UNIT;

/// Cubes of which the result is compared.
const CHECKED: usize = 1024;

/// Bytes that a copy too large for the caches moves.
pub const LARGE_COPY: usize = 1 << 31;

/// Bytes that a copy moves, read and written, and its time: at least `bytes`, rounded up to whole cubes.
///
/// # Errors
///
/// The device failed, or copied something else.
pub fn copy(gpu: &Gpu, bytes: usize, sampling: Sampling) -> Result<(usize, Spread)> {
    let cubes = bytes.div_ceil(2 * size_of::<f32>() * CUBE);
    let mut random = gpu.random();
    let shape = [cubes, CUBE];
    let seed = random.below(1 << 24) as u32;
    let from = normal_matrix::<f32>(gpu, &shape, CUBE, &vec![0; cubes], seed);
    let to = gpu.empty::<f32>(&shape);
    let launch = || {
        // SAFETY: the cubes cover both tensors exactly.
        #[allow(unsafe_code)]
        unsafe {
            copy_kernel::launch_unchecked::<CudaRuntime>(
                &gpu.client,
                CubeCount::Static(cubes as u32, 1, 1),
                CubeDim::new_1d(UNITS),
                WIDTH,
                from.clone().into_arg(),
                to.clone().into_arg(),
            );
        }
        Ok(())
    };
    let time = sampling.time(launch, || gpu.sync())?;
    let rows = random.stratified(cubes.div_ceil(CHECKED), cubes);
    let [expected, actual] = [&from, &to].map(|tensor| {
        let rows = gather_rows::<f32>(gpu, tensor, &rows);
        gpu.download::<f32>(&rows)
    });
    ensure!(expected? == actual?, "the copy kernel does not copy");
    Ok((2 * size_of::<f32>() * cubes * CUBE, time))
}

#[cube(launch_unchecked)]
fn copy_kernel<N: Size>(from: &Tensor<Vector<f32, N>>, to: &mut Tensor<Vector<f32, N>>) {
    let first =
        CUBE_POS_X as usize * comptime!(UNITS as usize * VECTORS_OF_UNIT) + UNIT_POS_X as usize;
    let mut held = Array::<Vector<f32, N>>::new(VECTORS_OF_UNIT);
    #[unroll]
    for slot in 0..VECTORS_OF_UNIT {
        held[slot] = from[first + slot * comptime!(UNITS as usize)];
    }
    #[unroll]
    for slot in 0..VECTORS_OF_UNIT {
        to[first + slot * comptime!(UNITS as usize)] = held[slot];
    }
}
