//! Dynamic loss scaling (Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2; training-precision
//! guide, "Mixed-Precision Training: The FP16 Recipe"), with the schedule of PyTorch's AMP: the scale falls in a step
//! whose gradients are not finite, and grows after so many steps whose gradients are.
//!
//! All scales and factors are powers of two. So a scaled loss has the gradients of an unscaled one, with another
//! exponent, and [`adamw`](mod@crate::adamw) divides by the scale without rounding.

use cubecl::{prelude::*, std::tensor::TensorHandle};
use serde::{Deserialize, Serialize};

use crate::{
    device::{check_contiguous, check_dtype, storage},
    error::KernelError,
};

const OPERATION: &str = "loss scaling";
/// 2^-126: the smallest number whose inverse is normal too, beside [`LARGEST`].
const SMALLEST: f32 = f32::MIN_POSITIVE;
/// 2^126.
const LARGEST: f32 = 1.0 / SMALLEST;
/// The bits of 1.0, twice: from them the bits of a power of two leave those of its inverse.
const TWICE_ONE: u32 = 2 * 1.0f32.to_bits();

/// How the factor moves by which a loss is multiplied before the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LossScaling {
    /// The scale of the first step.
    pub initial: f32,
    /// Multiplies the scale after `growth_interval` good steps, above 1.
    pub growth: f32,
    /// Multiplies the scale in a step whose gradients are not finite, below 1.
    pub backoff: f32,
    /// Good steps between two changes of the scale after which it grows.
    pub growth_interval: u32,
    /// The scale does not fall below.
    pub minimum: f32,
    /// The scale does not grow above.
    pub maximum: f32,
}

impl Default for LossScaling {
    /// The settings of AMP: 2^16, twice that after 2,000 good steps, half in one that is not; within [1, 2^32].
    fn default() -> Self {
        Self {
            initial: 65_536.0,
            growth: 2.0,
            backoff: 0.5,
            growth_interval: 2_000,
            minimum: 1.0,
            maximum: 4_294_967_296.0,
        }
    }
}

impl LossScaling {
    /// Checks the settings.
    ///
    /// # Errors
    ///
    /// If a scale or a factor is not a power of two between 2^-126 and 2^126, if `growth` is not above 1 or `backoff`
    /// not below 1, if `growth_interval` is 0 or above 2^31 - 1, or if `minimum <= initial <= maximum` does not hold.
    /// The message names the setting, its value and the remedy.
    pub fn check(&self) -> Result<(), KernelError> {
        let refused = |reason, remedy| {
            Err(KernelError::Unsupported {
                operation: OPERATION,
                reason,
                remedy,
            })
        };
        let Self {
            initial,
            growth,
            backoff,
            growth_interval,
            minimum,
            maximum,
        } = *self;
        let powers = [
            ("initial", initial),
            ("growth", growth),
            ("backoff", backoff),
            ("minimum", minimum),
            ("maximum", maximum),
        ];
        for (name, value) in powers {
            if !is_scale(value) {
                return refused(
                    format!("{name} is {value}"),
                    "use a power of two from 2^-126 to 2^126, which scales without rounding",
                );
            }
        }
        if growth <= 1.0 {
            return refused(format!("growth is {growth}"), "use one above 1, such as 2");
        }
        if backoff >= 1.0 {
            return refused(
                format!("backoff is {backoff}"),
                "use one below 1, such as 0.5",
            );
        }
        if growth_interval == 0 || i32::try_from(growth_interval).is_err() {
            return refused(
                format!("growth_interval is {growth_interval}"),
                "use 1 to 2147483647 steps, such as 2000",
            );
        }
        if !(minimum..=maximum).contains(&initial) {
            return refused(
                format!("initial is {initial}, between {minimum} and {maximum}"),
                "use minimum <= initial <= maximum",
            );
        }
        Ok(())
    }
}

/// True for a scale that a loss may have: a power of two whose inverse is a normal `f32` as well.
pub fn is_scale(value: f32) -> bool {
    const FRACTION: u32 = (1 << (f32::MANTISSA_DIGITS - 1)) - 1;
    (SMALLEST..=LARGEST).contains(&value) && value.to_bits() & FRACTION == 0
}

