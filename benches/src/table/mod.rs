//! Markdown tables of result files. The fields of a file show which results it holds.

mod attention;
pub(crate) mod errors;
mod gemm;
mod int4;
mod operators;
mod optimizer_seeds;
mod optimizer_speed;
mod optimizers;
mod paired;
mod peaks;
mod quantize;
mod rates;
mod recipe_seeds;
mod recipes;
mod runs;
mod states;
mod steps;
mod training;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::results::{Peer, Results, Rows, Run, Spread};

/// The table of a result file, and a line on what it was measured with.
///
/// | content | table |
/// | --- | --- |
/// | runs of `pretrain` | by recipe, or by recipe and optimizer where not all are FP32 AdamW |
/// | the same with several seeds | by recipe, or by recipe and optimizer, over the seeds |
/// | the same with several presets | the memory of each, beside what is computed |
/// | forks of checkpoints with one optimizer | by checkpoint and recipe, over the seeds |
/// | `qt-bench gemm` | by product and kernel, beside peers |
/// | `qt-bench attention` | by width, length, heads, mask and pass, beside peers |
/// | `qt-bench quantize` | by tensor, beside device copies |
/// | `qt-bench int4` | by size and stage |
/// | `qt-bench operators` | by operator, size and backend, beside peers |
/// | `qt-bench linear`, `qt-bench layer` | by size and backend, beside peers, and where the time goes |
/// | `qt-bench pretrain` | by backend |
/// | `qt-bench optimizer` | by optimizer |
/// | `states` | errors by the formats of both moments, beside those of the paper |
/// | `errors` | by sweep, beside those of the papers |
/// | `report pair` | by fork, beside the first one |
/// | `report recipes` | by recipe: losses and steps |
///
/// # Errors
///
/// It is none of these, or a field is missing, or rows differ in more than they may.
pub fn of(json: &str) -> Result<String> {
    let value: Value = serde_json::from_str(json).context("not JSON")?;
    if value.get("pairs").is_some() {
        return states::table(&serde_json::from_value(value)?);
    }
    if value.get("paired").is_some() {
        return paired::table(&serde_json::from_value(value)?);
    }
    if value.get("recipes").is_some() {
        return recipes::table(&serde_json::from_value(value)?);
    }
    if value.get("errors").is_some() {
        return errors::table(&serde_json::from_value(value)?);
    }
    if value.get("bench").is_some() {
        let Results { run, peer, rows } = serde_json::from_value(value)?;
        return match rows {
            Rows::Gemm(rows) => gemm::table(&run, peer.as_ref(), &rows),
            Rows::Attention(rows) => attention::table(&run, peer.as_ref(), &rows),
            Rows::Quantize(rows) => quantize::table(&run, peer.as_ref(), &rows),
            Rows::Int4(rows) => int4::table(&run, peer.as_ref(), &rows),
            Rows::Operators(rows) => operators::table(&run, peer.as_ref(), &rows),
            Rows::Linear(rows) | Rows::Layer(rows) => steps::table(&run, peer.as_ref(), &rows),
            Rows::Pretrain(rows) => training::table(&run, peer.as_ref(), &rows),
        };
    }
    let rows = value.as_array().context("not an array of results")?;
    let first = rows.first().context("no results")?;
    if first.get("median_ms").is_some() {
        optimizer_speed::table(&serde_json::from_value::<Vec<_>>(value)?)
    } else {
        of_runs(rows)
    }
}

/// The table of runs of `pretrain`.
fn of_runs(runs: &[Value]) -> Result<String> {
    if peaks::are_of_several_presets(runs) {
        return peaks::table(runs);
    }
    let optimizer = optimizers::label(&runs[0]);
    let one_optimizer = runs.iter().all(|run| optimizers::label(run) == optimizer);
    let forked = runs.iter().any(|run| !run["forked_from"].is_null());
    let several_seeds = optimizers::several_seeds(runs);
    if one_optimizer && (forked || several_seeds) {
        recipe_seeds::table(runs)
    } else if several_seeds {
        optimizer_seeds::table(runs)
    } else if runs
        .iter()
        .any(|run| optimizers::of(run) != optimizers::BASELINE)
    {
        optimizers::table(runs)
    } else {
        runs::table(runs)
    }
}

