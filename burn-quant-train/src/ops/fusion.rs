//! The quantized operations in a fused stream: each is one custom operation, run by the backend under `Fusion`.
//!
//! They are functional: state goes in and comes out as tensors, so the stream sees every dependency. A kernel that
//! updates a buffer in place is registered as the maker of the tensor that comes out.

use std::{fmt::Debug, sync::Arc};

use burn_backend::{
    DType, FloatDType, IntDType, Shape, TensorMetadata,
    ops::{FloatTensorOps, IntTensorOps},
    tensor::{FloatTensor, IntTensor},
};
use burn_fusion::{
    Fusion, FusionBackend, FusionTensor,
    stream::{Operation, OperationStreams},
};
use burn_ir::{CustomOpIr, HandleContainer, OperationIr, TensorIr};
use cubecl_kernels::shape::MatrixShape;

use super::{
    Fallback, FallbackQuantized, InputCasts, Layout, Operand, QuantOps, Quantized, Residual,
    StochasticKey,
    adamw::{AdamWItem, AdamWUpdate, Hyperparameters, Moment, MomentState, StateFormat},
    attention::{AttentionInputs, AttentionKernels},
    float,
    linear::{
        self, LinearBackward, LinearForward, LinearGradients, LinearOutput, LinearProduct,
        LinearWeight, LinearX,
    },
    matmul::MatmulKernel,
};
use crate::{
    layer::{DelayThreshold, FallbackState},
    recipe::{Cast, Format},
};

type Tensor<B> = FusionTensor<<B as FusionBackend>::FusionRuntime>;
type Handles<B> = HandleContainer<<B as burn_ir::BackendIr>::Handle>;
type Execute<B> = dyn Fn(&CustomOpIr, &mut Handles<B>) + Send + Sync;

/// A custom operation of the stream and what runs it.
struct Custom<B: FusionBackend> {
    ir: CustomOpIr,
    execute: Arc<Execute<B>>,
}

impl<B: FusionBackend> Debug for Custom<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.ir.id)
    }
}

impl<B: FusionBackend> Operation<B::FusionRuntime> for Custom<B> {
    fn execute(&self, handles: &mut Handles<B>) {
        (self.execute)(&self.ir, handles);
    }
}

/// Registers an operation on `inputs` with outputs of the given shapes and dtypes.
fn register<B: FusionBackend>(
    id: &'static str,
    inputs: Vec<Tensor<B>>,
    outputs: &[(Shape, DType)],
    execute: impl Fn(&CustomOpIr, &mut Handles<B>) + Send + Sync + 'static,
) -> std::vec::IntoIter<Tensor<B>> {
    let client = inputs[0].client.clone();
    let streams = OperationStreams::with_inputs(inputs.iter());
    let inputs: Vec<TensorIr> = inputs.into_iter().map(FusionTensor::into_ir).collect();
    let outputs: Vec<TensorIr> = outputs
        .iter()
        .map(|(shape, dtype)| TensorIr::uninit(client.create_empty_handle(), shape.clone(), *dtype))
        .collect();
    let ir = CustomOpIr::new(id, &inputs, &outputs);
    let operation = Custom::<B> {
        ir: ir.clone(),
        execute: Arc::new(execute),
    };
    client
        .register(streams, OperationIr::Custom(ir), operation)
        .into_iter()
}

/// The next input or output.
fn next<T>(tensors: &mut impl Iterator<Item = T>) -> T {
    tensors
        .next()
        .expect("an operation has the inputs and outputs that it was registered with")
}

/// A quantized matrix without its tensors.
#[derive(Clone, Copy)]
struct Form {
    shape: [usize; 2],
    cast: Cast,
    values: bool,
    transposed: bool,
}

impl Form {
    fn of<B: FusionBackend>(matrix: &Quantized<Fusion<B>>) -> Self {
        Self {
            shape: matrix.shape,
            cast: matrix.cast,
            values: matrix.values.is_some(),
            transposed: matrix.transposed.is_some(),
        }
    }

    fn new(shape: [usize; 2], cast: Cast, layout: Layout) -> Self {
        Self {
            shape,
            cast,
            values: layout.row_major(),
            transposed: layout.transposed(),
        }
    }

    fn scales(&self) -> Shape {
        let [rows, cols] = self.shape;
        let scales = self
            .cast
            .granularity
            .scales_shape(MatrixShape::new(rows, cols));
        Shape::new([scales.rows, scales.cols])
    }

