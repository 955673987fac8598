//! The memory of training steps, beside their time: each training in a process of its own.
//!
//! A process keeps what it has taken from the device in its pools. Of several trainings in one process only the first
//! says what it takes.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail, ensure};
use burn_quant_train::recipe::Name;
use clap::{Args, ValueEnum};
use examples::args::{Checkpointing, Contexts, Optimizer, Preset};

use crate::results::{Results, Rows, TrainingSpeed};

/// The trainings to measure: each recipe with each of these.
#[derive(Args, Debug, Clone)]
#[group(skip)]
pub struct Settings {
    /// The model, and its batch
    #[arg(long, value_enum, default_value = "medium")]
    pub preset: Preset,
    /// Lengths of sequences, in batches of as many tokens as the preset's [default: the preset's]
    #[arg(long, value_delimiter = ',', value_name = "N,..")]
    pub sequences: Vec<usize>,
    /// Sequences in a batch, of which those behind the first that does not run are left out; what waits between the
    /// passes is not told of these [default: as many tokens as the preset has]
    #[arg(long, value_delimiter = ',', value_name = "N,..")]
    pub batches: Vec<usize>,
    /// How activations wait for the backward pass
    #[arg(long, value_enum, value_delimiter = ',', default_value = "exact")]
    pub contexts: Vec<Contexts>,
    /// Which parts of the model keep their input alone and run again in the backward pass
    #[arg(long, value_enum, value_delimiter = ',', default_value = "none")]
    pub checkpointing: Vec<Checkpointing>,
    /// AdamW, by the format of its moments
    #[arg(long, value_enum, value_delimiter = ',', default_value = "adamw")]
    pub optimizer: Vec<Optimizer>,
}

impl Settings {
    /// The command lines of `qt-bench` that measure these trainings, by length, without `--json`: of one training those
    /// of its batches, in ascending order.
    fn commands(&self, recipes: &[Name]) -> Vec<Vec<Vec<String>>> {
        let mut batches = self.batches.clone();
        batches.sort_unstable();
        let lengths: Vec<Option<usize>> = match self.sequences.as_slice() {
            [] => vec![None],
            lengths => lengths.iter().copied().map(Some).collect(),
        };
        let mut commands = Vec::new();
        for length in lengths {
            for &checkpointing in &self.checkpointing {
                for &contexts in &self.contexts {
                    for &optimizer in &self.optimizer {
                        commands.extend(recipes.iter().map(|recipe| {
                            let mut command = vec![
                                String::from("pretrain"),
                                String::from("--without-burn"),
                                format!("--preset={}", name_of(&self.preset)),
                                format!("--checkpointing={}", name_of(&checkpointing)),
                                format!("--contexts={}", name_of(&contexts)),
                                format!("--optimizer={}", name_of(&optimizer)),
                                format!("--recipe={recipe}"),
                            ];
                            command.extend(length.map(|it| format!("--sequences={it}")));
                            of_batches(command, &batches)
                        }));
                    }
                }
            }
        }
        commands
    }

    /// Measures all trainings with `program`, which is this one, and calls `add` with the line of each. Says on stderr
    /// which batch of a training was the first that did not run.
    ///
    /// # Errors
    ///
    /// A training whose smallest batch failed, or what `add` gives.
    pub fn measure(
        &self,
        program: &Path,
        recipes: &[Name],
        mut add: impl FnMut(TrainingSpeed) -> Result<()>,
    ) -> Result<()> {
        for of_training in self.commands(recipes) {
            for (index, command) in of_training.iter().enumerate() {
                match line_of(program, command) {
                    Ok(line) => add(line)?,
                    Err(error) if index == 0 => return Err(error),
                    Err(error) => {
                        eprintln!("larger batches are left out: {error:#}");
                        break;
                    }
                }
            }
        }
        Ok(())
    }
}

/// The command of a training, or that of each of its batches.
fn of_batches(command: Vec<String>, batches: &[usize]) -> Vec<Vec<String>> {
    let of_batch = |batch: &usize| {
        // The largest batch that trains has no room for the values of two passes.
        let batch = [format!("--batch={batch}"), "--without-held".into()];
        command.iter().cloned().chain(batch).collect()
    };
    match batches {
        [] => vec![command],
        batches => batches.iter().map(of_batch).collect(),
    }
}

/// An option's value as the command line takes it.
fn name_of(value: &impl ValueEnum) -> String {
    let value = value.to_possible_value();
    String::from(value.expect("no value is hidden").get_name())
}

/// The one line that a command measures.
fn line_of(program: &Path, command: &[String]) -> Result<TrainingSpeed> {
    let folder = tempfile::tempdir().context("no folder for results")?;
    let file = folder.path().join("training.json");
    let what = || format!("{} {}", program.display(), command.join(" "));
    let status = Command::new(program)
        .args(command)
        .arg("--json")
        .arg(&file)
        .stdout(Stdio::null())
        .status()
        .with_context(|| format!("cannot run {}", what()))?;
    ensure!(status.success(), "{} ended with {status}", what());
    let text = fs::read_to_string(&file)
        .with_context(|| format!("{} left no {}", what(), file.display()))?;
    let results: Results =
        serde_json::from_str(&text).with_context(|| format!("{} wrote no results", what()))?;
    match results.rows {
        Rows::Pretrain(mut lines) if lines.len() == 1 => Ok(lines.remove(0)),
        _ => bail!("{} measured something else than one training", what()),
    }
}

