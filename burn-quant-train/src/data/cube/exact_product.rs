//! Products of small numbers that BF16 holds exactly: of E4M3, E5M2, E2M1 and the like.
//!
//! An operand is dequantized to BF16 without those of its scales that would not be exact there, and these are
//! multiplied in after the product:
//!
//! | scales | in the operand | after the product |
//! | --- | --- | --- |
//! | E8M0, of any regions | all: a power of two changes no bit of a significand | |
//! | E4M3 under a scale of the matrix | those of regions: E2M1 and E4M3 have 6 bits together | that of the matrix |
//! | FP32 of the matrix, or of what the product does not sum over | | all |
//! | FP32 of stretches of the sum | cannot be exact: there is no such product | |
//!
//! The sums are in FP32. Where the device has no kernel for BF16, or that cannot read an operand, the same numbers are
//! multiplied as FP32: exact there too if the device reads FP32 as TF32, which has the precision of 11 bits.

use burn_backend::{FloatDType, Shape, TensorMetadata};
use burn_cubecl::{CubeRuntime, kernel::into_contiguous, tensor::CubeTensor};
use cubecl_kernels::{gemm, granularity::Granularity};

use super::{
    product::{burns_product, float_product},
    quantize::{dequantize, on_device},
    tensors::{Cube, handle},
};
use crate::data::{
    cast::cast_to,
    quantize::{Operand, Quantized, ScaleNumber, Scales},
};

/// Bits of a significand of BF16.
const BF16_PRECISION: u32 = 8;
/// Bits of a significand of E4M3.
const E4M3_PRECISION: u32 = 4;

/// The side of the product that an operand is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Left,
    Right,
}

/// An operand without the scales that are multiplied in after the product.
struct Factor<B: Cube<R>, R: CubeRuntime> {
    /// In the orientation in which it was quantized.
    matrix: Quantized<B>,
    transpose: bool,
    /// FP32, `[1, 1]`, `[rows of the product, 1]` or `[1, columns of the product]`.
    scales: Option<CubeTensor<R>>,
}

/// The product of the numbers that the operands stand for, plus a bias in FP32, `[columns]`, if that can be computed
/// from BF16 operands exactly, but for the sums.
pub(super) fn exact_product<B: Cube<R>, R: CubeRuntime>(
    left: &Operand<'_, B>,
    right: &Operand<'_, B>,
    bias: Option<&CubeTensor<R>>,
    dtype: FloatDType,
) -> Option<CubeTensor<R>> {
    let left = Factor::new(left, Side::Left)?;
    let right = Factor::new(right, Side::Right)?;
    let is_plain = left.scales.is_none() && right.scales.is_none() && bias.is_none();
    let of_product = match is_plain {
        true => dtype,
        false => FloatDType::F32,
    };
    let mut product = multiply::<B, R>(&left, &right, of_product);
    for scales in [left.scales, right.scales].into_iter().flatten() {
        product = B::float_mul(product, scales);
    }
    if let Some(bias) = bias {
        let row = Shape::new([1, bias.shape()[0]]);
        product = B::float_add(product, B::float_reshape(bias.clone(), row));
    }
    Some(cast_to::<B>(product, Some(dtype)))
}

fn multiply<B: Cube<R>, R: CubeRuntime>(
    left: &Factor<B, R>,
    right: &Factor<B, R>,
    dtype: FloatDType,
) -> CubeTensor<R> {
    if gemm::has_gemm_float(&on_device(&left.matrix).client) {
        let [left, right] = [left, right].map(|factor| factor.floats(FloatDType::BF16));
        let readable = |it: &CubeTensor<R>| gemm::gemm_float_reads(&it.client, &handle(it));
        if readable(&left) && readable(&right) {
            return float_product::<B, R>(left, right, dtype);
        }
        let [left, right] = [left, right].map(|it| cast_to::<B>(it, Some(FloatDType::F32)));
        return cast_to::<B>(burns_product::<B, R>(left, right), Some(dtype));
    }
    let [left, right] = [left, right].map(|factor| factor.floats(FloatDType::F32));
    cast_to::<B>(burns_product::<B, R>(left, right), Some(dtype))
}

impl<B: Cube<R>, R: CubeRuntime> Factor<B, R> {
    /// `None` where scales can neither stay nor go.
    fn new(operand: &Operand<'_, B>, side: Side) -> Option<Self> {
        let matrix = operand.matrix;
        let precision = matrix.format.number.precision();
        let own_precision = match matrix.format.scale {
            ScaleNumber::F32 | ScaleNumber::E8M0 => precision,
            ScaleNumber::E4M3 => precision + E4M3_PRECISION,
        };
        if own_precision > BF16_PRECISION {
            return None;
        }
        let (inner, outer) = match &matrix.scales {
            Scales::E8M0(_) => (matrix.scales.clone(), None),
            Scales::E4M3 {
                scales,
                tensor_scale,
            } => {
                let inner = Scales::E4M3 {
                    scales: scales.clone(),
                    tensor_scale: ones::<B, R>(tensor_scale),
                };
                (inner, Some(tensor_scale.clone()))
            }
            Scales::F32(scales) => {
                let leaves = leaves_the_sum(matrix.format.granularity, operand.transpose, side);
                leaves.then(|| (Scales::F32(ones::<B, R>(scales)), Some(scales.clone())))?
            }
        };
        let scales = outer.map(|scales| {
            let count = scales.shape().num_elements();
            let shape = match side {
                Side::Left => [count, 1],
                Side::Right => [1, count],
            };
            B::float_reshape(scales, Shape::new(shape))
        });
        Some(Self {
            matrix: Quantized {
                scales: inner,
                ..matrix.clone()
            },
            transpose: operand.transpose,
            scales,
        })
    }

    /// The matrix as the product takes it, in this dtype.
    fn floats(&self, dtype: FloatDType) -> CubeTensor<R> {
        let floats = dequantize(&self.matrix, dtype);
        match self.transpose {
            true => B::float_swap_dims(floats, 0, 1),
            false => floats,
        }
    }
}

/// True if the product sums over no two scales of an operand.
fn leaves_the_sum(granularity: Granularity, transpose: bool, side: Side) -> bool {
    // True if the scales are of rows of the operand as the product sees it.
    let of_rows = match granularity {
        Granularity::Tensor => return true,
        Granularity::Token => !transpose,
        Granularity::Channel => transpose,
        Granularity::Block(_) | Granularity::Group(_) => return false,
    };
    of_rows == (side == Side::Left)
}

/// Scales of 1 in the place of these.
fn ones<B: Cube<R>, R: CubeRuntime>(scales: &CubeTensor<R>) -> CubeTensor<R> {
    let ones = B::float_ones(scales.shape(), &scales.device, FloatDType::F32);
    // Kernels take scales without padding between rows, and Burn pads those of tensors that it allocates on CUDA.
    into_contiguous(ones)
}
