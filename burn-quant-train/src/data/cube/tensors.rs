//! CubeCL's tensors as Burn's and as the kernels take them.

use burn_backend::{Backend, DType, Shape};
use burn_cubecl::{CubeRuntime, kernel::into_contiguous, tensor::CubeTensor};
use cubecl::std::tensor::TensorHandle;

/// A backend of CubeCL tensors.
pub(super) trait Cube<R: CubeRuntime>:
    Backend<
        Device = R::Device,
        FloatTensorPrimitive = CubeTensor<R>,
        IntTensorPrimitive = CubeTensor<R>,
        BoolTensorPrimitive = CubeTensor<R>,
    >
{
}

impl<B, R: CubeRuntime> Cube<R> for B where
    B: Backend<
            Device = R::Device,
            FloatTensorPrimitive = CubeTensor<R>,
            IntTensorPrimitive = CubeTensor<R>,
            BoolTensorPrimitive = CubeTensor<R>,
        >
{
}

pub(super) fn handle<R: CubeRuntime>(tensor: &CubeTensor<R>) -> TensorHandle<R> {
    tensor.clone().into()
}

/// A tensor of a kernel's output, on the device of `like`.
pub(super) fn tensor<R: CubeRuntime>(
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

/// A contiguous tensor in another shape.
pub(super) fn reshaped<R: CubeRuntime>(tensor: CubeTensor<R>, shape: Shape) -> CubeTensor<R> {
    CubeTensor::new_contiguous(
        tensor.client,
        tensor.device,
        shape,
        tensor.handle,
        tensor.dtype,
    )
}

/// A tensor to update in place: contiguous, and in a buffer that nothing else holds.
pub(super) fn own<R: CubeRuntime>(tensor: CubeTensor<R>) -> CubeTensor<R> {
    let tensor = into_contiguous(tensor);
    match tensor.can_mut() {
        true => tensor,
        // Burn may pad the rows of the copy.
        false => into_contiguous(tensor.copy()),
    }
}
