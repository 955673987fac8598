//! The device under test, and tensors on it.

use std::{
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
use cubecl_kernels::{format::StochasticKey, philox};

pub type Tensor = TensorHandle<CudaRuntime>;

/// The first NVIDIA GPU.
pub struct Gpu {
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
        let output = Command::new("nvidia-smi")
            .args(["--query-gpu=name", "--format=csv,noheader"])
            .output()
            .context("cannot run nvidia-smi: is this a machine with an NVIDIA GPU?")?;
        let names = String::from_utf8_lossy(&output.stdout);
        let name = names.lines().next().unwrap_or_default().trim().to_owned();
        ensure!(
            output.status.success() && !name.is_empty(),
            "nvidia-smi finds no GPU"
        );
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
        Ok(Self {
            client: CudaRuntime::client(&CudaDevice::default()),
            name,
            seed: now.as_nanos() as u64,
        })
    }

    pub fn random(&self) -> Random {
        Random {
            key: StochasticKey {
                seed: self.seed,
                stream: 0,
            },
            next: 0,
        }
    }

    /// Waits until the device is idle.
    pub fn sync(&self) -> Result<()> {
        block_on(self.client.sync()).context("the GPU failed")
    }

    /// A contiguous tensor `[x.len()]`.
    pub fn upload<T: CubePrimitive + bytemuck::Pod>(&self, x: &[T]) -> Tensor {
        let handle = self.client.create_from_slice(bytemuck::cast_slice(x));
        TensorHandle::new_contiguous(
            vec![x.len()],
            handle,
            T::as_type_native_unchecked().storage_type(),
        )
    }

    /// All elements of a contiguous tensor.
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

/// A stream of random numbers.
pub struct Random {
    key: StochasticKey,
    next: usize,
}

impl Random {
    fn uniform(&mut self) -> f32 {
        self.next += 1;
        philox::uniform(self.key, self.next / 4, self.next % 4)
    }

    /// Normal numbers of this deviation, each divided by a random power of two up to 2^8: their squares span the range of
    /// the second moments of a training run.
    pub fn values(&mut self, n: usize, deviation: f32) -> Vec<f32> {
        (0..n)
            .map(|_| {
                let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
                let normal = radius * (std::f32::consts::TAU * self.uniform()).cos();
                normal * deviation * (-8.0 * self.uniform()).exp2()
            })
            .collect()
    }

    /// The same in stretches that repeat: fast for large tensors.
    pub fn tiled(&mut self, n: usize, deviation: f32) -> Vec<f32> {
        let tile = self.values(n.min(1 << 20), deviation);
        let mut values = tile.repeat(n.div_ceil(tile.len()));
        values.truncate(n);
        values
    }
}
