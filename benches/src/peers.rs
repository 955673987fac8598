//! Measurements of other libraries on the same machine, from the file that `benches/peers/peers.py` writes.

use std::{fs, path::Path};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::results::{
    AttentionSpeed, GemmSpeed, Kernel, Operator, OperatorSpeed, Peer, Results, Rows, Spread,
    StepSpeed, Subject, TrainingSpeed,
};

/// The file of `peers.py`. Parts that it was told to leave out are empty.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Peers {
    run: Peer,
    #[serde(default)]
    gemm: Vec<Gemm>,
    #[serde(default)]
    attention: Vec<AttentionSpeed>,
    #[serde(default)]
    linear: Vec<Step>,
    #[serde(default)]
    layer: Vec<Step>,
    #[serde(default)]
    operators: Vec<Operated>,
    #[serde(default)]
    pretrain: Vec<TrainingSpeed>,
    #[serde(default)]
    optimizer: Vec<Torch>,
    #[serde(default)]
    copy: Vec<Copy>,
}

/// A square or other product, both operands with K along their rows.
#[derive(Debug, Clone, Deserialize)]
struct Gemm {
    kernel: Kernel,
    m: usize,
    n: usize,
    k: usize,
    time: Spread,
}

/// A linear or decoder layer.
#[derive(Debug, Clone, Deserialize)]
struct Step {
    subject: Subject,
    tokens: usize,
    sequence: Option<usize>,
    hidden: usize,
    #[serde(default)]
    outputs: Option<usize>,
    forward: Spread,
    both: Spread,
    activation_bytes: u64,
}

/// Both passes of an operator on matrices of BF16.
#[derive(Debug, Clone, Deserialize)]
struct Operated {
    operator: Operator,
    tokens: usize,
    columns: usize,
    subject: Subject,
    forward: Spread,
    backward: Spread,
}

/// The time of a step of PyTorch's fused AdamW on FP32 parameters.
#[derive(Debug, Clone, Deserialize)]
pub struct Torch {
    /// Parameters that it steps.
    pub parameters: usize,
    /// The time of a step.
    pub time: Spread,
}

/// The time of PyTorch's copy on the device.
#[derive(Debug, Clone, Deserialize)]
pub struct Copy {
    /// Bytes read and written.
    pub bytes: usize,
    /// The time of a copy.
    pub time: Spread,
}

impl Peers {
    /// Reads a file of `peers.py`.
    ///
    /// # Errors
    ///
    /// The file cannot be read, is no such file, or was measured on another device than `device`: ratios count between
    /// figures of one machine.
    pub fn read(path: &Path, device: &str) -> Result<Self> {
        let shown = path.display();
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {shown}"))?;
        Self::parse(&text, device).with_context(|| format!("{shown} is no file of peers.py"))
    }

    fn parse(text: &str, device: &str) -> Result<Self> {
        let peers: Self = serde_json::from_str(text)?;
        ensure!(
            peers.run.device == device,
            "it was measured on {}, not on {device}",
            peers.run.device
        );
        let times = peers.gemm.iter().map(|it| it.time);
        let of_attention = peers.attention.iter();
        let times = times.chain(
            of_attention
                .flat_map(|it| [it.forward, it.backward])
                .flatten(),
        );
        let times = times.chain(peers.linear.iter().flat_map(|it| [it.forward, it.both]));
        let times = times.chain(peers.layer.iter().flat_map(|it| [it.forward, it.both]));
        let of_operators = peers.operators.iter();
        let times = times.chain(of_operators.flat_map(|it| [it.forward, it.backward]));
        let times = times.chain(peers.pretrain.iter().map(|it| it.step));
        let times = times.chain(peers.optimizer.iter().map(|it| it.time));
        let mut times = times.chain(peers.copy.iter().map(|it| it.time));
        ensure!(
            times.all(|time| time.median_ms > 0.0),
            "a time is not positive"
        );
        Ok(peers)
    }

