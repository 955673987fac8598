//! The speed of burn-quant-train on an NVIDIA GPU, beside the device's limits and other libraries.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result};
use benches::{
    attention, gemm,
    gpu::{Gpu, Report},
    int4, operators, optimizer,
    peers::Peers,
    quantize,
    results::{Results, Rows, write},
    step::{layer, linear, memory, pretrain, recipes::Recipes},
    table,
};
use clap::{Args, Parser, Subcommand};

/// As in the program `pretrain`: glibc's allocator makes the threads that record, fuse and launch wait for each other.
#[cfg(not(target_env = "msvc"))]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Measures the speed of burn-quant-train on the first NVIDIA GPU. Each result is checked against its reference first.
#[derive(Parser, Debug)]
#[command(name = "qt-bench", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// The file of peers.py on this machine, to compare with
    #[arg(long, value_name = "FILE", global = true)]
    peers: Option<PathBuf>,
    #[command(flatten)]
    recipes: Recipes,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Products of block-quantized matrices
    Gemm {
        #[command(flatten)]
        settings: gemm::Settings,
        #[command(flatten)]
        output: Output,
    },
    /// Attention without scores in memory, both passes
    Attention {
        #[command(flatten)]
        settings: attention::Settings,
        #[command(flatten)]
        output: Output,
    },
    /// Quantization of the tensors of a linear layer
    Quantize {
        #[command(flatten)]
        settings: quantize::Settings,
        #[command(flatten)]
        output: Output,
    },
    /// The stages of an INT4 linear layer
    Int4 {
        #[command(flatten)]
        settings: int4::Settings,
        #[command(flatten)]
        output: Output,
    },
    /// Both passes of the non-linear operators between linear layers
    Operators {
        #[command(flatten)]
        settings: operators::Settings,
        #[command(flatten)]
        output: Output,
    },
    /// Forward and backward pass of a linear layer
    Linear {
        #[command(flatten)]
        settings: linear::Settings,
        #[command(flatten)]
        output: Output,
    },
    /// Forward and backward pass of a decoder layer
    Layer {
        #[command(flatten)]
        settings: layer::Settings,
        #[command(flatten)]
        output: Output,
    },
    /// Training steps of a preset of the program pretrain
    Pretrain {
        #[command(flatten)]
        settings: pretrain::Settings,
        #[command(flatten)]
        output: Output,
    },
    /// The same of each recipe in a process of its own, which tells what each takes from the device
    Memory {
        #[command(flatten)]
        settings: memory::Settings,
        #[command(flatten)]
        output: Output,
    },
    /// One step of AdamW on one tensor, in each format of its states
    Optimizer {
        #[command(flatten)]
        settings: optimizer::Settings,
        #[command(flatten)]
        output: Output,
    },
    /// Every benchmark but operators, whose options are called as those of others, and pretrain and memory, which need
    /// processes of their own
    All {
        #[command(flatten)]
        gemm: gemm::Settings,
        #[command(flatten)]
        attention: attention::Settings,
        #[command(flatten)]
        quantize: quantize::Settings,
        #[command(flatten)]
        int4: int4::Settings,
        #[command(flatten)]
        linear: linear::Settings,
        #[command(flatten)]
        layer: layer::Settings,
        #[command(flatten)]
        optimizer: optimizer::Settings,
        /// Write the results to files in this folder, each named after its benchmark
        #[arg(long, value_name = "FOLDER")]
        results: Option<PathBuf>,
    },
}

