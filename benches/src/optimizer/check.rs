//! One step on fresh random numbers, on the device and by the scalar reference.

use anyhow::{Result, ensure};
use cubecl::cuda::CudaRuntime;
use cubecl_kernels::{
    adamw::{AdamWTensors, adamw},
    optimizer_state::{Moment, StateFormat, StateTensor},
    reference::{
        adamw::{MomentChunk, Step},
        optimizer_state::{HostState, quantize_state},
    },
    rounding::Rounding,
};

use super::HYPERPARAMETERS;
use crate::gpu::{Gpu, Tensor};

/// Elements: both end in a group that is a short one in every format, the second between two vectors.
const LENS: [usize; 2] = [100_000, 100_003];
/// The step, far enough that both bias corrections matter.
const T: u32 = 10;

/// Steps from moments that are not zero, and compares parameters and moments.
///
/// # Errors
///
/// Parameters that differ by more than 1e-4 of a learning rate; codes, scales or values that differ at all without
/// expansion; with it, whose powers the device rounds in its own way, more than a few of them.
pub fn check(gpu: &Gpu, first: Option<StateFormat>, second: Option<StateFormat>) -> Result<()> {
    LENS.into_iter()
        .try_for_each(|len| step(gpu, len, first, second))
}

fn step(
    gpu: &Gpu,
    len: usize,
    first: Option<StateFormat>,
    second: Option<StateFormat>,
) -> Result<()> {
    let mut random = gpu.random();
    // Parameters not much larger than a step, so that they do not hide its errors.
    let mut p = random.values(len, 1e-3);
    let g = random.values(len, 1e-2);
    let m = random.values(len, 1e-2);
    // A second moment is never below the square of the first one.
    let spread = random.values(len, 1e-2);
    let v = m.iter().zip(spread).map(|(m, x)| m * m + x * x).collect();
    let mut m = HostMoment::new(m, first, Moment::First);
    let mut v = HostMoment::new(v, second, Moment::Second);

    let tensors = AdamWTensors {
        updated: None,
        parameter: gpu.upload(&p),
        gradient: gpu.upload(&g),
        first: m.upload(gpu, Moment::First),
        second: v.upload(gpu, Moment::Second),
        rounding: Rounding::Nearest,
        state_rounding: Rounding::Nearest,
    };
    let clock = gpu.upload(&[T as i32, 0]);
    adamw(
        &gpu.client,
        std::slice::from_ref(&tensors),
        &clock,
        None,
        None,
        &HYPERPARAMETERS,
    )?;
    let step = Step::new(&HYPERPARAMETERS, T)?;
    cubecl_kernels::reference::adamw::adamw(&step, &mut p, &g, m.chunk(), v.chunk(), None);

    let on_device: Vec<f32> = gpu.download(&tensors.parameter)?;
    for (index, (actual, expected)) in on_device.iter().zip(&p).enumerate() {
        ensure!(
            f64::from(actual - expected).abs()
                <= 1e-6 * f64::from(expected.abs()) + 1e-4 * HYPERPARAMETERS.learning_rate,
            "parameter {index} becomes {actual} instead of {expected}"
        );
    }
    m.compare(gpu, &tensors.first)?;
    v.compare(gpu, &tensors.second)
}

/// A moment on the host.
enum HostMoment {
    Full(Vec<f32>),
    Compressed(StateFormat, HostState),
}

impl HostMoment {
    fn new(values: Vec<f32>, format: Option<StateFormat>, moment: Moment) -> Self {
        match format {
            None => Self::Full(values),
            Some(format) => Self::Compressed(format, quantize_state(&values, format, moment)),
        }
    }

    fn chunk(&mut self) -> MomentChunk<'_> {
        match self {
            Self::Full(values) => MomentChunk::Full(values),
            Self::Compressed(format, state) => MomentChunk::Compressed {
                format: *format,
                codes: &mut state.codes,
                scales: &mut state.scales,
                exponents: &mut state.exponents,
            },
        }
    }

    fn upload(&self, gpu: &Gpu, moment: Moment) -> StateTensor<CudaRuntime> {
        match self {
            Self::Full(values) => StateTensor {
                values: gpu.upload(values),
                scales: None,
                exponents: None,
                format: None,
                moment,
            },
            Self::Compressed(format, state) => StateTensor {
                values: gpu.upload(&state.codes),
                scales: Some(gpu.upload(&state.scales)),
                exponents: format.expand.then(|| gpu.upload(&state.exponents)),
                format: Some(*format),
                moment,
            },
        }
    }

    /// Compares the state on the device with this one, the expected.
    fn compare(&self, gpu: &Gpu, actual: &StateTensor<CudaRuntime>) -> Result<()> {
        let moment = actual.moment;
        let (format, expected) = match self {
            Self::Full(expected) => {
                let values: Vec<f32> = gpu.download(&actual.values)?;
                ensure!(values == *expected, "the {moment:?} moment differs");
                return Ok(());
            }
            Self::Compressed(format, expected) => (format, expected),
        };
        let codes: Vec<u8> = gpu.download(&actual.values)?;
        let scales: Vec<f32> = optional(gpu, &actual.scales)?;
        let exponents: Vec<u8> = optional(gpu, &actual.exponents)?;
        ensure!(
            (codes.len(), scales.len(), exponents.len())
                == (
                    expected.codes.len(),
                    expected.scales.len(),
                    expected.exponents.len()
                ),
            "the {moment:?} moment has other groups"
        );
        if !format.expand {
            ensure!(
                (codes, scales) == (expected.codes.clone(), expected.scales.clone()),
                "the {moment:?} moment differs"
            );
            return Ok(());
        }
        // Where the last digits of the powers decide, an exponent is the neighbouring one, and with it all codes of the
        // group.
        let (mut other_exponents, mut other_codes) = (0, 0);
        for (index, group) in expected.codes.chunks(format.group).enumerate() {
            let (a, b) = (scales[index], expected.scales[index]);
            ensure!(
                (a - b).abs() <= 2e-5 * b,
                "a scale of the {moment:?} moment is {a:e} instead of {b:e}"
            );
            if exponents[index] != expected.exponents[index] {
                other_exponents += 1;
                continue;
            }
            let codes = &codes[index * format.group..][..group.len()];
            other_codes += codes.iter().zip(group).filter(|(a, b)| a != b).count();
        }
        ensure!(
            other_exponents * 50 <= scales.len() && other_codes * 200 <= codes.len(),
            "{other_codes} codes and {other_exponents} exponents of the {moment:?} moment differ"
        );
        Ok(())
    }
}

/// The elements of a tensor, or none.
fn optional<T: bytemuck::Pod>(gpu: &Gpu, tensor: &Option<Tensor>) -> Result<Vec<T>> {
    match tensor {
        Some(tensor) => gpu.download(tensor),
        None => Ok(Vec::new()),
    }
}
