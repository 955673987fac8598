//! Backends whose tensors are in host memory: `cubecl_kernels::host` works on their slices. Products are of dequantized
//! matrices, by the backend's own matrix product: a scaled INT8 block is a matrix that FP32 holds exactly.

mod attention;
mod concat;
mod health;
mod learned_step;
mod sampling;

use std::borrow::Cow;

use burn_backend::{
    Backend, DType, Element, FloatDType, IntDType, Shape, TensorData, TensorMetadata, bf16,
    tensor::{Device, FloatTensor, IntTensor},
};
use bytemuck::Pod;
use cubecl_kernels::{
    amax_history::DelayedScaling,
    host::{self, HostQuantized, HostScales, HostValues},
    layout::Layout,
    number::Storage,
    optimizer_state::NEUTRAL_EXPONENT,
    reference::{
        self,
        adamw::{MomentChunk, StateDither, Step, clip_factor, round_to_bf16},
        optimizer_state::quantize_state,
    },
};

use super::{
    amax_history::{AmaxHistory, AmaxHistoryKernels},
    cast::cast_to,
    composition::{CompositionKernels, Compositions, OperatorInput, SwigluGradients},
    kernels::checked,
    operation::{DataBackend, Operation},
    optimizer::{
        AdamWItem, AdamWUpdate, HostMoment, Hyperparameters, LossScale, LossScaling, Moment,
        MomentState, OptimizerKernels, StateFormat,
    },
    product::{
        Accumulation, ExpectedLayer, FloatProduct, ProductKernels, check_product, check_stacked,
        dequantized_product,
    },
    quantize::{
        DelayedMaximum, Fallback, FallbackQuantized, Format, MatrixSource, Operand,
        QuantizeKernels, QuantizeSpec, Quantized, QuantizedInput, Residual, Scales, fallback_block,
        quantize_input_by_copies,
    },
    random_hadamard::random_hadamard,
    read::{floats, int_data, integers},
    tensors::{On, matrix_shape},
    threshold::{DelayThreshold, ThresholdKernels, Thresholds},
};

/// A backend whose tensors are in host memory, or read there at little cost.
///
/// Its methods read tensors by Burn's own transfer; a backend that can lend its memory replaces them.
pub trait HostBackend: Backend {
    /// Calls `read` with the elements of a tensor of any float dtype and strides, as contiguous FP32.
    fn with_floats<A>(tensor: FloatTensor<Self>, read: impl FnOnce(&[f32]) -> A) -> A {
        read(&floats::<Self>(tensor))
    }

    /// Calls `read` with the elements of a tensor of any strides, contiguous.
    ///
    /// # Panics
    ///
    /// If they are not of type `E`.
    fn with_ints<E: Element + Pod, A>(tensor: IntTensor<Self>, read: impl FnOnce(&[E]) -> A) -> A {
        let data = int_data::<Self>(tensor);
        read(data.as_slice().expect("a tensor of this dtype"))
    }
}

#[cfg(feature = "ndarray")]
impl HostBackend for burn_ndarray::NdArray {}

#[cfg(feature = "flex")]
impl HostBackend for burn_flex::Flex {
    fn with_floats<A>(tensor: FloatTensor<Self>, read: impl FnOnce(&[f32]) -> A) -> A {
        let tensor = cast_to::<Self>(tensor, Some(FloatDType::F32)).to_contiguous();
        read(tensor.as_slice().expect("contiguous and FP32"))
    }

    fn with_ints<E: Element + Pod, A>(tensor: IntTensor<Self>, read: impl FnOnce(&[E]) -> A) -> A {
        let tensor = tensor.to_contiguous();
        read(tensor.as_slice().expect("a tensor of this dtype"))
    }
}

impl<B: HostBackend> DataBackend for B {
    type Kernels = B;

    fn run<O: Operation>(operation: O, inputs: On<O::Inputs, B>) -> On<O::Outputs, B> {
        operation.run::<B>(inputs)
    }
}

