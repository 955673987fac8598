//! Compositions by kernels.

use burn_backend::{DType, IntDType, Shape, TensorMetadata, tensor::Device};
use burn_cubecl::{
    CubeBackend, CubeRuntime, FloatElement, IntElement, element::BoolElement,
    kernel::into_contiguous, tensor::CubeTensor,
};
use cubecl::{prelude::ComputeClient, std::tensor::TensorHandle};
use cubecl_kernels::{
    KernelError, centred,
    column_sum::column_sum,
    dropout::{self, Draw},
    embedding, gelu,
    layer_norm::{self, LayerNormGradients, LayerNormOutput},
    log_softmax, operator_input, output_gradient, quantize,
    rms_norm::{self, RmsNormGradients, RmsNormOutput},
    rotary::{self, RotaryPass},
    sum::{self, Reduction},
    swiglu,
};

use super::{
    quantize::{on_device, unwrap, wrap},
    tensors::{Cube, handle, reshaped, tensor},
};
use crate::data::{
    composition::{
        Branch, CompositionKernels, Compositions, CopyOfMatrix, FloatWithCopy, GateInputs,
        NormInput, NormInputs, OperatorInput, OutputGradient, PairWithCopy, WithCopies,
        WithPairAndCopy, operations::rows_and_columns,
    },
    kernels::checked,
    quantize::{QuantizeKernels, QuantizeSpec},
};

impl<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement> CompositionKernels
    for CubeBackend<R, F, I, BT>
where
    Self: Cube<R>,
{
    fn composition_kernels(_device: &Device<Self>) -> Option<Compositions<Self>> {
        Some(Compositions {
            has_norms: |dtype, columns| {
                rms_norm::has_rms_norm(dtype.into(), columns)
                    && layer_norm::has_layer_norm(dtype.into(), columns)
            },
            rms_norm: rms_norm::<Self, R>,
            inverse_rms: |x, epsilon| {
                let x = Rows::of(x);
                x.of_rows(checked(rms_norm::inverse_rms(
                    x.client(),
                    x.input(),
                    epsilon,
                )))
            },
            row_deviations: |x, epsilon| {
                let x = Rows::of(x);
                let rows = layer_norm::row_deviations(x.client(), x.input(), epsilon);
                checked(rows).map(|it| x.of_rows(it)).into()
            },
            quantizes_norms: |device, granularity| {
                rms_norm::quantizes_norms(&R::client(device), granularity)
            },
            rms_norm_backward: rms_norm_backward::<Self, R>,
            layer_norm: layer_norm::<Self, R>,
            layer_norm_backward: layer_norm_backward::<Self, R>,
            gelu: gelu::<Self, R>,
            gelu_backward: gelu_backward::<Self, R>,
            dropout: dropout::<Self, R>,
            residual_sum: |x, residual| {
                let (x, residual) = (Rows::of(x), rows(residual));
                let sum = dropout::residual_sum(x.client(), x.input(), &residual);
                x.result(checked(sum))
            },
            swiglu: swiglu::<Self, R>,
            swiglu_compressing: swiglu_compressing::<Self, R>,
            swiglu_backward: swiglu_backward::<Self, R>,
            centred: centred::<Self, R>,
            dense: into_contiguous::<R>,
            rotary: rotary::<R>,
            log_softmax: log_softmax::<R>,
            log_softmax_backward: log_softmax_backward::<R>,
            sum: sum::<R>,
            embedding_gradient: embedding_gradient::<Self, R>,
        })
    }
}

/// A [pair](crate::data::composition::Pair).
type Two<R> = (CubeTensor<R>, CubeTensor<R>);

/// An input as kernels take it: `[rows, columns]`.
pub(super) struct Rows<R: CubeRuntime> {
    values: Values<R>,
    /// A tensor on the device.
    like: CubeTensor<R>,
    /// Shape and dtype of the tensor that it is.
    shape: Shape,
    dtype: DType,
}

enum Values<R: CubeRuntime> {
    Floats(TensorHandle<R>),
    Numbers(Box<quantize::Quantized<R>>),
}

