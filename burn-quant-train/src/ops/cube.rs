//! The quantized operations by the kernels of `cubecl-kernels`, on every CubeCL runtime.

use burn_backend::{
    Backend, DType, FloatDType, Shape, TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};
use burn_cubecl::{
    CubeBackend, CubeRuntime, FloatElement, IntElement, element::BoolElement,
    kernel::into_contiguous, ops::numeric::empty_device_contiguous_dtype, tensor::CubeTensor,
};
use cubecl::{client::ComputeClient, ir::StorageType, std::tensor::TensorHandle};
use cubecl_kernels::{
    KernelError,
    adamw::{self, AdamWTensors},
    delay_threshold::{self, DelayThreshold as KernelThreshold},
    fallback::{self, FallbackResidual, FallbackState},
    gemm::{self, GemmOperand, Strategy},
    granularity::Granularity,
    linear_input::quantize_linear_input,
    optimizer_state::{StateTensor, dequantize_state, quantize_state},
    quantize::{self, QuantizeSpec},
    rounding::Rounding as KernelRounding,
    scale::ScaleNumber,
    shape::MatrixShape,
    softmax,
    transpose::transpose_int8,
};

use super::{
    Fallback, FallbackQuantized, InputCasts, Layout, LinearInput, Operand, QuantOps, Quantized,
    Residual, StochasticKey,
    adamw::{AdamWItem, AdamWUpdate, Hyperparameters, Moment, MomentState, StateFormat},
    attention::AttentionKernels,
    fallback_block,
    float::matrix_shape,
    keyed,
    matmul::MatmulKernel,
    quantize_input_twice,
    softmax::SoftmaxKernels,
};
use crate::{
    layer::{self, DelayThreshold},
    recipe::{Cast, Format, Rounding},
};

