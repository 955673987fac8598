//! Products by kernels.

use std::sync::Mutex;

use burn_backend::{
    DType, FloatDType, Shape, TensorMetadata,
    tensor::{Device, FloatTensor},
};
use burn_cubecl::{
    CubeBackend, CubeRuntime, FloatElement, IntElement,
    element::BoolElement,
    kernel::{
        into_contiguous,
        matmul::{MatmulStrategy, matmul},
    },
    ops::numeric::empty_device_contiguous_dtype,
    tensor::CubeTensor,
};
use cubecl::{client::ComputeClient, ir::StorageType, std::tensor::TensorHandle};
use cubecl_kernels::{
    KernelError,
    fallback::FallbackResidual,
    gemm::{self, GemmOperand, Int4Operand, Strategy},
    granularity::Granularity,
    layout::Layout,
    number::Number,
    quantize::{Quantized as DeviceMatrix, unpack_int4},
    transpose::transpose_bytes,
};

use super::{
    exact_product::exact_product,
    fp8_product::{fp8_product, quantized_fp8_product},
    quantize::{dequantize, on_device, unwrap, wrap},
    tensors::{Cube, handle, reshaped, tensor},
};
use crate::data::{
    cast::cast_to,
    kernels::checked,
    product::{
        Accumulation, ExpectedLayer, FloatProduct, ProductKernels, check_product, check_stacked,
        dequantized_product,
    },
    quantize::{Format, Operand, QuantizeKernels, QuantizeSpec, Quantized, Residual, ScaleNumber},
};
use crate::{lock::lock, warning::warn};

impl<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement> ProductKernels
    for CubeBackend<R, F, I, BT>
