//! The speed of a step of AdamW on one large tensor, by the format of its states.

mod burn_adamw;
mod check;

use std::path::Path;

use anyhow::{Result, ensure};
use clap::Args;
use cubecl_kernels::{
    adamw::{
        AdamWTensors, Hyperparameters, adamw, find_nonfinite, initial_clock, initial_flag, tick,
    },
    optimizer_state::{Moment, StateFormat, initial_state},
    rounding::Rounding,
};

use crate::{
    format,
    gpu::{self, Gpu},
    peers::Peers,
    results::{OptimizerSpeed, Spread, tb_per_s},
    timing::Sampling,
};

/// The tensor to measure.
#[derive(Args, Debug, Clone)]
#[group(skip)]
pub struct Settings {
    /// Parameters of the tensor
    #[arg(long, default_value_t = 1 << 28, value_name = "N")]
    pub parameters: usize,
}

/// Of a training run, so that all numbers stay in a usual range.
const HYPERPARAMETERS: Hyperparameters = Hyperparameters {
    learning_rate: 1e-4,
    beta_1: 0.9,
    beta_2: 0.999,
    epsilon: 1e-8,
    weight_decay: 0.1,
    clip_norm: None,
};

/// An optimizer of ours: name, first and second moment.
type Candidate = (&'static str, Option<StateFormat>, Option<StateFormat>);

const CANDIDATES: [Candidate; 5] = [
    ("adamw", None, None),
    (
        "fp8-adamw",
        Some(StateFormat::E4M3.expanded()),
        Some(StateFormat::E4M3.expanded()),
    ),
    (
        "dynamic-fp8-adamw",
        Some(StateFormat::DYNAMIC_EXPONENT.expanded()),
        Some(StateFormat::E4M3.expanded()),
    ),
    (
        "dynamic-adamw-8bit",
        Some(StateFormat::DYNAMIC_EXPONENT.with_group(256)),
        Some(StateFormat::DYNAMIC_EXPONENT.with_group(256)),
    ),
    (
        "int8-adamw",
        Some(StateFormat::INT8),
        Some(StateFormat::INT8),
    ),
];

/// Checks every optimizer, then measures it. Says on stderr what it does.
///
/// # Errors
///
/// A result that differs from the reference, or a file of peers that is none of this GPU.
pub fn run(gpu: &Gpu, settings: &Settings, peers: Option<&Path>) -> Result<Vec<OptimizerSpeed>> {
    let n = settings.parameters;
    ensure!(
        (1..=1 << 31).contains(&n),
        "--parameters must lie from 1 to 2^31"
    );
    let peers = peers.map(|path| Peers::read(path, &gpu.name)).transpose()?;
    let torch = peers.as_ref().and_then(Peers::optimizer);
    eprintln!("{}, {n} parameters, seed {}", gpu.name, gpu.seed);
    for (name, first, second) in CANDIDATES {
        check::check(gpu, first, second).map_err(|error| error.context(name))?;
    }
    eprintln!("every optimizer steps as its reference does");

    let (bytes, copy) = gpu::copy(gpu, 8 * n, Sampling::LONG)?;
    let copy_tb_per_s = tb_per_s(bytes, copy.median_ms);
    eprintln!("device copy: {copy_tb_per_s:.2} TB/s");
    let burn = burn_adamw::measure(gpu, n)?;
    eprintln!("Burn: {:.3} ms", burn.median_ms);

    let rival = Rivals {
        copy_tb_per_s,
        burn_ms: burn.median_ms / n as f64,
        torch_ms: torch.map(|torch| torch.time.median_ms / torch.parameters as f64),
    };
    let mut rows = Vec::new();
    for (name, first, second) in CANDIDATES {
        let [step, with_search] = measure(gpu, n, first, second)?;
        eprintln!("{name}: {:.3} ms", step.median_ms);
        rows.push(OptimizerSpeed {
            with_search_ms: Some(with_search.median_ms),
            ..rival
                .row(name, [first, second], n, &gpu.name, step.median_ms)
                .with_spread(step)
        });
    }
    rows.push(
        rival
            .row(BURN, [None, None], n, &gpu.name, burn.median_ms)
            .with_spread(burn),
    );
    if let Some(torch) = torch {
        let name = "PyTorch AdamW, fused";
        let (parameters, time) = (torch.parameters, torch.time);
        rows.push(
            rival
                .row(name, [None, None], parameters, &gpu.name, time.median_ms)
                .with_spread(time),
        );
    }
    Ok(rows)
}

/// The name of Burn's own AdamW, which is faster where Burn fuses its operations.
const BURN: &str = if cfg!(feature = "fusion") {
    "Burn AdamW, fusion"
} else {
    "Burn AdamW"
};

/// The figures that the optimizers are compared with.
struct Rivals {
    copy_tb_per_s: f64,
    /// Time of Burn's AdamW for one parameter.
    burn_ms: f64,
    /// Time of PyTorch's fused AdamW for one parameter.
    torch_ms: Option<f64>,
}

impl Rivals {
    fn row(
        &self,
        name: &str,
        [first, second]: [Option<StateFormat>; 2],
        n: usize,
        device: &str,
        median_ms: f64,
    ) -> OptimizerSpeed {
        let bytes = bytes(n, first, second);
        let tb_per_s = tb_per_s(bytes, median_ms);
        let of_parameter = median_ms / n as f64;
        let state = |format: Option<StateFormat>| format.map_or(String::from("FP32"), format::name);
        OptimizerSpeed {
            name: name.to_owned(),
            states: [state(first), state(second)],
            n,
            median_ms,
            p10_ms: None,
            p90_ms: None,
            bytes,
            tb_per_s,
            of_copy: tb_per_s / self.copy_tb_per_s,
            with_search_ms: None,
            versus_torch_fused: self.torch_ms.map(|torch| torch / of_parameter),
            versus_burn: self.burn_ms / of_parameter,
            device: device.to_owned(),
            copy_tb_per_s: self.copy_tb_per_s,
        }
    }
}

/// Bytes that a step moves: the parameter read and written, its gradient read, both states read and written.
fn bytes(n: usize, first: Option<StateFormat>, second: Option<StateFormat>) -> usize {
    let state = |format: Option<StateFormat>| format.map_or(4 * n, |format| format.bytes(n));
    12 * n + 2 * (state(first) + state(second))
}

/// The times of a step, and of one with the search for gradients that are not finite and the counting of steps.
fn measure(
    gpu: &Gpu,
    n: usize,
    first: Option<StateFormat>,
    second: Option<StateFormat>,
) -> Result<[Spread; 2]> {
    let client = &gpu.client;
    let mut random = gpu.random();
    let tensors = [AdamWTensors {
        updated: None,
        parameter: gpu.upload(&random.tiled(n, 0.02)),
        gradient: gpu.upload(&random.tiled(n, 1e-3)),
        first: initial_state(client, &[n], first, Moment::First)?,
        second: initial_state(client, &[n], second, Moment::Second)?,
        rounding: Rounding::Nearest,
        state_rounding: Rounding::Nearest,
    }];
    let (clock, flag) = (initial_clock(client), initial_flag(client));
    tick(client, &clock, None)?;
    let sync = || gpu.sync();
    let step = Sampling::LONG.time(
        || {
            Ok(adamw(
                client,
                &tensors,
                &clock,
                None,
                None,
                &HYPERPARAMETERS,
            )?)
        },
        sync,
    )?;
    let with_search = Sampling::LONG.time(
        || {
            find_nonfinite(client, &[tensors[0].gradient.clone()], &flag)?;
            tick(client, &clock, Some(&flag))?;
            Ok(adamw(
                client,
                &tensors,
                &clock,
                Some(&flag),
                None,
                &HYPERPARAMETERS,
            )?)
        },
        sync,
    )?;
    drop(tensors);
    client.memory_cleanup();
    Ok([step, with_search])
}
