//! Products of FP8 numbers on tensor cores.

use burn_backend::{DType, FloatDType};
use burn_cubecl::{CubeRuntime, kernel::into_contiguous, tensor::CubeTensor};
use cubecl::{client::ComputeClient, ir::StorageType, std::tensor::TensorHandle};
use cubecl_kernels::{
    KernelError,
    gemm::{self, Fp8Operand},
    number::Number,
    transpose::transpose_int8,
};

use super::{
    quantize::{on_device, unwrap},
    tensors::{Cube, handle, tensor},
};
use crate::data::{kernels::checked, quantize::Operand};

/// The product plus a bias in FP32, `[columns]`, if both operands are FP8 and the device has a kernel for numbers, scales
/// and strides.
pub(super) fn fp8_product<B: Cube<R>, R: CubeRuntime>(
    left: Operand<'_, B>,
    right: Operand<'_, B>,
    bias: Option<&CubeTensor<R>>,
    dtype: FloatDType,
) -> Option<CubeTensor<R>> {
    let like = on_device(left.matrix);
    let is_fp8 = |operand: &Operand<'_, B>| match operand.matrix.format.number {
        Number::E4M3 | Number::E5M2 => true,
        Number::Int8
        | Number::Int10
        | Number::Int4
        | Number::E2M1
        | Number::E3M0
        | Number::DynamicExponent(_)
        | Number::Square => false,
    };
    if !(is_fp8(&left) && is_fp8(&right) && gemm::has_gemm_fp8(&like.client)) {
        return None;
    }
    // The kernel sums along the columns of the left operand and of the right one's transpose.
    let [a, b] = [left, right.t()].map(|operand| along_columns(&like.client, operand));
    let bias = bias.map(|bias| handle(&into_contiguous(bias.clone())));
    let out = DType::from(dtype);
    match gemm::gemm_fp8(&like.client, &a, &b, bias.as_ref(), out.into()) {
        Ok(product) => Some(tensor(like, product, out)),
        Err(KernelError::Unsupported { .. }) => None,
        Err(error) => panic!("{error}"),
    }
}

/// An operand whose columns the product sums over, in the layout in which these are neighbours. A copy that is missing is
/// made for the time of the product.
fn along_columns<B: Cube<R>, R: CubeRuntime>(
    client: &ComputeClient<R>,
    operand: Operand<'_, B>,
) -> Fp8Operand<R> {
    let mut matrix = unwrap(operand.matrix);
    let flipped = |values: &TensorHandle<R>| flipped(client, values);
    let operand = match operand.transpose {
        false => {
            let other = &matrix.transposed;
            matrix.values = matrix.values.or_else(|| other.as_ref().map(flipped));
            matrix.fp8_operand()
        }
        true => {
            let other = &matrix.values;
            matrix.transposed = matrix.transposed.or_else(|| other.as_ref().map(flipped));
            matrix.fp8_operand_transposed()
        }
    };
    operand.expect("a matrix has values in one layout at least")
}

/// The transposed copy of codes of a byte each.
fn flipped<R: CubeRuntime>(client: &ComputeClient<R>, values: &TensorHandle<R>) -> TensorHandle<R> {
    let of_type = |mut values: TensorHandle<R>, dtype: DType| {
        values.dtype = StorageType::from(dtype);
        values
    };
    let codes = of_type(values.clone(), DType::I8);
    of_type(checked(transpose_int8(client, &codes)), DType::U8)
}