/// A line on machine, date and command.
fn conditions(run: &Run, peer: Option<&Peer>) -> String {
    let peer = peer.map_or(String::new(), conditions_of_peer);
    format!(
        "{} at {} of {} MHz, memory at {} MHz, driver {}, Burn {}: `{}`, {}{peer}.\n",
        run.device,
        run.sm_mhz,
        run.max_sm_mhz,
        run.memory_mhz,
        run.driver,
        features(run),
        run.command,
        run.date,
    )
}

/// `with fusion and autotune`.
fn features(run: &Run) -> String {
    match run.features.as_slice() {
        [] => String::from("without fusion and autotune"),
        features => format!("with {}", features.join(" and ")),
    }
}

/// Behind those of a run.
fn conditions_of_peer(peer: &Peer) -> String {
    format!("; {}, `{}`, {}", peer.versions, peer.command, peer.date)
}

/// `1.250 ms (1.200 to 1.300)`.
fn spread(time: Spread) -> String {
    format!(
        "{:.3} ms ({:.3} to {:.3})",
        time.median_ms, time.p10_ms, time.p90_ms
    )
}

/// `1.25x`.
fn ratio(ratio: Option<f64>) -> String {
    ratio.map_or(String::from("-"), |ratio| format!("{ratio:.2}x"))
}

/// A whole number with commas: `20,480,000`.
fn grouped(number: f64) -> String {
    let digits = format!("{number:.0}");
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

fn mebibytes(bytes: f64) -> String {
    const MIB: f64 = (1u64 << 20) as f64;
    format!("{:.1} MiB", bytes / MIB)
}

/// A change in percent: `+1.25%`.
fn change(value: f64, baseline: f64) -> String {
    format!("{:+.2}%", 100.0 * (value / baseline - 1.0))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A run of `qt-bench`.
    pub fn run() -> Run {
        Run {
            device: String::from("NVIDIA H200"),
            driver: String::from("580.0"),
            max_sm_mhz: 1980,
            sm_mhz: 1755,
            memory_mhz: 3201,
            date: String::from("2026-11-21T12:00:00Z"),
            command: String::from("qt-bench all"),
            features: vec![String::from("fusion"), String::from("autotune")],
            seed: 1,
        }
    }

    #[test]
    fn conditions_name_both_runs() {
        let peer = Peer {
            device: String::from("NVIDIA H200"),
            date: String::from("2026-11-21T12:05:00Z"),
            command: String::from("peers.py"),
            versions: String::from("PyTorch 2.11.0"),
        };
        assert_eq!(
            conditions(&run(), Some(&peer)),
            "NVIDIA H200 at 1755 of 1980 MHz, memory at 3201 MHz, driver 580.0, Burn with fusion and autotune: \
             `qt-bench all`, 2026-11-21T12:00:00Z; PyTorch 2.11.0, `peers.py`, 2026-11-21T12:05:00Z.\n"
        );
        let plain = Run {
            features: Vec::new(),
            ..run()
        };
        assert!(
            conditions(&plain, None).contains("Burn without fusion and autotune: `qt-bench all`")
        );
    }

    #[test]
    fn other_files_are_errors() {
        for json in [
            "",
            "{}",
            "[]",
            "[1]",
            "[{}]",
            "{\"pairs\": 1}",
            "{\"errors\": \"contexts\", \"rows\": []}",
            "[{\"median_ms\": 1}]",
            "{\"bench\": \"gemm\", \"rows\": []}",
        ] {
            assert!(of(json).is_err(), "{json}");
        }
    }

    #[test]
    fn thousands_are_grouped() {
        assert_eq!(grouped(999.4), "999");
        assert_eq!(grouped(1000.0), "1,000");
        assert_eq!(grouped(20_480_000.0), "20,480,000");
    }
}
