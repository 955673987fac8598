//! The forward pass: a task for each tile of queries of each head.

use rayon::prelude::*;

use crate::{
    attention::{AttentionOptions, Dropped},
    error::KernelError,
    reference::attention::AttentionInputs,
};

use super::{
    HostAttention,
    exponential::exp,
    product::{Matrix, product},
    tile::{COLS, Problem, ROWS, Tile, largest, pieces, sum},
};

/// The forward pass, on contiguous tensors.
///
/// # Errors
///
/// When shapes, slices or options do not fit.
pub fn attention(
    inputs: &AttentionInputs<'_, f32>,
    options: &AttentionOptions,
) -> Result<HostAttention, KernelError> {
    inputs.check("attention", options)?;
    let shape = &inputs.shape;
    let mut result = HostAttention {
        output: vec![0.0; shape.output().iter().product()],
        log_sum_exp: vec![f32::NEG_INFINITY; shape.rows().iter().product()],
    };
    if result.log_sum_exp.is_empty() {
        return Ok(result);
    }
    let problem = Problem { inputs, options };
    let heads = result
        .output
        .par_chunks_mut(shape.queries * shape.value_width)
        .zip(result.log_sum_exp.par_chunks_mut(shape.queries));
    heads.enumerate().for_each(|(head, (output, log_sum_exp))| {
        output
            .par_chunks_mut(ROWS * shape.value_width)
            .zip(log_sum_exp.par_chunks_mut(ROWS))
            .enumerate()
            .for_each(|(index, (output, log_sum_exp))| {
                let first = index * ROWS;
                let rows = Tile {
                    batch: head / shape.heads,
                    head: head % shape.heads,
                    rows: first..first + log_sum_exp.len(),
                    cols: 0..0,
                };
                Rows::new(problem, rows, output).finish(log_sum_exp);
            });
    });
    Ok(result)
}

/// Queries on their way through the keys (Dao et al., 2022, Algorithm 1).
struct Rows<'a> {
    problem: Problem<'a>,
    rows: Tile,
    /// The sum of values, weighted by `exp(score - max)`.
    output: &'a mut [f32],
    /// The largest score of each row so far.
    max: Vec<f32>,
    /// The sum of `exp(score - max)` of each row.
    sum: Vec<f32>,
}

impl<'a> Rows<'a> {
    fn new(problem: Problem<'a>, rows: Tile, output: &'a mut [f32]) -> Self {
        let count = rows.rows.len();
        Self {
            problem,
            rows,
            output,
            max: vec![f32::NEG_INFINITY; count],
            sum: vec![0.0; count],
        }
    }

    /// Walks through the keys, and writes the log-sum-exp.
    fn finish(mut self, log_sum_exp: &mut [f32]) {
        let mut buffer = vec![0.0; ROWS * COLS];
        for cols in pieces(self.problem.keys_of(&self.rows.rows), COLS) {
            let tile = Tile {
                cols,
                ..self.rows.clone()
            };
            let scores = &mut buffer[..tile.rows.len() * tile.cols.len()];
            self.problem.scores(&tile, scores, &mut []);
            self.add(&tile, scores);
        }
        let outputs = self
            .output
            .chunks_exact_mut(self.problem.inputs.shape.value_width);
        let statistics = self.max.iter().zip(&self.sum);
        for ((output, (&max, &sum)), log) in outputs.zip(statistics).zip(log_sum_exp) {
            if sum == 0.0 {
                output.fill(0.0);
                continue;
            }
            let inverse = 1.0 / sum;
            output.iter_mut().for_each(|x| *x *= inverse);
            *log = shift(max) + sum.ln();
        }
    }

    /// Takes the keys of a tile in.
    fn add(&mut self, tile: &Tile, scores: &mut [f32]) {
        let width = self.problem.inputs.shape.value_width;
        let rows = scores.chunks_exact_mut(tile.cols.len());
        let outputs = self.output.chunks_exact_mut(width);
        for (index, (scores, output)) in rows.zip(outputs).enumerate() {
            let before = self.max[index];
            let max = before.max(largest(scores));
            let shift = shift(max);
            scores.iter_mut().for_each(|x| *x = exp(*x - shift));
            let decay = exp(before - shift);
            if decay != 1.0 {
                output.iter_mut().for_each(|x| *x *= decay);
            }
            self.max[index] = max;
            self.sum[index] = self.sum[index] * decay + sum(scores);
            let row = tile.rows.start + index;
            self.problem.drop(Dropped::Probabilities, tile, row, scores);
        }
        let shape = [tile.rows.len(), tile.cols.len()];
        let value = self.problem.value(tile);
        product(self.output, Matrix::rows(scores, shape), value, 1.0, true);
    }
}

/// The number that scores are lowered by: their maximum, or 0 where there is none.
fn shift(max: f32) -> f32 {
    if max == f32::NEG_INFINITY { 0.0 } else { max }
}