    /// Shapes and dtypes of the tensors: scales, then the copies that are there.
    fn tensors(&self) -> Vec<(Shape, DType)> {
        let [rows, cols] = self.shape;
        let (width, dtype) = match self.cast.format {
            Format::Int10 => (5 * cols.div_ceil(16), DType::U32),
            _ => (cols, DType::I8),
        };
        let values = self.values.then(|| (Shape::new([rows, width]), dtype));
        let transposed = self.transposed.then(|| (Shape::new([width, rows]), dtype));
        [Some((self.scales(), DType::F32)), values, transposed]
            .into_iter()
            .flatten()
            .collect()
    }

    /// Reassembles a matrix of the fused backend from its tensors, in the order of [`tensors`](Self::tensors).
    fn fused<B: FusionBackend>(
        &self,
        tensors: &mut impl Iterator<Item = Tensor<B>>,
    ) -> Quantized<Fusion<B>> {
        let scales = next(tensors);
        Quantized {
            shape: self.shape,
            cast: self.cast,
            values: self.values.then(|| next(tensors)),
            transposed: self.transposed.then(|| next(tensors)),
            scales,
        }
    }

    /// Takes a matrix of the inner backend from the stream's handles.
    fn take<B: FusionBackend>(
        &self,
        inputs: &mut std::slice::Iter<'_, TensorIr>,
        handles: &mut Handles<B>,
    ) -> Quantized<B> {
        let scales = handles.get_float_tensor::<B>(next(inputs));
        let mut copy = |is_there: bool| is_there.then(|| handles.get_int_tensor::<B>(next(inputs)));
        Quantized {
            shape: self.shape,
            cast: self.cast,
            values: copy(self.values),
            transposed: copy(self.transposed),
            scales,
        }
    }
}

/// The input of a forward pass without its tensors.
#[derive(Clone, Copy)]
enum InputForm {
    Quantized(Form),
    Float {
        casts: InputCasts,
        keeps_operand: bool,
    },
}

/// A weight of a forward pass without its tensors.
#[derive(Clone, Copy)]
enum WeightForm {
    Quantized { form: Form, transpose: bool },
    Float { cast: Cast, transposed: bool },
}

/// The tensors of a matrix, in the order of [`Form::tensors`].
fn tensors<B: FusionBackend>(matrix: &Quantized<Fusion<B>>) -> impl Iterator<Item = Tensor<B>> {
    let Quantized {
        values,
        transposed,
        scales,
        ..
    } = matrix;
    [Some(scales.clone()), values.clone(), transposed.clone()]
        .into_iter()
        .flatten()
}

/// Gives a matrix of the inner backend to the stream's handles.
fn give<B: FusionBackend>(
    matrix: Quantized<B>,
    outputs: &mut std::slice::Iter<'_, TensorIr>,
    handles: &mut Handles<B>,
) {
    handles.register_float_tensor::<B>(&next(outputs).id, matrix.scales);
    for values in [matrix.values, matrix.transposed].into_iter().flatten() {
        handles.register_int_tensor::<B>(&next(outputs).id, values);
    }
}

/// Shapes and dtypes of the tensors of a matrix' residual.
fn residual_tensors(shape: [usize; 2], form: &Form) -> [(Shape, DType); 3] {
    [
        (Shape::new(shape), DType::I8),
        (form.scales(), DType::F32),
        (form.scales(), DType::U32),
    ]
}

fn fused_residual<B: FusionBackend>(
    tensors: &mut impl Iterator<Item = Tensor<B>>,
) -> Residual<Fusion<B>> {
    Residual {
        values: next(tensors),
        scales: next(tensors),
        indicator: Some(next(tensors)),
    }
}

fn give_residual<B: FusionBackend>(
    residual: Residual<B>,
    outputs: &mut std::slice::Iter<'_, TensorIr>,
    handles: &mut Handles<B>,
) {
    handles.register_int_tensor::<B>(&next(outputs).id, residual.values);
    handles.register_float_tensor::<B>(&next(outputs).id, residual.scales);
    let indicator = residual.indicator;
    let indicator = indicator.expect("a fused backend runs kernels, which write the indicator");
    handles.register_int_tensor::<B>(&next(outputs).id, indicator);
}