/// The scale before the first step, and no good step: f32 `[1]` and i32 `[1]`.
pub fn initial_loss_scale<R: Runtime>(
    client: &ComputeClient<R>,
    config: &LossScaling,
) -> (TensorHandle<R>, TensorHandle<R>) {
    let upload = |bytes: &[u8], dtype| {
        TensorHandle::new_contiguous(vec![1], client.create_from_slice(bytes), dtype)
    };
    (
        upload(&config.initial.to_le_bytes(), storage::<f32>()),
        upload(&0i32.to_le_bytes(), storage::<i32>()),
    )
}

/// Moves the scale at the end of a step, on the device.
///
/// - `scale`: f32 `[1]`, updated in place.
/// - `good_steps`: i32 `[1]`, the good steps since the scale last fell or was due to grow, updated in place.
/// - `nonfinite`: i32 `[1]`; not 0 in a step whose gradients are not finite, as
///   [`find_nonfinite`](crate::adamw::find_nonfinite) leaves it.
///
/// The result is that of [`reference::update_loss_scale`](crate::reference::update_loss_scale).
///
/// # Errors
///
/// When shapes or element types differ from these, or a setting is out of its range: see [`LossScaling::check`].
pub fn update_loss_scale<R: Runtime>(
    client: &ComputeClient<R>,
    scale: &TensorHandle<R>,
    good_steps: &TensorHandle<R>,
    nonfinite: &TensorHandle<R>,
    config: &LossScaling,
) -> Result<(), KernelError> {
    config.check()?;
    check_scale(OPERATION, scale)?;
    for (name, tensor) in [("good_steps", good_steps), ("nonfinite", nonfinite)] {
        check_dtype(OPERATION, name, tensor, storage::<i32>(), "use i32")?;
        check_one(OPERATION, name, tensor)?;
    }
    // SAFETY: each tensor has the one element that the kernel reads and writes.
    #[allow(unsafe_code)]
    unsafe {
        update_loss_scale_kernel::launch_unchecked::<R>(
            client,
            CubeCount::new_single(),
            CubeDim::new_single(),
            scale.clone().into_arg(),
            good_steps.clone().into_arg(),
            nonfinite.clone().into_arg(),
            config.growth,
            config.backoff,
            config.growth_interval as i32,
            config.minimum,
            config.maximum,
        );
    }
    Ok(())
}

/// Accepts a scale: f32 `[1]`.
pub(crate) fn check_scale<R: Runtime>(
    operation: &'static str,
    scale: &TensorHandle<R>,
) -> Result<(), KernelError> {
    check_dtype(
        operation,
        "loss_scale",
        scale,
        storage::<f32>(),
        "use f32, which holds every scale",
    )?;
    check_one(operation, "loss_scale", scale)
}

fn check_one<R: Runtime>(
    operation: &'static str,
    name: &str,
    tensor: &TensorHandle<R>,
) -> Result<(), KernelError> {
    match check_contiguous(operation, tensor)? {
        1 => Ok(()),
        _ => Err(KernelError::Shape {
            operation,
            got: format!("{name} {:?}", tensor.shape()),
            remedy: "pass a tensor [1]",
        }),
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn update_loss_scale_kernel(
    scale: &mut Tensor<f32>,
    good_steps: &mut Tensor<i32>,
    nonfinite: &Tensor<i32>,
    growth: f32,
    backoff: f32,
    growth_interval: i32,
    minimum: f32,
    maximum: f32,
) {
    if nonfinite[0] != 0 {
        scale[0] = max(scale[0] * backoff, minimum);
        good_steps[0] = 0;
    } else if good_steps[0] + 1 < growth_interval {
        good_steps[0] += 1;
    } else {
        scale[0] = min(scale[0] * growth, maximum);
        good_steps[0] = 0;
    }
}

/// The inverse of a [scale](is_scale), exact on devices whose division is not.
#[cube]
pub(crate) fn inverse(scale: f32) -> f32 {
    f32::reinterpret(TWICE_ONE - u32::reinterpret(scale))
}
