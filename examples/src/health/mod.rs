//! `--health`: what quantization does to each layer, on the terminal and in files.
//!
//! - `table` is the terminal's heat map: layers by operands, the worst on top;
//! - `csv` is for other tools, and so is `health.jsonl`, a report a line, which a resumed run goes on with;
//! - `html` is a page with all of it, one file without network, drawn by `plot`.

mod csv;
mod figures;
mod html;
mod plot;
mod table;

use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use burn_quant_train::health::{HealthConfig, HealthReport};
use burn_quant_train::optim::advice::{Advice, advise};
use burn_quant_train::recipe::LinearRow;

use crate::args::{Args, Device};

/// The settings of `--health` and its companions, of a run of so many steps on this device.
pub fn config(args: &Args, steps: usize, device: Device) -> Option<HealthConfig> {
    let every = args.health?;
    // Ten reports of a run, if it is short.
    let every = every.unwrap_or_else(|| (steps as u64 / 10).clamp(1, 100));
    let turns = args.health_turns.unwrap_or(match device {
        Device::Cpu => 1,
        Device::Cuda | Device::Vulkan => 4,
    });
    let config = HealthConfig::every(every).in_turns(turns);
    Some(
        args.what_if
            .iter()
            .fold(config, |it, name| it.what_if(*name)),
    )
}

/// The text of the page on a run beside its reports.
pub struct About<'a> {
    /// The recipe and the model, in a line.
    pub title: &'a str,
    /// Loss of each step.
    pub losses: &'a [f64],
    /// The layers.
    pub memory: &'a [LayerMemory],
}

/// The shapes that a layer's memory follows from.
pub struct LayerMemory {
    /// The module path.
    pub layer: String,
    /// The shape of the weight.
    pub shape: [usize; 2],
    /// The row of the recipe, if the layer is quantized.
    pub row: Option<LinearRow>,
}

/// The files of a run.
#[derive(Clone)]
pub struct Files {
    folder: PathBuf,
}

const REPORTS: &str = "health.jsonl";

impl Files {
    /// Those in the folder of a run that goes on after step `first`: later reports in them are removed.
    ///
    /// # Errors
    ///
    /// A file that cannot be read or written.
    pub fn begin(folder: &Path, first: usize) -> Result<Self> {
        let files = Self {
            folder: folder.to_owned(),
        };
        let mut reports = match first {
            0 => Vec::new(),
            _ => files.read()?,
        };
        reports.retain(|report| report.step <= first as u64);
        files.put(REPORTS, lines(&reports)?)?;
        Ok(files)
    }

    /// Adds reports.
    ///
    /// # Errors
    ///
    /// The file cannot be written.
    pub fn add(&self, reports: &[HealthReport]) -> Result<()> {
        if reports.is_empty() {
            return Ok(());
        }
        let path = self.folder.join(REPORTS);
        let text = lines(reports)?;
        let file = fs::OpenOptions::new().append(true).open(&path);
        let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
        written.with_context(|| format!("cannot write {}", path.display()))
    }

    /// Writes the other files from the reports of the run. Gives what is to be printed.
    ///
    /// # Errors
    ///
    /// A file that cannot be read or written.
    pub fn finish(&self, about: &About<'_>) -> Result<String> {
        let reports = self.read()?;
        let advice = advise(&reports);
        self.put("health.csv", csv::rows(&reports)?)?;
        let page = self.put("health.html", html::page(about, &reports, &advice)?)?;
        Ok(printed(about.title, &reports, &advice, &page))
    }

    fn read(&self) -> Result<Vec<HealthReport>> {
        let path = self.folder.join(REPORTS);
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            Err(error) => {
                return Err(error).with_context(|| format!("cannot read {}", path.display()));
            }
        };
        let reports = text.lines().map(serde_json::from_str);
        let reports = reports.collect::<Result<_, _>>();
        reports.with_context(|| {
            let path = path.display();
            format!("{path} is damaged; remove it to go on without the reports in it")
        })
    }

    fn put(&self, name: &str, content: String) -> Result<PathBuf> {
        let path = self.folder.join(name);
        let context = || format!("cannot write {}", path.display());
        fs::create_dir_all(&self.folder).with_context(context)?;
        fs::write(&path, content).with_context(context)?;
        Ok(path)
    }
}

/// A report a line.
fn lines(reports: &[HealthReport]) -> Result<String> {
    let lines = reports
        .iter()
        .map(|report| Ok(serde_json::to_string(report)? + "\n"));
    lines.collect()
}

fn printed(title: &str, reports: &[HealthReport], advice: &Advice, page: &Path) -> String {
    let Some(last) = HealthReport::latest(reports) else {
        return format!("{title}: no step was measured\n");
    };
    let colours = crate::progress::in_terminal() && std::env::var_os("NO_COLOR").is_none();
    let heat_map = table::heat_map(&last, colours);
    let page = page.display();
    format!(
        "\n{title}: health in step {}\n{heat_map}\n{advice}\nmore in {page}\n",
        last.step
    )
}