where
    Self: Cube<R>,
{
    fn product(
        left: Operand<'_, Self>,
        residual: Option<&Residual<Self>>,
        right: Operand<'_, Self>,
        bias: Option<FloatTensor<Self>>,
        accumulation: Accumulation,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        check_product::<Self>(&left, &right, bias.as_ref());
        let bias = bias.map(|bias| cast_to::<Self>(bias, Some(FloatDType::F32)));
        let [of_left, of_right] =
            [&left, &right].map(|operand| Arithmetic::of(operand.matrix.format));
        match (of_left, of_right) {
            (Arithmetic::Int8, Arithmetic::Int8) => {
                int8_product(left, residual, right, bias, dtype)
            }
            (Arithmetic::Int8, Arithmetic::Float) | (Arithmetic::Float, _) => {
                let by_kernel = match residual {
                    None => fp8_product::<Self, R>(left, right, bias.as_ref(), accumulation, dtype)
                        .or_else(|| exact_product::<Self, R>(&left, &right, bias.as_ref(), dtype)),
                    Some(_) => None,
                };
                by_kernel.unwrap_or_else(|| {
                    say_slow([left.matrix.format, right.matrix.format]);
                    dequantized_product(left, residual, right, bias, dtype, with_residual)
                })
            }
        }
    }

    fn quantized_product(
        [left, right]: [Operand<'_, Self>; 2],
        bias: Option<FloatTensor<Self>>,
        accumulation: Accumulation,
        dtype: FloatDType,
        spec: &QuantizeSpec,
    ) -> Quantized<Self> {
        check_product::<Self>(&left, &right, bias.as_ref());
        let like = on_device(left.matrix);
        let wide = bias.clone();
        let wide = wide.map(|bias| cast_to::<Self>(bias, Some(FloatDType::F32)));
        let numbers = [&left, &right].map(|operand| operand.matrix.format.number);
        let arithmetic = [&left, &right].map(|operand| Arithmetic::of(operand.matrix.format));
        let quantized = match (numbers, arithmetic) {
            // Those of INT4 may have another kernel.
            ([Number::Int8, Number::Int8], [Arithmetic::Int8, Arithmetic::Int8]) => {
                let bias = wide.map(|bias| handle(&into_contiguous(bias)));
                let operands = [left, right.t()];
                let [a, b] = operands.map(|operand| along_columns(&like.client, operand));
                let out = DType::from(dtype).into();
                let product = gemm::gemm_quantized(&like.client, &a, &b, bias.as_ref(), out, spec);
                Some(wrap(like, checked(product)))
            }
            _ => quantized_fp8_product::<Self, R>(
                [left, right],
                wide.as_ref(),
                accumulation,
                dtype,
                spec,
            ),
        };
        quantized.unwrap_or_else(|| {
            let product = Self::product(left, None, right, bias, accumulation, dtype);
            Self::quantize_matrix(product, spec)
        })
    }

    fn stacked_product(
        left: &Quantized<Self>,
        right: &Quantized<Self>,
        batch: usize,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        check_stacked(left, right, batch);
        let (like, dtype) = (on_device(left), DType::from(dtype));
        let client = &like.client;
        let operands = [left.operand(), right.operand()];
        let product =
            int4_product(client, operands, Some(batch), None, dtype).unwrap_or_else(|| {
                let [a, b] = operands.map(|it| stack(along_columns(client, it), batch));
                let product = gemm::gemm(client, &a, &b, None, None, dtype.into(), Strategy::Auto);
                checked(product)
            });
        tensor(like, product, dtype)
    }

    fn float_product_kernel(
        device: &Device<Self>,
        dtype: DType,
        sums: &[usize],
    ) -> Option<FloatProduct<Self>> {
        let is_faster = is_narrow(dtype) && gemm::has_gemm_float(&R::client(device));
        let is_safer = !sums.iter().copied().all(is_summed_rightly);
        (is_faster || is_safer).then_some(float_product::<Self, R>)
    }

    fn expect_layers(device: &Device<Self>, layers: &[ExpectedLayer]) {
        let narrow = layers.iter().filter(|it| is_narrow(it.compute.into()));
        let layers: Vec<_> = narrow
            .map(|layer| gemm::ExpectedLayer {
                rows: layer.rows,
                inputs: layer.weight[0],
                outputs: layer.weight[1],
                operands: layer.operands,
                dtype: DType::from(layer.compute).into(),
            })
            .collect();
        gemm::expect_layers(&R::client(device), &layers);
    }
}

/// How an operand is multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arithmetic {
    /// As INT8, with INT32 sums.
    Int8,
    /// As the floats that it stands for.
    Float,
}

impl Arithmetic {
    fn of(format: Format) -> Self {
        match (format.number, format.scale) {
            (Number::Int8 | Number::Int4, ScaleNumber::F32) => Self::Int8,
            (Number::Int8 | Number::Int4, ScaleNumber::E8M0 | ScaleNumber::E4M3)
            | (Number::Int10 | Number::E2M1 | Number::E3M0 | Number::E4M3 | Number::E5M2, _)
            | (Number::DynamicExponent(_) | Number::Square, _) => Self::Float,
        }
    }
}

/// Warns, once for each pair of formats, that a product has no kernel.
fn say_slow(formats: [Format; 2]) {
    static SAID: Mutex<Vec<[Format; 2]>> = Mutex::new(Vec::new());
    let mut said = lock(&SAID);
    if said.contains(&formats) {
        return;
    }
    said.push(formats);
    let [left, right] = formats;
    warn(&format!(
        "quant-train: products of {left:?} and {right:?} have no kernel on this device: they are computed from FP32 \
         copies, slower than without quantization, and as exact as the device's products of FP32, in which some round \
         operands to TF32. This is said once."
    ));
}