impl<B: HostBackend> QuantizeKernels for B {
    fn quantize_matrix(x: FloatTensor<B>, spec: &QuantizeSpec) -> Quantized<B> {
        let shape = matrix_shape(&x, "quantize");
        let device = B::float_device(&x);
        // One layout serves both ways of reading it: products dequantize.
        let spec = spec.with_layout(Layout::RowMajor);
        let quantized = B::with_floats(x, |x| host::quantize(x, shape, &spec));
        upload(checked(quantized), &device)
    }

    fn quantize_both_ways(x: FloatTensor<B>, spec: &QuantizeSpec) -> [Quantized<B>; 2] {
        let transpose = B::float_swap_dims(x.clone(), 0, 1);
        [x, transpose].map(|x| Self::quantize_matrix(x, spec))
    }

    fn random_hadamard(x: FloatTensor<B>) -> FloatTensor<B> {
        random_hadamard::<B>(x)
    }

    fn quantize_source(x: MatrixSource<B>, spec: &QuantizeSpec) -> Quantized<B> {
        match x {
            MatrixSource::Product(factors) => factors.quantized(spec),
            others => Self::quantize_matrix(others.into_floats(), spec),
        }
    }

    fn quantize_delayed(
        x: MatrixSource<B>,
        spec: &QuantizeSpec,
        delayed: &DelayedMaximum<B>,
    ) -> Quantized<B> {
        let x = x.into_floats();
        let shape = matrix_shape(&x, "quantize_delayed");
        delayed.check("quantize_delayed");
        let device = B::float_device(&x);
        let spec = spec.with_layout(Layout::RowMajor);
        let maximum = B::with_floats(delayed.maxima.clone(), |maxima| maxima[delayed.layer]);
        let quantized = B::with_floats(x, |x| host::quantize_delayed(x, shape, &spec, maximum));
        let (quantized, absmax) = checked(quantized);
        let absmax = TensorData::new(vec![absmax], [1]);
        Quantized {
            absmax: Some(B::float_from_data(absmax, &device)),
            ..upload(quantized, &device)
        }
    }

    fn quantize_fallback(
        x: FloatTensor<B>,
        spec: &QuantizeSpec,
        fallback: Fallback<B>,
    ) -> FallbackQuantized<B> {
        let shape = matrix_shape(&x, "quantize_fallback");
        let block = fallback_block("quantize_fallback", spec);
        fallback.check("quantize_fallback");
        let device = B::float_device(&x);
        let layer = fallback.layer;
        let threshold = B::with_floats(fallback.thresholds, |thresholds| thresholds[layer]);
        let quantized = B::with_floats(x, |x| host::quantize_fallback(x, shape, block, threshold));
        let quantized = checked(quantized);
        let mut counts = integers::<B>(fallback.counts);
        count(&mut counts[2 * layer], quantized.fallback_blocks);
        count(&mut counts[2 * layer + 1], quantized.base.scales.len());
        let layers = counts.len() / 2;

        let residual = upload::<B>(quantized.residual, &device);
        let Scales::F32(scales) = residual.scales else {
            unreachable!("the scales of a residual are FP32");
        };
        FallbackQuantized {
            base: upload(quantized.base, &device),
            residual: Residual {
                values: residual.values.expect(ROW_MAJOR),
                scales,
                indicator: None,
            },
            counts: B::int_from_data(TensorData::new(counts, [layers, 2]), &device),
        }
    }

    fn quantize_input(
        x: MatrixSource<B>,
        forward: &QuantizeSpec,
        saved: Option<&QuantizeSpec>,
        fallback: Option<Fallback<B>>,
    ) -> QuantizedInput<B> {
        quantize_input_by_copies::<B>(x, forward, saved, fallback)
    }