impl<B: FusionBackend + QuantOps> QuantOps for Fusion<B> {
    fn quantize_matrix(
        x: FloatTensor<Self>,
        cast: Cast,
        layout: Layout,
        key: Option<StochasticKey>,
    ) -> Quantized<Self> {
        let form = Form::new(float::matrix_shape(&x, "quantize"), cast, layout);
        let mut outputs = register::<B>(
            "quantize_matrix",
            vec![x],
            &form.tensors(),
            move |ir, handles| {
                let x = handles.get_float_tensor::<B>(&ir.inputs[0]);
                let matrix = B::quantize_matrix(x, cast, layout, key);
                give::<B>(matrix, &mut ir.outputs.iter(), handles);
            },
        );
        form.fused::<B>(&mut outputs)
    }

    fn quantize_fallback(
        x: FloatTensor<Self>,
        cast: Cast,
        layer: usize,
        thresholds: FloatTensor<Self>,
        counts: IntTensor<Self>,
    ) -> (FallbackQuantized<Self>, IntTensor<Self>) {
        let shape = float::matrix_shape(&x, "quantize_fallback");
        let form = Form::new(shape, cast, Layout::RowMajor);
        let mut outputs = form.tensors();
        outputs.extend(residual_tensors(shape, &form));
        outputs.push((counts.shape(), DType::I32));
        let inputs = vec![x, thresholds, counts];
        let mut outputs =
            register::<B>("quantize_fallback", inputs, &outputs, move |ir, handles| {
                let x = handles.get_float_tensor::<B>(&ir.inputs[0]);
                let thresholds = handles.get_float_tensor::<B>(&ir.inputs[1]);
                let counts = handles.get_int_tensor::<B>(&ir.inputs[2]);
                let (quantized, counts) = B::quantize_fallback(x, cast, layer, thresholds, counts);
                let FallbackQuantized { base, residual } = quantized;
                let mut outputs = ir.outputs.iter();
                give::<B>(base, &mut outputs, handles);
                give_residual::<B>(residual, &mut outputs, handles);
                let output = next(&mut outputs);
                handles.register_int_tensor::<B>(&output.id, counts);
            });
        let base = form.fused::<B>(&mut outputs);
        let residual = fused_residual::<B>(&mut outputs);
        let counts = next(&mut outputs);
        (FallbackQuantized { base, residual }, counts)
    }

    fn dequantize_matrix(matrix: &Quantized<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let form = Form::of::<B>(matrix);
        let outputs = [(Shape::new(form.shape), dtype.into())];
        let inputs = tensors::<B>(matrix).collect();
        let mut outputs =
            register::<B>("dequantize_matrix", inputs, &outputs, move |ir, handles| {
                let matrix = form.take::<B>(&mut ir.inputs.iter(), handles);
                let output = B::dequantize_matrix(&matrix, dtype);
                handles.register_float_tensor::<B>(&ir.outputs[0].id, output);
            });
        next(&mut outputs)
    }

    fn quantized_matmul(
        a: Operand<'_, Self>,
        residual: Option<&Residual<Self>>,
        b: Operand<'_, Self>,
        bias: Option<FloatTensor<Self>>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let ([m, _], [_, n]) = (a.shape(), b.shape());
        let (a_form, b_form) = (Form::of::<B>(a.matrix), Form::of::<B>(b.matrix));
        let (a_transpose, b_transpose) = (a.transpose, b.transpose);
        let mut inputs: Vec<Tensor<B>> = tensors::<B>(a.matrix)
            .chain(tensors::<B>(b.matrix))
            .collect();
        if let Some(residual) = residual {
            let indicator = residual.indicator.clone();
            inputs.extend([residual.values.clone(), residual.scales.clone()]);
            inputs
                .push(indicator.expect("a fused backend runs kernels, which write the indicator"));
        }
        let has_residual = residual.is_some();
        inputs.extend(bias);
        let outputs = [(Shape::new([m, n]), dtype.into())];
        let mut outputs =
            register::<B>("quantized_matmul", inputs, &outputs, move |ir, handles| {
                let mut inputs = ir.inputs.iter();
                let a = a_form.take::<B>(&mut inputs, handles);
                let b = b_form.take::<B>(&mut inputs, handles);
                let residual = has_residual.then(|| Residual {
                    values: handles.get_int_tensor::<B>(next(&mut inputs)),
                    scales: handles.get_float_tensor::<B>(next(&mut inputs)),
                    indicator: Some(handles.get_int_tensor::<B>(next(&mut inputs))),
                });
                let bias = inputs
                    .next()
                    .map(|bias| handles.get_float_tensor::<B>(bias));
                let operand = |matrix, transpose| Operand { matrix, transpose };
                let output = B::quantized_matmul(
                    operand(&a, a_transpose),
                    residual.as_ref(),
                    operand(&b, b_transpose),
                    bias,
                    dtype,
                );
                handles.register_float_tensor::<B>(&ir.outputs[0].id, output);
            });
        next(&mut outputs)
    }

