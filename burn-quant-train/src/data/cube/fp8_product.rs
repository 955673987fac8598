//! Products of FP8 numbers on tensor cores.

use burn_backend::{DType, FloatDType};
use burn_cubecl::{CubeRuntime, kernel::into_contiguous, tensor::CubeTensor};
use cubecl::client::ComputeClient;
use cubecl_kernels::{
    KernelError,
    gemm::{self, Accumulation, Fp8Operand},
};

use super::{
    product::in_layout,
    quantize::{on_device, unwrap, wrap},
    tensors::{Cube, handle, tensor},
};
use crate::data::quantize::{Operand, QuantizeSpec, Quantized};

/// The product plus a bias in FP32, `[columns]`, if both operands are FP8 and the device has a kernel for numbers,
/// scales and strides.
pub(super) fn fp8_product<B: Cube<R>, R: CubeRuntime>(
    left: Operand<'_, B>,
    right: Operand<'_, B>,
    bias: Option<&CubeTensor<R>>,
    accumulation: Accumulation,
    dtype: FloatDType,
) -> Option<CubeTensor<R>> {
    let like = on_device(left.matrix);
    let [a, b] = operands([left, right])?;
    let bias = bias.map(|bias| handle(&into_contiguous(bias.clone())));
    let out = DType::from(dtype);
    let product = gemm::gemm_fp8(
        &like.client,
        &a,
        &b,
        bias.as_ref(),
        accumulation,
        out.into(),
    );
    match product {
        Ok(product) => Some(tensor(like, product, out)),
        Err(KernelError::Unsupported { .. }) => None,
        Err(error) => panic!("{error}"),
    }
}

/// The same in `dtype`, quantized by the spec.
pub(super) fn quantized_fp8_product<B: Cube<R>, R: CubeRuntime>(
    [left, right]: [Operand<'_, B>; 2],
    bias: Option<&CubeTensor<R>>,
    accumulation: Accumulation,
    dtype: FloatDType,
    spec: &QuantizeSpec,
) -> Option<Quantized<B>> {
    let like = on_device(left.matrix);
    let [a, b] = operands([left, right])?;
    let bias = bias.map(|bias| handle(&into_contiguous(bias.clone())));
    let product = gemm::gemm_fp8_quantized(
        &like.client,
        &a,
        &b,
        bias.as_ref(),
        accumulation,
        DType::from(dtype).into(),
        spec,
    );
    match product {
        Ok(product) => Some(wrap(like, product)),
        Err(KernelError::Unsupported { .. }) => None,
        Err(error) => panic!("{error}"),
    }
}

/// The operands of a kernel, if both are FP8 and the device has one: it sums along the columns of the left operand and of
/// the right one's transpose.
fn operands<B: Cube<R>, R: CubeRuntime>(
    [left, right]: [Operand<'_, B>; 2],
) -> Option<[Fp8Operand<R>; 2]> {
    let client = &on_device(left.matrix).client;
    let are_fp8 = [left, right]
        .iter()
        .all(|operand| operand.matrix.format.number.is_fp8());
    (are_fp8 && gemm::has_gemm_fp8(client))
        .then(|| [left, right.t()].map(|operand| along_columns(client, operand)))
}

/// An operand whose columns the product sums over, in the layout in which these are neighbours.
fn along_columns<B: Cube<R>, R: CubeRuntime>(
    client: &ComputeClient<R>,
    operand: Operand<'_, B>,
) -> Fp8Operand<R> {
    let matrix = in_layout(client, unwrap(operand.matrix), operand.transpose);
    let operand = match operand.transpose {
        false => matrix.fp8_operand(),
        true => matrix.fp8_operand_transposed(),
    };
    operand.expect("a matrix has values in one layout at least")
}