#[derive(Args, Debug)]
#[group(skip)]
struct Output {
    /// Write the results to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("qt-bench: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run(cli: Cli) -> Result<()> {
    let gpu = Gpu::open()?;
    let (gpu, recipes, peers) = (&gpu, &cli.recipes, cli.peers.as_deref());
    match cli.command {
        Command::Gemm { settings, output } => {
            let json = output.json.as_deref();
            show(&gemm::run(gpu, &settings, peers, json)?, json)
        }
        Command::Attention { settings, output } => {
            let json = output.json.as_deref();
            show(&attention::run(gpu, &settings, peers, json)?, json)
        }
        Command::Quantize { settings, output } => show(
            &quantize::run(gpu, &settings, peers)?,
            output.json.as_deref(),
        ),
        Command::Int4 { settings, output } => {
            let json = output.json.as_deref();
            show(&int4::run(gpu, &settings, json)?, json)
        }
        Command::Operators { settings, output } => {
            let json = output.json.as_deref();
            let without_burn = recipes.without_burn;
            show(
                &operators::run(gpu, &settings, without_burn, peers, json)?,
                json,
            )
        }
        Command::Linear { settings, output } => {
            let json = output.json.as_deref();
            show(&linear::run(gpu, &settings, recipes, peers, json)?, json)
        }
        Command::Layer { settings, output } => {
            let json = output.json.as_deref();
            show(&layer::run(gpu, &settings, recipes, peers, json)?, json)
        }
        Command::Pretrain { settings, output } => {
            let json = output.json.as_deref();
            show(&pretrain::run(gpu, &settings, recipes, peers, json)?, json)
        }
        Command::Memory { settings, output } => {
            let json = output.json.as_deref();
            show(&memory_of(gpu, &settings, recipes, peers, json)?, json)
        }
        Command::Optimizer { settings, output } => show(
            &optimizer::run(gpu, &settings, peers)?,
            output.json.as_deref(),
        ),
        Command::All {
            gemm: of_gemm,
            attention: of_attention,
            quantize: of_quantize,
            int4: of_int4,
            linear: of_linear,
            layer: of_layer,
            optimizer: of_optimizer,
            results,
        } => {
            if let Some(folder) = &results {
                fs::create_dir_all(folder)
                    .with_context(|| format!("cannot create {}", folder.display()))?;
            }
            let file = |name: &str| results.as_ref().map(|folder| folder.join(name));
            let json = file("gemm.json");
            let results = gemm::run(gpu, &of_gemm, peers, json.as_deref())?;
            show(&results, json.as_deref())?;
            let json = file("attention.json");
            let results = attention::run(gpu, &of_attention, peers, json.as_deref())?;
            show(&results, json.as_deref())?;
            let json = file("quantize.json");
            show(&quantize::run(gpu, &of_quantize, peers)?, json.as_deref())?;
            let json = file("int4.json");
            let results = int4::run(gpu, &of_int4, json.as_deref())?;
            show(&results, json.as_deref())?;
            let json = file("linear.json");
            let results = linear::run(gpu, &of_linear, recipes, peers, json.as_deref())?;
            show(&results, json.as_deref())?;
            let json = file("layer.json");
            let results = layer::run(gpu, &of_layer, recipes, peers, json.as_deref())?;
            show(&results, json.as_deref())?;
            let json = file("optimizer.json");
            show(&optimizer::run(gpu, &of_optimizer, peers)?, json.as_deref())
        }
    }
}

/// Measures each training in a process of this program, and writes what it has to `json` after each.
fn memory_of(
    gpu: &Gpu,
    settings: &memory::Settings,
    recipes: &Recipes,
    peers: Option<&Path>,
    json: Option<&Path>,
) -> Result<Results> {
    let peers = peers.map(|path| Peers::read(path, &gpu.name)).transpose()?;
    let program = env::current_exe().context("this program's path is not known")?;
    let mut report = Report::new(gpu, json, Rows::Pretrain)?;
    settings.measure(&program, &recipes.names, |line| report.add([line]))?;
    let rows = peers.iter().flat_map(Peers::pretrain);
    report.finish(peers.as_ref().map(Peers::run), rows)
}

/// Prints the table and writes the file.
fn show(results: &impl serde::Serialize, json: Option<&Path>) -> Result<()> {
    println!("\n{}", table::of(&serde_json::to_string(results)?)?);
    json.map_or(Ok(()), |path| write(path, results))
}
