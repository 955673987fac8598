//! AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019) with moments in any state format:
//! one kernel that decompresses both moments, updates them and the parameter in FP32, and compresses them again
//! (coat-fp8, appendix G.4). Every byte is read once and written once, in place.
//!
//! ```text
//! m = beta_1 m + (1 - beta_1) g              m_hat = m / (1 - beta_1^t)
//! v = beta_2 v + (1 - beta_2) g^2            v_hat = v / (1 - beta_2^t)
//! p = p (1 - lr weight_decay) - lr m_hat / (sqrt(v_hat) + epsilon)
//! ```
//!
//! The step counter `t` and the flag of gradients that are not finite live on the device, so that a training step never
//! waits for a number to reach the host:
//!
//! 1. [`find_nonfinite`] raises the flag.
//! 2. [`tick`] counts the step, as taken or as skipped.
//! 3. [`adamw`] reads both; under a raised flag it writes nothing.
//! 4. Where losses are scaled, [`adamw`] divides the gradients that it reads by the scale, and
//!    [`update_loss_scale`](crate::loss_scaling::update_loss_scale) moves it. Where gradients are clipped by norm,
//!    [`adamw`] multiplies them by their [`clip_factors`].

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{check_contiguous, check_dtype, check_float, or_unused, storage},
    error::KernelError,
    loss_scaling::check_scale,
    optimizer_state::StateTensor,
    rounding::Rounding,
};

mod clipping;
mod clock;
mod fused;
mod many;
mod nonfinite;
mod update;

pub use clipping::clip_factors;
pub use clock::{initial_clock, initial_flag, tick};
pub use many::MAX_SHARED_LEN;
pub use nonfinite::find_nonfinite;
pub(crate) use update::Coefficients;

const OPERATION: &str = "adamw";
/// Keeps the random numbers that round the moments apart from those of the parameter: a bit that no step reaches.
pub(crate) const STATE_STEPS: u32 = 1 << 31;

/// The numbers that AdamW takes beside the tensors.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Hyperparameters {
    /// The learning rate.
    pub learning_rate: f64,
    /// Decay of the first moment, in `[0, 1)`.
    pub beta_1: f32,
    /// Decay of the second moment, in `[0, 1)`.
    pub beta_2: f32,
    /// Added to the root of the second moment. Above 1e-12, so that second moments too small for a compressed state do
    /// not matter.
    pub epsilon: f32,
    /// The part of `learning_rate * parameter` that is taken off the parameter.
    pub weight_decay: f32,
    /// The norm to which each parameter's gradient is shortened, if it is longer: see [`clip_factors`].
    pub clip_norm: Option<f32>,
}

/// A parameter with all that its update reads and writes. The tensors are contiguous, of one number of elements.
#[derive(Debug)]
pub struct AdamWTensors<R: Runtime> {
    /// f32 or bf16, updated in place unless there is a tensor for its new value.
    pub parameter: TensorHandle<R>,
    /// The parameter's new value, of its type, for a parameter that others hold; `None`: the parameter itself. It saves a
    /// copy.
    pub updated: Option<TensorHandle<R>>,
    /// f32, f16 or bf16.
    pub gradient: TensorHandle<R>,
    /// The first moment, updated in place.
    pub first: StateTensor<R>,
    /// The second moment, updated in place.
    pub second: StateTensor<R>,
    /// How a bf16 parameter is rounded. The step is a coordinate of the random numbers: one key serves a whole run.
    pub rounding: Rounding,
    /// How the codes of the moments are rounded, with random numbers of their own: the key may be that of `rounding`.
    pub state_rounding: Rounding,
}

impl<R: Runtime> Clone for AdamWTensors<R> {
    fn clone(&self) -> Self {
        Self {
            parameter: self.parameter.clone(),
            updated: self.updated.clone(),
            gradient: self.gradient.clone(),
            first: self.first.clone(),
            second: self.second.clone(),
            rounding: self.rounding,
            state_rounding: self.state_rounding,
        }
    }
}

impl<R: Runtime> AdamWTensors<R> {
    fn len(&self) -> usize {
        self.parameter.shape().iter().product()
    }

    fn check(&self, client: &ComputeClient<R>) -> Result<(), KernelError> {
        let len = check_contiguous(OPERATION, &self.parameter)?;
        let gradient = check_contiguous(OPERATION, &self.gradient)?;
        check_float(client, OPERATION, "a gradient", self.gradient.dtype)?;
        check_parameter(client, self.parameter.dtype)?;
        self.first.check(OPERATION)?;
        self.second.check(OPERATION)?;
        let states = (self.first.len(), self.second.len());
        let updated = self.updated.as_ref().unwrap_or(&self.parameter);
        let remedy = "use the parameter's type";
        check_dtype(
            OPERATION,
            "the new value",
            updated,
            self.parameter.dtype,
            remedy,
        )?;
        let updated = check_contiguous(OPERATION, updated)?;
        if (gradient, updated, states) == (len, len, (len, len)) {
            return Ok(());
        }
        Err(KernelError::Shape {
            operation: OPERATION,
            got: format!(
                "a parameter {:?}, a new value of {updated} elements, a gradient {:?}, and moments of {} and {} elements",
                self.parameter.shape(),
                self.gradient.shape(),
                states.0,
                states.1
            ),
            remedy: "pass tensors of one shape",
        })
    }
}

