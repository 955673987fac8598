//! The quantized operations on Flex: its tensors are slices in host memory, and `cubecl_kernels::host` works on those.
//! Products are of dequantized matrices, by Flex's own matrix product.

use std::borrow::Cow;

use burn_backend::{Element, FloatDType, TensorData, ops::FloatTensorOps};
use burn_flex::{Flex, FlexTensor};
use cubecl_kernels::{
    KernelError,
    host::{self, HostQuantized, HostScales, HostValues},
    quantize::QuantizeSpec,
};

use super::{
    FallbackQuantized, Layout, Operand, QuantOps, Quantized, Residual, StochasticKey,
    check_fallback_state, fallback_block, float, keyed,
};
use crate::recipe::{Cast, Format};

impl QuantOps for Flex {
    fn quantize_matrix(
        x: FlexTensor,
        cast: Cast,
        _layout: Layout,
        key: Option<StochasticKey>,
    ) -> Quantized<Self> {
        if cast.format != Format::Int8 {
            return float::quantize::<Self>(x, cast, key);
        }
        let shape = float::matrix_shape(&x, "quantize");
        let x = float::to_f32::<Self>(x).to_contiguous();
        let quantized = host::quantize(
            slice(&x),
            shape,
            &QuantizeSpec::int8(cast.granularity).with_rounding(keyed(cast, key)),
        );
        wrap(checked(quantized), shape, cast)
    }

    fn quantize_fallback(
        x: FlexTensor,
        cast: Cast,
        layer: usize,
        thresholds: FlexTensor,
        mut counts: FlexTensor,
    ) -> (FallbackQuantized<Self>, FlexTensor) {
        let shape = float::matrix_shape(&x, "quantize_fallback");
        let block = fallback_block("quantize_fallback", cast);
        check_fallback_state("quantize_fallback", layer, &thresholds, &counts);
        let thresholds = thresholds.to_contiguous();
        let x = float::to_f32::<Self>(x).to_contiguous();
        let quantized = checked(host::quantize_fallback(
            slice(&x),
            shape,
            block,
            slice::<f32>(&thresholds)[layer],
        ));
        let blocks = quantized.base.scales.len();
        counts = counts.to_contiguous();
        let row = &mut counts.storage_mut::<i32>()[2 * layer..][..2];
        row[0] += quantized.fallback_blocks as i32;
        row[1] += blocks as i32;

        let residual = wrap(quantized.residual, shape, cast);
        let fallback = FallbackQuantized {
            base: wrap(quantized.base, shape, cast),
            residual: Residual {
                values: residual.values.expect("values on the host are row-major"),
                scales: residual.scales,
                indicator: None,
            },
        };
        (fallback, counts)
    }

    fn dequantize_matrix(matrix: &Quantized<Self>, dtype: FloatDType) -> FlexTensor {
        crate::precision::cast_to::<Self>(dequantize(matrix, None), Some(dtype))
    }

    fn quantized_matmul(
        a: Operand<'_, Self>,
        residual: Option<&Residual<Self>>,
        b: Operand<'_, Self>,
        bias: Option<FlexTensor>,
        dtype: FloatDType,
    ) -> FlexTensor {
        let operand = |operand: &Operand<'_, Self>, residual| {
            let matrix = dequantize(operand.matrix, residual);
            match operand.transpose {
                true => Self::float_swap_dims(matrix, 0, 1),
                false => matrix,
            }
        };
        float::product::<Self>(operand(&a, residual), operand(&b, None), bias, dtype)
    }
}

fn dequantize(matrix: &Quantized<Flex>, residual: Option<&Residual<Flex>>) -> FlexTensor {
    if matrix.cast.format != Format::Int8 {
        return float::dequantize::<Flex>(&matrix.operand());
    }
    let values = matrix
        .values
        .as_ref()
        .expect("values on the host are row-major");
    let (values, scales) = (values.to_contiguous(), matrix.scales.to_contiguous());
    let residual = residual.map(|residual| {
        (
            residual.values.to_contiguous(),
            residual.scales.to_contiguous(),
        )
    });
    let borrowed = |values, scales| HostQuantized {
        values: HostValues::I8(Cow::Borrowed(slice(values))),
        scales: HostScales::F32(Cow::Borrowed(slice(scales))),
        number: matrix.cast.format,
        granularity: matrix.cast.granularity,
        shape: matrix.shape,
    };
    let base = borrowed(&values, &scales);
    let dequantized = match &residual {
        None => host::dequantize(&base),
        Some((values, scales)) => host::dequantize_fallback(&base, &borrowed(values, scales)),
    };
    FlexTensor::from_data(TensorData::new(checked(dequantized), matrix.shape))
}

fn wrap(quantized: HostQuantized<'_>, shape: [usize; 2], cast: Cast) -> Quantized<Flex> {
    let [rows, cols] = float::extent(cast, shape);
    let grid = [shape[0].div_ceil(rows), shape[1].div_ceil(cols)];
    let (HostValues::I8(values), HostScales::F32(scales)) = (quantized.values, quantized.scales)
    else {
        unreachable!("INT8 with FP32 scales was asked for");
    };
    Quantized {
        shape,
        cast,
        values: Some(FlexTensor::from_data(TensorData::new(
            values.into_owned(),
            shape,
        ))),
        transposed: None,
        scales: FlexTensor::from_data(TensorData::new(scales.into_owned(), grid)),
    }
}

/// Burn's backend traits return no errors.
fn checked<T>(result: Result<T, KernelError>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}

/// The elements of a contiguous tensor.
fn slice<E: Element + bytemuck::Pod>(tensor: &FlexTensor) -> &[E] {
    tensor
        .as_slice()
        .expect("a contiguous tensor of this dtype is a slice")
}
