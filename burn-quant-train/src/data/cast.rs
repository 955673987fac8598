//! Casts between float dtypes.

use burn_backend::{Backend, DType, FloatDType, TensorMetadata, tensor::FloatTensor};

/// Casts `tensor` to `target`, unless it has that dtype already.
///
/// # Panics
///
/// If the device does not support `target`.
pub fn cast_to<B: Backend>(tensor: FloatTensor<B>, target: Option<FloatDType>) -> FloatTensor<B> {
    let Some(target) = target.filter(|target| !same(tensor.dtype(), *target)) else {
        return tensor;
    };
    let device = B::float_device(&tensor);
    assert!(
        B::supports_dtype(&device, target.into()),
        "cast of {:?} from {:?}: {device:?} does not support {target:?}; choose a recipe with another compute dtype, \
         such as FallbackInt8<f32>",
        tensor.shape(),
        tensor.dtype(),
    );
    B::float_cast(tensor, target)
}

/// True if a cast would change nothing. Burn's `Flex32` is FP32 whose arithmetic may be relaxed: never worth a cast.
fn same(dtype: DType, target: FloatDType) -> bool {
    dtype == target.into() || (dtype == DType::Flex32 && target == FloatDType::F32)
}
