//! Values of one tensor with the gradient of another.

use burn::tensor::{DType, Tensor, TensorData, backend::Backend};
use cubecl_kernels::granularity::Granularity;

use super::numbers::Numbers;

/// The value of `value`, up to the rounding of a sum, with the gradient of `gradient`.
pub fn with_gradient_of<B: Backend, const D: usize>(
    value: Tensor<B, D>,
    gradient: Tensor<B, D>,
) -> Tensor<B, D> {
    gradient.clone() + (value - gradient).detach()
}

/// `x` as it comes back from a number format; its gradient goes straight through. The last dimension is the columns of
/// a matrix.
pub fn rounded<B: Backend, const D: usize>(
    x: Tensor<B, D>,
    numbers: Numbers,
    granularity: Granularity,
) -> Tensor<B, D> {
    let dims = x.dims();
    let cols = dims[D - 1];
    let values = floats(x.clone().detach());
    let values = numbers.round(&values, [values.len() / cols.max(1), cols], granularity);
    let device = x.device();
    with_gradient_of(Tensor::from_data(TensorData::new(values, dims), &device), x)
}

/// The values of a tensor.
pub fn floats<B: Backend, const D: usize>(x: Tensor<B, D>) -> Vec<f32> {
    let data = x.cast(DType::F32).into_data();
    data.into_vec().expect("FP32 values are FP32")
}