    fn linear_forward(call: LinearForward<'_, Self>) -> LinearOutput<Self> {
        let shape = call.output_shape();
        let LinearProduct {
            weight,
            bias,
            dtype,
        } = call.product;
        let mut inputs = Vec::new();
        let (weight, new_weight) = match weight {
            LinearWeight::Quantized(Operand { matrix, transpose }) => {
                inputs.extend(tensors::<B>(matrix));
                let form = Form::of::<B>(matrix);
                (WeightForm::Quantized { form, transpose }, None)
            }
            LinearWeight::Float {
                weight,
                cast,
                transposed,
            } => {
                let mut shape = linear::flattened(&weight.shape());
                if transposed {
                    shape.reverse();
                }
                inputs.push(weight);
                let new = Form::new(shape, cast, Layout::RowMajor);
                (WeightForm::Float { cast, transposed }, Some(new))
            }
        };
        let has_bias = bias.is_some();
        inputs.extend(bias);
        let mut fallback_of = None;
        let (x, operand, saved) = match call.x {
            LinearX::Quantized { matrix, .. } => {
                inputs.extend(tensors::<B>(matrix));
                (InputForm::Quantized(Form::of::<B>(matrix)), None, None)
            }
            LinearX::Float {
                x,
                casts,
                fallback,
                keeps_operand,
            } => {
                fallback_of = fallback.map(|layer| (layer, Self::float_device(&x)));
                let matrix = linear::flattened(&x.shape());
                let new = |cast, layout| Form::new(matrix, cast, layout);
                inputs.push(x);
                (
                    InputForm::Float {
                        casts,
                        keeps_operand,
                    },
                    keeps_operand.then(|| new(casts.forward, Layout::RowMajor)),
                    casts.saved.map(|(cast, _)| new(cast, Layout::Transposed)),
                )
            }
        };
        let copies = [operand, saved, new_weight];
        let of_copies = copies.iter().flatten().flat_map(Form::tensors);
        let y = (shape.clone(), dtype.into());
        let mut outputs: Vec<_> = std::iter::once(y).chain(of_copies).collect();

        let record = |mut inputs: Vec<Tensor<B>>, fallback: Option<Fallback<Self>>| {
            let layer = fallback.as_ref().map(|fallback| fallback.layer);
            if let Some(Fallback {
                thresholds, counts, ..
            }) = fallback
            {
                outputs.push((counts.shape(), DType::I32));
                inputs.extend([thresholds, counts]);
            }
            register::<B>("linear_forward", inputs, &outputs, move |ir, handles| {
                let mut inputs = ir.inputs.iter();
                let matrix;
                let weight = match weight {
                    WeightForm::Quantized { form, transpose } => {
                        matrix = form.take::<B>(&mut inputs, handles);
                        LinearWeight::Quantized(Operand {
                            matrix: &matrix,
                            transpose,
                        })
                    }
                    WeightForm::Float { cast, transposed } => LinearWeight::Float {
                        weight: handles.get_float_tensor::<B>(next(&mut inputs)),
                        cast,
                        transposed,
                    },
                };
                let product = LinearProduct {
                    weight,
                    bias: has_bias.then(|| handles.get_float_tensor::<B>(next(&mut inputs))),
                    dtype,
                };
                let mut counts = None;
                let output = match x {
                    InputForm::Quantized(form) => {
                        let x = form.take::<B>(&mut inputs, handles);
                        linear::product(x.operand(), None, product, shape.clone())
                    }
                    InputForm::Float {
                        casts,
                        keeps_operand,
                    } => {
                        let x = handles.get_float_tensor::<B>(next(&mut inputs));
                        let fallback = layer.map(|layer| Fallback {
                            layer,
                            thresholds: handles.get_float_tensor::<B>(next(&mut inputs)),
                            counts: handles.get_int_tensor::<B>(next(&mut inputs)),
                        });
                        let mut input = B::quantize_input(linear::flatten::<B>(x), casts, fallback);
                        counts = input.counts.take();
                        linear::product_of_input(input, keeps_operand, product, shape.clone())
                    }
                };
                let mut outputs = ir.outputs.iter();
                handles.register_float_tensor::<B>(&next(&mut outputs).id, output.y);
                let copies = [output.operand, output.saved, output.weight];
                for copy in copies.into_iter().flatten() {
                    give::<B>(copy, &mut outputs, handles);
                }
                if let Some(counts) = counts {
                    handles.register_int_tensor::<B>(&next(&mut outputs).id, counts);
                }
            })
        };
        let output = |outputs: &mut std::vec::IntoIter<Tensor<B>>| {
            let y = next(outputs);
            let [operand, saved, weight] =
                copies.map(|form| form.map(|form| form.fused::<B>(outputs)));
            LinearOutput {
                y,
                operand,
                saved,
                weight,
            }
        };
        match fallback_of {
            None => output(&mut record(inputs, None)),
            Some((layer, device)) => layer.with_fallback(&device, |fallback| {
                let mut outputs = record(inputs, Some(fallback));
                (output(&mut outputs), next(&mut outputs))
            }),
        }
    }

