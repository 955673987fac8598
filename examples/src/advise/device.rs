//! Devices, as the guide tells them apart (training-precision-guide, `recommend_training_precision`).

use clap::ValueEnum;
use serde::Serialize;

use crate::args::Compute;

/// Where a model is to train.
#[derive(ValueEnum, Serialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Device {
    /// Burn's Flex backend.
    Cpu,
    /// NVIDIA V100.
    V100,
    /// NVIDIA T4.
    T4,
    /// NVIDIA A100.
    A100,
    /// NVIDIA H100.
    H100,
    /// NVIDIA H200, on which the results of the book were measured.
    H200,
    /// NVIDIA B100.
    B100,
    /// NVIDIA B200.
    B200,
    /// Another GPU.
    #[default]
    Gpu,
}

/// The narrowest floats that a device's tensor cores multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Narrowest {
    /// None is known to be faster than FP32.
    Fp32,
    /// FP16, and no BF16.
    Fp16,
    /// BF16 and FP16.
    Bf16,
    /// FP8.
    Fp8,
    /// FP4.
    Fp4,
}

impl Device {
    /// True where memory comes from CubeCL's pools.
    pub fn has_pools(self) -> bool {
        match self {
            Self::Cpu => false,
            Self::V100
            | Self::T4
            | Self::A100
            | Self::H100
            | Self::H200
            | Self::B100
            | Self::B200
            | Self::Gpu => true,
        }
    }

    /// The numbers that its tensor cores multiply; of a GPU that is not named, no more than BF16 is assumed.
    pub fn narrowest(self) -> Narrowest {
        match self {
            Self::Cpu => Narrowest::Fp32,
            Self::V100 | Self::T4 => Narrowest::Fp16,
            Self::A100 | Self::Gpu => Narrowest::Bf16,
            Self::H100 | Self::H200 => Narrowest::Fp8,
            Self::B100 | Self::B200 => Narrowest::Fp4,
        }
    }

    /// The compute dtype to take.
    pub fn compute(self) -> Compute {
        match self.narrowest() {
            Narrowest::Fp32 => Compute::F32,
            Narrowest::Fp16 => Compute::F16,
            Narrowest::Bf16 | Narrowest::Fp8 | Narrowest::Fp4 => Compute::Bf16,
        }
    }

    /// True where attention has a kernel on matrix instructions, which leaves its output for the backward pass; assumed
    /// of a GPU that is not named, since it takes more memory.
    pub fn has_flash_attention(self) -> bool {
        !matches!(self, Self::Cpu | Self::V100 | Self::T4)
    }

    /// True where the narrow copies of weights that are not quantized wait for the backward pass: on Hopper a kernel of
    /// ours multiplies them, which casts them each time.
    pub fn keeps_casts(self) -> bool {
        !matches!(self, Self::H100 | Self::H200)
    }
}