#[cfg(all(test, unix))]
mod tests {
    use std::path::PathBuf;

    use examples::rows;

    use super::*;
    use crate::{
        results::{Spread, Subject},
        table::tests::run,
    };

    fn recipes() -> Vec<Name> {
        let names = ["mixed-precision", "fallback-int8"];
        names.map(|it| it.parse().expect("a recipe")).to_vec()
    }

    /// A program of these lines of shell, in a folder of its own; its last argument is the file of results.
    fn program(folder: &Path, lines: &str) -> PathBuf {
        let path = tempfile::tempdir_in(folder)
            .expect("a folder")
            .keep()
            .join("program");
        let text = format!("#!/bin/sh\nfor file in \"$@\"; do :; done\n{lines}\n");
        // A shell writes it: a file that this process has open for writing cannot be run, nor while a process that
        // another thread forks meanwhile has it too.
        let status = Command::new("sh")
            .args(["-c", "printf %s \"$1\" > \"$0\" && chmod +x \"$0\""])
            .args([path.as_os_str(), text.as_ref()])
            .status();
        assert!(status.expect("a shell").success());
        path
    }

    fn settings() -> Settings {
        Settings {
            preset: Preset::Medium,
            sequences: vec![1024, 4096],
            batches: Vec::new(),
            contexts: vec![Contexts::Exact, Contexts::Int8],
            checkpointing: vec![Checkpointing::None, Checkpointing::Layers],
            optimizer: vec![Optimizer::Adamw],
        }
    }

    #[test]
    fn each_training_has_a_command() {
        let both = Settings {
            optimizer: vec![Optimizer::Adamw, Optimizer::Fp8Adamw],
            ..settings()
        };
        assert_eq!(both.commands(&recipes()).len(), 32);
        let commands = settings().commands(&recipes()).concat();
        assert_eq!(commands.len(), 16);
        let distinct: std::collections::HashSet<_> = commands.iter().collect();
        assert_eq!(distinct.len(), 16);
        assert_eq!(
            commands[7].join(" "),
            "pretrain --without-burn --preset=medium --checkpointing=layers --contexts=int8 --optimizer=adamw \
             --recipe=fallback-int8 --sequences=1024"
        );
        let all = Settings {
            sequences: Vec::new(),
            ..settings()
        };
        let commands = all.commands(&recipes()).concat();
        assert_eq!(commands.len(), 8);
        assert!(!commands[0].join(" ").contains("--sequences"));
        let of_batches = Settings {
            batches: vec![32, 16],
            ..settings()
        };
        let commands = of_batches.commands(&recipes());
        assert_eq!(commands.len(), 16);
        for of_training in commands {
            let batches = of_training.iter().map(|command| command[8].as_str());
            assert!(batches.eq(["--batch=16", "--batch=32"]));
        }
    }

    #[test]
    fn each_line_comes_from_a_process() {
        let folder = tempfile::tempdir().expect("a folder");
        let line = TrainingSpeed {
            subject: Subject::recipe("fallback-int8"),
            model: String::from("medium"),
            parameters: 1,
            batch: 16,
            sequence: 1024,
            step: Spread {
                median_ms: 2.0,
                p10_ms: 1.0,
                p90_ms: 3.0,
            },
            tokens_per_s: 5.0,
            contexts: None,
            checkpointing: Checkpointing::None,
            moments: None,
            activation_bytes: Some(7),
            peak_bytes: Some(9),
        };
        let results = |lines: Vec<TrainingSpeed>| Results {
            run: run(),
            peer: None,
            rows: Rows::Pretrain(lines),
        };
        let write = |name: &str, lines| {
            let path = folder.path().join(name);
            let text = rows::to_string(&results(lines)).expect("JSON");
            fs::write(&path, text).expect("a file");
            path
        };
        let one = write("one.json", vec![line.clone()]);
        let two = write("two.json", vec![line.clone(); 2]);
        let copy = |from: &Path| program(folder.path(), &format!("cp {} $file", from.display()));
        let measured = |program: PathBuf| -> Result<Vec<TrainingSpeed>> {
            let mut lines = Vec::new();
            settings().measure(&program, &recipes(), |line| {
                lines.push(line);
                Ok(())
            })?;
            Ok(lines)
        };
        assert_eq!(measured(copy(&one)).expect("lines"), vec![line; 16]);
        for (program, complaint) in [
            (copy(&two), "something else than one training"),
            (program(folder.path(), "exit 3"), "exit status: 3"),
            (program(folder.path(), "exit 0"), "left no"),
            (program(folder.path(), "echo x > $file"), "wrote no results"),
            (folder.path().join("none"), "cannot run"),
        ] {
            let error = format!("{:#}", measured(program).expect_err("no lines"));
            assert!(error.contains(complaint), "{error}");
            assert!(error.contains("--recipe=mixed-precision"), "{error}");
        }
    }
}
