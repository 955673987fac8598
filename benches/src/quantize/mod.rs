//! The speed of quantizing the tensors of a linear layer, beside that of a device copy.

mod check;
mod launch;

use std::path::Path;

use anyhow::{Context, Result, ensure};
use clap::Args;
use cubecl::prelude::*;
use half::bf16;

use crate::{
    gpu::{self, Gpu, OUTLIER, Tensor, normal_matrix},
    peers::Peers,
    random::Random,
    results::{Operand, QuantizeSpeed, Results, Rows, tb_per_s},
    timing::Sampling,
};
use launch::Fallback;

/// The tensors to measure.
#[derive(Args, Debug, Clone)]
#[group(skip)]
pub struct Settings {
    /// Rows and columns of the tensors
    #[arg(
        long,
        value_delimiter = ',',
        default_values = ["2048x4096", "8192x4096", "16384x8192"],
        value_name = "RxC,..",
        value_parser = shape
    )]
    pub tensors: Vec<[usize; 2]>,
}

/// Rows and columns of the block of a scale.
const BLOCK: usize = 128;
/// The share of the blocks of X that fall back.
const FALLBACK_RATE: f64 = 0.2;

fn shape(text: &str) -> Result<[usize; 2]> {
    let (rows, cols) = text.split_once('x').context("write it as 2048x4096")?;
    let shape = [rows.parse()?, cols.parse()?];
    ensure!(
        shape.iter().all(|size| (1..=1 << 15).contains(size)),
        "rows and columns must lie from 1 to 2^15"
    );
    Ok(shape)
}

/// Checks the quantization of every tensor, then measures it. Says on stderr what it does.
///
/// # Errors
///
/// A result that differs from the reference, or a file of peers that is none of this GPU.
pub fn run(gpu: &Gpu, settings: &Settings, peers: Option<&Path>) -> Result<Results> {
    let peers = peers.map(|path| Peers::read(path, &gpu.name)).transpose()?;
    let mut random = gpu.random();
    let (bytes, copy) = gpu::copy(gpu, gpu::LARGE_COPY, Sampling::LONG)?;
    let copy_tb_per_s = tb_per_s(bytes, copy.median_ms);
    eprintln!("device copy: {copy_tb_per_s:.2} TB/s");
    let torch_copy_tb_per_s = peers.as_ref().and_then(|peers| {
        let copy = peers.copy().first()?;
        Some(tb_per_s(copy.bytes, copy.time.median_ms))
    });
    let copies = Copies {
        copy_tb_per_s,
        torch_copy_tb_per_s,
    };
    let mut rows = Vec::new();
    for &shape in &settings.tensors {
        for operand in [Operand::X, Operand::Dy, Operand::Groups] {
            rows.push(measure::<bf16>(
                gpu,
                &mut random,
                operand,
                "BF16",
                shape,
                &copies,
            )?);
        }
        for operand in [Operand::X, Operand::Dy, Operand::W] {
            rows.push(measure::<f32>(
                gpu,
                &mut random,
                operand,
                "FP32",
                shape,
                &copies,
            )?);
        }
    }
    Ok(Results {
        run: gpu.run()?,
        peer: peers.map(|peers| peers.run()),
        rows: Rows::Quantize(rows),
    })
}

/// The rates of copies too large for the caches.
struct Copies {
    copy_tb_per_s: f64,
    torch_copy_tb_per_s: Option<f64>,
}

fn measure<F: Float + CubePrimitive>(
    gpu: &Gpu,
    random: &mut Random,
    operand: Operand,
    input: &str,
    shape: [usize; 2],
    copies: &Copies,
) -> Result<QuantizeSpeed> {
    let [rows, cols] = shape;
    let what = format!("{}, {input} {rows} x {cols}", operand.name());
    let blocks = rows.div_ceil(BLOCK) * cols.div_ceil(BLOCK);
    let fallen = (FALLBACK_RATE * blocks as f64).round() as usize;
    let mut outliers = vec![0u32; blocks];
    for index in random.subset(fallen, blocks) {
        outliers[index] = 1;
    }
    let x: Tensor = normal_matrix::<F>(gpu, &shape, BLOCK, &outliers, random.below(1 << 24) as u32);
    let fallback = Fallback {
        thresholds: gpu.upload(&[0.5 * OUTLIER]),
        counts: gpu.upload_as(&[0i32; 2], &[1, 2]),
    };
    let key = cubecl_kernels::rounding::StochasticKey {
        seed: gpu.seed,
        stream: 1,
    };
    let launched = launch::launch(&gpu.client, operand, &x, &fallback, key)?;
    check::check(gpu, operand, &x, &launched, key, fallen).with_context(|| what.clone())?;
    drop(launched);

    let launch = || {
        launch::launch(&gpu.client, operand, &x, &fallback, key)?;
        Ok(())
    };
    let time = Sampling::SHORT.time(launch, || gpu.sync())?;
    let bytes = bytes(
        operand,
        rows * cols * size_of::<F>(),
        rows * cols,
        blocks,
        fallen,
    );
    drop(x);
    gpu.client.memory_cleanup();
    let (_, copy) = gpu::copy(gpu, bytes, Sampling::SHORT)?;
    gpu.client.memory_cleanup();
    let speed = QuantizeSpeed {
        operand,
        input: String::from(input),
        rows,
        cols,
        fallback_rate: FALLBACK_RATE,
        bytes,
        time,
        copy,
        copy_tb_per_s: copies.copy_tb_per_s,
        torch_copy_tb_per_s: copies.torch_copy_tb_per_s,
    };
    eprintln!(
        "{what}: {:.4} ms, {:.2} TB/s",
        time.median_ms,
        speed.tb_per_s()
    );
    Ok(speed)
}

/// Bytes that must move: the input of `read` bytes once, and once the values of each copy, a scale of each block, or a
/// byte of each group, and, for X, the residual values of the blocks that fell back and each block's residual scale and
/// flag.
fn bytes(operand: Operand, read: usize, elements: usize, blocks: usize, fallen: usize) -> usize {
    let written = match operand {
        Operand::X => 2 * elements + elements * fallen / blocks.max(1) + (4 + 4 + 4) * blocks,
        Operand::Dy => 2 * elements + 4 * blocks,
        Operand::W => elements + 4 * blocks,
        Operand::Groups => 2 * (elements + elements.div_ceil(BLOCK)),
    };
    read + written
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_must_move() {
        let (elements, blocks) = (256 * 256, 4);
        assert_eq!(
            bytes(Operand::W, 4 * elements, elements, blocks, 0),
            5 * elements + 16
        );
        assert_eq!(
            bytes(Operand::Dy, 2 * elements, elements, blocks, 0),
            4 * elements + 16
        );
        assert_eq!(
            bytes(Operand::Groups, 2 * elements, elements, blocks, 0),
            4 * elements + 2 * 512
        );
        let x = bytes(Operand::X, 2 * elements, elements, blocks, 1);
        assert_eq!(x, 4 * elements + 128 * 128 + 48);
    }

    #[test]
    fn shapes_are_parsed() {
        assert_eq!(shape("2048x4096").unwrap(), [2048, 4096]);
        for text in ["", "2048", "0x5", "1x99999", "axb"] {
            assert!(shape(text).is_err(), "{text}");
        }
    }
}