fn int8_product<B: Cube<R>, R: CubeRuntime>(
    left: Operand<'_, B>,
    residual: Option<&Residual<B>>,
    right: Operand<'_, B>,
    bias: Option<CubeTensor<R>>,
    dtype: FloatDType,
) -> CubeTensor<R> {
    let (like, dtype) = (on_device(left.matrix), DType::from(dtype));
    let residual = residual.map(|residual| residual_of(&left, residual));
    let bias = bias.map(|bias| handle(&into_contiguous(bias)));
    if residual.is_none()
        && let Some(product) =
            int4_product(&like.client, [left, right.t()], None, bias.as_ref(), dtype)
    {
        return tensor(like, product, dtype);
    }
    // The kernel sums along the columns of the left operand and of the right one's transpose.
    let [a, b] = [left, right.t()].map(|operand| along_columns(&like.client, operand));
    let product = gemm::gemm(
        &like.client,
        &a,
        &b,
        residual.as_ref(),
        bias.as_ref(),
        dtype.into(),
        Strategy::Auto,
    );
    tensor(like, checked(product), dtype)
}

fn residual_of<B: Cube<R>, R: CubeRuntime>(
    left: &Operand<'_, B>,
    residual: &Residual<B>,
) -> FallbackResidual<R> {
    let Granularity::Block(block) = left.matrix.format.granularity else {
        panic!(
            "product: residual blocks of {:?}; fallback is for square blocks",
            left.matrix.format
        );
    };
    assert!(
        !left.transpose,
        "product: the residual of a transposed operand; fallback is for Y = X W"
    );
    let indicator = residual.indicator.as_ref();
    FallbackResidual {
        values: handle(&residual.values),
        scales: handle(&residual.scales),
        flags: handle(indicator.expect("kernels write the indicator of fallback blocks")),
        block,
    }
}

/// An operand whose columns the product sums over, in the layout in which these are neighbours. A copy that is missing
/// is made for the time of the product.
fn along_columns<B: Cube<R>, R: CubeRuntime>(
    client: &ComputeClient<R>,
    operand: Operand<'_, B>,
) -> GemmOperand<R> {
    let matrix = unwrap(operand.matrix).only(match operand.transpose {
        false => Layout::RowMajor,
        true => Layout::Transposed,
    });
    let matrix = match operand.matrix.format.number == Number::Int4 {
        true => checked(unpack_int4(client, &matrix)),
        false => matrix,
    };
    let matrix = in_layout(client, matrix, operand.transpose);
    checked(match operand.transpose {
        false => matrix.operand(),
        true => matrix.operand_transposed(),
    })
}

