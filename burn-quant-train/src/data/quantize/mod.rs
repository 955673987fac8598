//! Quantized matrices: from float matrices to numbers with shared scales, and back.

pub(super) mod delayed;
pub(super) mod fallback;
pub(super) mod kernels;
pub(super) mod matrix;
mod operations;
mod source;

pub use cubecl_kernels::{quantize::QuantizeSpec, scale::ScaleNumber};
pub use delayed::DelayedMaximum;
pub(crate) use fallback::fallback_block;
pub use fallback::{Fallback, FallbackQuantized, Residual};
pub use kernels::{QuantizeKernels, QuantizedInput};
pub(crate) use kernels::{quantize_input_by_copies, quantize_operand};
pub use matrix::{Format, Operand, Quantized, Scales};
pub use operations::{dequantize, quantize, quantize_delayed, quantize_fallback};
pub(crate) use operations::{quantize_source, quantize_swiglu_gradients};
pub use source::{MatrixSource, SwigluContexts};
