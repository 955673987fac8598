//! Compositions by kernels.

use burn_backend::{DType, IntDType, Shape, TensorMetadata, tensor::Device};
use burn_cubecl::{
    CubeBackend, CubeRuntime, FloatElement, IntElement, element::BoolElement,
    kernel::into_contiguous, tensor::CubeTensor,
};
use cubecl_kernels::{
    embedding,
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
            has_rms_norm: |dtype, columns| rms_norm::has_rms_norm(dtype.into(), columns),
            rms_norm,
            rms_norm_backward,
            swiglu,
            swiglu_backward,
            embedding_gradient: embedding_gradient::<Self, R>,
        })
    }
}

fn rms_norm<R: CubeRuntime>(
    (x, gain): (CubeTensor<R>, CubeTensor<R>),
    epsilon: f32,
) -> (CubeTensor<R>, CubeTensor<R>) {
    let (x, gain) = (into_contiguous(x), flat(gain));
    let norm = rms_norm::rms_norm(&x.client, &handle(&x), &handle(&gain), epsilon);
    let RmsNormOutput {
        output,
        inverse_rms,
    } = checked(norm);
    let of_rows = tensor(&x, inverse_rms, DType::F32);
    let rows = of_rows.shape().num_elements();
    (
        tensor(&x, output, x.dtype),
        reshaped(of_rows, Shape::new([rows, 1])),
    )
}

fn rms_norm_backward<R: CubeRuntime>(
    [x, gain, inverse_rms, gradient]: [CubeTensor<R>; 4],
) -> (CubeTensor<R>, CubeTensor<R>) {
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

fn swiglu<R: CubeRuntime>((gate, up): (CubeTensor<R>, CubeTensor<R>)) -> CubeTensor<R> {
    let (gate, up) = (into_contiguous(gate), into_contiguous(up));
    let output = swiglu::swiglu(&gate.client, &handle(&gate), &handle(&up));
    tensor(&gate, checked(output), gate.dtype)
}

fn swiglu_backward<R: CubeRuntime>(operands: [CubeTensor<R>; 3]) -> (CubeTensor<R>, CubeTensor<R>) {
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
