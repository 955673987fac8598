//! The quantized operations by ordinary float tensor operations, for any Burn backend.
//!
//! Scaled values are integers below 2^24, which FP32 holds exactly, so these give the very integers and scales of the
//! kernels. Products are of dequantized matrices: the same numbers up to FP32 rounding.

use burn_backend::{
    BoolDType, DType, FloatDType, IntDType, Scalar, Shape, Slice, TensorData, TensorMetadata,
    tensor::{BoolTensor, FloatTensor, IntTensor},
};
use cubecl_kernels::{
    delay_threshold::{MAX_THRESHOLD, MIN_THRESHOLD},
    philox,
    rounding::{Rounding, STOCHASTIC_OFFSET},
    scale::MIN_ABSMAX,
    shape::MatrixShape,
};

use super::{
    FallbackQuantized, Operand, QuantOps, Quantized, Residual, StochasticKey, check_fallback_state,
    fallback_block, keyed,
};
use crate::{
    layer::{DelayThreshold, FallbackState},
    recipe::{Cast, Format},
};

/// A matrix cut into blocks: FP32 `[block rows, rows of a block, block cols, cols of a block]`, edge blocks filled up
/// with zeros.
struct Blocks<B: QuantOps> {
    values: FloatTensor<B>,
    shape: [usize; 2],
    grid: [usize; 2],
    extent: [usize; 2],
}

impl<B: QuantOps> Blocks<B> {
    fn split(matrix: FloatTensor<B>, extent: [usize; 2]) -> Self {
        let shape = matrix_shape(&matrix, "quantize");
        // At least one element, also of a matrix without any.
        let extent = [0, 1].map(|dim| extent[dim].min(shape[dim]).max(1));
        let grid = [shape[0].div_ceil(extent[0]), shape[1].div_ceil(extent[1])];
        let padded = [grid[0] * extent[0], grid[1] * extent[1]];
        let values = match padded == shape {
            true => matrix,
            false => {
                let zeros = B::float_zeros(
                    Shape::new(padded),
                    &B::float_device(&matrix),
                    FloatDType::F32,
                );
                B::float_slice_assign(zeros, &corner(shape), matrix)
            }
        };
        let split = Shape::new([grid[0], extent[0], grid[1], extent[1]]);
        Self {
            values: B::float_reshape(values, split),
            shape,
            grid,
            extent,
        }
    }

    /// Back to `[rows, cols]`.
    fn join(&self, values: FloatTensor<B>) -> FloatTensor<B> {
        let padded = [self.grid[0] * self.extent[0], self.grid[1] * self.extent[1]];
        let values = B::float_reshape(values, Shape::new(padded));
        match padded == self.shape {
            true => values,
            false => B::float_slice(values, &corner(self.shape)),
        }
    }

    /// Reduces over each block: `[block rows, 1, block cols, 1]`.
    fn reduce(
        values: FloatTensor<B>,
        reduce: fn(FloatTensor<B>, usize) -> FloatTensor<B>,
    ) -> FloatTensor<B> {
        reduce(reduce(values, 3), 1)
    }

    /// The largest magnitude of each block; NaN for a block with NaN or Inf, which a backend's maximum may ignore.
    fn absmax(&self) -> FloatTensor<B> {
        let absmax = Self::reduce(B::float_abs(self.values.clone()), B::float_max_dim);
        let nan_marks = B::float_mul_scalar(self.values.clone(), Scalar::from(0.0f32));
        B::float_add(absmax, Self::reduce(nan_marks, B::float_sum_dim))
    }
}

/// Integers and scales of blocks, both in FP32 and in the blocks' four dimensions.
struct Scaled<B: QuantOps> {
    values: FloatTensor<B>,
    scales: FloatTensor<B>,
}

