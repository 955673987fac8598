//! Gradients under contexts.

use std::fmt::Write;

use anyhow::Result;

use crate::errors::contexts::{ContextError, Saved};

/// A line for each format and group, with what the reference simulates beside what the library does.
pub(super) fn table(errors: &[ContextError]) -> Result<String> {
    let mut out = String::from(
        "One less the cosine to the gradients under exact contexts:\n\n\
         | context | operators: all gradients | norms' | worst norm's | library: all gradients | norms' \
         | worst norm's |\n\
         | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n",
    );
    let mut shown: Vec<(&str, Option<usize>)> = Vec::new();
    for ContextError { numbers, group, .. } in errors {
        if shown.contains(&(numbers, *group)) {
            continue;
        }
        shown.push((numbers, *group));
        let group_name = group.map_or(String::new(), |group| format!(" 1x{group}"));
        write!(out, "| {numbers}{group_name} |")?;
        for saved in [Saved::Operators, Saved::All] {
            let mut same = errors.iter();
            let same =
                same.find(|it| (it.saved, &it.numbers, it.group) == (saved, numbers, *group));
            match same {
                Some(it) => write!(
                    out,
                    " {:.1e} | {:.1e} | {:.1e} |",
                    it.model, it.norms, it.worst_norm
                )?,
                None => out.push_str(" - | - | - |"),
            }
        }
        out.push('\n');
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{errors::ErrorRows, table::errors::tests::table_of};

    #[test]
    fn both_ways_stand_in_one_line() {
        let error = |saved, numbers: &str, group, model| ContextError {
            saved,
            numbers: String::from(numbers),
            bits: 8,
            group,
            model,
            norms: 2.0 * model,
            worst_norm: 4.0 * model,
        };
        let rows = vec![
            error(Saved::Operators, "INT8", Some(128), 1.25e-5),
            error(Saved::Operators, "BF16", None, 3e-6),
            error(Saved::All, "INT8", Some(128), 5e-4),
            error(Saved::All, "E4M3", Some(16), 0.5),
        ];
        let text = table_of(ErrorRows::Contexts(rows)).unwrap();
        let lines: Vec<&str> = text.lines().skip(4).take(3).collect();
        assert_eq!(
            lines,
            [
                "| INT8 1x128 | 1.3e-5 | 2.5e-5 | 5.0e-5 | 5.0e-4 | 1.0e-3 | 2.0e-3 |",
                "| BF16 | 3.0e-6 | 6.0e-6 | 1.2e-5 | - | - | - |",
                "| E4M3 1x16 | - | - | - | 5.0e-1 | 1.0e0 | 2.0e0 |",
            ]
        );
    }
}