impl<R, F, I, BT> QuantOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
    Self: Backend<
            Device = R::Device,
            FloatTensorPrimitive = CubeTensor<R>,
            IntTensorPrimitive = CubeTensor<R>,
        >,
{
    fn quantize_matrix(
        x: FloatTensor<Self>,
        cast: Cast,
        layout: Layout,
        key: Option<StochasticKey>,
    ) -> Quantized<Self> {
        matrix_shape(&x, "quantize");
        let spec = QuantizeSpec::new(cast.format, cast.granularity)
            .with_rounding(keyed(cast, key))
            .with_layout(layout);
        let quantized = checked(quantize::quantize(&x.client, &handle(&x), &spec));
        wrap(&x, quantized, cast)
    }

    fn quantize_fallback(
        x: FloatTensor<Self>,
        cast: Cast,
        layer: usize,
        thresholds: FloatTensor<Self>,
        counts: IntTensor<Self>,
    ) -> (FallbackQuantized<Self>, IntTensor<Self>) {
        matrix_shape(&x, "quantize_fallback");
        let block = fallback_block("quantize_fallback", cast);
        let counts = into_contiguous(counts);
        let quantized = checked(fallback::quantize_fallback(
            &x.client,
            &handle(&x),
            block,
            Layout::RowMajor,
            &handle(&thresholds),
            layer as u32,
            &handle(&counts),
        ));
        let fallback = FallbackQuantized {
            base: wrap(&x, quantized.base, cast),
            residual: wrap_residual(&x, quantized.residual),
        };
        (fallback, counts)
    }

    fn quantize_input(
        x: FloatTensor<Self>,
        casts: InputCasts,
        fallback: Option<Fallback<Self>>,
    ) -> LinearInput<Self> {
        let Some((block, saved_cast, key)) = one_read(&casts) else {
            return quantize_input_twice(x, casts, fallback);
        };
        matrix_shape(&x, "quantize_input");
        // Without padding between rows, as kernels take the counters: Burn pads the rows of what it allocates on CUDA.
        // From then on the kernels' own buffer goes round.
        let fallback = fallback.map(|fallback| Fallback {
            counts: into_contiguous(fallback.counts),
            ..fallback
        });
        let tensors = fallback
            .as_ref()
            .map(|it| (handle(&it.thresholds), handle(&it.counts), it.layer as u32));
        let state = tensors
            .as_ref()
            .map(|(thresholds, counts, layer)| FallbackState {
                thresholds,
                layer: *layer,
                counts,
            });
        let input = checked(quantize_linear_input(
            &x.client,
            &handle(&x),
            block,
            key,
            state,
        ));
        LinearInput {
            forward: wrap(&x, input.forward, casts.forward),
            residual: input.residual.map(|residual| wrap_residual(&x, residual)),
            saved: Some(wrap(&x, input.saved, saved_cast)),
            counts: fallback.map(|fallback| fallback.counts),
        }
    }

    fn dequantize_matrix(matrix: &Quantized<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let like = &matrix.scales;
        let dtype = DType::from(dtype);
        let dequantized = checked(quantize::dequantize(
            &like.client,
            &unwrap(matrix),
            dtype.into(),
        ));
        tensor(like, dequantized, dtype)
    }

    fn quantized_matmul(
        a: Operand<'_, Self>,
        residual: Option<&Residual<Self>>,
        b: Operand<'_, Self>,
        bias: Option<FloatTensor<Self>>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let like = &a.matrix.scales;
        let client = &like.client;
        let dtype = DType::from(dtype);
        let residual = residual.map(|residual| {
            let block = fallback_block("quantized_matmul", a.matrix.cast);
            assert!(
                !a.transpose,
                "quantized_matmul: the residual of a transposed operand; fallback is for Y = X W"
            );
            let indicator = residual.indicator.as_ref();
            FallbackResidual {
                values: handle(&residual.values),
                scales: handle(&residual.scales),
                flags: handle(indicator.expect("kernels write the indicator of fallback blocks")),
                block,
            }
        });
        let bias = bias.map(|bias| {
            let bias = crate::precision::cast_to::<Self>(bias, Some(FloatDType::F32));
            handle(&into_contiguous(bias))
        });
        let (lhs, rhs) = (left::<Self, R>(a), right::<Self, R>(b));
        let product = gemm::gemm(
            client,
            &lhs,
            &rhs,
            residual.as_ref(),
            bias.as_ref(),
            dtype.into(),
            Strategy::Auto,
        );
        tensor(like, checked(product), dtype)
    }

    fn delay_threshold(
        state: layer::FallbackState<Self>,
        config: &DelayThreshold,
    ) -> layer::FallbackState<Self> {
        let config = KernelThreshold {
            r_min: config.rate_min,
            r_max: config.rate_max,
            alpha: config.alpha,
        };
        let state = layer::FallbackState {
            counts: into_contiguous(state.counts),
            ..state
        };
        checked(delay_threshold::delay_threshold(
            &state.thresholds.client,
            &handle(&state.thresholds),
            &handle(&state.counts),
            &handle(&state.rates),
            config,
        ));
        state
    }

    fn matmul_kernel(device: &R::Device) -> Option<MatmulKernel<Self>> {
        gemm::has_gemm_float(&R::client(device)).then_some(product::<Self, R>)
    }

    fn attention_kernels() -> Option<AttentionKernels<Self>> {
        Some(AttentionKernels {
            forward: |inputs, scores| {
                let kernels = softmax_kernels::<Self, R>(&inputs.query.client);
                kernels.attention(inputs.map(readable), scores)
            },
            backward: |inputs, grad, wanted, scores| {
                let kernels = softmax_kernels::<Self, R>(&grad.client);
                let (inputs, grad) = (inputs.map(readable), readable(grad));
                kernels.attention_backward(inputs, grad, wanted, scores)
            },
        })
    }

    fn adamw(
        items: Vec<AdamWItem<Self>>,
        clock: &IntTensor<Self>,
        nonfinite: Option<&IntTensor<Self>>,
        hyperparameters: &Hyperparameters,
    ) -> Vec<AdamWUpdate<Self>> {
        let items: Vec<_> = items.into_iter().map(adamw_item).collect();
        let tensors: Vec<_> = items.iter().map(adamw_tensors).collect();
        checked(adamw::adamw(
            &clock.client,
            &tensors,
            &handle(&into_contiguous(clock.clone())),
            nonfinite.map(handle).as_ref(),
            hyperparameters,
        ));
        items
            .into_iter()
            .map(|item| AdamWUpdate {
                parameter: item.parameter,
                first: item.first,
                second: item.second,
            })
            .collect()
    }

    fn tick(clock: IntTensor<Self>, nonfinite: Option<&IntTensor<Self>>) -> IntTensor<Self> {
        let clock = own(clock);
        checked(adamw::tick(
            &clock.client,
            &handle(&clock),
            nonfinite.map(handle).as_ref(),
        ));
        clock
    }

    fn find_nonfinite(gradients: &[FloatTensor<Self>], device: &R::Device) -> IntTensor<Self> {
        let client = R::client(device);
        let flag = CubeTensor::new_contiguous(
            client.clone(),
            device.clone(),
            Shape::new([1]),
            adamw::initial_flag(&client).handle,
            DType::I32,
        );
        let gradients: Vec<_> = gradients
            .iter()
            .map(|gradient| handle(&into_contiguous(gradient.clone())))
            .collect();
        checked(adamw::find_nonfinite(&client, &gradients, &handle(&flag)));
        flag
    }

    fn compress_moment(
        x: FloatTensor<Self>,
        format: StateFormat,
        moment: Moment,
    ) -> MomentState<Self> {
        let x = into_contiguous(x);
        let StateTensor {
            values,
            scales,
            exponents,
            ..
        } = checked(quantize_state(&x.client, &handle(&x), format, moment));
        let scales = scales.expect("a compressed moment has scales");
        MomentState::Coded {
            format,
            codes: tensor(&x, values, DType::U8),
            scales: tensor(&x, scales, DType::F32),
            exponents: exponents.map(|it| tensor(&x, it, DType::U8)),
        }
    }

    fn decompress_moment(state: MomentState<Self>, moment: Moment) -> FloatTensor<Self> {
        // Tensors that were just uploaded may have padded rows.
        let state = state.map(into_contiguous, into_contiguous);
        let (MomentState::Full(like) | MomentState::Coded { codes: like, .. }) = &state;
        let values = checked(dequantize_state(
            &like.client,
            &state_tensor(&state, moment),
        ));
        tensor(like, values, DType::F32)
    }
}

