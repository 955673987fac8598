//! Attention: the reference against finite differences, everything else against the reference.

#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod hopper;
mod host;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod portable;
mod problem;
mod reference;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod solve;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod tensor_core;
