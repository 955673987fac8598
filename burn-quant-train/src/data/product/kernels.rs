//! The kernels of products.

use burn_backend::{
    Backend, DType, FloatDType, Shape, TensorMetadata,
    tensor::{Device, FloatTensor},
};

use cubecl_kernels::{
    gemm::{Accumulation, LayerOperands},
    granularity::Granularity,
    number::Number,
    quantize::QuantizeSpec,
    scale::ScaleNumber,
};

use crate::data::{
    cast::cast_to,
    quantize::{
        fallback::Residual,
        matrix::{Operand, Quantized},
    },
    tensors::Tensors,
};

/// Products on a backend that holds data.
pub trait ProductKernels: Backend {
    /// The product of two quantized matrices, `left` with the residuals of its fallback blocks if given, plus `bias`
    /// `[columns]` (fallback-int8, algorithm 1). Integers accumulate in INT32 inside a block and in FP32 across blocks,
    /// FP8 as `accumulation` says, all else in FP32 of dequantized values; rounds once, to `dtype`.
    ///
    /// # Panics
    ///
    /// If the inner dimensions differ, or `bias` does not have one element for each column, or the device does not
    /// support `dtype`.
    fn product(
        left: Operand<'_, Self>,
        residual: Option<&Residual<Self>>,
        right: Operand<'_, Self>,
        bias: Option<FloatTensor<Self>>,
        accumulation: Accumulation,
        dtype: FloatDType,
    ) -> FloatTensor<Self>;

    /// The [`product`](Self::product) of two operands without residuals in `dtype`, quantized by the spec: in the launch that
    /// computes it where there is a kernel for that.
    ///
    /// # Panics
    ///
    /// As [`product`](Self::product), and if the kernels do not have the spec.
    fn quantized_product(
        operands: [Operand<'_, Self>; 2],
        bias: Option<FloatTensor<Self>>,
        accumulation: Accumulation,
        dtype: FloatDType,
        spec: &QuantizeSpec,
    ) -> Quantized<Self>;

    /// The products `L Rᵀ` of `batch` pairs of matrices, which lie below one another in `left` `[batch M, K]` and in `right`
    /// `[batch N, K]`, each of INT4 or INT8 with one FP32 scale: `[batch, M, N]`. Adds up and rounds as
    /// [`product`](Self::product).
    ///
    /// # Panics
    ///
    /// If the operands are not of such shapes and formats.
    fn stacked_product(
        left: &Quantized<Self>,
        right: &Quantized<Self>,
        batch: usize,
        dtype: FloatDType,
    ) -> FloatTensor<Self>;

    /// The kernel of products of this dtype that sum over these numbers of elements, where the device has one that is
    /// faster than `float_matmul`, or one that is right where that may be wrong.
    fn float_product_kernel(
        device: &Device<Self>,
        dtype: DType,
        sums: &[usize],
    ) -> Option<FloatProduct<Self>>;

    /// Says which layers a program has, before it computes any of their products, so that their kernels are compiled
    /// ahead: see [`CompileAhead`](crate::CompileAhead).
    fn expect_layers(device: &Device<Self>, layers: &[ExpectedLayer]);
}

/// A linear layer whose products a program is going to compute.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpectedLayer {
    /// Rows of X.
    pub rows: usize,
    /// Shape of W, `[columns of X, columns of Y]`.
    pub weight: [usize; 2],
    /// How X and W are multiplied.
    pub operands: LayerOperands,
    /// The dtype of Y, and of X and W where they are floats.
    pub compute: FloatDType,
}

/// The product of `left [.., M, K]` and `right [.., K, N]`, in the given dtype. The operands have one dtype and the
/// same leading dimensions.
pub type FloatProduct<B> = fn(FloatTensor<B>, FloatTensor<B>, FloatDType) -> FloatTensor<B>;

/// The product of two float tensors of one dtype and the same leading dimensions, by the fastest kernel of the device.
pub(crate) fn float_product<K: ProductKernels>(
    left: FloatTensor<K>,
    right: FloatTensor<K>,
    dtype: FloatDType,
) -> FloatTensor<K> {
    let sum = left.shape()[left.rank() - 1];
    match K::float_product_kernel(&K::float_device(&left), left.dtype(), &[sum]) {
        Some(kernel) => kernel(left, right, dtype),
        None => cast_to::<K>(K::float_matmul(left, right), Some(dtype)),
    }
}

/// The product of the numbers that the operands stand for, in FP32, plus `bias`; rounded once, to `dtype`.
///
/// `dequantize` makes the FP32 values of a matrix, with its residual if there is one.
pub(crate) fn dequantized_product<B: ProductKernels>(
    left: Operand<'_, B>,
    residual: Option<&Residual<B>>,
    right: Operand<'_, B>,
    bias: Option<FloatTensor<B>>,
    dtype: FloatDType,
    dequantize: impl Fn(&Quantized<B>, Option<&Residual<B>>) -> FloatTensor<B>,
) -> FloatTensor<B> {
    let factor = |operand: Operand<'_, B>, residual| {
        let matrix = dequantize(operand.matrix, residual);
        match operand.transpose {
            true => B::float_swap_dims(matrix, 0, 1),
            false => matrix,
        }
    };
    let (left, right) = (factor(left, residual), factor(right, None));
    let mut product = float_product::<B>(left, right, FloatDType::F32);
    if let Some(bias) = bias {
        let bias = cast_to::<B>(bias, Some(FloatDType::F32));
        let row = Shape::new([1, bias.shape()[0]]);
        product = B::float_add(product, B::float_reshape(bias, row));
    }
    cast_to::<B>(product, Some(dtype))
}

/// Panics unless [`ProductKernels::stacked_product`] of these operands exists.
pub(crate) fn check_stacked<T: Tensors>(left: &Quantized<T>, right: &Quantized<T>, batch: usize) {
    let is_stack = |it: &Quantized<T>| {
        let format = it.format;
        it.shape[0].is_multiple_of(batch)
            && format.granularity == Granularity::Tensor
            && format.scale == ScaleNumber::F32
            && matches!(format.number, Number::Int4 | Number::Int8)
    };
    assert!(
        batch > 0 && is_stack(left) && is_stack(right) && left.shape[1] == right.shape[1],
        "stacked_product: {batch} matrices of {:?} {:?} and of {:?} {:?}; pass as many of each, with one number of \
         columns, in INT4 or INT8 with one FP32 scale",
        left.shape,
        left.format,
        right.shape,
        right.format,
    );
}

/// Panics unless the product of these operands exists, with this bias if there is one.
pub(crate) fn check_product<B: Backend>(
    left: &Operand<'_, B>,
    right: &Operand<'_, B>,
    bias: Option<&FloatTensor<B>>,
) {
    let ([m, k], [k_right, n]) = (left.shape(), right.shape());
    assert_eq!(
        k, k_right,
        "product: the inner dimensions of [{m}, {k}] and [{k_right}, {n}] differ"
    );
    if let Some(bias) = bias {
        let shape = bias.shape();
        assert!(
            shape.as_slice() == [n],
            "product: bias {shape:?} of a product [{m}, {n}]; pass a bias [{n}]"
        );
    }
}
