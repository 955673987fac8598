//! Our own product of BF16 matrices.

use anyhow::Result;
use cubecl::prelude::*;
use cubecl_kernels::{KernelError, gemm::gemm_float};
use half::bf16;

use super::check::{Accumulation, check_float};
use crate::{
    gpu::{Gpu, bf16_rows, normal_matrix},
    random::Random,
    results::Spread,
    timing::Sampling,
};

/// One row and one column of the sample that is checked lie in each stretch of this many.
const STRETCH: usize = 256;

/// The time of a product of square matrices, both with K along their rows, with BF16 output, checked on a sample first;
/// or why the device has no such kernel.
///
/// # Errors
///
/// A result that differs from its reference, or a device that failed.
pub fn measure(gpu: &Gpu, random: &mut Random, size: usize) -> Result<Result<Spread, String>> {
    let mut operand = || {
        let seed = random.below(1 << 24) as u32;
        normal_matrix::<bf16>(gpu, &[size, size], size, &[0], seed)
    };
    let (a, b) = (operand(), operand());
    let dtype = bf16::as_type_native_unchecked().storage_type();
    let product = || gemm_float(&gpu.client, &a, &b, None, dtype);
    let out = match product() {
        Err(KernelError::Unsupported { reason, .. }) => return Ok(Err(reason)),
        out => out?,
    };
    let rows = random.stratified(STRETCH, size);
    let cols = random.stratified(STRETCH, size);
    let (of_a, of_b) = (bf16_rows(gpu, &a, &rows)?, bf16_rows(gpu, &b, &cols)?);
    let of_out = bf16_rows(gpu, &out, &rows)?;
    for (i, &row) in rows.iter().enumerate() {
        for (j, &col) in cols.iter().enumerate() {
            let (a, b) = (&of_a[i * size..][..size], &of_b[j * size..][..size]);
            let factors = a.iter().copied().zip(b.iter().copied());
            let actual = of_out[i * size + col];
            check_float(actual, factors, Accumulation::Float, [row, col])?;
        }
    }
    drop(out);
    let launch = || {
        product()?;
        Ok(())
    };
    Ok(Ok(Sampling::SHORT.time(launch, || gpu.sync())?))
}