    /// Adds to results the lines of their benchmark, as a run with `--peers` does at its end: for one that was cut
    /// short.
    ///
    /// # Errors
    ///
    /// The results have such lines, are of a run that was not told of peers, or are of a benchmark that the file has no
    /// lines for.
    pub fn join(&self, results: &mut Results) -> Result<()> {
        ensure!(results.peer.is_none(), "the results have lines of peers");
        ensure!(
            results.run.command.contains("--peers"),
            "the results are of a run without --peers, of which nothing says that it is the peers' run"
        );
        fn extend<T>(rows: &mut Vec<T>, peers: impl IntoIterator<Item = T>) -> bool {
            let before = rows.len();
            rows.extend(peers);
            rows.len() > before
        }
        let has_grown = match &mut results.rows {
            Rows::Gemm(rows) => extend(rows, self.gemm()),
            Rows::Attention(rows) => extend(rows, self.attention()),
            Rows::Linear(rows) => extend(rows, self.linear()),
            Rows::Layer(rows) => extend(rows, self.layer()),
            Rows::Operators(rows) => extend(rows, self.operators()),
            Rows::Pretrain(rows) => extend(rows, self.pretrain()),
            Rows::Quantize(_) | Rows::Int4(_) => bail!("peers.py does not quantize"),
        };
        ensure!(has_grown, "the peers' file has no lines of this benchmark");
        results.peer = Some(self.run());
        Ok(())
    }

    /// Machine, date, command and versions.
    pub fn run(&self) -> Peer {
        self.run.clone()
    }

    /// The products, as lines of `qt-bench gemm`.
    pub fn gemm(&self) -> Vec<GemmSpeed> {
        let row = |gemm: &Gemm| GemmSpeed {
            kernel: gemm.kernel,
            batch: 1,
            m: gemm.m,
            n: gemm.n,
            k: gemm.k,
            block: (gemm.kernel == Kernel::TritonInt8).then_some(128),
            fallback: None,
            layer: None,
            time: Some(gemm.time),
            unavailable: None,
        };
        self.gemm.iter().map(row).collect()
    }

    /// Attention, as lines of `qt-bench attention`.
    pub fn attention(&self) -> Vec<AttentionSpeed> {
        self.attention.clone()
    }

    /// The linear layers, as lines of `qt-bench linear`.
    pub fn linear(&self) -> Vec<StepSpeed> {
        steps(&self.linear)
    }

    /// The decoder layers, as lines of `qt-bench layer`.
    pub fn layer(&self) -> Vec<StepSpeed> {
        steps(&self.layer)
    }

    /// Operators, as lines of `qt-bench operators`.
    pub fn operators(&self) -> Vec<OperatorSpeed> {
        let row = |it: &Operated| {
            let (shape, times) = ([it.tokens, it.columns], [it.forward, it.backward]);
            OperatorSpeed::of_floats(it.operator, shape, it.subject, times)
        };
        self.operators.iter().map(row).collect()
    }

    /// Training steps, as lines of `qt-bench pretrain`.
    pub fn pretrain(&self) -> Vec<TrainingSpeed> {
        self.pretrain.clone()
    }

    /// PyTorch's fused AdamW.
    pub fn optimizer(&self) -> Option<&Torch> {
        self.optimizer.first()
    }

    /// PyTorch's copies.
    pub fn copy(&self) -> &[Copy] {
        &self.copy
    }
}