/// A backend of CubeCL tensors.
trait Cube<R: CubeRuntime>:
    Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>
{
}

impl<B, R: CubeRuntime> Cube<R> for B where
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>
{
}

/// `[.., rows, cols]` as a batch of matrices, a copy only where the leading dimensions have no common stride. A copy
/// keeps the order of rows and columns in memory.
fn matrices<R: CubeRuntime>(tensor: CubeTensor<R>) -> TensorHandle<R> {
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

/// An operand of several products: as it lies in memory where the kernel reads it so, else contiguous, since heads are
/// slices of a row and products that take batches of matrices would each copy them.
fn readable<R: CubeRuntime>(operand: CubeTensor<R>) -> CubeTensor<R> {
    match gemm::gemm_float_reads(&operand.client, &handle(&operand)) {
        true => operand,
        false => into_contiguous(operand),
    }
}

/// The product of `[.., M, K]` and `[.., K, N]` by our kernel, or by Burn's where ours cannot read an operand.
fn product<B, R>(lhs: CubeTensor<R>, rhs: CubeTensor<R>) -> CubeTensor<R>
where
    B: QuantOps<FloatTensorPrimitive = CubeTensor<R>>,
    R: CubeRuntime,
{
    let (mut shape, n) = (lhs.shape(), rhs.shape()[rhs.rank() - 1]);
    let operand = |tensor: &CubeTensor<R>| match tensor.rank() {
        2..=4 => handle(tensor),
        _ => matrices(tensor.clone()),
    };
    let (a, b) = (operand(&lhs), transposed(operand(&rhs)));
    match gemm::gemm_float(&lhs.client, &a, &b, None, a.dtype) {
        Ok(product) => {
            let last = shape.num_dims() - 1;
            shape[last] = n;
            reshaped(tensor(&lhs, product, lhs.dtype), shape)
        }
        // What TMA cannot read, or more elements than 32 bits index.
        Err(KernelError::Unsupported { .. } | KernelError::Shape { .. }) => {
            B::float_matmul(lhs, rhs)
        }
        Err(error) => panic!("{error}"),
    }
}

/// [`product`] of rank 4, the heads of attention, side by side in the rows of its memory where our kernel computes it:
/// `[batch, heads, M, N]` as a view of `[batch, M, heads, N]`, so that the layer reads the rows without a copy.
fn product_in_rows<B, R>(lhs: CubeTensor<R>, rhs: CubeTensor<R>) -> CubeTensor<R>
where
    B: QuantOps<FloatTensorPrimitive = CubeTensor<R>>,
    R: CubeRuntime,
{
    let (a, b) = (handle(&lhs), handle(&rhs));
    if [&a, &b]
        .into_iter()
        .all(|it| gemm::gemm_float_reads(&lhs.client, it))
    {
        let (of_lhs, of_rhs) = (lhs.shape(), rhs.shape());
        let mut out = empty_device_contiguous_dtype(
            lhs.client.clone(),
            lhs.device.clone(),
            Shape::new([of_lhs[0], of_lhs[2], of_lhs[1], of_rhs[3]]),
            lhs.dtype,
        );
        out.meta.swap(1, 2);
        if gemm::gemm_float_into(&lhs.client, &a, &transposed(b), None, &handle(&out)).is_ok() {
            return out;
        }
    }
    product::<B, R>(lhs, rhs)
}

/// A contiguous tensor in another shape.
fn reshaped<R: CubeRuntime>(tensor: CubeTensor<R>, shape: Shape) -> CubeTensor<R> {
    CubeTensor::new_contiguous(
        tensor.client,
        tensor.device,
        shape,
        tensor.handle,
        tensor.dtype,
    )
}

/// A tensor to update in place: contiguous, and in a buffer that nothing else holds.
fn own<R: CubeRuntime>(tensor: CubeTensor<R>) -> CubeTensor<R> {
    let tensor = into_contiguous(tensor);
    match tensor.can_mut() {
        true => tensor,
        // Burn may pad the rows of the copy.
        false => into_contiguous(tensor.copy()),
    }
}

fn adamw_item<B, R>(item: AdamWItem<B>) -> AdamWItem<B>
where
    B: Cube<R>,
    R: CubeRuntime,
{
    AdamWItem {
        parameter: own(item.parameter),
        gradient: into_contiguous(item.gradient),
        first: item.first.map(own, own),
        second: item.second.map(own, own),
        key: item.key,
        state_key: item.state_key,
    }
}

fn rounding(key: Option<StochasticKey>) -> KernelRounding {
    key.map_or(KernelRounding::Nearest, KernelRounding::Stochastic)
}

fn adamw_tensors<B, R>(item: &AdamWItem<B>) -> AdamWTensors<R>
where
    B: Cube<R>,
    R: CubeRuntime,
{
    AdamWTensors {
        parameter: handle(&item.parameter),
        gradient: handle(&item.gradient),
        first: state_tensor(&item.first, Moment::First),
        second: state_tensor(&item.second, Moment::Second),
        rounding: rounding(item.key),
        state_rounding: rounding(item.state_key),
    }
}

fn state_tensor<B, R>(state: &MomentState<B>, moment: Moment) -> StateTensor<R>
where
    B: Cube<R>,
    R: CubeRuntime,
{
    match state {
        MomentState::Full(values) => StateTensor {
            values: handle(values),
            scales: None,
            exponents: None,
            format: None,
            moment,
        },
        MomentState::Coded {
            format,
            codes,
            scales,
            exponents,
        } => StateTensor {
            values: handle(codes),
            scales: Some(handle(scales)),
            exponents: exponents.as_ref().map(handle),
            format: Some(*format),
            moment,
        },
    }
}

fn softmax_kernels<B, R>(client: &ComputeClient<R>) -> SoftmaxKernels<B>
where
    B: QuantOps<FloatTensorPrimitive = CubeTensor<R>>,
    R: CubeRuntime,
{
    let (product, product_in_rows): (MatmulKernel<B>, MatmulKernel<B>) =
        match gemm::has_gemm_float(client) {
            true => (product::<B, R>, product_in_rows::<B, R>),
            false => (B::float_matmul, B::float_matmul),
        };
    SoftmaxKernels {
        product,
        product_in_rows,
        forward: |scores, attention| {
            let (like, shape) = (scores.clone(), scores.shape());
            let p = checked(softmax::softmax(&like.client, &matrices(scores), attention));
            reshaped(tensor(&like, p, like.dtype), shape)
        },
        backward: |scores, grad, attention| {
            let (like, shape) = (scores.clone(), scores.shape());
            let (p, grad) = checked(softmax::softmax_backward(
                &like.client,
                &matrices(scores),
                &matrices(grad),
                attention,
            ));
            let wrap = |it| reshaped(tensor(&like, it, like.dtype), shape.clone());
            (wrap(p), wrap(grad))
        },
    }
}

/// The left operand of a product, which sums along its columns.
fn left<B, R>(operand: Operand<'_, B>) -> GemmOperand<R>
where
    B: Cube<R>,
    R: CubeRuntime,
{
    let matrix = operand.matrix;
    let mut kernel = unwrap(matrix);
    let operand = match operand.transpose {
        false => {
            kernel.values = kernel
                .values
                .or_else(|| flipped(matrix, &matrix.transposed));
            kernel.operand()
        }
        true => {
            kernel.transposed = kernel
                .transposed
                .or_else(|| flipped(matrix, &matrix.values));
            kernel.operand_transposed()
        }
    };
    checked(operand)
}

/// The right operand of a product, which sums along its rows: the kernel takes its transpose.
fn right<B, R>(operand: Operand<'_, B>) -> GemmOperand<R>
where
    B: Cube<R>,
    R: CubeRuntime,
{
    left(operand.t())
}

/// The INT8 copy in the other layout, for the time of one product.
fn flipped<B, R>(matrix: &Quantized<B>, values: &Option<CubeTensor<R>>) -> Option<TensorHandle<R>>
where
    B: Backend,
    R: CubeRuntime,
{
    let values = values
        .clone()
        .filter(|_| matrix.cast.format == Format::Int8)?;
    let values = into_contiguous(values);
    Some(checked(transpose_int8(&values.client, &handle(&values))))
}

fn wrap<B, R>(like: &CubeTensor<R>, matrix: quantize::Quantized<R>, cast: Cast) -> Quantized<B>
where
    B: Cube<R>,
    R: CubeRuntime,
{
    let dtype = match matrix.number {
        Format::Int10 => DType::U32,
        _ => DType::I8,
    };
    Quantized {
        shape: [matrix.shape.rows, matrix.shape.cols],
        cast,
        values: matrix.values.map(|values| tensor(like, values, dtype)),
        transposed: matrix.transposed.map(|values| tensor(like, values, dtype)),
        scales: tensor(like, matrix.scales, DType::F32),
    }
}

fn wrap_residual<B, R>(like: &CubeTensor<R>, residual: FallbackResidual<R>) -> Residual<B>
where
    B: Cube<R>,
    R: CubeRuntime,
{
    Residual {
        values: tensor(like, residual.values, DType::I8),
        scales: tensor(like, residual.scales, DType::F32),
        indicator: Some(tensor(like, residual.flags, DType::U32)),
    }
}

/// The block size, the saved copy's cast and its key, if one kernel makes both copies: INT8 in blocks of one size, to
/// nearest and stochastic.
fn one_read(casts: &InputCasts) -> Option<(usize, Cast, StochasticKey)> {
    let (saved, key) = casts.saved?;
    let Granularity::Block(block) = saved.granularity else {
        return None;
    };
    let fits = casts.forward == Cast::int8(block, Rounding::Nearest)
        && saved == Cast::int8(block, Rounding::Stochastic);
    key.filter(|_| fits).map(|key| (block, saved, key))
}

fn unwrap<B, R>(matrix: &Quantized<B>) -> quantize::Quantized<R>
where
    B: Cube<R>,
    R: CubeRuntime,
{
    let [rows, cols] = matrix.shape;
    quantize::Quantized {
        values: matrix.values.as_ref().map(handle),
        transposed: matrix.transposed.as_ref().map(handle),
        scales: handle(&matrix.scales),
        tensor_scale: None,
        number: matrix.cast.format,
        scale: ScaleNumber::F32,
        granularity: matrix.cast.granularity,
        shape: MatrixShape::new(rows, cols),
        batched: false,
    }
}

fn handle<R: CubeRuntime>(tensor: &CubeTensor<R>) -> TensorHandle<R> {
    tensor.clone().into()
}

fn tensor<R: CubeRuntime>(
    like: &CubeTensor<R>,
    handle: TensorHandle<R>,
    dtype: DType,
) -> CubeTensor<R> {
    CubeTensor::new(
        like.client.clone(),
        handle.handle,
        *handle.metadata,
        like.device.clone(),
        dtype,
    )
}

/// Burn's backend traits return no errors: the kernels' message names operation, shapes and remedy.
fn checked<T>(result: Result<T, KernelError>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}
