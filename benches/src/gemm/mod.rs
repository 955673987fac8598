//! The speed of products of block-quantized matrices, beside that of BF16 matrices.

mod burn_matmul;
mod check;
mod problem;

use std::path::Path;

use anyhow::{Result, ensure};
use clap::Args;
use cubecl::{ir::StorageType, prelude::*};
use cubecl_kernels::{
    KernelError,
    gemm::{GemmOperand, Strategy, gemm},
};
use half::bf16;

use crate::{
    gpu::{Gpu, Tensor},
    peers::Peers,
    random::Random,
    results::{Fallback, GemmSpeed, Kernel, LayerProduct, Placement, Product, Results, Rows},
    timing::Sampling,
};
use problem::{Operands, Problem};

/// What is measured.
#[derive(Args, Debug, Clone)]
#[group(skip)]
pub struct Settings {
    /// M = N = K of the products
    #[arg(
        long,
        value_delimiter = ',',
        default_values = ["2048", "4096", "8192"],
        value_name = "N,.."
    )]
    pub sizes: Vec<usize>,
    /// Measure the products of the layers of models instead
    #[arg(long)]
    pub shapes: bool,
    /// The vocabulary of these models
    #[arg(long, default_value_t = 32_000, value_name = "N")]
    pub vocabulary: usize,
}

/// Our kernels.
const STRATEGIES: &[(Kernel, Strategy)] = &[
    (Kernel::Hopper, Strategy::Hopper),
    (Kernel::TensorCore, Strategy::TensorCore),
];

/// Sizes that no tile divides, and their neighbours that tiles do.
const ODD: [[usize; 3]; 2] = [[4095, 4097, 1000], [4096, 4096, 1024]];
/// A batch of products, and M = N = K of each.
const BATCHED: (usize, usize) = (8, 2048);

/// Checks every kernel on every problem, then measures it. Says on stderr what it does.
///
/// # Errors
///
/// A result that differs from the reference, or a file of peers that is none of this GPU.
pub fn run(gpu: &Gpu, settings: &Settings, peers: Option<&Path>) -> Result<Results> {
    ensure!(
        settings
            .sizes
            .iter()
            .all(|size| (1..=1 << 15).contains(size)),
        "--sizes must lie from 1 to 2^15"
    );
    let peers = peers.map(|path| Peers::read(path, &gpu.name)).transpose()?;
    let mut random = gpu.random();
    let mut rows = Vec::new();
    let problems = if settings.shapes {
        of_layers(settings.vocabulary)
    } else {
        by_themselves(&settings.sizes)
    };
    for problem in &problems {
        rows.extend(
            measure(gpu, &mut random, problem).map_err(|it| it.context(problem.to_string()))?,
        );
    }
    let mut peer = None;
    if !settings.shapes {
        for &size in &settings.sizes {
            rows.push(burn(gpu, &mut random, size)?);
        }
        rows.extend(peers.iter().flat_map(Peers::gemm));
        peer = peers.map(|peers| peers.run());
    }
    Ok(Results {
        run: gpu.run()?,
        peer,
        rows: Rows::Gemm(rows),
    })
}

/// Squares of each size, with smaller blocks and with fallback; odd sizes; a batch.
fn by_themselves(sizes: &[usize]) -> Vec<Problem> {
    let mut problems = Vec::new();
    for &size in sizes {
        let plain = Problem::new(size, size, size);
        problems.push(plain);
        problems.extend([64, 32].map(|block| Problem { block, ..plain }));
        for placement in [Placement::Scattered, Placement::Sequential] {
            problems.extend([0.1, 0.2].map(|rate| Problem {
                fallback: Some(Fallback { rate, placement }),
                ..plain
            }));
        }
    }
    problems.extend(ODD.map(|[m, n, k]| Problem::new(m, n, k)));
    let (batch, size) = BATCHED;
    problems.push(Problem {
        batch,
        ..Problem::new(size, size, size)
    });
    problems
}

/// The three products of the layers of Llama-style models of three widths.
fn of_layers(vocabulary: usize) -> Vec<Problem> {
    let mut problems = Vec::new();
    for tokens in [2048, 8192, 16_384] {
        for d in [1024, 2048, 4096] {
            for (inputs, outputs) in [(d, 4 * d), (4 * d, d), (d, 3 * d), (d, vocabulary)] {
                problems.extend(Product::ALL.map(|product| {
                    Problem::of_layer(LayerProduct {
                        tokens,
                        inputs,
                        outputs,
                        product,
                    })
                }));
            }
        }
    }
    problems
}

/// One line for each of our kernels.
fn measure(gpu: &Gpu, random: &mut Random, problem: &Problem) -> Result<Vec<GemmSpeed>> {
    let operands = problem.operands(gpu, random)?;
    let (a, b) = (operands.a.operand()?, operands.b.operand()?);
    let mut rows = Vec::new();
    for &(kernel, strategy) in STRATEGIES {
        let row = match product(gpu, problem, &operands, (&a, &b), strategy) {
            Err(KernelError::Unsupported { reason, .. }) => {
                eprintln!("{problem}, {}: {reason}", kernel.name());
                problem.unavailable(kernel, reason)
            }
            Err(error) => return Err(error.into()),
            Ok(out) => {
                check::check(gpu, random, problem, &operands, &out)
                    .map_err(|error| error.context(kernel.name()))?;
                drop(out);
                let launch = || {
                    product(gpu, problem, &operands, (&a, &b), strategy)?;
                    Ok(())
                };
                problem.timed(kernel, Sampling::SHORT.time(launch, || gpu.sync())?)
            }
        };
        if let (Some(time), Some(tera_ops)) = (row.time, row.tera_ops()) {
            let ms = time.median_ms;
            eprintln!(
                "{problem}, {}: {ms:.3} ms, {tera_ops:.0} TOP/s",
                kernel.name()
            );
        }
        rows.push(row);
    }
    drop((operands, a, b));
    gpu.client.memory_cleanup();
    Ok(rows)
}

fn product(
    gpu: &Gpu,
    problem: &Problem,
    operands: &Operands,
    (a, b): (
        &GemmOperand<cubecl::cuda::CudaRuntime>,
        &GemmOperand<cubecl::cuda::CudaRuntime>,
    ),
    strategy: Strategy,
) -> Result<Tensor, KernelError> {
    let residual = operands.residual.as_ref();
    gemm(&gpu.client, a, b, residual, None, output(problem), strategy)
}

fn output(problem: &Problem) -> StorageType {
    if problem.output_is_f32() {
        f32::as_type_native_unchecked().storage_type()
    } else {
        bf16::as_type_native_unchecked().storage_type()
    }
}

/// The line of Burn's own product of square BF16 matrices.
fn burn(gpu: &Gpu, random: &mut Random, size: usize) -> Result<GemmSpeed> {
    let time = burn_matmul::measure(random, size)
        .map_err(|error| error.context(format!("Burn's product of size {size}")))?;
    gpu.client.memory_cleanup();
    let row = GemmSpeed {
        block: None,
        ..Problem::new(size, size, size).timed(Kernel::BurnBf16, time)
    };
    eprintln!("Burn BF16, {size}: {:.3} ms", time.median_ms);
    Ok(row)
}
