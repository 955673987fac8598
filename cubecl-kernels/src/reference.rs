//! Every operation of this crate in scalar Rust, written from the equations: the specification of the kernels, one file
//! an equation or a concept.
//!
//! Quantization is specified to the bit. All of its arithmetic is `f32`, each operation rounded to nearest even,
//! after an exact conversion of the input; a product that feeds a sum is rounded on its own. The matrix product is
//! evaluated in `f64` over the same numbers and scales, and so are attention, RMSNorm, layer normalization and SwiGLU;
//! a kernel may differ by its `f32` accumulation.
//!
//! Matrices are contiguous slices, row-major, batch first.

pub mod adamw;
pub mod amax_history;
pub mod attention;
pub mod bit_splitting;
pub mod delay_threshold;
pub mod embedding;
pub mod fallback;
pub mod gelu;
pub mod gemm;
pub mod hadamard;
pub mod layer_norm;
pub mod learned_step;
pub mod leverage_score;
pub mod loss_scaling;
pub mod magnitude;
pub mod matrix;
pub mod number;
pub mod optimizer_state;
pub mod packing;
pub mod quantization_error;
pub mod quantize;
pub mod rms_norm;
pub mod scale;
pub mod swiglu;

pub use bit_splitting::{ReferenceBitSplit, bit_split, merge_parts};
pub use delay_threshold::delay_threshold;
pub use embedding::embedding_gradient;
pub use fallback::{ReferenceFallbackQuantized, dequantize_fallback, quantize_fallback};
pub use gemm::gemm;
pub use leverage_score::{
    ReferenceRowSample, gather_int4_rows, gather_parts, gather_scaled, int4_row_norms,
    leverage_scores, sample_rows,
};
pub use loss_scaling::update_loss_scale;
pub use magnitude::magnitudes;
pub use matrix::{ReferenceQuantized, transpose};
pub use packing::{pack_int10, stored};
pub use quantization_error::quantization_error;
pub use quantize::{dequantize, quantize, quantize_by, quantize_delayed, quantize_to};
pub use scale::absmax;