/// Scale = absmax / Q, value = round(x * (Q / absmax)): fallback-int8, section 3.1, and design.md, "Numerics".
fn scale_and_round<B: QuantOps>(
    x: FloatTensor<B>,
    absmax: FloatTensor<B>,
    format: Format,
    uniform: Option<FloatTensor<B>>,
) -> Scaled<B> {
    let device = B::float_device(&x);
    let bool_dtype = bool_dtype::<B>(&device);
    let q_max = format.largest();
    // Too small for a normal FP32 scale. NaN compares false, so blocks with NaN or Inf stay, and their scale is NaN.
    let tiny = B::float_lower_elem(absmax.clone(), Scalar::from(MIN_ABSMAX), bool_dtype);
    let not_finite = is_nan::<B>(absmax.clone(), bool_dtype);
    let scales = B::float_mask_fill(
        B::float_div_scalar(absmax.clone(), Scalar::from(q_max)),
        tiny.clone(),
        Scalar::from(0.0f32),
    );
    let numerator = B::float_full(
        absmax.shape(),
        Scalar::from(q_max),
        &device,
        FloatDType::F32,
    );
    let inverse = B::float_div(numerator, absmax);
    let inverse = B::float_mask_fill(inverse, tiny, Scalar::from(0.0f32));
    let inverse = B::float_mask_fill(inverse, not_finite.clone(), Scalar::from(0.0f32));
    let scaled = B::float_mul(x, inverse);
    let rounded = match uniform {
        None => B::float_round(scaled),
        Some(uniform) => {
            let offset = Scalar::from(STOCHASTIC_OFFSET);
            let sum = B::float_add(scaled, B::float_add_scalar(uniform, offset));
            B::float_sub_scalar(B::float_floor(sum), offset)
        }
    };
    let values = B::float_clamp(rounded, Scalar::from(-q_max), Scalar::from(q_max));
    let not_finite = B::bool_expand(not_finite, values.shape());
    Scaled {
        values: B::float_mask_fill(values, not_finite, Scalar::from(0.0f32)),
        scales,
    }
}

pub(super) fn quantize<B: QuantOps>(
    x: FloatTensor<B>,
    cast: Cast,
    key: Option<StochasticKey>,
) -> Quantized<B> {
    let shape = matrix_shape(&x, "quantize");
    let extent = extent(cast, shape);
    let blocks = Blocks::<B>::split(to_f32::<B>(x), extent);
    let uniform = match keyed(cast, key) {
        Rounding::Nearest => None,
        Rounding::Stochastic(key) => {
            let uniform = uniform::<B>(shape, key, &B::float_device(&blocks.values));
            Some(Blocks::<B>::split(uniform, extent).values)
        }
    };
    let absmax = blocks.absmax();
    let scaled = scale_and_round::<B>(blocks.values.clone(), absmax, cast.format, uniform);
    quantized(&blocks, scaled, cast)
}

pub(super) fn quantize_fallback<B: QuantOps>(
    x: FloatTensor<B>,
    cast: Cast,
    layer: usize,
    thresholds: FloatTensor<B>,
    counts: IntTensor<B>,
) -> (FallbackQuantized<B>, IntTensor<B>) {
    let shape = matrix_shape(&x, "quantize_fallback");
    fallback_block("quantize_fallback", cast);
    check_fallback_state("quantize_fallback", layer, &thresholds, &counts);
    let blocks = Blocks::<B>::split(to_f32::<B>(x), extent(cast, shape));
    let bool_dtype = bool_dtype::<B>(&B::float_device(&blocks.values));
    let absmax = blocks.absmax();

    // u(i, k) = [absmax > threshold]; false for NaN, whose block dequantizes to NaN already.
    let threshold = B::float_slice(
        thresholds,
        &[Slice::new(layer as isize, Some(layer as isize + 1), 1)],
    );
    let threshold = B::float_expand(
        B::float_reshape(threshold, Shape::new([1, 1, 1, 1])),
        absmax.shape(),
    );
    let indicator = B::float_greater(absmax.clone(), threshold, bool_dtype);
    let counts = count::<B>(
        counts,
        layer,
        indicator.clone(),
        blocks.grid[0] * blocks.grid[1],
    );

    let base = scale_and_round::<B>(blocks.values.clone(), absmax, cast.format, None);
    let dequantized = B::float_mul(base.values.clone(), base.scales.clone());
    let residual = Blocks::<B> {
        values: B::float_sub(blocks.values.clone(), dequantized),
        ..blocks
    };
    // An absmax of 0 gives scale and values 0: a block without fallback has no residual.
    let stays = B::bool_not(indicator);
    let absmax = B::float_mask_fill(residual.absmax(), stays, Scalar::from(0.0f32));
    let scaled = scale_and_round::<B>(residual.values.clone(), absmax, cast.format, None);

    let quantized_residual = quantized(&residual, scaled, cast);
    let fallback = FallbackQuantized {
        base: quantized(&residual, base, cast),
        residual: Residual {
            values: quantized_residual
                .values
                .expect("the float path makes row-major values"),
            scales: quantized_residual.scales,
            indicator: None,
        },
    };
    (fallback, counts)
}

