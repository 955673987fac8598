//! Logs of tests and sanitizers: which of them are older than the kernels that they speak of.
//!
//! The first line of a log names the commit that it was made with, as `scripts/gpu run` writes it: `commit: HASH`, with
//! `, with changes` behind it if the sources had changes that were not committed.

use std::{
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context, Result};

/// The sources of the kernels.
const KERNELS: &str = "cubecl-kernels/src";

/// The first line of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Header<'a> {
    commit: &'a str,
    changed: bool,
}

impl<'a> Header<'a> {
    /// Nothing where the log begins otherwise.
    fn of(log: &'a str) -> Option<Self> {
        let line = log.lines().next()?.strip_prefix("commit: ")?;
        let (commit, changed) = match line.split_once(',') {
            Some((commit, " with changes")) => (commit, true),
            Some(_) => return None,
            None => (line, false),
        };
        let is_hash = commit.len() >= 7 && commit.chars().all(|c| c.is_ascii_hexdigit());
        is_hash.then_some(Self { commit, changed })
    }
}

/// A sentence for each of the logs, pairs of a name and a text, whose kernels are not those of the repository `root`,
/// or are not known to be; one in all where there is no history to compare with.
///
/// # Errors
///
/// Git gives up over something else than a commit that it does not have.
pub fn warnings(root: &Path, logs: &[(String, String)]) -> Result<Vec<String>> {
    let mut warnings = Vec::new();
    let kernels = last_change(root);
    if kernels.is_none() {
        warnings.push(format!(
            "how old logs are is not known: git has no history of {KERNELS} here"
        ));
    }
    for (name, log) in logs {
        let Some(header) = Header::of(log) else {
            warnings.push(format!("{name} does not say which commit it is of"));
            continue;
        };
        let commit = header.commit;
        if header.changed {
            warnings.push(format!("{name} is of {commit} with changes"));
        } else if let Some(kernels) = &kernels {
            match has(root, commit, kernels)? {
                Some(true) => {}
                Some(false) => warnings.push(format!(
                    "{name} is of {commit}, older than the kernels, which are of {kernels}"
                )),
                None => warnings.push(format!(
                    "{name} is of {commit}, which is not in the history here"
                )),
            }
        }
    }
    Ok(warnings)
}

/// The last commit that touched the kernels.
fn last_change(root: &Path) -> Option<String> {
    let arguments = ["log", "-1", "--format=%h", "--", KERNELS];
    let output = git(root, &arguments).output().ok()?;
    let commit = String::from_utf8(output.stdout).ok()?;
    let commit = commit.trim();
    (output.status.success() && !commit.is_empty()).then(|| commit.to_owned())
}

/// True if `commit` has `other` in its history; nothing where `commit` is not known here.
fn has(root: &Path, commit: &str, other: &str) -> Result<Option<bool>> {
    let succeeds = |arguments: &[&str]| -> Result<Option<i32>> {
        let status = git(root, arguments).stdout(Stdio::null()).status();
        Ok(status.context("cannot run git")?.code())
    };
    let object = format!("{commit}^{{commit}}");
    if succeeds(&["rev-parse", "--quiet", "--verify", &object])? != Some(0) {
        return Ok(None);
    }
    match succeeds(&["merge-base", "--is-ancestor", other, commit])? {
        Some(0) => Ok(Some(true)),
        Some(1) => Ok(Some(false)),
        code => anyhow::bail!("git merge-base --is-ancestor {other} {commit}: status {code:?}"),
    }
}

fn git(root: &Path, arguments: &[&str]) -> Command {
    let mut git = Command::new("git");
    git.arg("-C")
        .arg(root)
        .args(arguments)
        .stderr(Stdio::null());
    git
}

#[cfg(test)]
mod tests {
    use std::{fs, path::PathBuf};

    use super::*;

    #[test]
    fn headers() {
        let header = |commit, changed| Some(Header { commit, changed });
        assert_eq!(
            Header::of("commit: 0123abcd\ncommand: x"),
            header("0123abcd", false)
        );
        assert_eq!(
            Header::of("commit: 0123abcd, with changes"),
            header("0123abcd", true)
        );
        for log in [
            "",
            "$ kernels",
            "running\ncommit: 0123abcd",
            "commit: ",
            "commit: unknown",
            "commit: 0123abcd, or so",
        ] {
            assert_eq!(Header::of(log), None, "{log}");
        }
    }

    /// A repository that is removed again.
    struct Repository(PathBuf);

    impl Repository {
        fn new() -> Self {
            let folder = std::env::temp_dir().join(format!("logs-{}", std::process::id()));
            fs::create_dir_all(folder.join(KERNELS)).expect("a folder");
            let repository = Self(folder);
            repository.git(&["init", "--quiet"]);
            repository
        }

        fn git(&self, arguments: &[&str]) -> String {
            let name = ["-c", "user.name=a", "-c", "user.email=a@b"];
            let output = git(&self.0, &[&name, arguments].concat()).output();
            let output = output.expect("git");
            assert!(output.status.success(), "{arguments:?}");
            String::from_utf8(output.stdout)
                .expect("text")
                .trim()
                .to_owned()
        }

        /// The commit that writes this file.
        fn commit(&self, file: &str, text: &str) -> String {
            fs::write(self.0.join(file), text).expect("a file");
            self.git(&["add", "."]);
            self.git(&["commit", "--quiet", "--message", text]);
            self.git(&["rev-parse", "--short", "HEAD"])
        }
    }

    impl Drop for Repository {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).expect("the folder is ours");
        }
    }

    #[test]
    fn old_logs_are_named() {
        let repository = Repository::new();
        let kernel = format!("{KERNELS}/lib.rs");
        let log = |name: &str, text: String| (name.to_owned(), text);
        let nothing = warnings(&repository.0, &[]).expect("git");
        assert_eq!(nothing.len(), 1);
        assert!(nothing[0].contains("no history"), "{nothing:?}");

        let first = repository.commit(&kernel, "one");
        let second = repository.commit(&kernel, "two");
        let third = repository.commit("other", "three");
        let logs = [
            log("old.log", format!("commit: {first}\n")),
            log("equal.log", format!("commit: {second}\n")),
            log("new.log", format!("commit: {third}\n")),
            log("changed.log", format!("commit: {third}, with changes\n")),
            log("foreign.log", "commit: 0123456789\n".into()),
            log("silent.log", "running 3 tests\n".into()),
        ];
        let warnings = warnings(&repository.0, &logs).expect("git");
        assert_eq!(
            warnings,
            [
                format!("old.log is of {first}, older than the kernels, which are of {second}"),
                format!("changed.log is of {third} with changes"),
                "foreign.log is of 0123456789, which is not in the history here".into(),
                "silent.log does not say which commit it is of".into(),
            ]
        );
    }
}
