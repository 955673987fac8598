//! Compositions by kernels.

use burn_backend::{DType, IntDType, Shape, TensorMetadata, tensor::Device};
use burn_cubecl::{
    CubeBackend, CubeRuntime, FloatElement, IntElement, element::BoolElement,
    kernel::into_contiguous, tensor::CubeTensor,
};
use cubecl::std::tensor::TensorHandle;
use cubecl_kernels::{
    embedding,
    layer_norm::{self, LayerNormGradients, LayerNormOutput},
    rms_norm::{self, RmsNormGradients, RmsNormOutput},
    swiglu,
};

use super::tensors::{Cube, handle, reshaped, tensor};
use crate::data::{
    composition::{CompositionKernels, Compositions},
    kernels::checked,
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
            rms_norm,
            rms_norm_backward,
            layer_norm,
            layer_norm_backward,
            swiglu,
            swiglu_backward,
            embedding_gradient: embedding_gradient::<Self, R>,
        })
    }
}

/// A [pair](crate::data::composition::Pair).
type Two<R> = (CubeTensor<R>, CubeTensor<R>);

fn rms_norm<R: CubeRuntime>((x, gain): Two<R>, epsilon: f32) -> Two<R> {
    let (x, gain) = (into_contiguous(x), flat(gain));
    let norm = rms_norm::rms_norm(&x.client, &handle(&x), &handle(&gain), epsilon);
    let RmsNormOutput {
        output,
        inverse_rms,
    } = checked(norm);
    (tensor(&x, output, x.dtype), of_rows(&x, inverse_rms))
}

/// A number for each row of `x`, `[rows, 1]`.
fn of_rows<R: CubeRuntime>(x: &CubeTensor<R>, numbers: TensorHandle<R>) -> CubeTensor<R> {
    let numbers = tensor(x, numbers, DType::F32);
    let rows = numbers.shape().num_elements();
    reshaped(numbers, Shape::new([rows, 1]))
}

fn rms_norm_backward<R: CubeRuntime>(
    [x, gain, inverse_rms, gradient]: [CubeTensor<R>; 4],
) -> Two<R> {
    let (x, gradient) = (into_contiguous(x), into_contiguous(gradient));
    let gradients = rms_norm::rms_norm_backward(
        &x.client,
        &handle(&x),
        &handle(&flat(gain)),
        &handle(&flat(inverse_rms)),
        &handle(&gradient),
    );
    let RmsNormGradients { input, gain } = checked(gradients);
    (tensor(&x, input, x.dtype), tensor(&x, gain, DType::F32))
}

fn layer_norm<R: CubeRuntime>(
    ((x, gain), bias): (Two<R>, Option<CubeTensor<R>>),
    epsilon: f32,
) -> (CubeTensor<R>, Two<R>) {
    let (x, gain) = (into_contiguous(x), handle(&flat(gain)));
    let bias = bias.map(|bias| handle(&flat(bias)));
    let norm = layer_norm::layer_norm(&x.client, &handle(&x), &gain, bias.as_ref(), epsilon);
    let LayerNormOutput {
        output,
        mean,
        inverse_deviation,
    } = checked(norm);
    let statistics = (of_rows(&x, mean), of_rows(&x, inverse_deviation));
    (tensor(&x, output, x.dtype), statistics)
}

fn layer_norm_backward<R: CubeRuntime>(
    [x, gain, gradient]: [CubeTensor<R>; 3],
    (mean, inverse_deviation): Two<R>,
) -> (CubeTensor<R>, Two<R>) {
    let (x, gradient) = (into_contiguous(x), into_contiguous(gradient));
    let gradients = layer_norm::layer_norm_backward(
        &x.client,
        &handle(&x),
        &handle(&flat(gain)),
        &handle(&flat(mean)),
        &handle(&flat(inverse_deviation)),
        &handle(&gradient),
    );
    let LayerNormGradients { input, gain, bias } = checked(gradients);
    let [gain, bias] = [gain, bias].map(|it| tensor(&x, it, DType::F32));
    (tensor(&x, input, x.dtype), (gain, bias))
}

fn swiglu<R: CubeRuntime>((gate, up): Two<R>) -> CubeTensor<R> {
    let (gate, up) = (into_contiguous(gate), into_contiguous(up));
    let output = swiglu::swiglu(&gate.client, &handle(&gate), &handle(&up));
    tensor(&gate, checked(output), gate.dtype)
}

fn swiglu_backward<R: CubeRuntime>(operands: [CubeTensor<R>; 3]) -> Two<R> {
    let [gate, up, gradient] = operands.map(into_contiguous);
    let gradients = swiglu::swiglu_backward(
        &gate.client,
        &handle(&gate),
        &handle(&up),
        &handle(&gradient),
    );
    let [of_gate, of_up] = checked(gradients).map(|it| tensor(&gate, it, gate.dtype));
    (of_gate, of_up)
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
fn flat<R: CubeRuntime>(tensor: CubeTensor<R>) -> CubeTensor<R> {
    let elements = tensor.shape().num_elements();
    reshaped(into_contiguous(tensor), Shape::new([elements]))
}
