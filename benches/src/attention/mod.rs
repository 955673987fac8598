//! The speed of attention without scores in memory, both passes.

mod check;

use std::{fmt, path::Path};

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use cubecl::frontend::CubePrimitive;
use cubecl_kernels::{
    attention::{
        AttentionGradients, AttentionKernel as Kernel, AttentionOptions, AttentionOutput,
        AttentionProducts, AttentionTensors, Band,
    },
    error::KernelError,
};
use half::bf16;

use crate::{
    gpu::{Gpu, Report, Tensor, normal_matrix},
    peers::Peers,
    random::Random,
    results::{
        AttentionKernel, AttentionPass, AttentionProblem, AttentionSpeed, Results, Rows, Spread,
    },
    timing::Sampling,
};

/// The attention to measure.
#[derive(Args, Debug, Clone)]
#[group(skip)]
pub struct Settings {
    /// Features of a head
    #[arg(
        long,
        value_delimiter = ',',
        default_values = ["64", "128"],
        value_name = "N,.."
    )]
    pub widths: Vec<usize>,
    /// Lengths of sequences
    #[arg(
        long,
        value_delimiter = ',',
        default_values = ["1024", "2048", "4096", "8192", "16384"],
        value_name = "N,.."
    )]
    pub sequences: Vec<usize>,
    /// Kernels of ours
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_values = ["hopper"],
        value_name = "KERNEL,.."
    )]
    pub kernels: Vec<OwnKernel>,
}

/// A kernel that can be measured.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum OwnKernel {
    /// `wgmma` instructions, sm_90
    Hopper,
    /// `wgmma` instructions of INT8 codes in the forward pass, sm_90
    HopperInt8,
    /// `mma.sync` instructions, from sm_80 on
    TensorCore,
    /// Ordinary arithmetic, any device
    Portable,
}

impl OwnKernel {
    const fn kernel(self) -> Kernel {
        match self {
            Self::Hopper | Self::HopperInt8 => Kernel::Hopper,
            Self::TensorCore => Kernel::TensorCore,
            Self::Portable => Kernel::Portable,
        }
    }

    const fn products(self) -> AttentionProducts {
        match self {
            Self::HopperInt8 => AttentionProducts::Int8,
            Self::Hopper | Self::TensorCore | Self::Portable => AttentionProducts::Float,
        }
    }

    const fn in_results(self) -> AttentionKernel {
        match self {
            Self::Hopper => AttentionKernel::Hopper,
            Self::HopperInt8 => AttentionKernel::HopperInt8,
            Self::TensorCore => AttentionKernel::TensorCore,
            Self::Portable => AttentionKernel::Portable,
        }
    }
}

/// Tokens of all sequences together, as FlashAttention's authors measure.
const TOKENS: usize = 16_384;
/// Features of all heads together.
const FEATURES: usize = 2048;

/// Query heads that share a head of keys, where they are grouped.
const GROUP: usize = 4;

impl Settings {
    /// Each width and length, causal, not, causal with grouped heads, and with a mask that hides a quarter of the keys.
    fn problems(&self) -> Result<Vec<AttentionProblem>> {
        let mut problems = Vec::new();
        for &width in &self.widths {
            ensure!(
                width > 0 && FEATURES.is_multiple_of(GROUP * width),
                "{GROUP} heads of each of --widths must divide {FEATURES}"
            );
            for &sequence in &self.sequences {
                ensure!(
                    sequence > 0 && TOKENS.is_multiple_of(sequence),
                    "each of --sequences must divide {TOKENS}"
                );
                let heads = FEATURES / width;
                let causal = AttentionProblem {
                    batch: TOKENS / sequence,
                    heads,
                    kv_heads: heads,
                    sequence,
                    width,
                    causal: true,
                    hidden: 0,
                };
                problems.push(causal);
                problems.push(AttentionProblem {
                    causal: false,
                    ..causal
                });
                problems.push(AttentionProblem {
                    kv_heads: heads / GROUP,
                    ..causal
                });
                problems.push(AttentionProblem {
                    causal: false,
                    hidden: sequence / 4,
                    ..causal
                });
            }
        }
        Ok(problems)
    }
}

/// Random operands, and the gradient of the output.
struct Operands {
    query: Heads,
    key: Heads,
    value: Heads,
    gradient: Heads,
    /// u8 `[batch, 1, 1, sequence]`.
    mask: Option<Tensor>,
}

/// Heads in the memory of `[batch, sequence, heads, width]`, as a linear layer leaves them.
struct Heads {
    /// Contiguous, `[batch, sequence, heads, width]`.
    rows: Tensor,
    /// A view of it, `[batch, heads, sequence, width]`.
    heads: Tensor,
}

impl Operands {
    fn new(gpu: &Gpu, random: &mut Random, problem: &AttentionProblem) -> Self {
        let mut normal = |heads: usize| {
            let shape = [problem.batch, problem.sequence, heads, problem.width];
            let seed = random.below(1 << 24) as u32;
            let rows = normal_matrix::<bf16>(
                gpu,
                &shape,
                problem.width.max(shape.iter().product()),
                &[0],
                seed,
            );
            let mut heads = rows.clone();
            heads.metadata.swap(1, 2);
            Heads { rows, heads }
        };
        Self {
            query: normal(problem.heads),
            key: normal(problem.kv_heads),
            value: normal(problem.kv_heads),
            gradient: normal(problem.heads),
            mask: (problem.hidden > 0).then(|| padding(gpu, problem)),
        }
    }

