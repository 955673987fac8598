//! The forward pass: a task for each tile of queries of each head.

use rayon::prelude::*;

use crate::{
    attention::{
        AttentionOptions, AttentionProducts, Dropped,
        products::{KEYS_OF_SCALE, LARGEST_CODE, round_to_codes},
    },
    error::KernelError,
    reference::attention::AttentionInputs,
    scale::fp32::scale_and_inverse,
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
    let of_codes = (options.products == AttentionProducts::Int8).then(|| in_codes(inputs));
    let rounded = of_codes.as_ref().map(|codes| inputs.with_heads(codes));
    let inputs = rounded.as_ref().unwrap_or(inputs);
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

/// Q, K and V as their codes are.
fn in_codes(inputs: &AttentionInputs<'_, f32>) -> [Vec<f32>; 3] {
    let shape = &inputs.shape;
    let rounded = |x: &[f32], part: usize, group: usize| {
        let mut x = x.to_vec();
        let parts = x.par_chunks_mut(part.max(1));
        parts.for_each(|part| part.chunks_mut(group.max(1)).for_each(round_to_codes));
        x
    };
    let of_keys = |x, width| rounded(x, shape.keys * width, KEYS_OF_SCALE * width);
    [
        rounded(inputs.query, shape.width, shape.width),
        of_keys(inputs.key, shape.width),
        of_keys(inputs.value, shape.value_width),
    ]
}

/// Rounds the weights of a row for keys from `first` on to codes of each tile's largest, and back.
fn round_probabilities(mut weights: &mut [f32], first: usize) {
    let mut of_tile = KEYS_OF_SCALE - first % KEYS_OF_SCALE;
    while !weights.is_empty() {
        let tile;
        (tile, weights) = weights.split_at_mut(of_tile.min(weights.len()));
        let (scale, inverse) = scale_and_inverse(largest(tile), LARGEST_CODE);
        // Without an inverse there is nothing, or NaN, which stays.
        if inverse > 0.0 {
            tile.iter_mut()
                .for_each(|p| *p = (*p * inverse).round_ties_even() * scale);
        }
        of_tile = KEYS_OF_SCALE;
    }
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
            if self.problem.options.products == AttentionProducts::Int8 {
                round_probabilities(scores, tile.cols.start);
            }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_of_a_tile_far_below_another_stay_finite() {
        let smallest = exp(-86.6);
        let mut weights = vec![0.5; KEYS_OF_SCALE];
        weights.extend([smallest, 0.0]);
        round_probabilities(&mut weights, 0);
        assert_eq!(weights[KEYS_OF_SCALE..], [smallest, 0.0]);
        assert_eq!(weights[0], 0.5);

        let mut bad = [f32::NAN, 1.0];
        round_probabilities(&mut bad, 0);
        assert!(bad[0].is_nan());
    }
}
