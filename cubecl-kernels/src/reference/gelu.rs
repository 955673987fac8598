//! GELU and its gradient in `f64`, of one element, from the equations of [`gelu`](mod@crate::gelu).

use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

/// `x P(x)`.
pub fn gelu(x: f64) -> f64 {
    x * normal_distribution(x)
}

/// The gradient of `x`.
pub fn gelu_backward(x: f64, gradient: f64) -> f64 {
    gradient * (normal_distribution(x) + x * normal_density(x))
}

/// `p(x)`, the density of the standard normal distribution.
pub fn normal_density(x: f64) -> f64 {
    0.5 * FRAC_2_SQRT_PI * FRAC_1_SQRT_2 * (-0.5 * x * x).exp()
}

/// `P(x)`, the distribution function of the standard normal distribution.
///
/// Near 0 it is the series `1/2 + p(x) (x + x³/3 + x⁵/(3·5) + ..)`, whose terms have one sign; beyond, 1 less the tail,
/// which is `p(x) / (x + 1/(x + 2/(x + 3/(x + ..))))` (Laplace).
pub fn normal_distribution(x: f64) -> f64 {
    const NEAR: f64 = 2.5;
    let magnitude = x.abs();
    if magnitude <= NEAR {
        let (mut term, mut sum, mut odd) = (x, x, 1.0);
        while term.abs() > f64::EPSILON * sum.abs() {
            odd += 2.0;
            term *= x * x / odd;
            sum += term;
        }
        return 0.5 + normal_density(x) * sum;
    }
    // Enough for 1e-16 from `NEAR` on.
    let fraction = (1..=150).rev().fold(magnitude, |below, level| {
        magnitude + f64::from(level) / below
    });
    let tail = normal_density(x) / fraction;
    if x > 0.0 { 1.0 - tail } else { tail }
}
