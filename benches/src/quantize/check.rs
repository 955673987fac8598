//! Quantized tensors against those of the host, bit for bit.

use anyhow::{Context, Result, bail, ensure};
use cubecl::{cuda::CudaRuntime, prelude::*};
use cubecl_kernels::{
    granularity::Granularity,
    host::{self, HostFallbackQuantized, HostQuantized, HostScales, HostValues},
    quantize::{QuantizeSpec, Quantized},
    rounding::{Rounding, StochasticKey},
};
use half::bf16;

use super::{
    BLOCK,
    launch::{GROUPS, Launched},
};
use crate::{
    gpu::{Gpu, OUTLIER, Tensor},
    results::Operand,
};

/// Compares all that was written with what the host makes of the same input.
///
/// # Errors
///
/// A value, a scale, a flag or a residual differs, or not `fallen` blocks fell back.
pub fn check(
    gpu: &Gpu,
    operand: Operand,
    x: &Tensor,
    launched: &Launched,
    key: StochasticKey,
    fallen: usize,
) -> Result<()> {
    let shape = [x.shape()[0], x.shape()[1]];
    let host_x = floats(gpu, x)?;
    let quantize = |rounding| {
        let spec = QuantizeSpec::int8(Granularity::Block(BLOCK)).with_rounding(rounding);
        host::quantize(&host_x, shape, &spec)
    };
    let stochastic = Rounding::Stochastic(key);
    match operand {
        Operand::X => {
            let expected = host::quantize_fallback(&host_x, shape, BLOCK, 0.5 * OUTLIER)?;
            ensure!(
                expected.fallback_blocks == fallen,
                "{} blocks fall back on the host instead of {fallen}",
                expected.fallback_blocks
            );
            compare(gpu, &launched.values, &expected.base)?;
            let residual = launched.residual.as_ref().context("there is no residual")?;
            compare_residual(gpu, residual, &expected, shape)?;
            let saved = launched.saved.as_ref().context("nothing is saved")?;
            ensure!(
                saved.transposed.is_some(),
                "the saved copy is not transposed"
            );
            compare(gpu, saved, &quantize(stochastic)?)
        }
        Operand::Dy => {
            ensure!(
                launched.values.values.is_some() && launched.values.transposed.is_some(),
                "a layout is missing"
            );
            compare(gpu, &launched.values, &quantize(stochastic)?)
        }
        Operand::W => {
            ensure!(launched.values.values.is_some(), "the values are missing");
            compare(gpu, &launched.values, &quantize(Rounding::Nearest)?)
        }
        Operand::Groups => {
            let [rows, cols] = shape;
            let saved = launched.saved.as_ref().context("there is one copy")?;
            compare_groups(gpu, &launched.values, &host_x, shape)?;
            compare_groups(gpu, saved, &transpose(&host_x, rows, cols), [cols, rows])
                .context("of the transpose")
        }
    }
}

/// Codes and scales of groups.
fn compare_groups(
    gpu: &Gpu,
    actual: &Quantized<CudaRuntime>,
    x: &[f32],
    shape: [usize; 2],
) -> Result<()> {
    let expected = host::quantize(x, shape, &GROUPS)?;
    let (HostValues::U8(expected_codes), HostScales::E8M0(expected_scales)) =
        (&expected.values, &expected.scales)
    else {
        bail!("{:?} on the host", expected.number);
    };
    let codes: Vec<u8> = gpu.download(actual.values.as_ref().context("there are no values")?)?;
    ensure!(codes == **expected_codes, "codes differ");
    let scales: Vec<u8> = gpu.download(&actual.scales)?;
    ensure!(scales == **expected_scales, "scales differ");
    Ok(())
}

