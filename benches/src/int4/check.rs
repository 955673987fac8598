//! The quantizer's codes and the parts of a gradient against those of the host, bit for bit.

use anyhow::{Context, Result, bail, ensure};
use cubecl_kernels::{
    bit_splitting::BitSplit,
    hadamard::HadamardTransform,
    host::{self, HostValues},
    rounding::{Rounding, StochasticKey},
};
use half::bf16;

use super::Matrix;
use crate::gpu::{Gpu, Tensor};

/// Compares codes with what the host makes of the same matrix by the same step size.
///
/// # Errors
///
/// A byte differs.
pub fn quantizer(
    gpu: &Gpu,
    x: &Tensor,
    steps: &Tensor,
    transform: HadamardTransform,
    actual: &Matrix,
) -> Result<()> {
    let steps: Vec<f32> = gpu.download(steps)?;
    let shape = [x.shape()[0], x.shape()[1]];
    let host_x = floats(gpu, x)?;
    let (expected, _) = host::learned_step::quantize(&host_x, shape, steps[0], transform, None)?;
    let HostValues::U8(expected) = &expected.values else {
        bail!("{:?} on the host", expected.number);
    };
    let codes = actual.values.as_ref().context("no row-major copy")?;
    ensure!(gpu.download::<u8>(codes)? == **expected, "codes differ");
    Ok(())
}

/// Compares both parts and their scales.
///
/// # Errors
///
/// A byte or a scale differs.
pub fn split(
    gpu: &Gpu,
    x: &Tensor,
    key: StochasticKey,
    actual: &BitSplit<cubecl::cuda::CudaRuntime>,
) -> Result<()> {
    let shape = [x.shape()[0], x.shape()[1]];
    let expected = host::bit_split(&floats(gpu, x)?, shape, Rounding::Stochastic(key))?;
    ensure!(
        gpu.download::<u8>(&actual.parts)? == expected.parts,
        "parts differ"
    );
    ensure!(
        gpu.download::<f32>(&actual.scales)? == expected.scales,
        "scales of parts differ"
    );
    Ok(())
}

fn floats(gpu: &Gpu, x: &Tensor) -> Result<Vec<f32>> {
    let bits: Vec<u16> = gpu.download(x)?;
    let floats = bits.into_iter().map(|bits| bf16::from_bits(bits).to_f32());
    Ok(floats.collect())
}