/// The product `L Rᵀ` as INT4, or those of a batch of pairs of matrices that lie below one another: if the device
/// multiplies that faster than INT8, and can read the operands as they are.
fn int4_product<B: Cube<R>, R: CubeRuntime>(
    client: &ComputeClient<R>,
    operands: [Operand<'_, B>; 2],
    batch: Option<usize>,
    bias: Option<&TensorHandle<R>>,
    dtype: DType,
) -> Option<TensorHandle<R>> {
    let are_int4 = operands
        .iter()
        .all(|it| it.matrix.format.number == Number::Int4);
    if !are_int4 || !gemm::has_gemm_int4(client) {
        return None;
    }
    let [a, b] = operands.map(|operand| {
        let matrix = unwrap(operand.matrix);
        let packed = match operand.transpose {
            false => matrix.int4_operand(),
            true => matrix.int4_operand_transposed(),
        };
        let Int4Operand { values, scale } = packed.ok()?;
        Some(Int4Operand {
            values: match batch {
                Some(batch) => stacked(values, batch),
                None => values,
            },
            scale,
        })
    });
    gemm::gemm_int4(client, &a?, &b?, bias, dtype.into()).ok()
}

/// A matrix `[batch rows, cols]` as `[batch, rows, cols]`.
fn stacked<R: CubeRuntime>(matrix: TensorHandle<R>, batch: usize) -> TensorHandle<R> {
    let [rows, cols] = [matrix.shape()[0] / batch, matrix.shape()[1]];
    let [row, col] = [matrix.strides()[0], matrix.strides()[1]];
    let (shape, strides) = (vec![batch, rows, cols], vec![rows * row, row, col]);
    let dtype = matrix.dtype;
    TensorHandle::new(matrix.handle, shape, strides, dtype)
}

/// An operand with one scale, as `batch` matrices that lie below one another.
fn stack<R: CubeRuntime>(operand: GemmOperand<R>, batch: usize) -> GemmOperand<R> {
    let GemmOperand { values, scales, .. } = operand;
    let [rows, cols] = [values.shape()[0] / batch, values.shape()[1]];
    // The same for each.
    let (shape, strides) = (vec![batch, 1, 1], vec![0, 1, 1]);
    let dtype = scales.dtype;
    let scales = TensorHandle::new(scales.handle, shape, strides, dtype);
    GemmOperand {
        values: stacked(values, batch),
        scales,
        rows_per_scale: rows,
        depth_per_scale: cols,
    }
}

/// A matrix of a byte an element that has its values, or transposed those. A copy that is missing is made.
pub(super) fn in_layout<R: CubeRuntime>(
    client: &ComputeClient<R>,
    mut matrix: DeviceMatrix<R>,
    transposed: bool,
) -> DeviceMatrix<R> {
    let (wanted, other) = match transposed {
        false => (&mut matrix.values, &matrix.transposed),
        true => (&mut matrix.transposed, &matrix.values),
    };
    if let (None, Some(other)) = (&wanted, other) {
        *wanted = Some(checked(transpose_bytes(client, other)));
    }
    matrix
}

/// The FP32 values of a matrix, with its residual if there is one.
fn with_residual<B: Cube<R>, R: CubeRuntime>(
    matrix: &Quantized<B>,
    residual: Option<&Residual<B>>,
) -> CubeTensor<R> {
    let base = dequantize(matrix, FloatDType::F32);
    match residual {
        None => base,
        Some(residual) => {
            let residual = residual.as_matrix(matrix);
            B::float_add(base, dequantize(&residual, FloatDType::F32))
        }
    }
}

fn is_narrow(dtype: DType) -> bool {
    matches!(dtype, DType::BF16 | DType::F16)
}

/// True if all of Burn's products that autotune may take sum over this many elements rightly.
///
/// Those of cubek 0.2 that have two buffers read a stage past the end of a sum that is an odd number of stages long: of 8,
/// 16 or 32 elements, or of a plane where planes are wider. See the book, "Results", "Products of Burn's that are wrong".
fn is_summed_rightly(elements: usize) -> bool {
    !cfg!(feature = "autotune") || elements.is_multiple_of(128)
}

/// The product of `[.., M, K]` and `[.., K, N]` by Burn, in their dtype: by the kernel that autotune chooses, or by one
/// with a single buffer where that choice may be wrong.
pub(super) fn burns_product<B: Cube<R>, R: CubeRuntime>(
    left: CubeTensor<R>,
    right: CubeTensor<R>,
) -> CubeTensor<R> {
    match is_summed_rightly(right.shape()[right.rank() - 2]) {
        true => B::float_matmul(left, right),
        false => {
            let dtype = left.dtype;
            matmul(left, right, None, MatmulStrategy::Cube, dtype)
                .unwrap_or_else(|error| panic!("product: {error:?}"))
        }
    }
}

/// The product of `[.., M, K]` and `[.., K, N]` in `dtype`, by our kernel, or by Burn's where there is none, or ours
/// cannot read an operand.
pub(super) fn float_product<B: Cube<R>, R: CubeRuntime>(
    left: CubeTensor<R>,
    right: CubeTensor<R>,
    dtype: FloatDType,
) -> CubeTensor<R> {
    let by_burn = |left, right| cast_to::<B>(burns_product::<B, R>(left, right), Some(dtype));
    if !is_narrow(left.dtype) || !gemm::has_gemm_float(&left.client) {
        return by_burn(left, right);
    }
    let out = DType::from(dtype);
    let (mut shape, n) = (left.shape(), right.shape()[right.rank() - 1]);
    let operand = |tensor: &CubeTensor<R>| match tensor.rank() {
        2..=4 => handle(tensor),
        _ => matrices(tensor.clone()),
    };
    let (a, b) = (operand(&left), transposed(operand(&right)));
    match gemm::gemm_float(&left.client, &a, &b, None, out.into()) {
        Ok(product) => {
            let last = shape.num_dims() - 1;
            shape[last] = n;
            reshaped(tensor(&left, product, out), shape)
        }
        // TMA cannot read an operand, or there are more elements than 32 bits index.
        Err(KernelError::Unsupported { .. } | KernelError::Shape { .. }) => by_burn(left, right),
        Err(error) => panic!("{error}"),
    }
}

/// [`float_product`] of rank 4, in the dtype of its operands, for the heads of attention.
///
/// Where our kernel computes it, the heads lie side by side in the rows of the result's memory: `[batch, heads, M, N]`
/// is a view of `[batch, M, heads, N]`, so that the layer reads the rows without a copy.
pub(super) fn float_product_in_rows<B: Cube<R>, R: CubeRuntime>(
    left: CubeTensor<R>,
    right: CubeTensor<R>,
) -> CubeTensor<R> {
    let (a, b) = (handle(&left), handle(&right));
    if [&a, &b]
        .into_iter()
        .all(|it| gemm::gemm_float_reads(&left.client, it))
    {
        let (of_left, of_right) = (left.shape(), right.shape());
        let mut out = empty_device_contiguous_dtype(
            left.client.clone(),
            left.device.clone(),
            Shape::new([of_left[0], of_left[2], of_left[1], of_right[3]]),
            left.dtype,
        );
        out.meta.swap(1, 2);
        if gemm::gemm_float_into(&left.client, &a, &transposed(b), None, &handle(&out)).is_ok() {
            return out;
        }
    }
    let dtype = left.dtype.into();
    float_product::<B, R>(left, right, dtype)
}

/// `[.., rows, cols]` as a batch of matrices, a copy only where the leading dimensions have no common stride. A copy
/// keeps the order of rows and columns in memory.
pub(super) fn matrices<R: CubeRuntime>(tensor: CubeTensor<R>) -> TensorHandle<R> {
    let (shape, strides) = (tensor.shape(), tensor.meta.strides().to_vec());
    let [rows, cols] = [shape.num_dims() - 2, shape.num_dims() - 1];
    let batch = shape[..rows].iter().product();
    let leading: Vec<_> = (0..rows).filter(|&dim| shape[dim] != 1).collect();
    let merges = leading
        .windows(2)
        .all(|dims| strides[dims[0]] == strides[dims[1]] * shape[dims[1]]);
    if merges {
        let whole = shape[rows] * strides[rows];
        let batch_stride = leading.last().map_or(whole, |&dim| strides[dim]);
        let dtype = StorageType::from(tensor.dtype);
        return TensorHandle::new(
            tensor.handle,
            vec![batch, shape[rows], shape[cols]],
            vec![batch_stride, strides[rows], strides[cols]],
            dtype,
        );
    }
    let by_columns = strides[rows] == 1 && strides[cols] != 1;
    let mut tensor = tensor;
    if by_columns {
        tensor.meta.swap(rows, cols);
    }
    let shape = tensor.shape();
    let matrices = Shape::new([batch, shape[rows], shape[cols]]);
    let matrices = handle(&reshaped(into_contiguous(tensor), matrices));
    match by_columns {
        true => transposed(matrices),
        false => matrices,
    }
}

/// The matrices transposed, without a copy.
fn transposed<R: CubeRuntime>(mut matrices: TensorHandle<R>) -> TensorHandle<R> {
    let rank = matrices.shape().len();
    matrices.metadata.swap(rank - 2, rank - 1);
    matrices
}