impl<R: CubeRuntime> Rows<R> {
    pub(super) fn of<B: Cube<R> + QuantizeKernels>(input: OperatorInput<B>) -> Self {
        let (shape, dtype) = (input.shape(), input.dtype());
        match input {
            OperatorInput::Quantized { matrix, .. } if matrix.shape == rows_and_columns(&shape) => {
                Self {
                    values: Values::Numbers(Box::new(unwrap(&matrix))),
                    like: on_device(&matrix).clone(),
                    shape,
                    dtype,
                }
            }
            input => {
                let like = input.into_floats();
                Self {
                    values: Values::Floats(rows(like.clone())),
                    like,
                    shape,
                    dtype,
                }
            }
        }
    }

    pub(super) fn input(&self) -> operator_input::OperatorInput<'_, R> {
        match &self.values {
            Values::Floats(tensor) => tensor.into(),
            Values::Numbers(matrix) => {
                operator_input::OperatorInput::Quantized(matrix, self.dtype.into())
            }
        }
    }

    /// A tensor on the device.
    pub(super) fn on_device(&self) -> &CubeTensor<R> {
        &self.like
    }

    fn client(&self) -> &ComputeClient<R> {
        &self.like.client
    }

    /// A result of a kernel, in the shape and dtype of the tensor.
    fn result(&self, result: TensorHandle<R>) -> CubeTensor<R> {
        reshaped(tensor(&self.like, result, self.dtype), self.shape.clone())
    }

    /// The sum of what a kernel left in parts, FP32 `[parts, columns]`: `[1, columns]`.
    fn sum(&self, parts: &TensorHandle<R>) -> CubeTensor<R> {
        let sum = checked(column_sum(self.client(), parts));
        tensor(&self.like, sum, DType::F32)
    }

    /// FP32 numbers that a kernel gave, `[rows, 1]`.
    fn of_rows(&self, numbers: TensorHandle<R>) -> CubeTensor<R> {
        let numbers = tensor(&self.like, numbers, DType::F32);
        let rows = numbers.shape().num_elements();
        reshaped(numbers, Shape::new([rows, 1]))
    }
}

/// The gradient of an output, of `[rows, columns]` each.
struct GradientRows<R: CubeRuntime> {
    terms: Terms<R>,
    other: Option<TensorHandle<R>>,
}

/// Its terms: all floats, or all numbers.
enum Terms<R: CubeRuntime> {
    Floats(Vec<TensorHandle<R>>),
    Numbers(Vec<quantize::Quantized<R>>, DType),
}

impl<R: CubeRuntime> GradientRows<R> {
    fn of<B: Cube<R> + QuantizeKernels>((terms, other): OutputGradient<B>) -> Self {
        let numbers = |term: &OperatorInput<B>| match term {
            OperatorInput::Quantized { matrix, shape, .. } => {
                (matrix.shape == rows_and_columns(shape)).then(|| unwrap(matrix))
            }
            OperatorInput::Floats(_) => None,
        };
        let all_numbers: Option<Vec<_>> = terms.iter().map(numbers).collect();
        let floats = |term: OperatorInput<B>| rows(term.into_floats());
        Self {
            terms: match all_numbers {
                Some(numbers) => Terms::Numbers(numbers, terms[0].dtype()),
                None => Terms::Floats(terms.into_iter().map(floats).collect()),
            },
            other: other.map(rows),
        }
    }

    fn borrow(&self) -> output_gradient::OutputGradient<'_, R> {
        output_gradient::OutputGradient {
            terms: match &self.terms {
                Terms::Floats(floats) => output_gradient::Terms::Floats(floats),
                Terms::Numbers(numbers, dtype) => {
                    output_gradient::Terms::Numbers(numbers, (*dtype).into())
                }
            },
            other: self.other.as_ref(),
        }
    }
}

/// A tensor as `[rows, columns]`.
fn rows<R: CubeRuntime>(tensor: CubeTensor<R>) -> TensorHandle<R> {
    let shape = rows_and_columns(&tensor.shape());
    handle(&reshaped(into_contiguous(tensor), Shape::new(shape)))
}

fn rms_norm<B: Cube<R> + QuantizeKernels, R: CubeRuntime>(
    (x, gain): NormInput<B>,
    epsilon: f32,
    copy: Option<&QuantizeSpec>,
) -> PairWithCopy<B> {
    let (x, gain) = (Rows::of(x), handle(&flat(gain)));
    let (norm, copy) = match (&x.values, copy) {
        (Values::Floats(floats), Some(spec)) => {
            let norm = rms_norm::rms_norm_compressing(x.client(), floats, &gain, epsilon, spec);
            let (norm, copy) = checked(norm);
            (norm, Some(wrap(&x.like, copy)))
        }
        _ => {
            let norm = rms_norm::rms_norm(x.client(), x.input(), &gain, epsilon);
            (checked(norm), None)
        }
    };
    let RmsNormOutput {
        output,
        inverse_rms,
    } = norm;
    ((x.result(output), x.of_rows(inverse_rms)), copy)
}