    fn quantize_swiglu_gradients(
        [gate, up]: [OperatorInput<B>; 2],
        gradient: OperatorInput<B>,
        [of_gate, of_up]: [&QuantizeSpec; 2],
        delayed: Option<[&DelayedMaximum<B>; 2]>,
    ) -> [Quantized<B>; 2] {
        let (gate, up) = SwigluGradients.run::<B>(((gate, up), gradient));
        match delayed {
            None => [
                B::quantize_matrix(gate, of_gate),
                B::quantize_matrix(up, of_up),
            ],
            Some([gate_maximum, up_maximum]) => [
                B::quantize_delayed(MatrixSource::Floats(gate), of_gate, gate_maximum),
                B::quantize_delayed(MatrixSource::Floats(up), of_up, up_maximum),
            ],
        }
    }

    fn dequantize_matrix(matrix: &Quantized<B>, dtype: FloatDType) -> FloatTensor<B> {
        cast_to::<B>(dequantize(matrix, None), Some(dtype))
    }
}

/// Adds blocks to a counter.
fn count(counter: &mut i32, blocks: usize) {
    let counted = i32::try_from(blocks).ok();
    let counted = counted.and_then(|blocks| counter.checked_add(blocks));
    *counter = counted.unwrap_or_else(|| {
        panic!(
            "quantize_fallback: {blocks} blocks after {counter} pass the largest INT32 count; step the optimizer, \
             which sets the counters to zero"
        )
    });
}

const ROW_MAJOR: &str = "values on the host are row-major";

/// FP32.
fn dequantize<B: HostBackend>(
    matrix: &Quantized<B>,
    residual: Option<&Residual<B>>,
) -> FloatTensor<B> {
    let values = matrix.values.clone().expect(ROW_MAJOR);
    let device = B::int_device(&values);
    let floats = with_matrix(matrix, |base| match residual {
        None => host::dequantize(base),
        Some(residual) => with_matrix(&residual.as_matrix(matrix), |residual| {
            host::dequantize_fallback(base, residual)
        }),
    });
    B::float_from_data(TensorData::new(checked(floats), matrix.shape), &device)
}

