//! Burn's own product of BF16 matrices.

use anyhow::{Context, Result, ensure};
use burn::{
    backend::{Cuda, cuda::CudaDevice},
    tensor::{DType, Tensor, TensorData, backend::Backend, bf16},
};

use super::check::{Accumulation, check_float};
use crate::{random::Random, results::Spread, timing::Sampling};

/// Rows and columns of the sample that is checked.
const SAMPLE: usize = 16;

/// The time of a product of square row-major matrices with BF16 output, checked on a sample first.
pub fn measure(random: &mut Random, size: usize) -> Result<Spread> {
    let device = CudaDevice::default();
    let mut operand = || {
        let mut host = random.normals(size * size, 1.0);
        let data = TensorData::new(host.clone(), [size, size]);
        let tensor = Tensor::<Cuda, 2>::from_data(data, &device).cast(DType::BF16);
        for x in &mut host {
            *x = bf16::from_f32(*x).to_f32();
        }
        (host, tensor)
    };
    let (host_a, a) = operand();
    let (host_b, b) = operand();
    let product = a.clone().matmul(b.clone());
    ensure!(product.dtype() == DType::BF16, "the product is not in BF16");
    for _ in 0..SAMPLE {
        let row = random.below(size);
        let of_row = product.clone().slice([row..row + 1, 0..size]);
        let of_row = of_row.into_data().convert::<f32>();
        let of_row = of_row
            .as_slice::<f32>()
            .ok()
            .context("a row of FP32 numbers")?;
        for _ in 0..SAMPLE {
            let col = random.below(size);
            let factors =
                (0..size).map(|depth| (host_a[row * size + depth], host_b[depth * size + col]));
            check_float(of_row[col], factors, Accumulation::Float, [row, col])?;
        }
    }
    drop(product);
    let launch = || {
        let _ = a.clone().matmul(b.clone());
        Ok(())
    };
    Sampling::SHORT.time(launch, || <Cuda>::sync(&device).context("the GPU failed"))
}
