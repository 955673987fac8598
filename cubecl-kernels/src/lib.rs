//! CubeCL kernels for low-precision training, and the functions that launch them.
//!
//! The crate is generic over the CubeCL runtime and knows nothing of a deep-learning framework: every function
//! takes and returns [`TensorHandle`](cubecl::std::tensor::TensorHandle)s. A *matrix* is a tensor of rank 2,
//! `[rows, cols]`, or of rank 3, `[batch, rows, cols]`, with any strides. Outputs are contiguous.
//!
//! | module | what it computes |
//! | --- | --- |
//! | [`quantize`] | quantization by block, group, token, channel or tensor, or by a given scale, and back |
//! | [`quantization_error`](mod@quantization_error) | how far the numbers that a matrix became are from the matrix |
//! | [`magnitude`] | the largest magnitude of a matrix, and how many elements it has in each octave below |
//! | [`quantize::learned_step`] | the Hadamard quantizer with a learned step size, and its backward pass |
//! | [`fallback`] | INT8 block quantization with a second INT8 copy of the residual of outlier blocks |
//! | [`linear_input`] | the INT8 copies of a linear layer's input from one read |
//! | [`random_hadamard`](mod@random_hadamard) | the random Hadamard transform of the rows of a matrix |
//! | [`bit_splitting`] | a gradient as the sum of two INT4 matrices |
//! | [`leverage_score`] | the rows of a split gradient that a product keeps, sampled by their scores |
//! | [`transpose`] | INT8 matrices transposed |
//! | [`gemm`] | the product of two quantized matrices, or its output quantized; on Hopper also of two in BF16 or FP16 |
//! | [`adamw`](mod@adamw) | AdamW on compressed moments, and what lets it skip a step without asking the host |
//! | [`loss_scaling`] | the schedule of the scale of losses, in FP16 training |
//! | [`optimizer_state`] | moments of an optimizer as 8-bit codes with a scale for each group, and back |
//! | [`dynamic_range_expansion`] | powers that stretch a group to the range of its codes |
//! | [`attention`](mod@attention) | attention and its gradients, without the scores in memory |
//! | [`centred`](mod@centred) | keys less what they have in common |
//! | [`softmax`](mod@softmax) | the softmax of attention scores and its gradient |
//! | [`log_softmax`](mod@log_softmax) | the logarithm of the softmax of logits, and its gradient |
//! | [`rms_norm`](mod@rms_norm) | RMSNorm and its gradients |
//! | [`rotary`](mod@rotary) | rotary positions and their gradient |
//! | [`layer_norm`](mod@layer_norm) | layer normalization and its gradients |
//! | [`gelu`](mod@gelu) | GELU and its gradient |
//! | [`dropout`](mod@dropout) | dropout, and the sum of a residual and a branch |
//! | [`column_sum`](mod@column_sum) | what the norms' backward passes leave in parts, added up |
//! | [`sum`](mod@sum) | the sum or the mean of all elements, such as of losses |
//! | [`concatenate`](mod@concatenate) | many short tensors in one |
//! | [`extremes`](mod@extremes) | the smallest and the largest of scales |
//! | [`operator_input`] | what norms, GELU, the gate and dropout read: floats, or numbers with scales |
//! | [`swiglu`](mod@swiglu) | the gate of a SwiGLU layer and its gradients |
//! | [`embedding`] | the gradient of an embedding's table |
//! | [`amax_history`] | the histories of largest magnitudes by which delayed scaling quantizes |
//! | [`delay_threshold`] | the controller that keeps the rate of fallback blocks in its range |
//! | [`compile_ahead`] | compilation of kernels before they are launched |
//! | [`philox`] | the counter-based random bits of stochastic rounding |
//! | [`host`] | quantization, with and without fallback, and AdamW on slices in host memory |
//! | [`reference`](mod@reference) | all of the above in scalar Rust, the specification that the tests compare with |
//!
//! and the vocabulary of quantization:
//!
//! | module | what it names |
//! | --- | --- |
//! | [`number`] | number formats: INT4, INT8, INT10, E2M1, E3M0, E4M3, E5M2, and those of optimizer states |
//! | [`scale`] | how scales are stored: FP32, E8M0, or E4M3 under an FP32 scale of the matrix |
//! | [`hadamard`] | the size and the axis of a Hadamard transform |
//! | [`granularity`] | which elements share a scale |
//! | [`rounding`] | to nearest, or stochastic by a key |
//! | [`layout`] | row-major and transposed copies |
//!
//! # Numerics
//!
//! The integers and the scales are specified to the bit, so that a backend without these kernels can compute the
//! same numbers from ordinary float operations; see [`reference`](mod@reference). It presumes that a division of
//! two normal `f32` is correctly rounded on the device, as it is on CUDA and on Mesa's lavapipe.
#![deny(missing_docs)]
// Kernels are written in CubeCL's subset of Rust: it has no `is_multiple_of`, and an `if comptime!` stands alone
// because it is decided when the kernel is built, the `if` inside it when the kernel runs.
#![allow(clippy::manual_is_multiple_of, clippy::collapsible_if)]

pub mod adamw;
pub mod amax_history;
pub mod attention;
pub mod bit_splitting;
pub mod centred;
pub mod column_sum;
pub mod compile_ahead;
pub mod concatenate;
pub mod delay_threshold;
pub mod dropout;
pub mod dynamic_range_expansion;
pub mod embedding;
pub mod error;
pub mod extremes;
pub mod fallback;
pub mod gelu;
pub mod gemm;
pub mod granularity;
pub mod hadamard;
pub mod host;
pub mod layer_norm;
pub mod layout;
pub mod leverage_score;
pub mod linear_input;
pub mod log_softmax;
pub mod loss_scaling;
pub mod magnitude;
pub mod number;
pub mod operator_input;
pub mod optimizer_state;
pub mod output_gradient;
pub mod philox;
pub mod quantization_error;
pub mod quantize;
pub mod random_hadamard;
pub mod reference;
pub mod rms_norm;
pub mod rotary;
pub mod rounding;
pub mod scale;
pub mod shape;
pub mod softmax;
pub mod sum;
pub mod swiglu;
pub mod transpose;

mod arguments;
mod byte_tile;
mod cuda;
mod device;
mod exact;
mod fast;
mod row_lanes;
mod row_units;

pub use error::KernelError;
