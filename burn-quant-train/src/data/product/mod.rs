//! Products of matrices: of quantized ones, and of floats in the compute dtype.

pub(super) mod kernels;
mod operation;

pub use cubecl_kernels::gemm::{Accumulation, LayerOperands};
pub use kernels::{ExpectedLayer, FloatProduct, ProductKernels};
pub(crate) use kernels::{check_product, check_stacked, dequantized_product, float_product};
pub(crate) use operation::Product;
pub use operation::{ProductInputs, product};
