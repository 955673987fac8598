//! Generated parts of Markdown pages: what stands between `<!-- table:NAME -->` and `<!-- end -->`.

use anyhow::{Context, Result, bail};

const BEGIN: &str = "<!-- table:";
const CLOSE: &str = " -->";
const END: &str = "<!-- end -->";

/// The names of the tables that `page` asks for, in order.
///
/// # Errors
///
/// A marker is malformed, or not followed by its end.
pub fn names(page: &str) -> Result<Vec<String>> {
    let mut names = Vec::new();
    replace(page, |name| {
        names.push(name.to_owned());
        Ok(String::new())
    })?;
    Ok(names)
}

/// `page` with the text between each pair of markers replaced by what `make` gives for its name.
///
/// A marker is a line of its own.
///
/// # Errors
///
/// A marker is malformed, or not followed by its end, or `make` fails.
pub fn replace(page: &str, mut make: impl FnMut(&str) -> Result<String>) -> Result<String> {
    let mut out = String::with_capacity(page.len());
    let mut lines = page.split_inclusive('\n');
    while let Some(line) = lines.next() {
        out.push_str(line);
        let marker = line.trim_end();
        if marker == END {
            bail!("`{END}` without a marker before it");
        }
        let Some(rest) = marker.strip_prefix(BEGIN) else {
            continue;
        };
        let name = rest
            .strip_suffix(CLOSE)
            .filter(|name| !name.is_empty() && !name.contains(char::is_whitespace))
            .with_context(|| format!("malformed marker: {marker}"))?;
        let end = lines
            .by_ref()
            .find(|line| line.trim_end() == END || line.starts_with(BEGIN))
            .filter(|line| line.trim_end() == END)
            .with_context(|| format!("`{marker}` is not followed by `{END}`"))?;
        let text = make(name)?;
        if !text.is_empty() {
            out.push('\n');
            out.push_str(text.trim_end());
            out.push_str("\n\n");
        }
        out.push_str(end);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str =
        "# A\n\n<!-- table:one -->\nold\nold\n<!-- end -->\ntext\n<!-- table:two -->\n<!-- end -->";

    #[test]
    fn text_between_markers_is_replaced_and_all_else_kept() {
        let page = replace(PAGE, |name| Ok(format!("new {name}\n"))).unwrap();
        assert_eq!(
            page,
            "# A\n\n<!-- table:one -->\n\nnew one\n\n<!-- end -->\ntext\n<!-- table:two -->\n\nnew two\n\n<!-- end -->"
        );
    }

    #[test]
    fn replacing_twice_is_replacing_once() {
        let make = |name: &str| Ok(format!("| {name} |\n\nnote"));
        let once = replace(PAGE, make).unwrap();
        assert_eq!(replace(&once, make).unwrap(), once);
    }

    #[test]
    fn names_come_in_order() {
        assert_eq!(names(PAGE).unwrap(), ["one", "two"]);
        assert!(names("no markers\n").unwrap().is_empty());
    }

    #[test]
    fn broken_markers_are_errors() {
        for page in [
            "<!-- table:one -->\n",
            "<!-- table:one -->\n<!-- table:two -->\n<!-- end -->\n",
            "<!-- table: -->\n<!-- end -->\n",
            "<!-- table:one\n<!-- end -->\n",
            "<!-- end -->\n",
        ] {
            assert!(names(page).is_err(), "{page:?}");
        }
    }
}
