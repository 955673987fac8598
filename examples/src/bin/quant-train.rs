//! Advice before training: see `quant-train advise --help`.

use std::process::ExitCode;

fn main() -> ExitCode {
    examples::advise::main()
}
