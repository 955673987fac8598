//! Pretrains a small Llama-style model once with each recipe: see `pretrain --help`.

use std::process::ExitCode;

use allocator::live_bytes;

fn main() -> ExitCode {
    examples::main(live_bytes)
}

/// Counts live bytes to the byte, for the activations that a forward pass saves on the CPU.
#[cfg(any(not(feature = "cuda"), target_env = "msvc"))]
mod allocator {
    use peak_alloc::PeakAlloc;

    #[global_allocator]
    static ALLOCATOR: PeakAlloc = PeakAlloc;

    pub fn live_bytes() -> u64 {
        ALLOCATOR.current_usage() as u64
    }
}

/// Beside a GPU, one thread records operations, another fuses them, a third launches kernels, and each frees what
/// another allocated: with glibc's allocator they wait for each other, and the GPU for them.
#[cfg(all(feature = "cuda", not(target_env = "msvc")))]
mod allocator {
    use tikv_jemalloc_ctl::{epoch, stats};
    use tikv_jemallocator::Jemalloc;

    #[global_allocator]
    static ALLOCATOR: Jemalloc = Jemalloc;

    /// Rounded up to the allocator's size classes, and with what threads keep at hand.
    pub fn live_bytes() -> u64 {
        let read = || {
            epoch::advance()?;
            stats::allocated::read()
        };
        read().expect("jemalloc is built with statistics") as u64
    }
}
