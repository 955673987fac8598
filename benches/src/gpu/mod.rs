//! The device under test, and tensors on it.

mod copy;
mod gather;
mod normal;
mod report;

use std::{
    env,
    process::Command,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, ensure};
use cubecl::{
    cuda::{CudaDevice, CudaRuntime},
    future::block_on,
    prelude::*,
    std::tensor::TensorHandle,
};

use crate::{
    random::Random,
    results::{Run, utc},
};
pub use copy::{LARGE_COPY, copy};
pub use gather::{bf16_rows, gather_rows};
pub use normal::{OUTLIER, normal_matrix};
pub use report::Report;

/// A tensor on the GPU.
pub type Tensor = TensorHandle<CudaRuntime>;

/// The first NVIDIA GPU.
pub struct Gpu {
    /// Launches kernels.
    pub client: ComputeClient<CudaRuntime>,
    /// As the driver calls it.
    pub name: String,
    /// Of the random inputs, another one in each run.
    pub seed: u64,
}

impl Gpu {
    /// # Errors
    ///
    /// No GPU or no driver.
    pub fn open() -> Result<Self> {
        let [name] = query(["name"])?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
        Ok(Self {
            client: CudaRuntime::client(&CudaDevice::default()),
            name,
            seed: now.as_nanos() as u64,
        })
    }

    /// The circumstances of this run of the program, clocks as they are now.
    ///
    /// # Errors
    ///
    /// The driver does not tell.
    pub fn run(&self) -> Result<Run> {
        let [driver, max_sm, sm, memory] =
            query(["driver_version", "clocks.max.sm", "clocks.sm", "clocks.mem"])?;
        let mhz = |clock: &str| {
            let number = clock.parse();
            number.with_context(|| format!("nvidia-smi says that a clock runs at {clock}"))
        };
        let fusion = cfg!(feature = "fusion").then_some("fusion");
        let autotune = cfg!(feature = "autotune").then_some("autotune");
        let arguments = env::args().skip(1);
        Ok(Run {
            device: self.name.clone(),
            driver,
            max_sm_mhz: mhz(&max_sm)?,
            sm_mhz: mhz(&sm)?,
            memory_mhz: mhz(&memory)?,
            date: utc(SystemTime::now()),
            command: std::iter::once(String::from("qt-bench"))
                .chain(arguments)
                .collect::<Vec<_>>()
                .join(" "),
            features: fusion
                .into_iter()
                .chain(autotune)
                .map(String::from)
                .collect(),
            seed: self.seed,
        })
    }

    /// A stream of random numbers, the same in each call.
    pub fn random(&self) -> Random {
        Random::new(self.seed)
    }

    /// Bytes in use in the device's memory pools, their slack not counted; none if the device does not tell.
    pub fn live_bytes(&self) -> Option<u64> {
        let usage = self.client.memory_usage();
        usage.ok().map(|usage| usage.bytes_in_use)
    }

    /// Bytes of the device that are in use, by whatever program, as the driver says.
    ///
    /// # Errors
    ///
    /// The driver does not tell.
    pub fn used_bytes(&self) -> Result<u64> {
        let [mebibytes] = query(["memory.used"])?;
        let mebibytes: u64 = mebibytes
            .parse()
            .with_context(|| format!("nvidia-smi says that {mebibytes} MiB are in use"))?;
        Ok(mebibytes << 20)
    }

    /// A tensor with undefined contents.
    pub fn empty<T: CubePrimitive>(&self, shape: &[usize]) -> Tensor {
        let dtype = T::as_type_native_unchecked().storage_type();
        let bytes = shape.iter().product::<usize>() * dtype.size();
        TensorHandle::new_contiguous(shape.to_vec(), self.client.empty(bytes), dtype)
    }

    /// Waits until the device is idle.
    ///
    /// # Errors
    ///
    /// The device failed.
    pub fn sync(&self) -> Result<()> {
        block_on(self.client.sync()).context("the GPU failed")
    }

    /// A contiguous tensor `[x.len()]`.
    pub fn upload<T: CubePrimitive + bytemuck::Pod>(&self, x: &[T]) -> Tensor {
        self.upload_as(x, &[x.len()])
    }

    /// A contiguous tensor of this shape.
    pub fn upload_as<T: CubePrimitive + bytemuck::Pod>(&self, x: &[T], shape: &[usize]) -> Tensor {
        let handle = self.client.create_from_slice(bytemuck::cast_slice(x));
        let dtype = T::as_type_native_unchecked().storage_type();
        TensorHandle::new_contiguous(shape.to_vec(), handle, dtype)
    }

    /// All elements of a contiguous tensor.
    ///
    /// # Errors
    ///
    /// The device failed.
    pub fn download<T: bytemuck::Pod>(&self, tensor: &Tensor) -> Result<Vec<T>> {
        let bytes = self.client.read_one(tensor.handle.clone());
        let bytes = bytes.context("cannot read a tensor back")?;
        let len = tensor.shape().iter().product();
        Ok(bytes
            .chunks_exact(size_of::<T>())
            .take(len)
            .map(bytemuck::pod_read_unaligned)
            .collect())
    }
}

/// The values of these fields that nvidia-smi reports for the first GPU that the program sees.
fn query<const N: usize>(fields: [&str; N]) -> Result<[String; N]> {
    let mut command = Command::new("nvidia-smi");
    // nvidia-smi lists all GPUs, and the program sees but these. Both count alike where the GPUs are alike.
    if let Ok(visible) = env::var("CUDA_VISIBLE_DEVICES") {
        let first = visible.split(',').next().unwrap_or_default().trim();
        command.arg(format!("--id={first}"));
    }
    let output = command
        .arg(format!("--query-gpu={}", fields.join(",")))
        .arg("--format=csv,noheader,nounits")
        .output()
        .context("cannot run nvidia-smi: is this a machine with an NVIDIA GPU?")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().next().unwrap_or_default();
    let values: Vec<_> = line.split(',').map(|it| it.trim().to_owned()).collect();
    ensure!(
        output.status.success() && values.iter().all(|it| !it.is_empty()),
        "nvidia-smi finds no GPU"
    );
    let count = values.len();
    let values = values.try_into().ok();
    values.with_context(|| format!("nvidia-smi gives {count} values for {fields:?}"))
}
