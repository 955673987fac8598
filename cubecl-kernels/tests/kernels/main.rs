//! The kernels against the scalar reference, on the runtime that a feature names: `cuda`, else `vulkan`. Without either
//! only what runs on the host is tested.

mod adamw;
mod amax_history;
mod attention;
mod bit_splitting;
mod clipping;
mod delay_threshold;
mod dropout;
mod embedding;
mod gelu;
mod given;
mod hadamard;
mod host;
mod layer_norm;
mod learned_step;
mod leverage_score;
mod loss_scaling;
mod magnitude;
mod number;
mod optimizer_state;
mod philox;
mod quantization_error;
mod random;
mod reference;
mod rms_norm;
mod rows;
mod scales;
mod swiglu;

#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod centred;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod column_sum;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod concatenate;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod copies;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod device;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod errors;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod extremes;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod fallback;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod gemm;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod gemm_fp8;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod gemm_hopper;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod gemm_int4;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod gemm_quantized;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod linear_input;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod log_softmax;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod operator_input;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod output_gradient;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod quantize;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod random_hadamard;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod rotary;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod softmax;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod split_k;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod sum;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod transpose;
