//! Kernels of CUDA source, compiled on threads of their own before CubeCL comes to them.
//!
//! CubeCL compiles a kernel when it is launched for the first time, one after the other, in the thread that serves the
//! device. NVRTC (from CUDA 12.9 on) and the driver keep what they have compiled in the driver's cache, where they find
//! it by its source. So threads of this module compile sources as CubeCL will, for nothing but that cache: CubeCL then
//! has a kernel in 0.02 s, where it takes 0.6 to 1.7 s (10 kernels, one NVIDIA H200, CUDA 13.0, 2026-11-28).
//!
//! Each first launch of a kernel asks for it, and for what is likely to follow: the other products of a linear layer, the
//! backward pass of attention. A program may say which layers it has, before it launches anything
//! ([`expect_layers`](crate::gemm::expect_layers)); if it does not, products of layers that are not quantized are guessed.

#[cfg(feature = "cuda")]
mod queue;
#[cfg(feature = "cuda")]
pub(crate) use queue::{anticipate, expect, knows_layers};

/// Asks for what a program is going to launch.
#[cfg(not(feature = "cuda"))]
pub(crate) fn expect<R: cubecl::Runtime>(
    _texts: impl FnOnce() -> Vec<crate::cuda::source::SourceText>,
) {
}

/// True where products are asked for by the layers of a model.
#[cfg(not(feature = "cuda"))]
pub(crate) fn knows_layers() -> bool {
    false
}

/// Compiles ahead while it lives; one of them at a time.
///
/// For programs that train: a program which launches a few kernels waits for others, as it waits at its end for those
/// that are being compiled then. Without the feature `cuda`, on devices of other architectures than sm_90, whose
/// kernels have no CUDA source, and with `CUDA_CACHE_DISABLE=1` in the environment it does nothing.
#[must_use = "kernels are compiled ahead while this lives"]
#[derive(Debug)]
pub struct CompileAhead {
    #[cfg(feature = "cuda")]
    _threads: Option<queue::Threads>,
}

impl CompileAhead {
    /// Starts half as many threads as the machine has processors, 8 at most. They wait until a kernel is launched, and
    /// each takes some 0.5 GB of the device's memory while it compiles.
    ///
    /// Has no effect while another lives.
    pub fn start() -> Self {
        Self {
            #[cfg(feature = "cuda")]
            _threads: queue::Threads::start(),
        }
    }
}
