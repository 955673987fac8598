//! Pretrains a small Llama-style model once with each recipe: see `pretrain --help`.

use std::process::ExitCode;

use peak_alloc::PeakAlloc;

/// Counts live bytes, for the activations that a forward pass saves on the CPU.
#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

fn main() -> ExitCode {
    examples::main(|| ALLOCATOR.current_usage() as u64)
}
