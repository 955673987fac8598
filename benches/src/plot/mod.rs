//! Pictures of result files, as SVG on a white ground, so that they are readable on light and on dark pages.
//!
//! Nothing depends on the machine: no font is loaded, and a picture of the same file has the same bytes.

mod contexts;
mod formats;
mod granularity;
mod groups;
mod hadamard;
mod panel;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::errors::{ErrorResults, ErrorRows};

/// The picture of a result file; none of files of which there is none.
///
/// # Errors
///
/// It is not JSON, a field is missing, or the library does not draw.
pub fn of(json: &str) -> Result<Option<String>> {
    let value: Value = serde_json::from_str(json).context("not JSON")?;
    if value.get("errors").is_none() {
        return Ok(None);
    }
    let results: ErrorResults = serde_json::from_value(value)?;
    let picture = match &results.rows {
        ErrorRows::Contexts(rows) => contexts::picture(rows),
        ErrorRows::Groups(rows) => groups::picture(rows),
        ErrorRows::Granularity(rows) => granularity::picture(rows),
        ErrorRows::Formats(rows) => formats::picture(rows),
        ErrorRows::Hadamard(rows) => hadamard::picture(rows),
    };
    picture.map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::errors::{
        Model,
        contexts::{ContextError, Saved},
    };

    #[test]
    fn other_files_have_no_picture() {
        assert_eq!(of("[]").unwrap(), None);
        assert!(of("").is_err() && of("{\"errors\": \"contexts\"}").is_err());
    }

    #[test]
    fn a_picture_names_its_lines_and_repeats_to_the_byte() {
        let error = |bits: u32| ContextError {
            saved: Saved::Operators,
            numbers: format!("INT{bits}"),
            bits,
            group: Some(128),
            model: (-2.0 * f64::from(bits)).exp2(),
            norms: (1.0 - 2.0 * f64::from(bits)).exp2(),
            worst_norm: 1e-3,
        };
        let results = ErrorResults {
            model: Model {
                steps: 1,
                seed: 1,
                parameters: 1,
                hidden: 1,
                layers: 1,
                batch: [1, 1],
                loss: 1.0,
            },
            rows: ErrorRows::Contexts((4..=16).map(error).collect()),
        };
        let json = serde_json::to_string(&results).unwrap();
        let svg = of(&json).unwrap().unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        for text in ["bits", "all gradients", "norms"] {
            assert!(svg.contains(text), "{text}");
        }
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
        assert_eq!(of(&json).unwrap().unwrap(), svg);
    }
}
