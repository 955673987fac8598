//! The speed of products of INT8 and of FP8 matrices, beside that of BF16 matrices.

mod bf16_gemm;
mod burn_matmul;
mod check;
mod problem;
mod scaled;

use std::path::Path;

use anyhow::{Context, Result, ensure};
use clap::Args;
use cubecl::{cuda::CudaRuntime, ir::StorageType, prelude::*};
use cubecl_kernels::{
    KernelError,
    gemm::{GemmOperand, Strategy, gemm},
};
use half::bf16;

use crate::{
    gpu::{Gpu, Report},
    peers::Peers,
    random::Random,
    results::{
        Fallback, GemmSpeed, Kernel, LayerProduct, Placement, Product, Results, Rows, Spread,
    },
    timing::Sampling,
};
use problem::{Operands, Problem};

/// The products to measure.
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
    /// Measure the products of the layers of models instead, briefly, and odd sizes and a batch
    #[arg(long, conflicts_with = "floats")]
    pub shapes: bool,
    /// Leave out INT8 products
    #[arg(long)]
    pub floats: bool,
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

/// How thoroughly a product is measured.
#[derive(Debug, Clone, Copy)]
struct Care {
    sampling: Sampling,
    /// Rows and columns at most of the sample that is checked.
    checked: usize,
}

impl Settings {
    /// A few products are measured with care. For hundreds that would take minutes.
    fn care(&self) -> Care {
        if self.shapes {
            Care {
                sampling: Sampling::BRIEF,
                checked: 32,
            }
        } else {
            Care {
                sampling: Sampling::SHORT,
                checked: 128,
            }
        }
    }

    fn problems(&self) -> Vec<Problem> {
        if self.floats {
            return Vec::new();
        }
        let mut problems = if self.shapes {
            of_layers(self.vocabulary)
        } else {
            by_themselves(&self.sizes)
        };
        problems.extend(ODD.map(|[m, n, k]| Problem::new(m, n, k)));
        let (batch, size) = BATCHED;
        problems.push(Problem {
            batch,
            ..Problem::new(size, size, size)
        });
        problems
    }
}

/// Checks every kernel on every problem, then measures it. Says on stderr what it does, and writes what it has to
/// `json` after each problem.
///
/// # Errors
///
/// A result that differs from the reference, a file of peers that is none of this GPU, or a file that cannot be
/// written.
pub fn run(
    gpu: &Gpu,
    settings: &Settings,
    peers: Option<&Path>,
    json: Option<&Path>,
) -> Result<Results> {
    ensure!(
        settings
            .sizes
            .iter()
            .all(|size| (1..=1 << 15).contains(size)),
        "--sizes must lie from 1 to 2^15"
    );
    let peers = peers.map(|path| Peers::read(path, &gpu.name)).transpose()?;
    let mut random = gpu.random();
    let mut report = Report::new(gpu, json, Rows::Gemm)?;
    for problem in &settings.problems() {
        let rows = measure(gpu, &mut random, problem, settings.care());
        report.add(rows.map_err(|it| it.context(problem.to_string()))?)?;
    }
    if !settings.shapes {
        for &size in &settings.sizes {
            let bf16 = bf16_gemm::measure(gpu, &mut random, size);
            report.add([without_blocks(Kernel::HopperBf16, size, bf16)?])?;
            let is_wanted = |scaling: scaled::Scaling| !(settings.floats && scaling.is_int8());
            let scalings = scaled::SCALINGS.into_iter().filter(|it| is_wanted(it.1));
            for (kernel, scaling) in scalings {
                gpu.client.memory_cleanup();
                let time = scaled::measure(gpu, &mut random, size, scaling);
                report.add([without_blocks(kernel, size, time)?])?;
            }
            gpu.client.memory_cleanup();
            report.add([burn(gpu, &mut random, size)?])?;
        }
    }
    let peers = peers.filter(|_| !settings.shapes);
    let rows = peers.iter().flat_map(Peers::gemm);
    report.finish(peers.as_ref().map(Peers::run), rows)
}

/// Squares of each size, with smaller blocks and with fallback.
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
fn measure(
    gpu: &Gpu,
    random: &mut Random,
    problem: &Problem,
    care: Care,
) -> Result<Vec<GemmSpeed>> {
    let operands = problem.operands(gpu, random)?;
    let (a, b) = (operands.a.operand()?, operands.b.operand()?);
    let mut rows = Vec::new();
    for &(kernel, strategy) in STRATEGIES {
        let row = measure_kernel(gpu, random, problem, &operands, [&a, &b], strategy, care);
        let row = match row.map_err(|error| error.context(kernel.name()))? {
            Err(reason) => problem.unavailable(kernel, reason),
            Ok(time) => problem.timed(kernel, time),
        };
        say(&problem.to_string(), &row);
        rows.push(row);
    }
    drop((operands, a, b));
    gpu.client.memory_cleanup();
    Ok(rows)
}

/// The time of one kernel, or why there is no such kernel.
fn measure_kernel(
    gpu: &Gpu,
    random: &mut Random,
    problem: &Problem,
    operands: &Operands,
    [a, b]: [&GemmOperand<CudaRuntime>; 2],
    strategy: Strategy,
    care: Care,
) -> Result<Result<Spread, String>> {
    let (residual, dtype) = (operands.residual.as_ref(), output(problem));
    let product = || gemm(&gpu.client, a, b, residual, None, dtype, strategy);
    let out = match product() {
        Err(KernelError::Unsupported { reason, .. }) => return Ok(Err(reason)),
        out => out?,
    };
    check::check(gpu, random, problem, operands, &out, care.checked)?;
    drop(out);
    let launch = || {
        product()?;
        Ok(())
    };
    Ok(Ok(care.sampling.time(launch, || gpu.sync())?))
}

/// Says what was measured.
fn say(what: &str, row: &GemmSpeed) {
    let kernel = row.kernel.name();
    match (row.time, row.tera_ops()) {
        (Some(time), Some(tera_ops)) => {
            eprintln!(
                "{what}, {kernel}: {:.3} ms, {tera_ops:.0} TOP/s",
                time.median_ms
            );
        }
        _ => {
            let reason = row.unavailable.as_deref().unwrap_or_default();
            eprintln!("{what}, {kernel}: {reason}");
        }
    }
}

fn output(problem: &Problem) -> StorageType {
    if problem.output_is_f32() {
        f32::as_type_native_unchecked().storage_type()
    } else {
        bf16::as_type_native_unchecked().storage_type()
    }
}

/// The line of one of our products of square matrices that are not in square blocks.
fn without_blocks(
    kernel: Kernel,
    size: usize,
    time: Result<Result<Spread, String>>,
) -> Result<GemmSpeed> {
    let time = time.with_context(|| format!("{} of size {size}", kernel.name()))?;
    let problem = Problem::new(size, size, size);
    let row = GemmSpeed {
        block: None,
        ..match time {
            Err(reason) => problem.unavailable(kernel, reason),
            Ok(time) => problem.timed(kernel, time),
        }
    };
    say(&size.to_string(), &row);
    Ok(row)
}

/// The line of Burn's own product of square BF16 matrices.
fn burn(gpu: &Gpu, random: &mut Random, size: usize) -> Result<GemmSpeed> {
    let time = burn_matmul::measure(random, size)
        .with_context(|| format!("Burn's product of size {size}"))?;
    gpu.client.memory_cleanup();
    let row = GemmSpeed {
        block: None,
        ..Problem::new(size, size, size).timed(Kernel::BurnBf16, time)
    };
    say(&size.to_string(), &row);
    Ok(row)
}