    fn linear_backward(call: LinearBackward<'_, Self>) -> LinearGradients<Self> {
        let LinearBackward {
            grad,
            cast,
            key,
            weight,
            x,
        } = call;
        if weight.is_none() && x.is_none() {
            return LinearGradients {
                x: None,
                weight: None,
            };
        }
        let mut inputs = vec![grad];
        let mut outputs = Vec::new();
        let [weight, x] = [weight, x].map(|product| {
            product.map(|(operand, gradient)| {
                inputs.extend(tensors::<B>(operand.matrix));
                outputs.push((gradient.shape.clone(), gradient.dtype.into()));
                let form = Form::of::<B>(operand.matrix);
                (form, operand.transpose, gradient)
            })
        });
        let wanted = [&weight, &x].map(Option::is_some);
        let mut outputs = register::<B>("linear_backward", inputs, &outputs, move |ir, handles| {
            let mut inputs = ir.inputs.iter();
            let grad = handles.get_float_tensor::<B>(next(&mut inputs));
            let matrices = [&weight, &x].map(|product| {
                let (form, ..) = product.as_ref()?;
                Some(form.take::<B>(&mut inputs, handles))
            });
            let [weight, x] = [(&weight, &matrices[0]), (&x, &matrices[1])].map(|product| {
                let (Some((_, transpose, gradient)), Some(matrix)) = product else {
                    return None;
                };
                let transpose = *transpose;
                Some((Operand { matrix, transpose }, gradient.clone()))
            });
            let gradients = B::linear_backward(LinearBackward {
                grad,
                cast,
                key,
                weight,
                x,
            });
            let mut outputs = ir.outputs.iter();
            for grad in [gradients.x, gradients.weight].into_iter().flatten() {
                handles.register_float_tensor::<B>(&next(&mut outputs).id, grad);
            }
        });
        let [x, weight] = wanted.map(|wanted| wanted.then(|| next(&mut outputs)));
        LinearGradients { x, weight }
    }

    fn delay_threshold(state: FallbackState<Self>, config: &DelayThreshold) -> FallbackState<Self> {
        let FallbackState {
            thresholds,
            counts,
            rates,
        } = state;
        let outputs = [
            (thresholds.shape(), DType::F32),
            (counts.shape(), DType::I32),
            (rates.shape(), DType::F32),
        ];
        let config = *config;
        let inputs = vec![thresholds, counts, rates];
        let mut outputs = register::<B>("delay_threshold", inputs, &outputs, move |ir, handles| {
            let state = FallbackState {
                thresholds: handles.get_float_tensor::<B>(&ir.inputs[0]),
                counts: handles.get_int_tensor::<B>(&ir.inputs[1]),
                rates: handles.get_float_tensor::<B>(&ir.inputs[2]),
            };
            let state = B::delay_threshold(state, &config);
            handles.register_float_tensor::<B>(&ir.outputs[0].id, state.thresholds);
            handles.register_int_tensor::<B>(&ir.outputs[1].id, state.counts);
            handles.register_float_tensor::<B>(&ir.outputs[2].id, state.rates);
        });
        FallbackState {
            thresholds: next(&mut outputs),
            counts: next(&mut outputs),
            rates: next(&mut outputs),
        }
    }