/// Adds the blocks that fell back and all blocks to row `layer` of the counters.
fn count<B: QuantOps>(
    counts: IntTensor<B>,
    layer: usize,
    indicator: BoolTensor<B>,
    blocks: usize,
) -> IntTensor<B> {
    let row = [
        Slice::new(layer as isize, Some(layer as isize + 1), 1),
        Slice::new(0, Some(2), 1),
    ];
    let fallback = B::int_sum(B::bool_into_int(indicator, IntDType::I32));
    let fallback = B::int_reshape(fallback, Shape::new([1, 1]));
    let device = B::int_device(&fallback);
    let all = B::int_full(
        Shape::new([1, 1]),
        Scalar::from(blocks as i32),
        &device,
        IntDType::I32,
    );
    let seen = B::int_cat(vec![fallback, all], 1);
    let counted = B::int_add(B::int_slice(counts.clone(), &row), seen);
    B::int_slice_assign(counts, &row, counted)
}

pub(super) fn dequantize<B: QuantOps>(operand: &Operand<'_, B>) -> FloatTensor<B> {
    let matrix = operand.matrix;
    let values = match (&matrix.values, &matrix.transposed) {
        (Some(values), _) => values.clone(),
        (None, Some(transposed)) => B::int_swap_dims(transposed.clone(), 0, 1),
        (None, None) => unreachable!("a quantized matrix holds its values in one layout at least"),
    };
    let result = apply_scales::<B>(values, matrix.scales.clone(), matrix.cast, matrix.shape);
    match operand.transpose {
        true => B::float_swap_dims(result, 0, 1),
        false => result,
    }
}

fn apply_scales<B: QuantOps>(
    values: IntTensor<B>,
    scales: FloatTensor<B>,
    cast: Cast,
    shape: [usize; 2],
) -> FloatTensor<B> {
    let blocks = Blocks::<B>::split(
        B::int_into_float(values, FloatDType::F32),
        extent(cast, shape),
    );
    let [rows, cols] = blocks.grid;
    let scales = B::float_reshape(scales, Shape::new([rows, 1, cols, 1]));
    blocks.join(B::float_mul(blocks.values.clone(), scales))
}

pub(super) fn quantized_matmul<B: QuantOps>(
    a: Operand<'_, B>,
    residual: Option<&Residual<B>>,
    b: Operand<'_, B>,
    bias: Option<FloatTensor<B>>,
    dtype: FloatDType,
) -> FloatTensor<B> {
    let mut lhs = dequantize::<B>(&a);
    if let Some(residual) = residual {
        let shape = a.matrix.shape;
        let fallback = apply_scales::<B>(
            residual.values.clone(),
            residual.scales.clone(),
            a.matrix.cast,
            shape,
        );
        let fallback = if a.transpose {
            B::float_swap_dims(fallback, 0, 1)
        } else {
            fallback
        };
        lhs = B::float_add(lhs, fallback);
    }
    product::<B>(lhs, dequantize::<B>(&b), bias, dtype)
}

/// The product of two dequantized operands, plus `bias` along the columns.
pub(super) fn product<B: QuantOps>(
    lhs: FloatTensor<B>,
    rhs: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
    dtype: FloatDType,
) -> FloatTensor<B> {
    let ([m, k], [k_b, n]) = (
        matrix_shape(&lhs, "quantized_matmul"),
        matrix_shape(&rhs, "quantized_matmul"),
    );
    assert_eq!(
        k, k_b,
        "quantized_matmul: the inner dimensions of [{m}, {k}] and [{k_b}, {n}] differ"
    );
    let mut product = B::float_matmul(lhs, rhs);
    if let Some(bias) = bias {
        let shape = bias.shape();
        assert!(
            shape.as_slice() == [n],
            "quantized_matmul: bias {shape:?} of a product [{m}, {n}]; pass a bias [{n}]"
        );
        let bias = B::float_reshape(to_f32::<B>(bias), Shape::new([1, n]));
        product = B::float_add(product, bias);
    }
    crate::precision::cast_to::<B>(product, Some(dtype))
}