fn rms_norm_backward<B: Cube<R> + QuantizeKernels, R: CubeRuntime>(
    (x, gain): NormInput<B>,
    inverse_rms: CubeTensor<R>,
    gradient: OutputGradient<B>,
) -> Two<R> {
    let (x, gradient) = (Rows::of(x), GradientRows::of::<B>(gradient));
    let gradients = rms_norm::rms_norm_backward(
        x.client(),
        x.input(),
        &handle(&flat(gain)),
        &handle(&flat(inverse_rms)),
        gradient.borrow(),
    );
    let RmsNormGradients { input, gain } = checked(gradients);
    (x.result(input), x.sum(&gain))
}

fn layer_norm<B: Cube<R> + QuantizeKernels, R: CubeRuntime>(
    ((x, gain), bias): NormInputs<B>,
    epsilon: f32,
    copy: Option<&QuantizeSpec>,
) -> WithPairAndCopy<B> {
    let (x, gain) = (Rows::of(x), handle(&flat(gain)));
    let bias = bias.map(|bias| handle(&flat(bias)));
    let bias = bias.as_ref();
    let (norm, copy) = match (&x.values, copy) {
        (Values::Floats(floats), Some(spec)) => {
            let client = x.client();
            let norm =
                layer_norm::layer_norm_compressing(client, floats, &gain, bias, epsilon, spec);
            let (norm, copy) = checked(norm);
            (norm, Some(wrap(&x.like, copy)))
        }
        _ => {
            let norm = layer_norm::layer_norm(x.client(), x.input(), &gain, bias, epsilon);
            (checked(norm), None)
        }
    };
    let LayerNormOutput {
        output,
        mean,
        inverse_deviation,
    } = norm;
    let statistics = (x.of_rows(mean), x.of_rows(inverse_deviation));
    ((x.result(output), statistics), copy)
}

/// Of a tensor `[matrices, rows, columns]`.
fn centred<B: Cube<R>, R: CubeRuntime>(
    x: CubeTensor<R>,
    step: usize,
    copy: CopyOfMatrix,
) -> FloatWithCopy<B> {
    let x = into_contiguous(x);
    let (less, copy) = match copy {
        Some((spec, columns)) => {
            let less = centred::centred_compressing(&x.client, &handle(&x), step, spec, columns);
            let (less, copy) = checked(less);
            (less, Some(wrap(&x, copy)))
        }
        None => (
            checked(centred::centred(&x.client, &handle(&x), step)),
            None,
        ),
    };
    (tensor(&x, less, x.dtype), copy)
}

fn layer_norm_backward<B: Cube<R> + QuantizeKernels, R: CubeRuntime>(
    (x, gain): NormInput<B>,
    gradient: OutputGradient<B>,
    (mean, inverse_deviation): Two<R>,
) -> (CubeTensor<R>, Two<R>) {
    let (x, gradient) = (Rows::of(x), GradientRows::of::<B>(gradient));
    let gradients = layer_norm::layer_norm_backward(
        x.client(),
        x.input(),
        &handle(&flat(gain)),
        &handle(&flat(mean)),
        &handle(&flat(inverse_deviation)),
        gradient.borrow(),
    );
    let LayerNormGradients { input, gain, bias } = checked(gradients);
    (x.result(input), (x.sum(&gain), x.sum(&bias)))
}

fn gelu<B: Cube<R> + QuantizeKernels, R: CubeRuntime>(x: OperatorInput<B>) -> CubeTensor<R> {
    let x = Rows::of(x);
    x.result(checked(gelu::gelu(x.client(), x.input())))
}

fn gelu_backward<B: Cube<R> + QuantizeKernels, R: CubeRuntime>(
    x: OperatorInput<B>,
    gradient: OperatorInput<B>,
) -> CubeTensor<R> {
    let (x, gradient) = (Rows::of(x), Rows::of(gradient));
    let of_x = gelu::gelu_backward(x.client(), x.input(), gradient.input());
    x.result(checked(of_x))
}