/// All copies and the scales.
fn compare(gpu: &Gpu, actual: &Quantized<CudaRuntime>, expected: &HostQuantized<'_>) -> Result<()> {
    let (expected_values, expected_scales) = int8(expected)?;
    let scales: Vec<f32> = gpu.download(&actual.scales)?;
    ensure!(scales == expected_scales, "scales differ");
    let (rows, cols) = (actual.shape.rows, actual.shape.cols);
    if let Some(values) = &actual.values {
        let values: Vec<i8> = gpu.download(values)?;
        ensure!(values == expected_values, "row-major values differ");
    }
    if let Some(transposed) = &actual.transposed {
        let transposed: Vec<i8> = gpu.download(transposed)?;
        ensure!(
            transposed == transpose(expected_values, rows, cols),
            "transposed values differ"
        );
    }
    Ok(())
}

/// Values and scales of INT8 on the host.
fn int8<'a>(matrix: &'a HostQuantized<'_>) -> Result<(&'a [i8], &'a [f32])> {
    let (HostValues::I8(values), HostScales::F32(scales)) = (&matrix.values, &matrix.scales) else {
        bail!("{:?} on the host", matrix.number);
    };
    Ok((values, scales))
}

/// Residual scales and flags, and the values of the blocks that fell back.
fn compare_residual(
    gpu: &Gpu,
    actual: &cubecl_kernels::fallback::FallbackResidual<CudaRuntime>,
    expected: &HostFallbackQuantized,
    [_, cols]: [usize; 2],
) -> Result<()> {
    let (expected_values, expected_scales) = int8(&expected.residual)?;
    let scales: Vec<f32> = gpu.download(&actual.scales)?;
    ensure!(scales == expected_scales, "residual scales differ");
    let flags: Vec<u32> = gpu.download(&actual.flags)?;
    let flagged = flags.iter().filter(|&&flag| flag == 1).count();
    ensure!(
        flagged == expected.fallback_blocks && flags.iter().all(|&flag| flag <= 1),
        "{flagged} blocks are flagged instead of {}",
        expected.fallback_blocks
    );
    let values: Vec<i8> = gpu.download(&actual.values)?;
    let across = cols.div_ceil(BLOCK);
    for (row, (actual, expected)) in values
        .chunks(cols)
        .zip(expected_values.chunks(cols))
        .enumerate()
    {
        let flags = &flags[row / BLOCK * across..][..across];
        let parts = actual.chunks(BLOCK).zip(expected.chunks(BLOCK));
        for ((actual, expected), flag) in parts.zip(flags) {
            ensure!(
                *flag == 0 || actual == expected,
                "residual values of row {row} differ"
            );
        }
    }
    Ok(())
}

/// `[rows, cols]` to `[cols, rows]`, in squares that fit the cache.
fn transpose<T: Copy + Default>(x: &[T], rows: usize, cols: usize) -> Vec<T> {
    const SQUARE: usize = 64;
    let mut out = vec![T::default(); x.len()];
    for first_row in (0..rows).step_by(SQUARE) {
        for first_col in (0..cols).step_by(SQUARE) {
            for row in first_row..(first_row + SQUARE).min(rows) {
                for col in first_col..(first_col + SQUARE).min(cols) {
                    out[col * rows + row] = x[row * cols + col];
                }
            }
        }
    }
    out
}

/// The elements of a tensor of BF16 or FP32.
fn floats(gpu: &Gpu, x: &Tensor) -> Result<Vec<f32>> {
    if x.dtype == f32::as_type_native_unchecked().storage_type() {
        return gpu.download(x);
    }
    let bits: Vec<u16> = gpu.download(x)?;
    Ok(bits
        .into_iter()
        .map(|bits| bf16::from_bits(bits).to_f32())
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transposing() {
        let (rows, cols) = (70, 130);
        let x: Vec<i8> = (0..rows * cols).map(|index| (index % 101) as i8).collect();
        let out = transpose(&x, rows, cols);
        assert!(
            (0..rows).all(|row| (0..cols).all(|col| out[col * rows + row] == x[row * cols + col]))
        );
    }
}
