//! A product against an f64 evaluation over the same integers and scales, on a sample of its elements.

use anyhow::{Result, ensure};
use cubecl_kernels::granularity::Granularity;

use super::{Operands, Problem};
use crate::{
    gpu::{Gpu, Tensor, bf16_rows, gather_rows},
    random::Random,
};

/// One row and one column of the sample lie in each stretch of this many: in every tile of a kernel.
const STRETCH: usize = 64;
/// FP32 rounding of a sum of scaled products of blocks, as a part of the sum of its terms' magnitudes.
const ACCUMULATION: f64 = 1e-6;

/// How a kernel sums products of floats.
#[derive(Debug, Clone, Copy)]
pub(super) enum Accumulation {
    /// In FP32.
    Float,
    /// 128 of them with the 14 bits that Hopper's FP8 products keep, these in FP32.
    Fp8,
}

impl Accumulation {
    /// Its rounding, as a part of the sum of its terms' magnitudes.
    const fn part(self) -> f64 {
        match self {
            Self::Float => 1e-5,
            Self::Fp8 => 1e-3,
        }
    }
}

/// Rows of an operand, or of its residual, on the host.
struct Rows {
    values: Vec<i8>,
    scales: Vec<f32>,
}

/// Compares a sample of `out`, of at most `most` rows and columns, with its reference.
///
/// # Errors
///
/// An element differs by more than its rounding and that of an FP32 sum.
pub fn check(
    gpu: &Gpu,
    random: &mut Random,
    problem: &Problem,
    operands: &Operands,
    out: &Tensor,
    most: usize,
) -> Result<()> {
    let Problem {
        batch,
        m,
        n,
        k,
        block,
        ..
    } = *problem;
    ensure!(
        operands.a.granularity == Granularity::Block(block),
        "operands of another block size"
    );
    let mut sample = |end: usize| random.stratified(STRETCH.max(end.div_ceil(most)), end);
    let (rows, cols) = (sample(batch * m), sample(n));
    let rows_of_b: Vec<usize> = (0..batch)
        .flat_map(|index| cols.iter().map(move |col| index * n + col))
        .collect();
    let download = |values: &Option<Tensor>, scales: &Tensor, rows: &[usize]| -> Result<Rows> {
        let values = values.as_ref().expect("operands are row-major");
        Ok(Rows {
            values: gpu.download(&gather_rows::<i8>(gpu, values, rows))?,
            scales: gpu.download(scales)?,
        })
    };
    let a = download(&operands.a.values, &operands.a.scales, &rows)?;
    let b = download(&operands.b.values, &operands.b.scales, &rows_of_b)?;
    let residual = match &operands.residual {
        None => None,
        Some(residual) => {
            let flags: Vec<u32> = gpu.download(&residual.flags)?;
            let rows = download(&Some(residual.values.clone()), &residual.scales, &rows)?;
            Some((rows, flags))
        }
    };
    let f32_output = problem.output_is_f32();
    let actual: Vec<f32> = if f32_output {
        gpu.download(&gather_rows::<f32>(gpu, out, &rows))?
    } else {
        bf16_rows(gpu, out, &rows)?
    };

    let (blocks_m, blocks_n, blocks_k) = (m.div_ceil(block), n.div_ceil(block), k.div_ceil(block));
    for (i, &row) in rows.iter().enumerate() {
        let (index, row_of_matrix) = (row / m, row % m);
        let scales_of_row = (index * blocks_m + row_of_matrix / block) * blocks_k;
        for (j, &col) in cols.iter().enumerate() {
            let scales_of_col = (index * blocks_n + col / block) * blocks_k;
            let (mut expected, mut magnitude) = (0.0, 0.0);
            for depth in 0..blocks_k {
                let part = depth * block..((depth + 1) * block).min(k);
                let b_values = &b.values[(index * cols.len() + j) * k..][part.clone()];
                let b_scale = f64::from(b.scales[scales_of_col + depth]);
                let mut add = |a: &Rows| {
                    let sum = dot(&a.values[i * k..][part.clone()], b_values);
                    let term =
                        f64::from(sum) * f64::from(a.scales[scales_of_row + depth]) * b_scale;
                    expected += term;
                    magnitude += term.abs();
                };
                add(&a);
                if let Some((residual, flags)) = &residual
                    && flags[scales_of_row + depth] != 0
                {
                    add(residual);
                }
            }
            let actual = f64::from(actual[i * n + col]);
            let rounding = if f32_output { 0.0 } else { half_ulp(expected) };
            ensure!(
                (actual - expected).abs() <= 1.0001 * rounding + ACCUMULATION * magnitude,
                "element {row}, {col} is {actual} instead of {expected}"
            );
        }
    }
    Ok(())
}

/// Compares an element of a product of float matrices, in BF16, with the sum of the products of its factors.
///
/// # Errors
///
/// It differs by more than its rounding and that of the sum.
pub(super) fn check_float(
    actual: f32,
    factors: impl Iterator<Item = (f32, f32)>,
    accumulation: Accumulation,
    place: [usize; 2],
) -> Result<()> {
    let (mut expected, mut magnitude) = (0.0, 0.0);
    for (a, b) in factors {
        let term = f64::from(a) * f64::from(b);
        expected += term;
        magnitude += term.abs();
    }
    let error = (f64::from(actual) - expected).abs();
    ensure!(
        error <= 1.0001 * half_ulp(expected) + accumulation.part() * magnitude,
        "element {place:?} is {actual} instead of {expected}"
    );
    Ok(())
}

fn dot(a: &[i8], b: &[i8]) -> i32 {
    let products = a.iter().zip(b).map(|(&a, &b)| i32::from(a) * i32::from(b));
    products.sum()
}

/// Half a unit in the last place of BF16.
fn half_ulp(x: f64) -> f64 {
    let exponent = x.abs().max(f64::from(f32::MIN_POSITIVE)).log2().floor() as i32;
    2f64.powi(exponent - 8)
}
