//! The measurements of `qt-bench gemm`: single products, and the products of layers.

use std::fmt::Write;

use anyhow::{Result, ensure};

use super::{conditions, ratio, spread};
use crate::results::{Fallback, GemmSpeed, Kernel, LayerProduct, Peer, Placement, Product, Run};

/// The kernels that the others are compared with.
const RIVALS: [Kernel; 4] = [
    Kernel::BurnBf16,
    Kernel::CublasBf16,
    Kernel::CublasFp8,
    Kernel::TritonInt8,
];

/// One line for each product by itself, one for each layer and kernel, and one on the device.
pub(super) fn table(run: &Run, peer: Option<&Peer>, rows: &[GemmSpeed]) -> Result<String> {
    ensure!(!rows.is_empty(), "no results");
    let (layers, products): (Vec<_>, Vec<_>) = rows.iter().partition(|row| row.layer.is_some());
    let mut out = String::new();
    if !products.is_empty() {
        of_products(&mut out, &products)?;
    }
    if !layers.is_empty() {
        if !products.is_empty() {
            out.push('\n');
        }
        of_layers(&mut out, &layers)?;
    }
    out.push_str("\nTOP/s count 2 M N K operations, those of residuals not; output in BF16");
    out.push_str(if layers.is_empty() {
        ". "
    } else {
        ", that of dW in FP32. "
    });
    out.push_str(&conditions(run, peer));
    Ok(out)
}

fn of_products(out: &mut String, rows: &[&GemmSpeed]) -> Result<()> {
    // Ratios to what was not measured would be columns of nothing.
    let rivals: Vec<Kernel> = RIVALS
        .into_iter()
        .filter(|rival| rows.iter().any(|row| row.kernel == *rival))
        .collect();
    out.push_str(
        "| M x N x K | kernel | block | fallback | time (10% to 90%) | TOP/s | of plain |",
    );
    for rival in &rivals {
        write!(out, " against {} |", rival.name())?;
    }
    out.push_str("\n| --- | --- | ---: | --- | ---: | ---: | ---: |");
    out.push_str(&" ---: |".repeat(rivals.len()));
    out.push('\n');
    for row in sorted(rows) {
        write!(
            out,
            "| {} | {} | {} | {} |",
            shape(row),
            row.kernel.name(),
            row.block.map_or(String::from("-"), |it| it.to_string()),
            row.fallback.map_or(String::from("-"), fallback),
        )?;
        match (row.time, row.tera_ops()) {
            (Some(time), Some(tera_ops)) => {
                write!(out, " {} | {tera_ops:.0} |", spread(time))?;
                let plain = plain(rows, row).and_then(GemmSpeed::tera_ops);
                write!(out, " {} |", share(plain.map(|plain| tera_ops / plain)))?;
                for rival in &rivals {
                    let rival = rows
                        .iter()
                        .find(|other| other.kernel == *rival && other.shape() == row.shape())
                        .filter(|other| other.kernel != row.kernel)
                        .and_then(|other| other.tera_ops());
                    write!(out, " {} |", ratio(rival.map(|rival| tera_ops / rival)))?;
                }
            }
            _ => {
                write!(out, " {} | - | - |", unavailable(row))?;
                out.push_str(&" - |".repeat(rivals.len()));
            }
        }
        out.push('\n');
    }
    Ok(())
}

/// The order of the first line of each shape, so that the kernels of one shape stand together.
fn sorted<'a>(rows: &[&'a GemmSpeed]) -> Vec<&'a GemmSpeed> {
    let mut shapes = Vec::new();
    for row in rows {
        if !shapes.contains(&row.shape()) {
            shapes.push(row.shape());
        }
    }
    let of = |shape| rows.iter().copied().filter(move |row| row.shape() == shape);
    shapes.into_iter().flat_map(of).collect()
}

/// The product without fallback at the nearest aligned size; none for that product itself.
fn plain<'a>(rows: &[&'a GemmSpeed], row: &GemmSpeed) -> Option<&'a GemmSpeed> {
    let other = rows.iter().copied().find(|other| {
        other.kernel == row.kernel
            && other.block == row.block
            && other.shape() == row.aligned_shape()
            && other.fallback.is_none()
    })?;
    (other != row).then_some(other)
}