/// Calls `read` with the matrix as the functions of `host` take it.
fn with_matrix<B: HostBackend, A>(
    matrix: &Quantized<B>,
    read: impl FnOnce(&HostQuantized<'_>) -> A,
) -> A {
    with_values(matrix, |values| {
        with_scales(&matrix.scales, |scales| {
            read(&HostQuantized {
                values,
                scales,
                number: matrix.format.number,
                granularity: matrix.format.granularity,
                shape: matrix.shape,
            })
        })
    })
}

fn with_values<B: HostBackend, A>(
    matrix: &Quantized<B>,
    read: impl FnOnce(HostValues<'_>) -> A,
) -> A {
    let values = matrix.values.clone().expect(ROW_MAJOR);
    match matrix.format.number.storage() {
        Storage::SignedBytes => B::with_ints(values, |it| read(HostValues::I8(it.into()))),
        Storage::Bytes | Storage::Nibbles => {
            B::with_ints(values, |it| read(HostValues::U8(it.into())))
        }
        Storage::TenBits => B::with_ints(values, |it| read(HostValues::U32(it.into()))),
    }
}

fn with_scales<B: HostBackend, A>(scales: &Scales<B>, read: impl FnOnce(HostScales<'_>) -> A) -> A {
    match scales.clone() {
        Scales::F32(scales) => B::with_floats(scales, |it| read(HostScales::F32(it.into()))),
        Scales::E8M0(scales) => B::with_ints(scales, |it| read(HostScales::E8M0(it.into()))),
        Scales::E4M3 {
            scales,
            tensor_scale,
        } => B::with_ints(scales, |scales: &[u8]| {
            let tensor_scale = floats::<B>(tensor_scale)[0];
            let scales = scales.into();
            read(HostScales::E4M3 {
                scales,
                tensor_scale,
            })
        }),
    }
}

/// A matrix in the memory of the backend.
fn upload<B: HostBackend>(matrix: HostQuantized<'_>, device: &Device<B>) -> Quantized<B> {
    let format = Format {
        number: matrix.number,
        scale: matrix.scales.number(),
        granularity: matrix.granularity,
    };
    let of_values = format.values_shape(matrix.shape);
    let of_scales = format.scales_shape(matrix.shape);
    let values = match matrix.values {
        HostValues::I8(values) => TensorData::new(values.into_owned(), of_values),
        HostValues::U8(values) => TensorData::new(values.into_owned(), of_values),
        HostValues::U32(values) => TensorData::new(values.into_owned(), of_values),
    };
    let bytes = |scales: Cow<'_, [u8]>| {
        B::int_from_data(
            TensorData::new(scales.into_owned(), of_scales.clone()),
            device,
        )
    };
    let floats =
        |scales: Vec<f32>, shape: Shape| B::float_from_data(TensorData::new(scales, shape), device);
    Quantized {
        shape: matrix.shape,
        format,
        values: Some(B::int_from_data(values, device)),
        transposed: None,
        absmax: None,
        scales: match matrix.scales {
            HostScales::F32(scales) => Scales::F32(floats(scales.into_owned(), of_scales.clone())),
            HostScales::E8M0(scales) => Scales::E8M0(bytes(scales)),
            HostScales::E4M3 {
                scales,
                tensor_scale,
            } => Scales::E4M3 {
                scales: bytes(scales),
                tensor_scale: floats(vec![tensor_scale], Shape::new([1])),
            },
        },
    }
}

impl<B: HostBackend> ProductKernels for B {
    fn product(
        left: Operand<'_, B>,
        residual: Option<&Residual<B>>,
        right: Operand<'_, B>,
        bias: Option<FloatTensor<B>>,
        _accumulation: Accumulation,
        dtype: FloatDType,
    ) -> FloatTensor<B> {
        check_product::<B>(&left, &right, bias.as_ref());
        dequantized_product(left, residual, right, bias, dtype, dequantize)
    }

    fn quantized_product(
        [left, right]: [Operand<'_, B>; 2],
        bias: Option<FloatTensor<B>>,
        accumulation: Accumulation,
        dtype: FloatDType,
        spec: &QuantizeSpec,
    ) -> Quantized<B> {
        let product = B::product(left, None, right, bias, accumulation, dtype);
        B::quantize_matrix(product, spec)
    }

    fn stacked_product(
        left: &Quantized<B>,
        right: &Quantized<B>,
        batch: usize,
        dtype: FloatDType,
    ) -> FloatTensor<B> {
        check_stacked(left, right, batch);
        let [left, right] = [left, right].map(|it| {
            let [rows, cols] = it.shape;
            let stack = Shape::new([batch, rows / batch, cols]);
            B::float_reshape(dequantize(it, None), stack)
        });
        let product = B::float_matmul(left, B::float_swap_dims(right, 1, 2));
        cast_to::<B>(product, Some(dtype))
    }

    fn float_product_kernel(
        _device: &Device<B>,
        _dtype: DType,
        _sums: &[usize],
    ) -> Option<FloatProduct<B>> {
        None
    }

    fn expect_layers(_device: &Device<B>, _layers: &[ExpectedLayer]) {}
}

impl<B: HostBackend> CompositionKernels for B {
    fn composition_kernels(_device: &Device<B>) -> Option<Compositions<B>> {
        None
    }
}

impl<B: HostBackend> ThresholdKernels for B {
    fn delay_threshold(state: Thresholds<B>, config: &DelayThreshold) -> Thresholds<B> {
        let device = B::float_device(&state.thresholds);
        let mut thresholds = floats::<B>(state.thresholds);
        let mut moves = floats::<B>(state.moves);
        let mut rates = floats::<B>(state.rates);
        let counts = integers::<B>(state.counts);
        let (counts, _) = counts.as_chunks();
        reference::delay_threshold(
            &mut thresholds,
            &mut moves,
            &mut counts.to_vec(),
            &mut rates,
            &config.kernel(),
        );
        Thresholds::new(&thresholds, &moves, &rates, &device)
    }
}

impl<B: HostBackend> AmaxHistoryKernels for B {
    fn advance_amax_history(
        state: AmaxHistory<B>,
        runs: FloatTensor<B>,
        scaling: &DelayedScaling,
    ) -> AmaxHistory<B> {
        let device = B::float_device(&runs);
        let shape = state.history.shape();
        let mut maxima = floats::<B>(state.maxima);
        let mut history = floats::<B>(state.history);
        B::with_floats(runs, |runs| {
            reference::amax_history::advance_amax_history(&mut maxima, &mut history, runs, scaling);
        });
        let layers = maxima.len();
        let upload = |values, shape| B::float_from_data(TensorData::new(values, shape), &device);
        AmaxHistory {
            maxima: upload(maxima, Shape::new([layers])),
            history: upload(history, shape),
        }
    }
}

impl<B: HostBackend> OptimizerKernels for B {
    fn adamw(
        items: Vec<AdamWItem<B>>,
        clock: &IntTensor<B>,
        nonfinite: Option<&IntTensor<B>>,
        loss_scale: Option<&FloatTensor<B>>,
        hyperparameters: &Hyperparameters,
    ) -> Vec<AdamWUpdate<B>> {
        let skip = is_raised::<B>(nonfinite);
        let taken = integers::<B>(clock.clone())[0];
        let t = u32::try_from(taken).unwrap_or_else(|_| {
            panic!("adamw: the clock is at step {taken}; pass one that counts up from 0")
        });
        let step = checked(Step::new(hyperparameters, t));
        let loss_scale = loss_scale.map(|scale| floats::<B>(scale.clone())[0]);
        let step = loss_scale.map_or(step, |scale| step.of_scaled_loss(scale));
        items
            .into_iter()
            .map(|item| match skip {
                true => AdamWUpdate {
                    parameter: item.parameter,
                    first: item.first,
                    second: item.second,
                },
                false => {
                    let step = match hyperparameters.clip_norm {
                        Some(threshold) => {
                            let norm = norm::<B>(item.gradient.clone(), loss_scale);
                            step.of_clipped_gradient(clip_factor(norm, threshold))
                        }
                        None => step,
                    };
                    update::<B>(&step, t, item)
                }
            })
            .collect()
    }

    fn tick(clock: IntTensor<B>, nonfinite: Option<&IntTensor<B>>) -> IntTensor<B> {
        let device = B::int_device(&clock);
        let mut counts = integers::<B>(clock);
        counts[usize::from(is_raised::<B>(nonfinite))] += 1;
        B::int_from_data(TensorData::new(counts, [2]), &device)
    }

    fn find_nonfinite(gradients: &[FloatTensor<B>]) -> IntTensor<B> {
        let holds = |gradient: &FloatTensor<B>| {
            B::with_floats(gradient.clone(), |values| {
                values.iter().any(|x| !x.is_finite())
            })
        };
        let found = gradients.iter().position(holds);
        let flag = found.map_or(0, |index| index + 1);
        let flag = i32::try_from(flag).expect("INT32 counts the gradients of a step");
        let device = B::float_device(&gradients[0]);
        B::int_from_data(TensorData::new(vec![flag], [1]), &device)
    }

    fn update_loss_scale(
        state: LossScale<B>,
        nonfinite: &IntTensor<B>,
        config: &LossScaling,
    ) -> LossScale<B> {
        let device = B::float_device(&state.scale);
        let (mut scale, mut good_steps) = state.read();
        let good = !is_raised::<B>(Some(nonfinite));
        reference::update_loss_scale(&mut scale, &mut good_steps, good, config);
        LossScale::new(scale, good_steps, &device)
    }

    fn initial_moment(
        parameter: &FloatTensor<B>,
        format: Option<StateFormat>,
        moment: Moment,
    ) -> MomentState<B> {
        let (shape, device) = (parameter.shape(), B::float_device(parameter));
        let Some(format) = format else {
            return MomentState::Full(B::float_zeros(shape, &device, FloatDType::F32));
        };
        let groups = Shape::new([format.groups(shape.num_elements())]);
        let bytes = |shape, byte: u8| B::int_full(shape, byte.into(), &device, IntDType::U8);
        MomentState::Coded {
            format,
            codes: bytes(shape, format.encoding.zero(moment)),
            scales: B::float_zeros(groups.clone(), &device, FloatDType::F32),
            exponents: format.expand.then(|| bytes(groups, NEUTRAL_EXPONENT)),
        }
    }

    fn compress_moment(x: FloatTensor<B>, format: StateFormat, moment: Moment) -> MomentState<B> {
        let (shape, device) = (x.shape(), B::float_device(&x));
        let state = B::with_floats(x, |x| quantize_state(x, format, moment));
        HostMoment::Coded { format, state }.write(shape, &device)
    }

    fn decompress_moment(state: MomentState<B>, moment: Moment) -> FloatTensor<B> {
        let (shape, device) = match &state {
            MomentState::Full(values) => return values.clone(),
            MomentState::Coded { codes, .. } => (codes.shape(), B::int_device(codes)),
        };
        let values = HostMoment::read(state).values(moment);
        B::float_from_data(TensorData::new(values, shape), &device)
    }
}

fn is_raised<B: HostBackend>(nonfinite: Option<&IntTensor<B>>) -> bool {
    nonfinite.is_some_and(|flag| integers::<B>(flag.clone())[0] != 0)
}

/// The norm of a gradient without the scale that it has: in FP32, by the operations of Burn's clipping.
fn norm<B: HostBackend>(gradient: FloatTensor<B>, loss_scale: Option<f32>) -> f32 {
    let gradient = cast_to::<B>(gradient, Some(FloatDType::F32));
    let gradient = match loss_scale {
        Some(scale) => B::float_div_scalar(gradient, scale.into()),
        None => gradient,
    };
    let squared = B::float_powi_scalar(gradient, 2.into());
    let norm = B::float_sqrt(B::float_sum(squared));
    floats::<B>(norm)[0]
}

fn update<B: HostBackend>(step: &Step, t: u32, item: AdamWItem<B>) -> AdamWUpdate<B> {
    let device = B::float_device(&item.parameter);
    let (shape, dtype) = (item.parameter.shape(), item.parameter.dtype());
    let gradient = floats::<B>(item.gradient);
    let mut parameter = floats::<B>(item.parameter);
    let mut first = HostMoment::read::<B>(item.first);
    let mut second = HostMoment::read::<B>(item.second);
    host::adamw(
        step,
        &mut parameter,
        &gradient,
        chunk(&mut first),
        chunk(&mut second),
        item.state_key.map(|key| StateDither { key, t, start: 0 }),
    );
    let data = match (dtype, item.key) {
        (DType::BF16, Some(key)) => {
            let mut rounded = vec![bf16::ZERO; parameter.len()];
            round_to_bf16(&parameter, key, t, 0, &mut rounded);
            TensorData::new(rounded, shape.clone())
        }
        _ => TensorData::new(parameter, shape.clone()).convert_dtype(dtype),
    };
    AdamWUpdate {
        parameter: B::float_from_data(data, &device),
        first: first.write(shape.clone(), &device),
        second: second.write(shape, &device),
    }
}

fn chunk(moment: &mut HostMoment) -> MomentChunk<'_> {
    match moment {
        HostMoment::Full(values) => MomentChunk::Full(values),
        HostMoment::Coded { format, state } => MomentChunk::Compressed {
            format: *format,
            codes: &mut state.codes,
            scales: &mut state.scales,
            exponents: &mut state.exponents,
        },
    }
}
