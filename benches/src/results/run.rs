//! The circumstances of a measurement.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// Machine, date and command of a run of `qt-bench`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// The name of the GPU.
    pub device: String,
    /// The version of its driver.
    pub driver: String,
    /// The highest clock of the multiprocessors, in MHz.
    pub max_sm_mhz: u32,
    /// Their clock right after the last measurement, in MHz.
    pub sm_mhz: u32,
    /// The memory's clock right after the last measurement, in MHz.
    pub memory_mhz: u32,
    /// UTC, `2026-11-21T12:00:00Z`.
    pub date: String,
    /// The command line.
    pub command: String,
    /// The features that decide what Burn's own kernels do: `fusion`, `autotune`.
    pub features: Vec<String>,
    /// The seed of the random inputs.
    pub seed: u64,
}

/// Machine, date and command of a run of `peers.py`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Peer {
    /// The name of the GPU.
    pub device: String,
    /// UTC, `2026-11-21T12:00:00Z`.
    pub date: String,
    /// The command line.
    pub command: String,
    /// The libraries: `PyTorch 2.11.0, Triton 3.6.0, CUDA 13.0`.
    pub versions: String,
}

/// A point of time in UTC, to the second: `2026-11-21T12:00:00Z`.
///
/// # Panics
///
/// Before 1970.
pub fn utc(time: SystemTime) -> String {
    let since = time
        .duration_since(UNIX_EPOCH)
        .expect("a clock past 1970")
        .as_secs();
    let (mut days, second) = (since / 86_400, since % 86_400);
    let leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let february = 28 + u64::from(leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    format!(
        "{year}-{month:02}-{:02}T{:02}:{:02}:{:02}Z",
        days + 1,
        second / 3600,
        second / 60 % 60,
        second % 60
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn dates_of_leap_years_and_others() {
        let at = |seconds| utc(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "1970-01-01T00:00:00Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(at(1_709_251_199), "2024-02-29T23:59:59Z");
        assert_eq!(at(1_709_251_200), "2024-03-01T00:00:00Z");
        assert_eq!(at(1_798_761_599), "2026-12-31T23:59:59Z");
        assert_eq!(at(4_107_542_400), "2100-03-01T00:00:00Z");
    }
}
