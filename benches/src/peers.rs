//! What PyTorch does on the same machine, from the output of `torch_adamw.py`.

use std::{fs, path::Path};

use anyhow::{Context, Result};

/// The time of a fused step of PyTorch's AdamW.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Torch {
    /// Median of a step, in milliseconds.
    pub median_ms: f64,
    /// Parameters that it steps.
    pub parameters: usize,
}

impl Torch {
    /// Reads the file that holds the script's output.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or has no line for fused AdamW.
    pub fn read(path: &Path) -> Result<Self> {
        let text =
            fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        Self::parse(&text).with_context(|| {
            format!(
                "{} has no line `AdamW fp32 fused=True: ... ms for ... parameters`",
                path.display()
            )
        })
    }

    fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        let rest = lines.find_map(|line| line.trim().strip_prefix("AdamW fp32 fused=True: "))?;
        let (ms, rest) = rest.split_once(" ms for ")?;
        let (parameters, _) = rest.split_once(" parameters")?;
        let torch = Self {
            median_ms: ms.parse().ok()?,
            parameters: parameters.parse().ok()?,
        };
        (torch.median_ms > 0.0 && torch.parameters > 0).then_some(torch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fused_line_is_found() {
        let text = "warning\nAdamW fp32 fused=True: 2.153 ms for 268435456 parameters, 3.49 TB/s\n\
                    AdamW fp32 fused=False: 9.000 ms for 268435456 parameters, 0.80 TB/s\n\
                    device copy: 4.27 TB/s\n";
        let torch = Torch {
            median_ms: 2.153,
            parameters: 268_435_456,
        };
        assert_eq!(Torch::parse(text), Some(torch));
    }

    #[test]
    fn other_texts_are_not() {
        for text in [
            "",
            "device copy: 4.27 TB/s",
            "AdamW fp32 fused=True: fast",
            "AdamW fp32 fused=True: 0 ms for 5 parameters",
        ] {
            assert_eq!(Torch::parse(text), None, "{text}");
        }
    }
}
