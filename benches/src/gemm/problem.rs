//! Products to measure, and random operands for them.

use std::fmt;

use anyhow::{Result, ensure};
use cubecl::cuda::CudaRuntime;
use cubecl_kernels::{
    fallback::{FallbackResidual, quantize_fallback},
    granularity::Granularity,
    layout::Layout,
    quantize::{QuantizeSpec, Quantized, quantize},
};

use crate::{
    gpu::{Gpu, OUTLIER, Tensor, normal_matrix},
    random::Random,
    results::{Fallback, GemmSpeed, Kernel, LayerProduct, Placement, Product, Spread},
};

/// A product `C[M, N] = A[M, K] B[N, K]^T`, or a batch of them.
#[derive(Debug, Clone, Copy)]
pub struct Problem {
    pub batch: usize,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    /// Rows and columns of the block of a scale.
    pub block: usize,
    pub fallback: Option<Fallback>,
    pub layer: Option<LayerProduct>,
}

/// Quantized operands, row-major, on the device.
pub struct Operands {
    pub a: Quantized<CudaRuntime>,
    pub residual: Option<FallbackResidual<CudaRuntime>>,
    pub b: Quantized<CudaRuntime>,
}

impl Problem {
    /// One product in blocks of 128, without fallback.
    pub fn new(m: usize, n: usize, k: usize) -> Self {
        Self {
            batch: 1,
            m,
            n,
            k,
            block: 128,
            fallback: None,
            layer: None,
        }
    }

    /// One of a linear layer's products.
    pub fn of_layer(layer: LayerProduct) -> Self {
        let LayerProduct {
            tokens,
            inputs,
            outputs,
            product,
        } = layer;
        let (m, n, k) = match product {
            Product::Y => (tokens, outputs, inputs),
            Product::Dx => (tokens, inputs, outputs),
            Product::Dw => (inputs, outputs, tokens),
        };
        Self {
            layer: Some(layer),
            ..Self::new(m, n, k)
        }
    }

    /// True if the output is FP32, as gradients of weights are, and not BF16.
    pub fn output_is_f32(&self) -> bool {
        self.layer.is_some_and(|layer| layer.product == Product::Dw)
    }

    /// Fresh random operands. Blocks of A that shall fall back hold an outlier.
    pub fn operands(&self, gpu: &Gpu, random: &mut Random) -> Result<Operands> {
        let fallen = self.fallen(random);
        let x = self.matrix(gpu, random, self.m, &fallen);
        let (a, residual) = match self.fallback {
            None => (self.quantized(gpu, &x)?, None),
            Some(_) => {
                let threshold = gpu.upload(&[0.5 * OUTLIER]);
                let counts = gpu.upload_as(&[0i32; 2], &[1, 2]);
                let layout = Layout::RowMajor;
                let quantized =
                    quantize_fallback(&gpu.client, &x, self.block, layout, &threshold, 0, &counts)?;
                let counted: Vec<i32> = gpu.download(&counts)?;
                let fallen = self.fallen_blocks();
                ensure!(
                    counted[0] as usize == fallen,
                    "{} blocks fell back instead of {fallen}",
                    counted[0]
                );
                (quantized.base, Some(quantized.residual))
            }
        };
        drop(x);
        let x = self.matrix(gpu, random, self.n, &vec![0; self.blocks(self.n)]);
        let b = self.quantized(gpu, &x)?;
        Ok(Operands { a, residual, b })
    }

    /// Blocks of a matrix with K columns, the rows of a batch one below the other.
    fn blocks(&self, rows: usize) -> usize {
        (self.batch * rows).div_ceil(self.block) * self.k.div_ceil(self.block)
    }

    /// How many blocks of A fall back.
    fn fallen_blocks(&self) -> usize {
        let rate = self.fallback.map_or(0.0, |fallback| fallback.rate);
        (rate * self.blocks(self.m) as f64).round() as usize
    }

    /// For each block of A, 1 if it falls back.
    fn fallen(&self, random: &mut Random) -> Vec<u32> {
        let (count, blocks) = (self.fallen_blocks(), self.blocks(self.m));
        let mut fallen = vec![0; blocks];
        match self.fallback.map(|fallback| fallback.placement) {
            None => {}
            Some(Placement::Sequential) => fallen[..count].fill(1),
            Some(Placement::Scattered) => {
                for index in random.subset(count, blocks) {
                    fallen[index] = 1;
                }
            }
        }
        fallen
    }

    fn matrix(&self, gpu: &Gpu, random: &mut Random, rows: usize, outliers: &[u32]) -> Tensor {
        let seed = random.below(1 << 24) as u32;
        let shape = [self.batch, rows, self.k];
        let shape = if self.batch == 1 { &shape[1..] } else { &shape };
        normal_matrix::<f32>(gpu, shape, self.block, outliers, seed)
    }

    fn quantized(&self, gpu: &Gpu, x: &Tensor) -> Result<Quantized<CudaRuntime>> {
        let spec = QuantizeSpec::int8(Granularity::Block(self.block));
        Ok(quantize(&gpu.client, x, &spec)?)
    }

    /// The line of a kernel that computed it.
    pub fn timed(&self, kernel: Kernel, time: Spread) -> GemmSpeed {
        GemmSpeed {
            kernel,
            batch: self.batch,
            m: self.m,
            n: self.n,
            k: self.k,
            block: Some(self.block),
            fallback: self.fallback,
            layer: self.layer,
            time: Some(time),
            unavailable: None,
        }
    }

    /// The line of a kernel that cannot compute it.
    pub fn unavailable(&self, kernel: Kernel, reason: String) -> GemmSpeed {
        GemmSpeed {
            time: None,
            unavailable: Some(reason),
            ..self.timed(kernel, Spread::of(vec![0.0]))
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.batch > 1 {
            write!(f, "{} of ", self.batch)?;
        }
        write!(
            f,
            "{} x {} x {}, block {}",
            self.m, self.n, self.k, self.block
        )?;
        if let Some(Fallback { rate, placement }) = self.fallback {
            write!(f, ", fallback {rate} {placement:?}")?;
        }
        Ok(())
    }
}
