//! Files that show damage: each is written with the SHA-256 of what it holds, and read only if that still fits.
//!
//! SHA-256 and not a checksum of 32 bits: `sha256sum` checks it too, processors have instructions for it, and a
//! checkpoint takes longer to write than to sum.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};

use crate::rows;

/// JSON that carries its own checksum.
#[derive(Deserialize)]
struct Sealed<'a> {
    sha256: String,
    #[serde(borrow)]
    content: &'a RawValue,
}

/// Writes JSON with its checksum. The file is there whole or not at all.
///
/// # Errors
///
/// It cannot be written.
pub fn write_json(path: &Path, content: &impl Serialize) -> Result<()> {
    let content = rows::to_string(content)?;
    let content = content.trim();
    let sum = hex(&Sha256::digest(content));
    let text = format!("{{\"sha256\": \"{sum}\", \"content\": {content}}}\n");
    let partial = path.with_added_extension("partial");
    fs::write(&partial, text)
        .and_then(|()| fs::rename(&partial, path))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Reads JSON back. Files of versions that wrote no checksum are read as they are.
///
/// # Errors
///
/// There is no such file, it is damaged, or it holds something else.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let at = path.display();
    let bytes = fs::read(path).with_context(|| format!("cannot read {at}"))?;
    let content = checked(&bytes).with_context(|| format!("{at} is damaged"))?;
    serde_json::from_str(content)
        .with_context(|| format!("{at} is damaged, or not of this version of pretrain"))
}

/// The content of a sealed file; of one without a checksum, all of it.
fn checked(file: &[u8]) -> Result<&str> {
    let text = str::from_utf8(file).context("it is not text")?;
    let Ok(sealed) = serde_json::from_str::<Sealed<'_>>(text) else {
        return Ok(text);
    };
    let content = sealed.content.get();
    ensure!(
        sealed.sha256 == hex(&Sha256::digest(content)),
        "its checksum is not that of its content"
    );
    Ok(content)
}

/// The checksum of a file, as `sha256sum` prints it.
///
/// # Errors
///
/// It cannot be read.
pub fn sum(path: &Path) -> Result<String> {
    let mut hash = Sha256::new();
    File::open(path)
        .and_then(|mut file| io::copy(&mut file, &mut hash))
        .with_context(|| format!("cannot read {}", path.display()))?;
    Ok(hex(&hash.finalize()))
}

/// Compares a file with its checksum.
///
/// # Errors
///
/// It cannot be read, or is damaged.
pub fn check(path: &Path, expected: &str) -> Result<()> {
    ensure!(
        sum(path)? == expected,
        "{} is damaged: its checksum is not the one that was written with it",
        path.display()
    );
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_sha_256() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("abc");
        fs::write(&file, "abc").unwrap();
        // FIPS 180-4's example.
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(sum(&file).unwrap(), expected);
        check(&file, expected).unwrap();
        fs::write(&file, "abd").unwrap();
        assert!(
            check(&file, expected)
                .unwrap_err()
                .to_string()
                .contains("abc is damaged")
        );
    }

    /// Every bit of a file counts.
    #[test]
    fn one_flipped_bit_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("values.json");
        let values = vec![1.5, 0.1, 1e-300, 0.000_316_227_766_016_837_95];
        write_json(&file, &values).unwrap();
        assert_eq!(read_json::<Vec<f64>>(&file).unwrap(), values);
        assert!(!folder.path().join("values.json.partial").exists());
        let whole = fs::read(&file).unwrap();
        let read = |file: &[u8]| -> Result<Vec<f64>> { Ok(serde_json::from_str(checked(file)?)?) };
        assert_eq!(read(&whole).unwrap(), values);
        for byte in 0..whole.len() {
            for bit in 0..8 {
                let mut damaged = whole.clone();
                damaged[byte] ^= 1 << bit;
                assert!(read(&damaged).is_err(), "bit {bit} of byte {byte}");
            }
        }
        for length in 0..whole.len() - 1 {
            assert!(read(&whole[..length]).is_err(), "{length} bytes");
        }
        fs::write(&file, &whole[1..]).unwrap();
        let error = read_json::<Vec<f64>>(&file).unwrap_err().to_string();
        assert!(error.contains("values.json is damaged"), "{error}");
    }

    #[test]
    fn files_without_a_checksum_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("old.json");
        fs::write(&file, "[1.5, 2.5]\n").unwrap();
        assert_eq!(read_json::<Vec<f64>>(&file).unwrap(), [1.5, 2.5]);
    }
}
