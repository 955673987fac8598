//! Losses of runs that diverged. JSON has no NaN, so a loss that is NaN is written as `null`.

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

#[cfg(test)]
mod tests {
    use serde::Serialize;

    use super::*;

    #[derive(Serialize, Deserialize)]
    struct Losses {
        #[serde(deserialize_with = "number")]
        last: f64,
        #[serde(deserialize_with = "numbers")]
        all: Vec<f64>,
        #[serde(deserialize_with = "curve")]
        curve: Vec<(usize, f64)>,
    }

    #[test]
    fn losses_that_are_none_come_back() {
        let losses = Losses {
            last: f64::INFINITY,
            all: vec![0.1, f64::NAN],
            curve: vec![(1, 0.1), (2, f64::NAN)],
        };
        let text = serde_json::to_string(&losses).unwrap();
        let read: Losses = serde_json::from_str(&text).unwrap();
        assert!(read.last.is_nan() && read.all[1].is_nan() && read.curve[1].1.is_nan());
        assert_eq!((read.all[0], read.curve[0]), (0.1, (1, 0.1)));
        assert!(serde_json::from_str::<Losses>(&text.replace("null", "\"x\"")).is_err());
    }
}