    fn matmul_kernel(device: &burn_backend::tensor::Device<Self>) -> Option<MatmulKernel<Self>> {
        B::matmul_kernel(device)?;
        Some(|lhs: FloatTensor<Self>, rhs: FloatTensor<Self>| {
            let mut shape = lhs.shape();
            let last = shape.num_dims() - 1;
            shape[last] = rhs.shape()[last];
            let outputs = [(shape, lhs.dtype())];
            let mut outputs =
                register::<B>("matmul", vec![lhs, rhs], &outputs, move |ir, handles| {
                    let lhs = handles.get_float_tensor::<B>(&ir.inputs[0]);
                    let rhs = handles.get_float_tensor::<B>(&ir.inputs[1]);
                    let kernel = B::matmul_kernel(&B::float_device(&lhs))
                        .expect("a product in a fused stream wraps one of the fused backend");
                    let output = kernel(lhs, rhs);
                    handles.register_float_tensor::<B>(&ir.outputs[0].id, output);
                });
            next(&mut outputs)
        })
    }

    fn attention_kernels() -> Option<AttentionKernels<Self>> {
        B::attention_kernels().map(|_| AttentionKernels {
            forward: |inputs: AttentionInputs<Tensor<B>>, scores| {
                let mut shape = inputs.query.shape();
                shape[3] = inputs.value.shape()[3];
                let outputs = [(shape, inputs.query.dtype())];
                let kernel = attention_kernels::<B>().forward;
                let inputs = inputs.into_array().into();
                let mut outputs =
                    register::<B>("attention", inputs, &outputs, move |ir, handles| {
                        let mut take =
                            |index: usize| handles.get_float_tensor::<B>(&ir.inputs[index]);
                        let output = kernel([0, 1, 2].map(&mut take).into(), scores);
                        handles.register_float_tensor::<B>(&ir.outputs[0].id, output);
                    });
                next(&mut outputs)
            },
            backward: |inputs: AttentionInputs<Tensor<B>>, grad, wanted, scores| {
                let like = |input: &Tensor<B>| (input.shape(), input.dtype());
                let mut inputs = Vec::from(inputs.into_array());
                let outputs: Vec<_> = std::iter::zip(&inputs, wanted.into_array())
                    .filter(|(_, wanted)| *wanted)
                    .map(|(input, _)| like(input))
                    .collect();
                inputs.push(grad);
                let kernel = attention_kernels::<B>().backward;
                let execute = move |ir: &CustomOpIr, handles: &mut Handles<B>| {
                    let mut take = |index: usize| handles.get_float_tensor::<B>(&ir.inputs[index]);
                    let (inputs, grad) = ([0, 1, 2].map(&mut take).into(), take(3));
                    let grads = kernel(inputs, grad, wanted, scores).into_array();
                    for (output, grad) in std::iter::zip(&ir.outputs, grads.into_iter().flatten()) {
                        handles.register_float_tensor::<B>(&output.id, grad);
                    }
                };
                let mut outputs = register::<B>("attention_backward", inputs, &outputs, execute);
                wanted.map(|wanted| wanted.then(|| next(&mut outputs)))
            },
        })
    }

