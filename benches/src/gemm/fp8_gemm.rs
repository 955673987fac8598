//! Our own products of FP8 matrices.

use anyhow::{Context, Result};
use cubecl::prelude::*;
use cubecl_kernels::{
    KernelError,
    gemm::gemm_fp8,
    granularity::Granularity,
    number::Number,
    quantize::{QuantizeSpec, dequantize, quantize},
};
use half::bf16;

use super::check::{Accumulation, check_float};
use crate::{
    gpu::{Gpu, bf16_rows, gather_rows, normal_matrix},
    random::Random,
    results::{Kernel, Spread},
    timing::Sampling,
};

/// Our products, and the granularities of their operands.
pub const SCALINGS: [(Kernel, [Granularity; 2]); 3] = [
    (Kernel::HopperFp8Tensor, [Granularity::Tensor; 2]),
    (Kernel::HopperFp8Row, [Granularity::Token; 2]),
    // DeepSeek-V3's: groups of activations, blocks of weights.
    (
        Kernel::HopperFp8Block,
        [Granularity::Group(128), Granularity::Block(128)],
    ),
];

/// One row and one column of the sample that is checked lie in each stretch of this many.
const STRETCH: usize = 256;

/// The time of a product of square E4M3 matrices, both with K along their rows, with BF16 output, checked on a sample
/// first; or why the device has no such kernel.
///
/// # Errors
///
/// A result that differs from its reference, or a device that failed.
pub fn measure(
    gpu: &Gpu,
    random: &mut Random,
    size: usize,
    granularities: [Granularity; 2],
) -> Result<Result<Spread, String>> {
    let (f32, bf16) = (
        f32::as_type_native_unchecked().storage_type(),
        bf16::as_type_native_unchecked().storage_type(),
    );
    let mut operand = |granularity| -> Result<_> {
        let seed = random.below(1 << 24) as u32;
        let x = normal_matrix::<bf16>(gpu, &[size, size], size, &[0], seed);
        let spec = QuantizeSpec::new(Number::E4M3, granularity);
        let quantized = quantize(&gpu.client, &x, &spec)?;
        let operand = quantized.fp8_operand().context("no row-major copy")?;
        Ok((operand, dequantize(&gpu.client, &quantized, f32)?))
    };
    let [of_a, of_b] = granularities;
    let ((a, a_values), (b, b_values)) = (operand(of_a)?, operand(of_b)?);
    let product = || gemm_fp8(&gpu.client, &a, &b, None, bf16);
    let out = match product() {
        Err(KernelError::Unsupported { reason, .. }) => return Ok(Err(reason)),
        out => out?,
    };
    let rows = random.stratified(STRETCH, size);
    let cols = random.stratified(STRETCH, size);
    let a_rows: Vec<f32> = gpu.download(&gather_rows::<f32>(gpu, &a_values, &rows))?;
    let b_rows: Vec<f32> = gpu.download(&gather_rows::<f32>(gpu, &b_values, &cols))?;
    let of_out = bf16_rows(gpu, &out, &rows)?;
    for (i, &row) in rows.iter().enumerate() {
        for (j, &col) in cols.iter().enumerate() {
            let (a, b) = (&a_rows[i * size..][..size], &b_rows[j * size..][..size]);
            let factors = a.iter().copied().zip(b.iter().copied());
            let actual = of_out[i * size + col];
            check_float(actual, factors, Accumulation::Fp8, [row, col])?;
        }
    }
    drop((out, a_values, b_values));
    let launch = || {
        product()?;
        Ok(())
    };
    Ok(Ok(Sampling::SHORT.time(launch, || gpu.sync())?))
}
