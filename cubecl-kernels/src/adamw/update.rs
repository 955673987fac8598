//! The arithmetic of one step, on the host's side of the launch and in kernels.

use cubecl::prelude::*;

use crate::{arguments::Arguments, error::KernelError, exact, fast};

use super::{Hyperparameters, OPERATION};

/// The hyperparameters as a step needs them, derived once in f64.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Coefficients {
    pub learning_rate: f32,
    pub beta_1: f32,
    pub one_minus_beta_1: f32,
    pub log_beta_1: f32,
    pub beta_2: f32,
    pub one_minus_beta_2: f32,
    pub log_beta_2: f32,
    pub epsilon: f32,
    pub decay: f32,
}

impl Coefficients {
    pub fn new(hyperparameters: &Hyperparameters) -> Result<Self, KernelError> {
        let &Hyperparameters {
            learning_rate,
            beta_1,
            beta_2,
            epsilon,
            weight_decay,
            clip_norm: _,
        } = hyperparameters;
        let betas = [beta_1, beta_2];
        if !betas.iter().all(|beta| (0.0..1.0).contains(beta)) || epsilon.is_nan() || epsilon < 0.0
        {
            return Err(KernelError::Unsupported {
                operation: OPERATION,
                reason: format!("{hyperparameters:?}"),
                remedy: "use betas in [0, 1) and an epsilon that is not negative",
            });
        }
        // A beta of 0 has no logarithm; e^-100 is 0 in f32 beside 1.
        let log = |beta: f32| f64::from(beta).ln().max(-100.0) as f32;
        Ok(Self {
            learning_rate: learning_rate as f32,
            beta_1,
            one_minus_beta_1: 1.0 - beta_1,
            log_beta_1: log(beta_1),
            beta_2,
            one_minus_beta_2: 1.0 - beta_2,
            log_beta_2: log(beta_2),
            epsilon,
            decay: (1.0 - learning_rate * f64::from(weight_decay)) as f32,
        })
    }

    /// The launch argument.
    pub fn launch<R: Runtime>(&self) -> CoefficientsArgLaunch<R> {
        CoefficientsArgLaunch::new(
            self.learning_rate,
            self.beta_1,
            self.one_minus_beta_1,
            self.log_beta_1,
            self.beta_2,
            self.one_minus_beta_2,
            self.log_beta_2,
            self.epsilon,
            self.decay,
        )
    }

    /// Adds the launch argument.
    pub fn add_to(&self, arguments: &mut Arguments) -> CoefficientsArgCompilationArg {
        CoefficientsArgCompilationArg {
            learning_rate: arguments.scalar(self.learning_rate),
            beta_1: arguments.scalar(self.beta_1),
            one_minus_beta_1: arguments.scalar(self.one_minus_beta_1),
            log_beta_1: arguments.scalar(self.log_beta_1),
            beta_2: arguments.scalar(self.beta_2),
            one_minus_beta_2: arguments.scalar(self.one_minus_beta_2),
            log_beta_2: arguments.scalar(self.log_beta_2),
            epsilon: arguments.scalar(self.epsilon),
            decay: arguments.scalar(self.decay),
        }
    }
}

/// [`Coefficients`] in a kernel.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct CoefficientsArg {
    learning_rate: f32,
    beta_1: f32,
    one_minus_beta_1: f32,
    log_beta_1: f32,
    beta_2: f32,
    one_minus_beta_2: f32,
    log_beta_2: f32,
    epsilon: f32,
    decay: f32,
}

/// The numbers that are the same for all elements of a step.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Step {
    beta_1: f32,
    one_minus_beta_1: f32,
    beta_2: f32,
    one_minus_beta_2: f32,
    epsilon: f32,
    decay: f32,
    /// `lr / (1 - beta_1^t)`
    rate: f32,
    /// `1 / (1 - beta_2^t)`
    correction_2: f32,
}

/// The step of a clock that has counted it.
#[cube]
pub(crate) fn step_of(coefficients: &CoefficientsArg, taken: i32) -> Step {
    let t = f32::cast_from(max(taken, 1));
    Step {
        beta_1: coefficients.beta_1,
        one_minus_beta_1: coefficients.one_minus_beta_1,
        beta_2: coefficients.beta_2,
        one_minus_beta_2: coefficients.one_minus_beta_2,
        epsilon: coefficients.epsilon,
        decay: coefficients.decay,
        rate: fast::quotient(
            coefficients.learning_rate,
            one_minus_power(coefficients.log_beta_1, t),
        ),
        correction_2: fast::quotient(1.0f32, one_minus_power(coefficients.log_beta_2, t)),
    }
}

/// [`step_of`], computed by one unit for its cube, which synchronizes here.
#[cube]
pub(crate) fn cube_step(coefficients: &CoefficientsArg, taken: i32) -> Step {
    let mut shared = SharedMemory::<f32>::new(2usize);
    if UNIT_POS == 0 {
        let step = step_of(coefficients, taken);
        shared[0] = step.rate;
        shared[1] = step.correction_2;
    }
    sync_cube();
    Step {
        beta_1: coefficients.beta_1,
        one_minus_beta_1: coefficients.one_minus_beta_1,
        beta_2: coefficients.beta_2,
        one_minus_beta_2: coefficients.one_minus_beta_2,
        epsilon: coefficients.epsilon,
        decay: coefficients.decay,
        rate: shared[0],
        correction_2: shared[1],
    }
}

/// `1 - beta^t`, which in the first steps is far below 1: there from the series of `e^x - 1`, since `1 - e^x` would
/// lose the digits that the two have in common. Every unit computes it, so later steps branch around the series.
#[cube]
fn one_minus_power(log_beta: f32, t: f32) -> f32 {
    let x = log_beta * t;
    let mut result = 1.0f32 - x.exp();
    if x > -0.5f32 {
        let mut series = 1.0f32 + x * (1.0f32 / 9.0f32);
        #[unroll]
        for index in 0..7u32 {
            series = 1.0f32 + series * x * comptime!(1.0 / (8 - index) as f32);
        }
        result = -(series * x);
    }
    result
}

/// One element's first moment. `exactly` rounds each product on its own, as the reference does; without it the compiler
/// may fuse one of them with the sum, which saves a third of the instructions.
#[cube]
pub(crate) fn first_moment(
    m: f32,
    g: f32,
    step: &Step,
    zero: u32,
    #[comptime] exactly: bool,
) -> f32 {
    if comptime!(exactly) {
        exact::product(m, step.beta_1, zero) + exact::product(g, step.one_minus_beta_1, zero)
    } else {
        m * step.beta_1 + g * step.one_minus_beta_1
    }
}

/// One element's second moment; see [`first_moment`].
#[cube]
pub(crate) fn second_moment(
    v: f32,
    g: f32,
    step: &Step,
    zero: u32,
    #[comptime] exactly: bool,
) -> f32 {
    if comptime!(exactly) {
        exact::product(v, step.beta_2, zero) + exact::product(g * g, step.one_minus_beta_2, zero)
    } else {
        v * step.beta_2 + g * g * step.one_minus_beta_2
    }
}

/// One element's parameter, from its new moments.
#[cube]
pub(crate) fn parameter(p: f32, m: f32, v: f32, step: &Step) -> f32 {
    let root = fast::root(v * step.correction_2);
    p * step.decay - fast::quotient(step.rate * m, root + step.epsilon)
}