    fn adamw(
        items: Vec<AdamWItem<Self>>,
        clock: &IntTensor<Self>,
        nonfinite: Option<&IntTensor<Self>>,
        hyperparameters: &Hyperparameters,
    ) -> Vec<AdamWUpdate<Self>> {
        let forms: Vec<_> = items.iter().map(ItemForm::of::<B>).collect();
        let outputs: Vec<_> = forms.iter().flat_map(ItemForm::outputs).collect();
        let mut inputs = vec![clock.clone()];
        inputs.extend(nonfinite.cloned());
        for item in items {
            inputs.extend([item.parameter, item.gradient]);
            inputs.extend(moment_tensors::<B>(item.first));
            inputs.extend(moment_tensors::<B>(item.second));
        }
        let (flagged, hyperparameters) = (nonfinite.is_some(), *hyperparameters);
        let in_stream = forms.clone();
        let mut outputs = register::<B>("adamw", inputs, &outputs, move |ir, handles| {
            let mut inputs = ir.inputs.iter();
            let mut input = || next(&mut inputs);
            let clock = handles.get_int_tensor::<B>(input());
            let nonfinite = flagged.then(|| handles.get_int_tensor::<B>(input()));
            let items = in_stream
                .iter()
                .map(|form| AdamWItem {
                    parameter: handles.get_float_tensor::<B>(input()),
                    gradient: handles.get_float_tensor::<B>(input()),
                    first: form.first.take::<B>(&mut input, handles),
                    second: form.second.take::<B>(&mut input, handles),
                    key: form.key,
                    state_key: form.state_key,
                })
                .collect();
            let mut outputs = ir.outputs.iter();
            for update in B::adamw(items, &clock, nonfinite.as_ref(), &hyperparameters) {
                let mut next = || &next(&mut outputs).id;
                handles.register_float_tensor::<B>(next(), update.parameter);
                for moment in [update.first, update.second] {
                    give_moment::<B>(moment, &mut next, handles);
                }
            }
        });
        forms
            .iter()
            .map(|form| AdamWUpdate {
                parameter: next(&mut outputs),
                first: form.first.fused::<B>(&mut outputs),
                second: form.second.fused::<B>(&mut outputs),
            })
            .collect()
    }

    fn tick(clock: IntTensor<Self>, nonfinite: Option<&IntTensor<Self>>) -> IntTensor<Self> {
        let flagged = nonfinite.is_some();
        let mut inputs = vec![clock];
        inputs.extend(nonfinite.cloned());
        let outputs = [(Shape::new([2]), DType::I32)];
        let mut outputs = register::<B>("tick", inputs, &outputs, move |ir, handles| {
            let clock = handles.get_int_tensor::<B>(&ir.inputs[0]);
            let nonfinite = flagged.then(|| handles.get_int_tensor::<B>(&ir.inputs[1]));
            let clock = B::tick(clock, nonfinite.as_ref());
            handles.register_int_tensor::<B>(&ir.outputs[0].id, clock);
        });
        next(&mut outputs)
    }

    fn find_nonfinite(
        gradients: &[FloatTensor<Self>],
        device: &burn_backend::tensor::Device<Self>,
    ) -> IntTensor<Self> {
        let flag = Shape::new([1]);
        if gradients.is_empty() {
            return Self::int_zeros(flag, device, IntDType::I32);
        }
        let device = device.clone();
        let outputs = [(flag, DType::I32)];
        let mut outputs = register::<B>(
            "find_nonfinite",
            gradients.to_vec(),
            &outputs,
            move |ir, handles| {
                let gradients: Vec<_> = ir
                    .inputs
                    .iter()
                    .map(|gradient| handles.get_float_tensor::<B>(gradient))
                    .collect();
                let flag = B::find_nonfinite(&gradients, &device);
                handles.register_int_tensor::<B>(&ir.outputs[0].id, flag);
            },
        );
        next(&mut outputs)
    }

    fn compress_moment(
        x: FloatTensor<Self>,
        format: StateFormat,
        moment: Moment,
    ) -> MomentState<Self> {
        let form = MomentForm {
            shape: x.shape(),
            format: Some(format),
        };
        let outputs: Vec<_> = form.outputs().collect();
        let mut outputs = register::<B>("compress_moment", vec![x], &outputs, {
            move |ir, handles| {
                let x = handles.get_float_tensor::<B>(&ir.inputs[0]);
                let state = B::compress_moment(x, format, moment);
                let mut outputs = ir.outputs.iter();
                let mut next = || &next(&mut outputs).id;
                give_moment::<B>(state, &mut next, handles);
            }
        });
        form.fused::<B>(&mut outputs)
    }

    fn decompress_moment(state: MomentState<Self>, moment: Moment) -> FloatTensor<Self> {
        let form = MomentForm::of::<B>(&state);
        let outputs = [(form.shape.clone(), DType::F32)];
        let inputs = moment_tensors::<B>(state).collect();
        let mut outputs =
            register::<B>("decompress_moment", inputs, &outputs, move |ir, handles| {
                let mut inputs = ir.inputs.iter();
                let mut next = || next(&mut inputs);
                let state = form.take::<B>(&mut next, handles);
                let values = B::decompress_moment(state, moment);
                handles.register_float_tensor::<B>(&ir.outputs[0].id, values);
            });
        next(&mut outputs)
    }
}

