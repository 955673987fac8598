//! CUDA source as kernels of CubeCL: what kernels of CUDA source are launched by, and an edit of the source that CubeCL
//! writes itself. The sources of kernels lie beside the Rust files that launch them.

pub(crate) mod counters;
pub(crate) mod fingerprint;
pub(crate) mod flush_to_zero;
pub(crate) mod numbers;
pub(crate) mod source;
pub(crate) mod tensor_map;