fn dropout<B: Cube<R> + QuantizeKernels, R: CubeRuntime>(
    (x, residual): Branch<B>,
    draw: &Draw,
) -> CubeTensor<R> {
    let x = Rows::of(x);
    let residual = residual.map(rows);
    let output = dropout::dropout(x.client(), x.input(), residual.as_ref(), draw);
    x.result(checked(output))
}

fn swiglu<B: Cube<R> + QuantizeKernels, R: CubeRuntime>(
    (gate, up): GateInputs<B>,
) -> CubeTensor<R> {
    let (gate, up) = (Rows::of(gate), Rows::of(up));
    let output = swiglu::swiglu(gate.client(), gate.input(), up.input());
    gate.result(checked(output))
}

fn swiglu_compressing<B: Cube<R>, R: CubeRuntime>(
    (gate, up): Two<R>,
    spec: &QuantizeSpec,
) -> WithCopies<B> {
    let [gate, up] = [gate, up].map(into_contiguous);
    let results = swiglu::swiglu_compressing(&gate.client, &handle(&gate), &handle(&up), spec);
    let (output, copies) = checked(results);
    let [of_gate, of_up] = copies.map(|copy| wrap(&gate, copy));
    (tensor(&gate, output, gate.dtype), (of_gate, of_up))
}

fn swiglu_backward<B: Cube<R> + QuantizeKernels, R: CubeRuntime>(
    (gate, up): GateInputs<B>,
    gradient: OperatorInput<B>,
) -> Two<R> {
    let [gate, up, gradient] = [gate, up, gradient].map(Rows::of);
    let gradients =
        swiglu::swiglu_backward(gate.client(), gate.input(), up.input(), gradient.input());
    let [of_gate, of_up] = checked(gradients).map(|it| gate.result(it));
    (of_gate, of_up)
}

fn log_softmax<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    let output = log_softmax::log_softmax(&x.client, &rows(x.clone()));
    let shape = x.shape();
    reshaped(tensor(&x, checked(output), DType::F32), shape)
}

fn log_softmax_backward<R: CubeRuntime>((output, gradient): Two<R>, dtype: DType) -> CubeTensor<R> {
    let shape = output.shape();
    let (client, like) = (output.client.clone(), output.clone());
    let of_x =
        log_softmax::log_softmax_backward(&client, &rows(output), &rows(gradient), dtype.into());
    reshaped(tensor(&like, checked(of_x), dtype), shape)
}

fn sum<R: CubeRuntime>(x: CubeTensor<R>, reduction: Reduction) -> CubeTensor<R> {
    let x = into_contiguous(x);
    let sum = sum::sum(&x.client, &handle(&x), reduction);
    tensor(&x, checked(sum), DType::F32)
}

fn rotary<R: CubeRuntime>(
    x: CubeTensor<R>,
    (turn, table): Two<R>,
    pass: RotaryPass,
) -> CubeTensor<R> {
    let (turn, table) = (handle(&turn), handle(&table));
    let run = |x: &CubeTensor<R>| rotary::rotary(&x.client, &handle(x), &turn, &table, pass);
    let output = match run(&x) {
        // Features that do not lie side by side, or rows at odd places.
        Err(KernelError::Unsupported { .. }) => run(&into_contiguous(x.clone())),
        output => output,
    };
    tensor(&x, checked(output), x.dtype)
}

fn embedding_gradient<B: Cube<R>, R: CubeRuntime>(
    gradient: CubeTensor<R>,
    indices: CubeTensor<R>,
    rows: usize,
) -> CubeTensor<R> {
    let gradient = into_contiguous(gradient);
    let columns = gradient.shape()[gradient.rank() - 1];
    let indices = flat(B::int_cast(indices, IntDType::I32));
    let tokens = indices.shape().num_elements();
    let gradient = reshaped(gradient, Shape::new([tokens, columns]));
    let table = embedding::embedding_gradient(
        &gradient.client,
        &handle(&indices),
        &handle(&gradient),
        rows,
    );
    tensor(&gradient, checked(table), gradient.dtype)
}

/// All elements in one dimension.
pub(super) fn flat<R: CubeRuntime>(tensor: CubeTensor<R>) -> CubeTensor<R> {
    let elements = tensor.shape().num_elements();
    reshaped(into_contiguous(tensor), Shape::new([elements]))
}