    fn tensors(&self) -> AttentionTensors<cubecl::cuda::CudaRuntime> {
        let [query, key, value] = [&self.query, &self.key, &self.value].map(|it| it.heads.clone());
        AttentionTensors {
            query,
            key,
            value,
            mask: self.mask.clone(),
            bias: None,
        }
    }

    fn forward(
        &self,
        gpu: &Gpu,
        kernel: Kernel,
        options: &AttentionOptions,
    ) -> Result<AttentionOutput<cubecl::cuda::CudaRuntime>, KernelError> {
        kernel.forward(&gpu.client, &self.tensors(), options)
    }

    fn backward(
        &self,
        gpu: &Gpu,
        kernel: Kernel,
        forward: &AttentionOutput<cubecl::cuda::CudaRuntime>,
        options: &AttentionOptions,
    ) -> Result<AttentionGradients<Option<Tensor>>, KernelError> {
        kernel.backward(
            &gpu.client,
            &self.tensors(),
            forward,
            &self.gradient.heads,
            AttentionGradients {
                query: true,
                key: true,
                value: true,
                bias: false,
            },
            options,
        )
    }
}

/// The mask that hides the last keys of each sequence.
fn padding(gpu: &Gpu, problem: &AttentionProblem) -> Tensor {
    let AttentionProblem {
        batch,
        sequence,
        hidden,
        ..
    } = *problem;
    let flags: Vec<u8> = (0..batch * sequence)
        .map(|at| u8::from(at % sequence >= sequence - hidden))
        .collect();
    let handle = gpu.client.create_from_slice(&flags);
    let dtype = u8::as_type_native_unchecked().storage_type();
    Tensor::new_contiguous(vec![batch, 1, 1, sequence], handle, dtype)
}

/// `1 / sqrt(width)`, and what a query sees by its place.
fn options(problem: &AttentionProblem, products: AttentionProducts) -> AttentionOptions {
    let band = if problem.causal {
        Band::CAUSAL
    } else {
        Band::ALL
    };
    AttentionOptions {
        band,
        products,
        ..AttentionOptions::new((problem.width as f32).sqrt().recip())
    }
}

/// Checks both passes of every problem, then measures them. Says on stderr what it does, and writes what it has to
/// `json` after each problem.
///
/// # Errors
///
/// A result that differs from the reference, a device without a kernel, a file of peers that is none of this GPU, or a
/// file that cannot be written.
pub fn run(
    gpu: &Gpu,
    settings: &Settings,
    peers: Option<&Path>,
    json: Option<&Path>,
) -> Result<Results> {
    let problems = settings.problems()?;
    let peers = peers.map(|path| Peers::read(path, &gpu.name)).transpose()?;
    let mut random = gpu.random();
    let mut report = Report::new(gpu, json, Rows::Attention)?;
    for problem in &problems {
        for &kernel in &settings.kernels {
            let row = measure(gpu, &mut random, problem, kernel);
            report.add([row.with_context(|| Described(problem).to_string())?])?;
            gpu.client.memory_cleanup();
        }
    }
    let rows = peers.iter().flat_map(Peers::attention);
    report.finish(peers.as_ref().map(Peers::run), rows)
}

fn measure(
    gpu: &Gpu,
    random: &mut Random,
    problem: &AttentionProblem,
    own: OwnKernel,
) -> Result<AttentionSpeed> {
    let operands = Operands::new(gpu, random, problem);
    let options = options(problem, own.products());
    let kernel = own.kernel();
    let forward = operands.forward(gpu, kernel, &options)?;
    let gradients = operands.backward(gpu, kernel, &forward, &options)?;
    check::check(
        gpu,
        random,
        problem,
        options.products,
        &operands,
        &forward,
        &gradients,
    )?;
    drop(gradients);
    let time = |launch: &dyn Fn() -> Result<(), KernelError>| -> Result<Spread> {
        Sampling::SHORT.time(|| Ok(launch()?), || gpu.sync())
    };
    let row = AttentionSpeed {
        kernel: own.in_results(),
        problem: *problem,
        forward: Some(time(&|| operands.forward(gpu, kernel, &options).map(drop))?),
        backward: Some(time(&|| {
            operands.backward(gpu, kernel, &forward, &options).map(drop)
        })?),
    };
    let tera_flops = |pass| row.tera_flops(pass).unwrap_or_default();
    eprintln!(
        "{}: {} kernel: forward {:.0}, backward {:.0} TFLOP/s",
        Described(problem),
        row.kernel.name(),
        tera_flops(AttentionPass::Forward),
        tera_flops(AttentionPass::Backward)
    );
    Ok(row)
}

/// A problem in words.
struct Described<'a>(&'a AttentionProblem);

impl fmt::Display for Described<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let AttentionProblem {
            batch,
            heads,
            kv_heads,
            sequence,
            width,
            causal,
            hidden,
        } = self.0;
        let band = if *causal { "causal" } else { "not causal" };
        write!(
            f,
            "{batch} x {heads} heads of {width}, {kv_heads} of keys, sequence {sequence}, {band}, {hidden} keys hidden"
        )
    }
}