fn of_layers(out: &mut String, rows: &[&GemmSpeed]) -> Result<()> {
    out.push_str("| tokens | layer | kernel | Y, TOP/s | dX, TOP/s | dW, TOP/s |\n");
    out.push_str("| ---: | --- | --- | ---: | ---: | ---: |\n");
    let mut lines: Vec<(LayerProduct, Kernel)> = Vec::new();
    for (row, layer) in rows.iter().filter_map(|row| Some((row, row.layer?))) {
        let line = (
            LayerProduct {
                product: Product::Y,
                ..layer
            },
            row.kernel,
        );
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    for (layer, kernel) in lines {
        write!(
            out,
            "| {} | {} x {} | {} |",
            layer.tokens,
            layer.inputs,
            layer.outputs,
            kernel.name()
        )?;
        for product in Product::ALL {
            let wanted = Some(LayerProduct { product, ..layer });
            let row = rows
                .iter()
                .find(|row| row.layer == wanted && row.kernel == kernel);
            match row.map(|row| (row, row.tera_ops())) {
                Some((_, Some(tera_ops))) => write!(out, " {tera_ops:.0} |")?,
                Some((row, None)) => write!(out, " {} |", unavailable(row))?,
                None => write!(out, " - |")?,
            }
        }
        out.push('\n');
    }
    Ok(())
}

fn shape(row: &GemmSpeed) -> String {
    let batch = if row.batch == 1 {
        String::new()
    } else {
        format!("{} of ", row.batch)
    };
    format!("{batch}{} x {} x {}", row.m, row.n, row.k)
}

fn fallback(fallback: Fallback) -> String {
    let placement = match fallback.placement {
        Placement::Scattered => "scattered",
        Placement::Sequential => "sequential",
    };
    format!("{:.0}% {placement}", 100.0 * fallback.rate)
}

fn share(share: Option<f64>) -> String {
    share.map_or(String::from("-"), |share| format!("{:.0}%", 100.0 * share))
}

fn unavailable(row: &GemmSpeed) -> String {
    let reason = row.unavailable.as_deref().unwrap_or("for no reason given");
    format!("not available: {reason}")
}

#[cfg(test)]
mod tests {
    use crate::{
        results::{Results, Rows, Spread},
        table::{of, tests::run},
    };

    use super::*;

    fn row(kernel: Kernel, size: usize, tera_ops: f64) -> GemmSpeed {
        let ms = 2.0 * (size as f64).powi(3) / tera_ops / 1e9;
        GemmSpeed {
            kernel,
            batch: 1,
            m: size,
            n: size,
            k: size,
            block: (kernel == Kernel::TensorCore).then_some(128),
            fallback: None,
            layer: None,
            time: Some(Spread::of(vec![ms])),
            unavailable: None,
        }
    }

    fn lines(rows: Vec<GemmSpeed>) -> Vec<String> {
        let results = Results {
            run: run(),
            peer: None,
            rows: Rows::Gemm(rows),
        };
        let table = of(&serde_json::to_string(&results).unwrap()).unwrap();
        table.lines().map(String::from).collect()
    }

    #[test]
    fn products_are_compared_with_rivals_of_their_shape() {
        let fallback = Some(Fallback {
            rate: 0.1,
            placement: Placement::Scattered,
        });
        let lines = lines(vec![
            row(Kernel::TensorCore, 4096, 500.0),
            row(Kernel::TensorCore, 8192, 600.0),
            GemmSpeed {
                fallback,
                ..row(Kernel::TensorCore, 4096, 450.0)
            },
            row(Kernel::BurnBf16, 4096, 200.0),
        ]);
        assert!(lines[0].ends_with("| of plain | against Burn BF16 |"));
        assert_eq!(
            lines[2],
            "| 4096 x 4096 x 4096 | ours, tensor cores | 128 | - | 0.275 ms (0.275 to 0.275) | 500 | - | 2.50x |"
        );
        assert!(
            lines[3].contains("| 10% scattered |") && lines[3].ends_with("| 450 | 90% | 2.25x |")
        );
        assert!(lines[4].starts_with("| 4096 x 4096 x 4096 | Burn BF16 | - | - |"));
        assert!(lines[4].ends_with("| 200 | - | - |"));
        assert!(lines[5].starts_with("| 8192 x") && lines[5].ends_with("| 600 | - | - |"));
        assert!(lines[7].starts_with("TOP/s count 2 M N K operations"));
        assert!(lines[7].contains("NVIDIA H200"));
    }

    #[test]
    fn our_bf16_products_are_compared_with_the_others() {
        let lines = lines(vec![
            row(Kernel::HopperBf16, 4096, 780.0),
            row(Kernel::BurnBf16, 4096, 195.0),
            row(Kernel::CublasBf16, 4096, 650.0),
        ]);
        assert!(lines[2].starts_with("| 4096 x 4096 x 4096 | ours, Hopper BF16 | - | - |"));
        assert!(
            lines[2].ends_with("| 780 | - | 4.00x | 1.20x |"),
            "{}",
            lines[2]
        );
    }

    #[test]
    fn odd_sizes_are_compared_with_their_neighbours() {
        let odd = GemmSpeed {
            m: 4095,
            n: 4097,
            k: 4090,
            ..row(Kernel::TensorCore, 4096, 400.0)
        };
        let lines = lines(vec![row(Kernel::TensorCore, 4096, 500.0), odd]);
        assert!(lines[3].starts_with("| 4095 x 4097 x 4090 |"));
        assert!(lines[3].ends_with("| 399 | 80% |"), "{}", lines[3]);
    }

    #[test]
    fn what_a_device_lacks_is_said() {
        let missing = GemmSpeed {
            time: None,
            unavailable: Some(String::from("no wgmma")),
            ..row(Kernel::Hopper, 4096, 1.0)
        };
        let lines = lines(vec![missing, row(Kernel::BurnBf16, 4096, 200.0)]);
        assert!(lines[2].ends_with("| not available: no wgmma | - | - | - |"));
    }

    #[test]
    fn products_of_a_layer_share_a_line() {
        let of_layer = |product, tera_ops| GemmSpeed {
            layer: Some(LayerProduct {
                tokens: 2048,
                inputs: 1024,
                outputs: 4096,
                product,
            }),
            ..row(Kernel::TensorCore, 1024, tera_ops)
        };
        let lines = lines(vec![
            of_layer(Product::Y, 300.0),
            of_layer(Product::Dx, 310.0),
            of_layer(Product::Dw, 320.0),
        ]);
        assert_eq!(
            lines[2],
            "| 2048 | 1024 x 4096 | ours, tensor cores | 300 | 310 | 320 |"
        );
        assert!(lines[4].contains("that of dW in FP32"));
    }
}
