//! The rows of `qt-bench gemm`.

use serde::{Deserialize, Serialize};

use super::Spread;

/// A way to compute a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kernel {
    /// Ours, in CubeCL, on `mma` instructions.
    TensorCore,
    /// Ours, on `wgmma` instructions.
    Hopper,
    /// Ours, of BF16 matrices, on `wgmma` instructions.
    HopperBf16,
    /// Ours, of INT8 matrices with a scale each.
    HopperInt8Tensor,
    /// The same with a scale for each row of A and of B.
    HopperInt8Row,
    /// Ours, of E4M3 matrices with a scale each.
    HopperFp8Tensor,
    /// The same with fast accumulation.
    HopperFp8TensorFast,
    /// Ours, of E4M3 matrices with a scale for each row of A and of B.
    HopperFp8Row,
    /// The same with fast accumulation.
    HopperFp8RowFast,
    /// Ours, of E4M3 matrices with a scale for each 1 x 128 of A and 128 x 128 of B.
    HopperFp8Block,
    /// Burn's own product of BF16 matrices.
    BurnBf16,
    /// PyTorch's product of BF16 matrices.
    CublasBf16,
    /// PyTorch's product of E4M3 matrices with a scale each, with fast accumulation.
    CublasFp8,
    /// PyTorch's product of INT8 matrices without scales.
    CublasInt8,
    /// A Triton kernel with a scale for each 128 x 128 block.
    TritonInt8,
}

impl Kernel {
    /// The name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::TensorCore => "ours, tensor cores",
            Self::Hopper => "ours, Hopper",
            Self::HopperBf16 => "ours, Hopper BF16",
            Self::HopperInt8Tensor => "ours, Hopper INT8, tensors",
            Self::HopperInt8Row => "ours, Hopper INT8, rows",
            Self::HopperFp8Tensor => "ours, Hopper FP8, tensors",
            Self::HopperFp8TensorFast => "ours, Hopper FP8, tensors, fast",
            Self::HopperFp8Row => "ours, Hopper FP8, rows",
            Self::HopperFp8RowFast => "ours, Hopper FP8, rows, fast",
            Self::HopperFp8Block => "ours, Hopper FP8, blocks",
            Self::BurnBf16 => "Burn BF16",
            Self::CublasBf16 => "cuBLAS BF16",
            Self::CublasFp8 => "cuBLAS FP8, tensors",
            Self::CublasInt8 => "cuBLAS INT8, no scales",
            Self::TritonInt8 => "Triton INT8",
        }
    }
}

/// Where the blocks with a fallback lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Placement {
    /// Anywhere.
    Scattered,
    /// One after another, row of blocks by row of blocks: the first tiles have all the work (fallback-int8, figure 8c).
    Sequential,
}

/// The blocks of A that have a residual.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Fallback {
    /// Their share.
    pub rate: f64,
    /// Where they lie.
    pub placement: Placement,
}

/// One of a linear layer's three products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Product {
    /// The output, BF16.
    Y,
    /// The gradient of the input, BF16.
    #[serde(rename = "dX")]
    Dx,
    /// The gradient of the weight, FP32.
    #[serde(rename = "dW")]
    Dw,
}

impl Product {
    /// All three.
    pub const ALL: [Self; 3] = [Self::Y, Self::Dx, Self::Dw];
}

/// The layer that a product belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerProduct {
    /// Rows of the input.
    pub tokens: usize,
    /// Features of the input.
    pub inputs: usize,
    /// Features of the output.
    pub outputs: usize,
    /// Which product.
    pub product: Product,
}

/// The speed of one product `C[M, N] = A[M, K] B[N, K]^T`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GemmSpeed {
    /// The kernel that computed it.
    pub kernel: Kernel,
    /// Number of products at once.
    pub batch: usize,
    /// Rows of A and C.
    pub m: usize,
    /// Rows of B, columns of C.
    pub n: usize,
    /// Columns of A and B.
    pub k: usize,
    /// Rows and columns of the block of a scale; none where there are no such scales.
    pub block: Option<usize>,
    /// The fallback; none for a plain product.
    pub fallback: Option<Fallback>,
    /// The layer; none for a product that stands for itself.
    pub layer: Option<LayerProduct>,
    /// The time of a product; none where the kernel cannot compute it.
    pub time: Option<Spread>,
    /// Why there is no time.
    pub unavailable: Option<String>,
}

impl GemmSpeed {
    /// Arithmetic operations of the plain product over the time, in 10^12 a second; residual products do not count.
    pub fn tera_ops(&self) -> Option<f64> {
        let operations = 2.0 * self.batch as f64 * self.m as f64 * self.n as f64 * self.k as f64;
        self.time.map(|time| operations / time.median_ms / 1e9)
    }

    /// Batch, M, N, K.
    pub fn shape(&self) -> [usize; 4] {
        [self.batch, self.m, self.n, self.k]
    }

    /// The shape with M, N and K at the nearest multiples of 128.
    pub fn aligned_shape(&self) -> [usize; 4] {
        let nearest = |size: usize| ((size + 64) / 128 * 128).max(128);
        [
            self.batch,
            nearest(self.m),
            nearest(self.n),
            nearest(self.k),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_and_neighbours() {
        let speed = GemmSpeed {
            kernel: Kernel::TensorCore,
            batch: 2,
            m: 4095,
            n: 4097,
            k: 1000,
            block: Some(128),
            fallback: None,
            layer: None,
            time: Some(Spread::of(vec![1.0])),
            unavailable: None,
        };
        assert_eq!(speed.aligned_shape(), [2, 4096, 4096, 1024]);
        let expected = 4.0 * 4095.0 * 4097.0 * 1000.0 / 1e9;
        assert!((speed.tera_ops().unwrap() - expected).abs() < 1e-9);
    }
}
