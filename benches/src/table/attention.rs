//! The measurements of `qt-bench attention`.

use std::fmt::Write;

use anyhow::{Result, ensure};

use super::{conditions, ratio, spread};
use crate::results::{AttentionKernel, AttentionPass, AttentionProblem, AttentionSpeed, Peer, Run};

/// Ours.
const OWN: [AttentionKernel; 4] = [
    AttentionKernel::Hopper,
    AttentionKernel::HopperInt8,
    AttentionKernel::TensorCore,
    AttentionKernel::Portable,
];
/// Whose speed ours is compared with.
const RIVALS: [AttentionKernel; 3] = [
    AttentionKernel::TorchCudnn,
    AttentionKernel::TorchFlash,
    AttentionKernel::TorchEfficient,
];

/// One line for each problem and pass, and one on the device.
pub(super) fn table(run: &Run, peer: Option<&Peer>, rows: &[AttentionSpeed]) -> Result<String> {
    ensure!(!rows.is_empty(), "no results");
    let rivals: Vec<AttentionKernel> = RIVALS
        .into_iter()
        .filter(|rival| rows.iter().any(|row| row.kernel == *rival))
        .collect();
    let mut out = String::from(
        "| width | sequence | heads | mask | kernel | pass | time (10% to 90%) | TFLOP/s |",
    );
    for rival in &rivals {
        write!(out, " {} |", rival.name())?;
    }
    if !rivals.is_empty() {
        out.push_str(" of the faster |");
    }
    out.push_str("\n| ---: | ---: | --- | --- | --- | --- | ---: | ---: |");
    let columns = rivals.len() + usize::from(!rivals.is_empty());
    out.push_str(&" ---: |".repeat(columns));
    out.push('\n');
    for row in rows.iter().filter(|row| OWN.contains(&row.kernel)) {
        for pass in [AttentionPass::Forward, AttentionPass::Backward] {
            line(&mut out, rows, row, pass, &rivals)?;
        }
    }
    write!(
        out,
        "\nBF16, as many keys as queries, heads beside each other in memory as a linear layer leaves them; TFLOP/s count \
         two products forward and five backward, half of them where a query sees no later key. {}",
        conditions(run, peer)
    )?;
    Ok(out)
}

fn line(
    out: &mut String,
    rows: &[AttentionSpeed],
    row: &AttentionSpeed,
    pass: AttentionPass,
    rivals: &[AttentionKernel],
) -> Result<()> {
    let AttentionProblem {
        batch,
        heads,
        kv_heads,
        sequence,
        width,
        causal,
        hidden,
    } = row.problem;
    let of_keys = match kv_heads == heads {
        true => String::new(),
        false => format!(", {kv_heads} of keys"),
    };
    let mask = match (causal, hidden) {
        (true, 0) => String::from("causal"),
        (false, 0) => String::from("none"),
        (true, hidden) => format!("causal, {hidden} hidden"),
        (false, hidden) => format!("{hidden} hidden"),
    };
    let name = match pass {
        AttentionPass::Forward => "forward",
        AttentionPass::Backward => "backward",
    };
    write!(
        out,
        "| {width} | {sequence} | {batch} x {heads}{of_keys} | {mask} | {} | {name} |",
        row.kernel.name()
    )?;
    let ours = row.tera_flops(pass);
    match row.time(pass) {
        Some(time) => write!(out, " {} | {} |", spread(time), whole(ours))?,
        None => out.push_str(" - | - |"),
    }
    let of_rivals: Vec<Option<f64>> = rivals
        .iter()
        .map(|rival| {
            let same =
                |other: &&AttentionSpeed| other.kernel == *rival && other.problem == row.problem;
            rows.iter().find(same).and_then(|it| it.tera_flops(pass))
        })
        .collect();
    for rival in &of_rivals {
        write!(out, " {} |", whole(*rival))?;
    }
    if !rivals.is_empty() {
        let fastest = of_rivals.into_iter().flatten().reduce(f64::max);
        let of_fastest = ours.zip(fastest).map(|(ours, rival)| ours / rival);
        write!(out, " {} |", ratio(of_fastest))?;
    }
    out.push('\n');
    Ok(())
}

fn whole(tera_flops: Option<f64>) -> String {
    tera_flops.map_or(String::from("-"), |it| format!("{it:.0}"))
}

#[cfg(test)]
mod tests {
    use crate::{
        results::{Results, Rows, Spread},
        table::{of, tests::run},
    };

    use super::*;

    fn row(kernel: AttentionKernel, ms: f64) -> AttentionSpeed {
        AttentionSpeed {
            kernel,
            problem: AttentionProblem {
                batch: 1,
                heads: 16,
                kv_heads: 4,
                sequence: 1000,
                width: 128,
                causal: true,
                hidden: 0,
            },
            forward: Some(Spread::of(vec![ms])),
            backward: (kernel != AttentionKernel::TorchFlash).then(|| Spread::of(vec![2.0 * ms])),
        }
    }

    fn lines(rows: Vec<AttentionSpeed>) -> Vec<String> {
        let results = Results {
            run: run(),
            peer: None,
            rows: Rows::Attention(rows),
        };
        let table = of(&serde_json::to_string(&results).unwrap()).unwrap();
        table.lines().map(String::from).collect()
    }

    #[test]
    fn ours_is_compared_with_the_faster_one() {
        let lines = lines(vec![
            row(AttentionKernel::Hopper, 0.01),
            row(AttentionKernel::TorchCudnn, 0.008),
            row(AttentionKernel::TorchFlash, 0.016),
        ]);
        assert!(lines[0].ends_with("| PyTorch, cuDNN | PyTorch, FlashAttention | of the faster |"));
        assert_eq!(
            lines[2],
            "| 128 | 1000 | 1 x 16, 4 of keys | causal | Hopper | forward | 0.010 ms (0.010 to 0.010) | 410 | 512 | 256 | 0.80x |"
        );
        assert!(
            lines[3].ends_with("| 512 | 640 | - | 0.80x |"),
            "{}",
            lines[3]
        );
        assert_eq!(lines.len(), 6);
        assert!(lines[5].contains("NVIDIA H200"));
    }

    #[test]
    fn without_peers_there_is_nothing_to_compare_with() {
        let lines = lines(vec![row(AttentionKernel::Hopper, 0.01)]);
        assert!(lines[0].ends_with("| TFLOP/s |") && lines[2].ends_with("| 410 |"));
    }
}
