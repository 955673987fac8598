//! Losses of runs that diverged: JSON has no NaN, so that a loss which is none is written as `null`.

use serde::{Deserialize, Deserializer};

/// Reads a number; `null` is NaN.
///
/// # Errors
///
/// It is something else.
pub fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Option::deserialize(deserializer).map(or_nan)
}

/// Reads numbers; `null` is NaN.
///
/// # Errors
///
/// They are something else.
pub fn numbers<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<f64>, D::Error> {
    let numbers = Vec::<Option<f64>>::deserialize(deserializer)?;
    Ok(numbers.into_iter().map(or_nan).collect())
}

/// Reads a loss curve; a loss that is `null` is NaN.
///
/// # Errors
///
/// It is something else.
pub fn curve<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<(usize, f64)>, D::Error> {
    let points = Vec::<(usize, Option<f64>)>::deserialize(deserializer)?;
    Ok(points
        .into_iter()
        .map(|(step, loss)| (step, or_nan(loss)))
        .collect())
}

fn or_nan(number: Option<f64>) -> f64 {
    number.unwrap_or(f64::NAN)
}
