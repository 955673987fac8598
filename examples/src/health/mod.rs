//! `--health`: what quantization does to each layer, on the terminal and in files.
//!
//! - [`table`] is the terminal's heat map: layers by operands, the worst on top;
//! - [`csv`] is for other tools, and so is `health.jsonl`, a report a line, which a resumed run goes on with;
//! - [`html`] is a page with all of it, one file without network, drawn by [`plot`].

mod csv;
mod figures;
mod html;
mod plot;
mod table;

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use burn_quant_train::health::{HealthConfig, HealthReport};
use burn_quant_train::optim::advice::{Advice, advise};
use burn_quant_train::recipe::LinearRow;

use crate::args::Args;

/// What `--health` and its companions ask for; `steps` are those of the run.
pub fn config(args: &Args, steps: usize) -> Option<HealthConfig> {
    let every = args.health?;
    // Ten reports of a run, if it is short.
    let every = every.unwrap_or_else(|| (steps as u64 / 10).clamp(1, 100));
    let config = HealthConfig::every(every);
    Some(
        args.what_if
            .iter()
            .fold(config, |it, name| it.what_if(*name)),
    )
}

/// What the page says of a run beside its reports.
pub struct About<'a> {
    /// The recipe and the model, in a line.
    pub title: &'a str,
    /// Loss of each step.
    pub losses: &'a [f64],
    /// The layers.
    pub memory: &'a [LayerMemory],
}

/// What a layer's memory follows from.
pub struct LayerMemory {
    /// The module path.
    pub layer: String,
    /// The shape of the weight.
    pub shape: [usize; 2],
    /// The row of the recipe, if the layer is quantized.
    pub row: Option<LinearRow>,
}

/// The files of a run.
pub struct Files {
    folder: PathBuf,
}

impl Files {
    /// Those in the folder of a run.
    pub fn new(folder: &Path) -> Self {
        Self {
            folder: folder.to_owned(),
        }
    }

    /// Adds the reports of this process, which began at step `first`, and writes all files anew. Gives what is to be
    /// printed.
    ///
    /// # Errors
    ///
    /// A file that cannot be read or written.
    pub fn write(
        &self,
        first: usize,
        reports: Vec<HealthReport>,
        about: &About<'_>,
    ) -> Result<String> {
        let mut all = self.read()?;
        all.retain(|report| report.step <= first as u64);
        all.extend(reports);
        let advice = advise(&all);
        let lines = all.iter().map(serde_json::to_string);
        let lines = lines.collect::<Result<Vec<_>, _>>()?;
        self.put("health.jsonl", lines.join("\n") + "\n")?;
        self.put("health.csv", csv::rows(&all)?)?;
        let page = self.put("health.html", html::page(about, &all, &advice)?)?;
        Ok(printed(about.title, &all, &advice, &page))
    }

    fn read(&self) -> Result<Vec<HealthReport>> {
        let path = self.folder.join("health.jsonl");
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

fn printed(title: &str, reports: &[HealthReport], advice: &Advice, page: &Path) -> String {
    let Some(last) = reports.last() else {
        return format!("{title}: no step was measured\n");
    };
    let colours = crate::progress::in_terminal() && std::env::var_os("NO_COLOR").is_none();
    let heat_map = table::heat_map(last, colours);
    let page = page.display();
    format!(
        "\n{title}: health in step {}\n{heat_map}\n{advice}\nmore in {page}\n",
        last.step
    )
}