fn steps(steps: &[Step]) -> Vec<StepSpeed> {
    let row = |step: &Step| StepSpeed {
        subject: step.subject,
        tokens: step.tokens,
        sequence: step.sequence,
        hidden: step.hidden,
        outputs: step.outputs,
        contexts: None,
        forward: step.forward,
        both: step.both,
        enqueue: None,
        alone: None,
        activation_bytes: Some(step.activation_bytes),
        fallback_rate: None,
        error: None,
        parts: Vec::new(),
    };
    steps.iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: &str = r#""run": {"device": "NVIDIA H200", "date": "2026-11-21T12:00:00Z", "command": "peers.py",
        "versions": "PyTorch 2.11.0"}"#;
    const TIME: &str = r#"{"median_ms": 2.0, "p10_ms": 1.5, "p90_ms": 3.0}"#;

    fn parse(rest: &str) -> Result<Peers> {
        Peers::parse(&format!("{{{RUN}{rest}}}"), "NVIDIA H200")
    }

    #[test]
    fn lines_become_those_of_the_benchmarks() {
        let peers = parse(&format!(
            r#", "gemm": [{{"kernel": "triton-int8", "m": 1, "n": 2, "k": 3, "time": {TIME}}},
                         {{"kernel": "cublas-bf16", "m": 4, "n": 5, "k": 6, "time": {TIME}}}],
            "layer": [{{"subject": "torch-eager", "tokens": 2048, "hidden": 1024, "forward": {TIME}, "both": {TIME},
                       "activation_bytes": 77}}],
            "attention": [{{"kernel": "torch-cudnn", "batch": 1, "heads": 4, "kv_heads": 2, "sequence": 8, "width": 64,
                           "causal": true, "forward": {TIME}, "backward": null}}],
            "pretrain": [{{"subject": "torch-compiled", "model": "medium", "parameters": 9, "batch": 16,
                          "sequence": 1024, "step": {TIME}, "tokens_per_s": 8192.0, "activation_bytes": 5,
                          "peak_bytes": 6}}],
            "operators": [{{"operator": "swiglu", "tokens": 100, "columns": 10, "subject": "torch-compiled",
                           "forward": {TIME}, "backward": {TIME}}}],
            "optimizer": [{{"parameters": 5, "time": {TIME}}}], "copy": [{{"bytes": 9, "time": {TIME}}}]"#
        ))
        .unwrap();
        let gemm = peers.gemm();
        assert_eq!(
            (gemm[0].kernel, gemm[0].block),
            (Kernel::TritonInt8, Some(128))
        );
        assert_eq!((gemm[1].shape(), gemm[1].block), ([1, 4, 5, 6], None));
        let layer = peers.layer();
        assert_eq!(
            (layer[0].subject, layer[0].hidden),
            (Subject::TorchEager, 1024)
        );
        assert_eq!(layer[0].activation_bytes, Some(77));
        assert!(peers.linear().is_empty());
        let attention = peers.attention();
        assert_eq!(attention[0].problem.kv_heads, 2);
        assert!(attention[0].forward.is_some() && attention[0].backward.is_none());
        assert_eq!(peers.pretrain()[0].peak_bytes, Some(6));
        let operators = peers.operators();
        assert_eq!(operators[0].operator, Operator::Swiglu);
        assert_eq!(operators[0].backward_bytes, 5 * 2000);
        assert_eq!(peers.optimizer().map(|it| it.time.median_ms), Some(2.0));
        assert_eq!(peers.copy()[0].bytes, 9);
    }

    #[test]
    fn results_that_were_cut_short_get_the_lines_of_peers_once() {
        let peers = parse(&format!(
            r#", "attention": [{{"kernel": "torch-cudnn", "batch": 1, "heads": 4, "kv_heads": 2, "sequence": 8, "width": 64,
                           "causal": true, "forward": {TIME}, "backward": null}}]"#
        ))
        .unwrap();
        let results = r#"{"run": {"device": "NVIDIA H200", "driver": "1", "max_sm_mhz": 1, "sm_mhz": 1, "memory_mhz": 1,
            "date": "2026-11-21T12:00:00Z", "command": "qt-bench attention --peers peers.json", "features": [], "seed": 1},
            "peer": null, "bench": "attention", "rows": []}"#;
        let mut results: Results = serde_json::from_str(results).unwrap();
        assert!(parse("").unwrap().join(&mut results).is_err());
        let mut alone = results.clone();
        alone.run.command = "qt-bench attention".into();
        assert!(peers.join(&mut alone).is_err());
        peers.join(&mut results).unwrap();
        assert_eq!(results.rows, Rows::Attention(peers.attention()));
        assert_eq!(results.peer, Some(peers.run()));
        assert!(peers.join(&mut results).is_err());
    }

    #[test]
    fn parts_may_be_left_out() {
        let peers = parse("").unwrap();
        assert!(peers.gemm().is_empty() && peers.optimizer().is_none());
    }

    #[test]
    fn other_files_are_errors() {
        let other = format!("{{{RUN}}}");
        assert!(Peers::parse(&other, "NVIDIA H100").is_err());
        assert!(Peers::parse("device copy: 4.27 TB/s", "NVIDIA H200").is_err());
        assert!(parse(r#", "gem": []"#).is_err());
        let never = r#"{"median_ms": 0.0, "p10_ms": 0.0, "p90_ms": 0.0}"#;
        assert!(parse(&format!(r#", "copy": [{{"bytes": 9, "time": {never}}}]"#)).is_err());
        let kernel =
            format!(r#", "gemm": [{{"kernel": "other", "m": 1, "n": 2, "k": 3, "time": {TIME}}}]"#);
        assert!(parse(&kernel).is_err());
    }
}