/// One step of AdamW for all of these parameters, with `t` read from the clock.
///
/// - `tensors`: see [`AdamWTensors`]. Small ones with f32 parameters and f32 moments share launches.
/// - `clock`: i32 `[2]`, the steps taken and skipped, after [`tick`] counted this one.
/// - `nonfinite`: i32 `[1]`; while it is not 0, nothing is changed.
/// - `loss_scale`: f32 `[1]`, a [scale](crate::loss_scaling::is_scale) that the gradients have and are divided by as
///   they are read; without it they are taken as they are.
///
/// The moments are those of [`reference::adamw`](mod@crate::reference::adamw), to the bit where no state is expanded;
/// the parameters within the rounding of a few `f32` operations. A gradient that is not finite, with `nonfinite` 0 or
/// `None`, makes NaN of its parameter and of the groups of its moments; where gradients are clipped, NaN makes NaN of
/// all of its parameter, and an infinity makes NaN of its own element and zeros of the gradient's others. A gradient
/// whose squares add up to infinity becomes zeros.
///
/// # Errors
///
/// When shapes or element types differ from these, a hyperparameter is out of its range, or the groups of two moments
/// do not nest: of sizes a power of two apart. All tensors are checked before the first launch.
pub fn adamw<R: Runtime>(
    client: &ComputeClient<R>,
    tensors: &[AdamWTensors<R>],
    clock: &TensorHandle<R>,
    nonfinite: Option<&TensorHandle<R>>,
    loss_scale: Option<&TensorHandle<R>>,
    hyperparameters: &Hyperparameters,
) -> Result<(), KernelError> {
    check_counters(OPERATION, clock, nonfinite)?;
    if let Some(scale) = loss_scale {
        check_scale(OPERATION, scale)?;
    }
    let coefficients = Coefficients::new(hyperparameters)?;
    for tensors in tensors {
        tensors.check(client)?;
        fused::span(client, tensors)?;
    }
    if tensors.is_empty() {
        return Ok(());
    }
    let factors = hyperparameters.clip_norm.map(|norm| {
        let gradients = tensors.iter().map(|tensors| tensors.gradient.clone());
        let gradients: Vec<_> = gradients.collect();
        clip_factors(client, &gradients, norm, loss_scale)
    });
    let factors = factors.transpose()?;
    let shared = Shared {
        clock,
        nonfinite,
        loss_scale,
        factors: factors.as_ref(),
        coefficients,
    };
    let (small, rest): (Vec<_>, Vec<_>) = tensors
        .iter()
        .enumerate()
        .filter(|(_, tensors)| tensors.len() > 0)
        .partition(|(_, tensors)| many::accepts(tensors));
    // SAFETY: all tensors, counters and the scale were checked, there is a factor for each, and the small ones were
    // asked for.
    #[allow(unsafe_code)]
    unsafe {
        many::launch(client, &small, &shared);
        for (index, tensors) in rest {
            fused::launch(client, tensors, index, &shared)?;
        }
    }
    Ok(())
}

/// The numbers that all parameters of a step share.
struct Shared<'a, R: Runtime> {
    clock: &'a TensorHandle<R>,
    nonfinite: Option<&'a TensorHandle<R>>,
    loss_scale: Option<&'a TensorHandle<R>>,
    /// Of the parameters' gradients, where they are clipped.
    factors: Option<&'a TensorHandle<R>>,
    coefficients: Coefficients,
}

impl<R: Runtime> Shared<'_, R> {
    /// Clock, flag, scale and factors; stand-ins for those that are not used.
    fn tensors(&self) -> [TensorHandle<R>; 4] {
        [
            self.clock.clone(),
            or_unused(self.nonfinite, self.clock, storage::<i32>()),
            or_unused(self.loss_scale, self.clock, storage::<f32>()),
            or_unused(self.factors, self.clock, storage::<f32>()),
        ]
    }
}

fn check_parameter<R: Runtime>(
    client: &ComputeClient<R>,
    dtype: StorageType,
) -> Result<(), KernelError> {
    check_float(client, OPERATION, "a parameter", dtype)?;
    if dtype == storage::<half::f16>() {
        return Err(KernelError::Dtype {
            operation: OPERATION,
            tensor: "a parameter",
            dtype: dtype.to_string(),
            remedy: "use f32 or bf16: updates of a small parameter vanish below the range of f16",
        });
    }
    Ok(())
}

/// Accepts a clock of two numbers and a flag of one.
fn check_counters<R: Runtime>(
    operation: &'static str,
    clock: &TensorHandle<R>,
    nonfinite: Option<&TensorHandle<R>>,
) -> Result<(), KernelError> {
    let counters = [("clock", Some(clock), 2), ("nonfinite", nonfinite, 1)];
    for (name, tensor, len) in counters {
        let Some(tensor) = tensor else { continue };
        check_dtype(operation, name, tensor, storage::<i32>(), "use i32")?;
        if check_contiguous(operation, tensor)? != len {
            return Err(KernelError::Shape {
                operation,
                got: format!("{name} {:?}", tensor.shape()),
                remedy: "pass a clock [2] and a flag [1]",
            });
        }
    }
    Ok(())
}