/// The kernels of the backend under `Fusion`, which has some if the fused one has.
fn attention_kernels<B: QuantOps>() -> AttentionKernels<B> {
    B::attention_kernels().expect("attention in a fused stream wraps that of a backend that has it")
}

/// One moment without its tensors.
#[derive(Clone)]
struct MomentForm {
    shape: Shape,
    format: Option<StateFormat>,
}

impl MomentForm {
    fn of<B: FusionBackend>(state: &MomentState<Fusion<B>>) -> Self
    where
        Fusion<B>: QuantOps,
    {
        Self {
            shape: state.shape(),
            format: state.format(),
        }
    }

    /// Shapes and dtypes of the tensors, in the order of [`moment_tensors`].
    fn outputs(&self) -> impl Iterator<Item = (Shape, DType)> {
        let values = match self.format {
            None => DType::F32,
            Some(_) => DType::U8,
        };
        let groups = |format: StateFormat| Shape::new([format.groups(self.shape.num_elements())]);
        let scales = self.format.map(|format| (groups(format), DType::F32));
        let expanded = self.format.filter(|format| format.expand);
        let exponents = expanded.map(|format| (groups(format), DType::U8));
        [Some((self.shape.clone(), values)), scales, exponents]
            .into_iter()
            .flatten()
    }

    fn fused<B: FusionBackend>(
        &self,
        tensors: &mut impl Iterator<Item = Tensor<B>>,
    ) -> MomentState<Fusion<B>> {
        let mut next = || next(tensors);
        match self.format {
            None => MomentState::Full(next()),
            Some(format) => MomentState::Coded {
                format,
                codes: next(),
                scales: next(),
                exponents: format.expand.then(next),
            },
        }
    }

    fn take<'a, B: FusionBackend>(
        &self,
        next: &mut impl FnMut() -> &'a TensorIr,
        handles: &mut Handles<B>,
    ) -> MomentState<B> {
        match self.format {
            None => MomentState::Full(handles.get_float_tensor::<B>(next())),
            Some(format) => MomentState::Coded {
                format,
                codes: handles.get_int_tensor::<B>(next()),
                scales: handles.get_float_tensor::<B>(next()),
                exponents: format.expand.then(|| handles.get_int_tensor::<B>(next())),
            },
        }
    }
}

/// The tensors of a moment, in the order of [`MomentForm::outputs`].
fn moment_tensors<B: FusionBackend>(
    state: MomentState<Fusion<B>>,
) -> impl Iterator<Item = Tensor<B>> {
    match state {
        MomentState::Full(values) => [Some(values), None, None],
        MomentState::Coded {
            codes,
            scales,
            exponents,
            ..
        } => [Some(codes), Some(scales), exponents],
    }
    .into_iter()
    .flatten()
}

fn give_moment<'a, B: FusionBackend>(
    state: MomentState<B>,
    next: &mut impl FnMut() -> &'a burn_ir::TensorId,
    handles: &mut Handles<B>,
) {
    match state {
        MomentState::Full(values) => handles.register_float_tensor::<B>(next(), values),
        MomentState::Coded {
            codes,
            scales,
            exponents,
            ..
        } => {
            handles.register_int_tensor::<B>(next(), codes);
            handles.register_float_tensor::<B>(next(), scales);
            if let Some(exponents) = exponents {
                handles.register_int_tensor::<B>(next(), exponents);
            }
        }
    }
}

/// A parameter with its moments, without the tensors.
#[derive(Clone)]
struct ItemForm {
    parameter: (Shape, DType),
    first: MomentForm,
    second: MomentForm,
    key: Option<StochasticKey>,
    state_key: Option<StochasticKey>,
}

impl ItemForm {
    fn of<B: FusionBackend>(item: &AdamWItem<Fusion<B>>) -> Self
    where
        Fusion<B>: QuantOps,
    {
        Self {
            parameter: (item.parameter.shape(), item.parameter.dtype()),
            first: MomentForm::of::<B>(&item.first),
            second: MomentForm::of::<B>(&item.second),
            key: item.key,
            state_key: item.state_key,
        }
    }

    fn outputs(&self) -> impl Iterator<Item = (Shape, DType)> {
        std::iter::once(self.parameter.clone())
            .chain(self.first.outputs())
            .chain(self.second.outputs())
    }
}
