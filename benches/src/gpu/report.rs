//! A result file that grows with each measurement.

use std::path::Path;

use anyhow::Result;

use super::Gpu;
use crate::results::{Peer, Results, Rows, Run, write};

/// The lines measured so far, and the file that holds them if the program is cut off.
pub struct Report<'a, T> {
    gpu: &'a Gpu,
    json: Option<&'a Path>,
    rows_of: fn(Vec<T>) -> Rows,
    run: Run,
    rows: Vec<T>,
}

impl<'a, T: Clone> Report<'a, T> {
    /// Without lines yet: `rows_of` says of which benchmark they are.
    ///
    /// # Errors
    ///
    /// The driver does not tell the circumstances.
    pub fn new(gpu: &'a Gpu, json: Option<&'a Path>, rows_of: fn(Vec<T>) -> Rows) -> Result<Self> {
        Ok(Self {
            gpu,
            json,
            rows_of,
            run: gpu.run()?,
            rows: Vec::new(),
        })
    }

    /// Adds lines and writes the file, if there is one. The clocks are those of now, when the device has been busy.
    ///
    /// # Errors
    ///
    /// The driver does not tell the circumstances, or the file cannot be written.
    pub fn add(&mut self, rows: impl IntoIterator<Item = T>) -> Result<()> {
        self.rows.extend(rows);
        self.run = self.gpu.run()?;
        match self.json {
            None => Ok(()),
            Some(path) => write(path, &self.results(None)),
        }
    }

    /// All lines, and those of `peer`.
    ///
    /// # Errors
    ///
    /// The driver does not tell the circumstances.
    pub fn finish(
        mut self,
        peer: Option<Peer>,
        of_peer: impl IntoIterator<Item = T>,
    ) -> Result<Results> {
        self.run = self.gpu.run()?;
        self.rows.extend(of_peer);
        Ok(self.results(peer))
    }

    fn results(&self, peer: Option<Peer>) -> Results {
        Results {
            run: self.run.clone(),
            peer,
            rows: (self.rows_of)(self.rows.clone()),
        }
    }
}