pub(super) fn delay_threshold<B: QuantOps>(
    state: FallbackState<B>,
    config: &DelayThreshold,
) -> FallbackState<B> {
    let device = B::float_device(&state.thresholds);
    let bool_dtype = bool_dtype::<B>(&device);
    let layers = state.thresholds.shape()[0];
    let column = |index: isize| {
        let slices = [
            Slice::new(0, Some(layers as isize), 1),
            Slice::new(index, Some(index + 1), 1),
        ];
        let column = B::int_slice(state.counts.clone(), &slices);
        B::int_into_float(
            B::int_reshape(column, Shape::new([layers])),
            FloatDType::F32,
        )
    };
    // 0 / 0 = NaN for a layer that saw no block: it compares false below, so its threshold stays, and its rate is kept.
    let rates = B::float_div(column(0), column(1));
    let unseen = is_nan::<B>(rates.clone(), bool_dtype);
    let lower = B::float_lower_elem(rates.clone(), Scalar::from(config.rate_min), bool_dtype);
    let raise = B::float_greater_elem(rates.clone(), Scalar::from(config.rate_max), bool_dtype);
    let thresholds = state.thresholds.clone();
    let divided = B::float_div_scalar(thresholds.clone(), Scalar::from(config.alpha));
    let multiplied = B::float_mul_scalar(thresholds.clone(), Scalar::from(config.alpha));
    let thresholds = B::float_mask_where(thresholds, lower, divided);
    let thresholds = B::float_mask_where(thresholds, raise, multiplied);
    FallbackState {
        thresholds: B::float_clamp(
            thresholds,
            Scalar::from(MIN_THRESHOLD),
            Scalar::from(MAX_THRESHOLD),
        ),
        rates: B::float_mask_where(rates, unseen, state.rates),
        counts: B::int_zeros(state.counts.shape(), &device, IntDType::I32),
    }
}

fn quantized<B: QuantOps>(blocks: &Blocks<B>, scaled: Scaled<B>, cast: Cast) -> Quantized<B> {
    // INT10 is packed on devices with kernels; here the next wider integer holds it.
    let dtype = match cast.format {
        Format::Int8 => IntDType::I8,
        Format::Int10 => IntDType::I16,
        Format::Int4
        | Format::E2M1
        | Format::E4M3
        | Format::E5M2
        | Format::DynamicExponent(_)
        | Format::Square => panic!(
            "quantize: {:?} by float operations; they make INT8 and INT10",
            cast.format
        ),
    };
    Quantized {
        shape: blocks.shape,
        cast,
        values: Some(B::float_into_int(blocks.join(scaled.values), dtype)),
        transposed: None,
        scales: B::float_reshape(scaled.scales, Shape::new(blocks.grid)),
    }
}

/// The numbers of the stream in [0, 1), one for each element of the matrix, made on the host: backends without kernels
/// live there.
fn uniform<B: QuantOps>(
    [rows, cols]: [usize; 2],
    key: StochasticKey,
    device: &burn_backend::tensor::Device<B>,
) -> FloatTensor<B> {
    let mut values = vec![0.0f32; rows * cols];
    for (row, out) in values.chunks_exact_mut(cols.max(1)).enumerate() {
        philox::dither_row(key, row, out);
    }
    B::float_from_data(TensorData::new(values, [rows, cols]), device)
}

/// Rows and columns that share a scale.
///
/// # Panics
///
/// If the cast has blocks or groups of no elements.
pub(super) fn extent(cast: Cast, [rows, cols]: [usize; 2]) -> [usize; 2] {
    let (rows, cols) = cast.granularity.scale_block(MatrixShape::new(rows, cols));
    assert!(
        rows > 0 && cols > 0,
        "quantize: {:?}; use a block or a group of at least one element",
        cast.granularity
    );
    [rows, cols]
}

fn bool_dtype<B: QuantOps>(device: &burn_backend::tensor::Device<B>) -> BoolDType {
    burn_backend::get_device_settings::<B>(device).bool_dtype
}

pub(super) fn to_f32<B: QuantOps>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    match tensor.dtype() {
        DType::F32 => tensor,
        _ => B::float_cast(tensor, FloatDType::F32),
    }
}

pub(super) fn matrix_shape<T: TensorMetadata>(matrix: &T, operation: &str) -> [usize; 2] {
    let shape = matrix.shape();
    match shape.as_slice() {
        &[rows, cols] => [rows, cols],
        dims => panic!(
            "{operation}: expected a matrix, got shape {dims:?}; flatten the leading dimensions"
        ),
    }
}

fn corner([rows, cols]: [usize; 2]) -> [Slice; 2] {
    [
        Slice::new(0, Some(rows as isize), 1),
        Slice::new(0, Some(cols as isize), 1),
    ]
}

/// Not by `float_is_nan`: NdArray's SIMD `not_equal` and `equal` miss NaN.
fn is_nan<B: QuantOps>(x: FloatTensor<B>, bool_dtype: BoolDType) -> BoolTensor<B> {
    B::bool_not(B::float_lower_equal_elem(
        x,
        Scalar::from(f32::INFINITY),
        bool_dtype,
    ))
}
