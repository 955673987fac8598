//! A result file that grows with each measurement.

use std::{fs, path::Path};

use anyhow::{Context, Result};

use super::Gpu;
use crate::results::{Peer, Results, Rows};

/// The lines measured so far, and the file that holds them if the program is cut off.
pub struct Report<'a, T> {
    gpu: &'a Gpu,
    json: Option<&'a Path>,
    rows_of: fn(Vec<T>) -> Rows,
    rows: Vec<T>,
}

impl<'a, T: Clone> Report<'a, T> {
    /// Without lines yet: `rows_of` says of which benchmark they are.
    pub fn new(gpu: &'a Gpu, json: Option<&'a Path>, rows_of: fn(Vec<T>) -> Rows) -> Self {
        Self {
            gpu,
            json,
            rows_of,
            rows: Vec::new(),
        }
    }

    /// Adds lines and writes the file, if there is one.
    ///
    /// # Errors
    ///
    /// The file cannot be written, or the driver does not tell the circumstances.
    pub fn add(&mut self, rows: impl IntoIterator<Item = T>) -> Result<()> {
        self.rows.extend(rows);
        let Some(path) = self.json else {
            return Ok(());
        };
        let results = self.results(self.rows.clone(), None)?;
        let text = serde_json::to_string_pretty(&results)? + "\n";
        fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    /// All lines, and those of `peer`. The clocks are those of now, when the device has been busy.
    ///
    /// # Errors
    ///
    /// The driver does not tell the circumstances.
    pub fn finish(
        mut self,
        peer: Option<Peer>,
        of_peer: impl IntoIterator<Item = T>,
    ) -> Result<Results> {
        let mut rows = std::mem::take(&mut self.rows);
        rows.extend(of_peer);
        self.results(rows, peer)
    }

    fn results(&self, rows: Vec<T>, peer: Option<Peer>) -> Result<Results> {
        Ok(Results {
            run: self.gpu.run()?,
            peer,
            rows: (self.rows_of)(rows),
        })
    }
}
