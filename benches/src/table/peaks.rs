//! Runs of `pretrain` with several presets: the memory that each took from its device, beside what `quant-train advise`
//! computes.

use std::fmt::Write;

use anyhow::{Context, Result};
use examples::{
    advise::{device::Device, memory::Memory},
    args::Checkpointing,
    report::Report,
};
use serde_json::Value;

use super::mebibytes;

/// True if the runs are of several presets.
pub(super) fn are_of_several_presets(runs: &[Value]) -> bool {
    runs.iter().any(|run| run["preset"] != runs[0]["preset"])
}

/// One line for each run.
pub(super) fn table(runs: &[Value]) -> Result<String> {
    let mut out = String::from(
        "| preset | batch | recipe | contexts | saved activations | device memory | computed | off by |\n\
         | --- | ---: | --- | --- | ---: | ---: | ---: | ---: |\n",
    );
    for run in runs {
        let report: Report = serde_json::from_value(run.clone())?;
        let (preset, recipe) = (report.preset, report.recipe);
        let taken = report.taken_bytes;
        let taken = taken.with_context(|| format!("{preset}, {recipe}: no device memory"))?;
        // Devices with kernels for attention on matrix instructions do not differ.
        let computed = Memory::of_run(&report, Device::H100).peak;
        writeln!(
            out,
            "| `{preset}` | {} x {} | `{recipe}` | {}{} | {} | {} | {} | {:+.1}% |",
            report.batch,
            report.sequence,
            report.contexts,
            match report.checkpointing {
                Checkpointing::None => "",
                Checkpointing::Layers => ", layers run again",
            },
            mebibytes(report.activation_bytes as f64),
            mebibytes(taken as f64),
            mebibytes(computed as f64),
            100.0 * (computed as f64 / taken as f64 - 1.0),
        )?;
    }
    out.push_str(
        "\nDevice memory: what the memory pools took for training and validation, in exact sizes. Computed: by \
         `quant-train advise`.\n",
    );
    Ok(out)
}

#[cfg(test)]
mod tests {
    use crate::table::of;

    #[test]
    fn what_was_taken_stands_beside_what_is_computed() {
        let run = |preset: &str, parameters: usize, [batch, sequence]: [usize; 2], taken: &str| {
            format!(
                r#"{{"recipe": "mixed-precision", "optimizer": "adamw", "state_rounding": "nearest", "preset": "{preset}",
                "device": "cuda", "compute": "bf16", "steps": 6, "batch": {batch}, "sequence": {sequence}, "seed": 1,
                "forked_from": null, "lr": 0.001, "parameters": {parameters}, "tokens": 1, "train_loss": 2.0,
                "val_loss": 2.0, "bits_per_byte": 3.0, "tokens_per_s": 1.0, "activation_bytes": 1048576,
                "optimizer_bytes": 1, "taken_bytes": {taken}, "skipped_steps": 0, "fallback_rate": null,
                "fallback_rates": {{}}, "loss_curve": []}}"#
            )
        };
        let runs = |taken| {
            let small = run("small", 30_942_720, [32, 512], "4194304000");
            let medium = run("medium", 123_101_952, [16, 1024], taken);
            of(&format!("[{small}, {medium}]"))
        };
        let table = runs("1048576000").expect("a table");
        assert!(
            table.contains(
                "| `medium` | 16 x 1024 | `mixed-precision` | exact | 1.0 MiB | 1000.0 MiB |"
            ),
            "{table}"
        );
        // Within a few percent of what an H100 took.
        let computed = table
            .lines()
            .nth(3)
            .and_then(|line| line.split(" | ").nth(6));
        let computed = computed
            .and_then(|it| it.strip_suffix(" MiB"))
            .expect("MiB");
        let computed: f64 = computed.parse().expect("a number");
        assert!((8_000.0..10_000.0).contains(&computed), "{table}");
        assert!(runs("null").is_err());
    }
}
