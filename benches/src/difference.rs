//! How far values lie from a reference.

use anyhow::{Result, ensure};

/// The difference of values from what is expected, over all that was added.
#[derive(Debug, Default)]
pub struct Difference {
    squares: f64,
    of_expected: f64,
}

impl Difference {
    /// Adds values, as many as are expected.
    pub fn add(&mut self, actual: &[f32], expected: &[f64]) {
        for (&actual, &expected) in actual.iter().zip(expected) {
            self.squares += (f64::from(actual) - expected).powi(2);
            self.of_expected += expected.powi(2);
        }
    }

    /// Root mean square over root mean square.
    pub fn relative(&self) -> f64 {
        (self.squares / self.of_expected).sqrt()
    }

    /// Accepts a difference of at most `limit`.
    ///
    /// # Errors
    ///
    /// It is larger, or not a number.
    pub fn check(&self, name: &str, limit: f64) -> Result<()> {
        let relative = self.relative();
        ensure!(
            relative <= limit,
            "{name} differs from its reference by {relative:.2e} of it, more than {limit:.0e}"
        );
        Ok(())
    }
}
