//! Writes the tables of measured results into the book and the README, and the pictures of those that have one, or
//! checks them, and warns of logs under `book/results` that are older than the kernels.
//!
//! `book/results/NAME.json` is what `pretrain`, `qt-bench`, `states` or `errors` wrote with `--json`,
//! `book/results/NAME.md` a sentence that says how: command, machine, date. A page asks for the table with the lines
//! `<!-- table:NAME -->` and `<!-- end -->`, and shows the picture as `pictures/NAME.svg`.
//!
//! `report join RESULTS PEERS` adds what `peers.py` measured to a result file of the same run that was cut short.
//!
//! `report pair RESULTS RUN...` writes how the training losses of forks differ from that of the first one, step by
//! step; a RUN is the folder that `pretrain` leaves the checkpoints of a run in. Of runs whose folders are gone their
//! result files do, which have means of some steps.
//!
//! `report recipes RESULTS FILE...` gathers result files of `qt-bench memory` and of `report pair` into one.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result, bail, ensure};
use benches::{
    logs, markers,
    paired::PairedLosses,
    peers::Peers,
    plot,
    recipe_results::RecipeResults,
    results::{Results, write},
    table,
};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("report: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .context("the package is not in its workspace")?;
    let results = root.join("book/results");
    let check = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => false,
        ["--check"] => true,
        ["join", results, peers] => return join(Path::new(results), Path::new(peers)),
        ["pair", results, ref runs @ ..] => return pair(Path::new(results), runs),
        ["recipes", results, ref files @ ..] => return recipes(Path::new(results), files),
        _ => bail!(
            "usage: report [--check | join RESULTS PEERS | pair RESULTS RUN... | recipes RESULTS FILE...]"
        ),
    };
    for warning in logs::warnings(root, &logs_of(&results)?)? {
        eprintln!("report: warning: {warning}");
    }

    let mut asked = BTreeSet::new();
    let mut stale = Vec::new();
    for path in pages(root)? {
        let shown = path.strip_prefix(root).unwrap_or(&path).display();
        let page = fs::read_to_string(&path).with_context(|| format!("cannot read {shown}"))?;
        asked.extend(markers::names(&page).with_context(|| shown.to_string())?);
        let updated = markers::replace(&page, |name| made(&results, name))
            .with_context(|| shown.to_string())?;
        if updated == page {
            continue;
        }
        if check {
            stale.push(shown.to_string());
        } else {
            fs::write(&path, updated).with_context(|| format!("cannot write {shown}"))?;
            println!("wrote {shown}");
        }
    }
    for name in measured(&results)? {
        ensure!(
            asked.contains(&name),
            "no page shows book/results/{name}.json"
        );
        let picture = root.join(format!("book/src/pictures/{name}.svg"));
        let Some(svg) = drawn(&results, &name)? else {
            continue;
        };
        if fs::read_to_string(&picture).is_ok_and(|it| it == svg) {
            continue;
        }
        let shown = picture.strip_prefix(root).unwrap_or(&picture).display();
        if check {
            stale.push(shown.to_string());
        } else {
            fs::write(&picture, svg).with_context(|| format!("cannot write {shown}"))?;
            println!("wrote {shown}");
        }
    }
    ensure!(
        stale.is_empty(),
        "{} differ from book/results; run: cargo run --bin report",
        stale.join(", ")
    );
    Ok(())
}

/// Adds the lines of a file of `peers.py` to a result file.
fn join(path: &Path, peers: &Path) -> Result<()> {
    let shown = path.display();
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {shown}"))?;
    let mut results: Results =
        serde_json::from_str(&text).with_context(|| format!("{shown} is no result file"))?;
    let peers = Peers::read(peers, &results.run.device)?;
    peers
        .join(&mut results)
        .with_context(|| shown.to_string())?;
    write(path, &results)
}

/// Writes the comparison of the forks in these folders, or result files, with the first one, and shows it.
fn pair(path: &Path, runs: &[&str]) -> Result<()> {
    let runs: Vec<&Path> = runs.iter().map(Path::new).collect();
    let losses = match runs.iter().all(|run| run.is_file()) {
        true => PairedLosses::of_results(&runs)?,
        false => PairedLosses::of(&runs)?,
    };
    write(path, &losses)?;
    println!("{}", table::of(&serde_json::to_string(&losses)?)?);
    Ok(())
}

/// Writes these result files as one, and shows it.
fn recipes(path: &Path, files: &[&str]) -> Result<()> {
    let read =
        |file: &&str| fs::read_to_string(file).with_context(|| format!("cannot read {file}"));
    let texts = files.iter().map(read).collect::<Result<Vec<_>>>()?;
    let results = RecipeResults::of(&texts)?;
    write(path, &results)?;
    println!("{}", table::of(&serde_json::to_string(&results)?)?);
    Ok(())
}

/// The pages that may ask for tables.
fn pages(root: &Path) -> Result<Vec<PathBuf>> {
    let mut pages = files(&root.join("book/src"), "md")?;
    pages.push(root.join("README.md"));
    Ok(pages)
}

/// The names of the result files.
fn measured(results: &Path) -> Result<Vec<String>> {
    let stem = |path: PathBuf| Some(path.file_stem()?.to_str()?.to_owned());
    Ok(files(results, "json")?
        .into_iter()
        .filter_map(stem)
        .collect())
}

/// The names and the texts of the logs.
fn logs_of(results: &Path) -> Result<Vec<(String, String)>> {
    let log = |path: PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let text =
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok((name.into_owned(), text))
    };
    files(results, "log")?.into_iter().map(log).collect()
}

/// The files of a folder with this extension, sorted; none if there is no such folder.
fn files(folder: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let entries =
        fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut files = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|it| it == extension) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// The picture of a result file, if there is one of such files.
fn drawn(results: &Path, name: &str) -> Result<Option<String>> {
    let json = results.join(format!("{name}.json"));
    let text =
        fs::read_to_string(&json).with_context(|| format!("cannot read {}", json.display()))?;
    plot::of(&text).with_context(|| format!("{name}.json"))
}

/// The table of a result file and the sentence that says how it was made.
fn made(results: &Path, name: &str) -> Result<String> {
    let json = results.join(format!("{name}.json"));
    if !json.exists() {
        return Ok(format!(
            "Not measured yet: there is no `book/results/{name}.json`.\n"
        ));
    }
    let text =
        fs::read_to_string(&json).with_context(|| format!("cannot read {}", json.display()))?;
    let table = table::of(&text).with_context(|| format!("{name}.json"))?;
    let how = fs::read_to_string(results.join(format!("{name}.md"))).with_context(|| {
        format!("book/results/{name}.md must say how {name}.json was made: command, machine, date")
    })?;
    Ok(format!("{table}\n{}\n", how.trim()))
}
