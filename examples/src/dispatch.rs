//! From the command line's words to types.
//!
//! Each line of the `match` below compiles the whole model, training loop and checkpoint code once more, for all
//! recipes together. So only the dtypes that a device is for are built: FP32 on the CPU (which has no faster one), BF16
//! with CUDA, FP32 with Vulkan (which has no BF16), and FP16 everywhere. A device costs nothing unless its feature is
//! on.

use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};

use anyhow::{Result, bail, ensure};
use burn::backend::Autodiff;
#[cfg(feature = "flex")]
use burn::backend::Flex;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, ElementConversion, Tensor};
#[allow(unused_imports)]
use burn::tensor::{bf16, f16};
use burn_quant_train::QuantTrain;
use burn_quant_train::data::DataBackend;
use burn_quant_train::optim::LayerBackend;
use burn_quant_train::recipe::{ComputeDtype, Named};

use crate::args::{Compute, Device};
use crate::config::Config;
use crate::memory::Gauges;
use crate::train::{self, Ended, Job, Session};

/// Trains a run on its device.
///
/// # Errors
///
/// A device that is not there or not built in, and whatever goes wrong in training.
pub fn run(session: &Session<'_>, job: &Job) -> Result<Ended> {
    match (job.config.device, job.config.compute) {
        #[cfg(feature = "flex")]
        (Device::Cpu, Compute::F32) => on_cpu::<f32>(session, job),
        #[cfg(feature = "flex")]
        (Device::Cpu, Compute::F16) => on_cpu::<f16>(session, job),
        #[cfg(feature = "cuda")]
        (Device::Cuda, Compute::F16) => {
            on::<burn::backend::Cuda, f16>(session, job, &gpu::gauges::<gpu::Cuda>())
        }
        #[cfg(feature = "cuda")]
        (Device::Cuda, Compute::Bf16) => {
            on::<burn::backend::Cuda, bf16>(session, job, &gpu::gauges::<gpu::Cuda>())
        }
        #[cfg(feature = "vulkan")]
        (Device::Vulkan, Compute::F16) => {
            on::<burn::backend::Vulkan, f16>(session, job, &gpu::gauges::<gpu::Vulkan>())
        }
        #[cfg(feature = "vulkan")]
        (Device::Vulkan, Compute::F32) => {
            on::<burn::backend::Vulkan, f32>(session, job, &gpu::gauges::<gpu::Vulkan>())
        }
        (device, compute) => {
            check_built(&job.config)?;
            bail!("--device {device} --compute {compute} is not built in")
        }
    }
}

/// The run on a CPU, whose memory is that of the process.
#[cfg(feature = "flex")]
fn on_cpu<E: ComputeDtype>(session: &Session<'_>, job: &Job) -> Result<Ended> {
    let gauges = Gauges {
        live: &|_| (session.live_bytes)(),
        taken: |_| None,
        give_back: |_| (),
    };
    on::<Flex, E>(session, job, &gauges)
}

/// The run on a backend, in a compute dtype: in the recipe of its name.
#[allow(dead_code)]
fn on<B: DataBackend, E: ComputeDtype>(
    session: &Session<'_>,
    job: &Job,
    gauges: &Gauges<'_, B::Device>,
) -> Result<Ended> {
    let _entered = job.run.recipe.enter()?;
    start::<QuantTrain<Autodiff<B>, Named<E>>>(session, job, gauges)
}

/// Tells early whether this build can train these runs.
///
/// # Errors
///
/// It cannot.
pub fn check_built(config: &Config) -> Result<()> {
    let (device, compute) = (config.device, config.compute);
    let (built, feature, dtypes): (_, _, &[Compute]) = match device {
        Device::Cpu => (
            cfg!(feature = "flex"),
            "flex",
            &[Compute::F32, Compute::F16],
        ),
        Device::Cuda => (
            cfg!(feature = "cuda"),
            "cuda",
            &[Compute::Bf16, Compute::F16],
        ),
        Device::Vulkan => (
            cfg!(feature = "vulkan"),
            "vulkan",
            &[Compute::F16, Compute::F32],
        ),
    };
    ensure!(
        built,
        "this build cannot train on --device {device}: build it with --features {feature}"
    );
    let names: Vec<_> = dtypes.iter().map(Compute::to_string).collect();
    ensure!(
        dtypes.contains(&compute),
        "--device {device} computes in {}, not in {compute}",
        names.join(" or ")
    );
    Ok(())
}

fn start<B: LayerBackend>(
    session: &Session<'_>,
    job: &Job,
    gauges: &Gauges<'_, B::Device>,
) -> Result<Ended> {
    let (name, compute) = (job.config.device, job.config.compute);
    let device = B::Device::default();
    ensure!(
        works::<B>(&device),
        "no working device for --device {name}: is there a GPU, and its driver?"
    );
    let dtype = match compute {
        Compute::F32 => DType::F32,
        Compute::Bf16 => DType::BF16,
        Compute::F16 => DType::F16,
    };
    ensure!(
        B::supports_dtype(&device, dtype),
        "the device of --device {name} does not support --compute {compute}"
    );
    train::run::<B>(session, job, &device, gauges)
}

/// True if the device can do a sum. Without a GPU the runtimes panic, on threads of their own too: keep them quiet.
fn works<B: Backend>(device: &B::Device) -> bool {
    let hook = take_hook();
    set_hook(Box::new(|_| {}));
    let one = catch_unwind(AssertUnwindSafe(|| {
        Tensor::<B, 1>::ones([1], device)
            .into_scalar()
            .elem::<f32>()
    }));
    set_hook(hook);
    one.is_ok_and(|it| it == 1.0)
}

#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod gpu {
    use cubecl::Runtime;
    #[cfg(feature = "cuda")]
    pub use cubecl::cuda::CudaRuntime as Cuda;
    #[cfg(feature = "vulkan")]
    pub use cubecl::wgpu::WgpuRuntime as Vulkan;

    use crate::memory::Gauges;

    /// Those of a runtime's memory pools; what is live is counted without their slack.
    pub fn gauges<R: Runtime>() -> Gauges<'static, R::Device> {
        Gauges {
            live: &|device| {
                let usage = R::client(device).memory_usage();
                usage.map_or(0, |it| it.bytes_in_use)
            },
            taken: |device| {
                let usage = R::client(device).memory_usage();
                usage.ok().map(|it| it.bytes_reserved)
            },
            give_back: |device| R::client(device).memory_cleanup(),
        }
    }
}
