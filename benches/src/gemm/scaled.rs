//! Our own products of FP8 matrices, and of INT8 matrices whose scales cover all of K.

use anyhow::Result;
use cubecl::{cuda::CudaRuntime, ir::StorageType, prelude::*};
use cubecl_kernels::{
    KernelError,
    gemm::{Accumulation as Fp8Accumulation, Strategy, gemm, gemm_fp8},
    granularity::Granularity,
    number::Number,
    quantize::{QuantizeSpec, Quantized, dequantize, quantize},
};
use half::bf16;

use super::check::{Accumulation, check_float};
use crate::{
    gpu::{Gpu, Tensor, bf16_rows, gather_rows, normal_matrix},
    random::Random,
    results::{Kernel, Spread},
    timing::Sampling,
};

/// Numbers of a product's operands, and how each shares its scales.
#[derive(Debug, Clone, Copy)]
pub struct Scaling {
    number: Number,
    granularities: [Granularity; 2],
    accumulation: Fp8Accumulation,
}

impl Scaling {
    const fn new(number: Number, granularities: [Granularity; 2]) -> Self {
        Self {
            number,
            granularities,
            accumulation: Fp8Accumulation::Promoted,
        }
    }

    const fn fast(self) -> Self {
        Self {
            accumulation: Fp8Accumulation::Fast,
            ..self
        }
    }

    /// False for FP8.
    pub fn is_int8(self) -> bool {
        self.number == Number::Int8
    }

    fn product(
        self,
        gpu: &Gpu,
        [a, b]: [&Quantized<CudaRuntime>; 2],
        out: StorageType,
    ) -> Result<Tensor, KernelError> {
        if self.is_int8() {
            let (a, b) = (a.operand()?, b.operand()?);
            return gemm(&gpu.client, &a, &b, None, None, out, Strategy::Hopper);
        }
        let operand = |x: &Quantized<_>| x.fp8_operand().expect("a row-major copy");
        let (a, b) = (operand(a), operand(b));
        gemm_fp8(&gpu.client, &a, &b, None, self.accumulation, out)
    }
}

/// Our products.
pub const SCALINGS: [(Kernel, Scaling); 7] = [
    (
        Kernel::HopperInt8Tensor,
        Scaling::new(Number::Int8, [Granularity::Tensor; 2]),
    ),
    (
        Kernel::HopperInt8Row,
        Scaling::new(Number::Int8, [Granularity::Token; 2]),
    ),
    (
        Kernel::HopperFp8Tensor,
        Scaling::new(Number::E4M3, [Granularity::Tensor; 2]),
    ),
    (
        Kernel::HopperFp8TensorFast,
        Scaling::new(Number::E4M3, [Granularity::Tensor; 2]).fast(),
    ),
    (
        Kernel::HopperFp8Row,
        Scaling::new(Number::E4M3, [Granularity::Token; 2]),
    ),
    (
        Kernel::HopperFp8RowFast,
        Scaling::new(Number::E4M3, [Granularity::Token; 2]).fast(),
    ),
    // DeepSeek-V3's: groups of activations, blocks of weights.
    (
        Kernel::HopperFp8Block,
        Scaling::new(
            Number::E4M3,
            [Granularity::Group(128), Granularity::Block(128)],
        ),
    ),
];

/// One row and one column of the sample that is checked lie in each stretch of this many.
const STRETCH: usize = 256;

/// The time of a product of square matrices, both with K along their rows, with BF16 output, checked on a sample first;
/// or why the device has no such kernel.
///
/// # Errors
///
/// A result that differs from its reference, or a device that failed.
pub fn measure(
    gpu: &Gpu,
    random: &mut Random,
    size: usize,
    scaling: Scaling,
) -> Result<Result<Spread, String>> {
    let (f32, bf16) = (
        f32::as_type_native_unchecked().storage_type(),
        bf16::as_type_native_unchecked().storage_type(),
    );
    let mut operand = |granularity| -> Result<_> {
        let seed = random.below(1 << 24) as u32;
        let x = normal_matrix::<bf16>(gpu, &[size, size], size, &[0], seed);
        let spec = QuantizeSpec::new(scaling.number, granularity);
        let quantized = quantize(&gpu.client, &x, &spec)?;
        let values = dequantize(&gpu.client, &quantized, f32)?;
        Ok((quantized, values))
    };
    let [of_a, of_b] = scaling.granularities;
    let ((a, a_values), (b, b_values)) = (operand(of_a)?, operand(of_b)?);
    let product = || scaling.product(gpu, [&a, &b], bf16);
    let out = match product() {
        Err(KernelError::Unsupported { reason, .. }) => return Ok(Err(reason)),
        out => out?,
    };
    let accumulation = if scaling.is_int8() {
        Accumulation::Float
    } else {
        Accumulation::Fp8
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
            check_float(actual, factors, accumulation, [row, col])?;
        }
    }
    drop((out, a_values, b_values));
    let launch = || {
        product()?;
        Ok(())
    };
    Ok(Ok(Sampling::SHORT.time(launch, || gpu.sync())?))
}
