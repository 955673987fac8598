//! Attention and its gradients against an f64 evaluation of the formulas, on a sample of rows.

use std::ops::Range;

use anyhow::{Context, Result};
use cubecl::cuda::CudaRuntime;
use cubecl_kernels::attention::{AttentionGradients, AttentionOutput, AttentionProducts};

use super::{Heads, Operands};
use crate::{
    difference::Difference,
    gpu::{Gpu, Tensor, bf16_rows},
    random::Random,
    results::AttentionProblem,
};

/// Heads of the sample.
const SAMPLED_HEADS: usize = 3;
/// Rows at most of each.
const SAMPLED_ROWS: usize = 24;
/// Rounding of a sample in BF16, root mean square over root mean square: of the output and, with dS in BF16 too, of
/// gradients.
const TOLERANCE: [f64; 2] = [5e-3, 1e-2];
/// The same where the forward pass multiplies codes: of normal numbers, and of probabilities, by 127 of each scale.
const TOLERANCE_OF_CODES: [f64; 2] = [5e-2, 2e-2];

/// One head of keys and values, and the query heads that read it, on the host. Rows lie one after the other.
struct Group<'a> {
    gpu: &'a Gpu,
    problem: &'a AttentionProblem,
    batch: usize,
    kv_head: usize,
}

/// Rows of one head.
struct Rows {
    values: Vec<f32>,
    width: usize,
}

impl Rows {
    fn row(&self, index: usize) -> &[f32] {
        &self.values[index * self.width..][..self.width]
    }
}

/// Compares samples of the output and of the gradients with the formulas of [`cubecl_kernels::attention`].
///
/// # Errors
///
/// A sample differs by more than the rounding of BF16, or of codes.
pub fn check(
    gpu: &Gpu,
    random: &mut Random,
    problem: &AttentionProblem,
    products: AttentionProducts,
    operands: &Operands,
    forward: &AttentionOutput<CudaRuntime>,
    gradients: &AttentionGradients<Option<Tensor>>,
) -> Result<()> {
    let gradient = |of: &Option<Tensor>| of.clone().context("a gradient is missing");
    let [of_query, of_key, of_value] = [&gradients.query, &gradients.key, &gradients.value];
    let [of_query, of_key, of_value] =
        [gradient(of_query)?, gradient(of_key)?, gradient(of_value)?];
    let log_sum_exp: Vec<f32> = gpu.download(&forward.log_sum_exp)?;
    let [mut output, mut d_query, mut d_key, mut d_value] = [(); 4].map(|()| Difference::default());
    for _ in 0..SAMPLED_HEADS {
        let group = Group {
            gpu,
            problem,
            batch: random.below(problem.batch),
            kv_head: random.below(problem.kv_heads),
        };
        let keys = group.of(&operands.key.rows, problem.kv_heads, group.kv_head)?;
        let values = group.of(&operands.value.rows, problem.kv_heads, group.kv_head)?;
        let sampled = random.stratified(problem.sequence.div_ceil(SAMPLED_ROWS), problem.sequence);
        let mut of_keys = vec![[vec![0.0; problem.width], vec![0.0; problem.width]]; sampled.len()];
        for head in group.query_heads() {
            let of = |heads: &Heads| group.of(&heads.rows, problem.heads, head);
            let (queries, d_output) = (of(&operands.query)?, of(&operands.gradient)?);
            let outputs = group.of(&in_rows(&forward.output), problem.heads, head)?;
            let d_queries = group.of(&in_rows(&of_query), problem.heads, head)?;
            for &row in &sampled {
                let expected = group.query(row, &queries, &keys, &values, d_output.row(row));
                output.add(outputs.row(row), &expected[0]);
                d_query.add(d_queries.row(row), &expected[1]);
            }
            let sums = &log_sum_exp[(group.batch * problem.heads + head) * problem.sequence..];
            let deltas: Vec<f64> = (0..problem.sequence)
                .map(|row| dot(d_output.row(row), outputs.row(row)))
                .collect();
            for (&col, [d_key, d_value]) in sampled.iter().zip(&mut of_keys) {
                for row in group.queries_of(col) {
                    let score = group.scale() * dot(queries.row(row), keys.row(col));
                    let probability = (score - f64::from(sums[row])).exp();
                    let d_score =
                        probability * (dot(d_output.row(row), values.row(col)) - deltas[row]);
                    add(d_value, probability, d_output.row(row));
                    add(d_key, group.scale() * d_score, queries.row(row));
                }
            }
        }
        let d_keys = group.of(&in_rows(&of_key), problem.kv_heads, group.kv_head)?;
        let d_values = group.of(&in_rows(&of_value), problem.kv_heads, group.kv_head)?;
        for (&col, [of_key, of_value]) in sampled.iter().zip(&of_keys) {
            d_key.add(d_keys.row(col), of_key);
            d_value.add(d_values.row(col), of_value);
        }
    }
    let [of_output, of_gradients] = match products {
        AttentionProducts::Float => TOLERANCE,
        AttentionProducts::Int8 => TOLERANCE_OF_CODES,
    };
    output.check("the output", of_output)?;
    d_query.check("dQ", of_gradients)?;
    d_key.check("dK", of_gradients)?;
    d_value.check("dV", of_gradients)
}

impl Group<'_> {
    /// The query heads that read this head of keys.
    fn query_heads(&self) -> Range<usize> {
        let group = self.problem.heads / self.problem.kv_heads;
        self.kv_head * group..(self.kv_head + 1) * group
    }

    fn scale(&self) -> f64 {
        f64::from((self.problem.width as f32).sqrt().recip())
    }

    /// One head of a contiguous tensor `[batch, sequence, heads, width]`.
    fn of(&self, rows: &Tensor, heads: usize, head: usize) -> Result<Rows> {
        let first = self.batch * self.problem.sequence;
        let places: Vec<usize> = (first..first + self.problem.sequence)
            .map(|row| row * heads + head)
            .collect();
        let values = bf16_rows(self.gpu, rows, &places)?;
        let width = self.problem.width;
        Ok(Rows { values, width })
    }

    /// Keys that the mask shows: the first ones.
    fn shown(&self) -> usize {
        self.problem.sequence - self.problem.hidden
    }

    /// The queries that see a key.
    fn queries_of(&self, col: usize) -> Range<usize> {
        let sequence = self.problem.sequence;
        match (self.problem.causal, col >= self.shown()) {
            (_, true) => 0..0,
            (true, false) => col..sequence,
            (false, false) => 0..sequence,
        }
    }

    /// O and dQ of a query.
    fn query(
        &self,
        row: usize,
        queries: &Rows,
        keys: &Rows,
        values: &Rows,
        d_output: &[f32],
    ) -> [Vec<f64>; 2] {
        let seen = match self.problem.causal {
            true => self.shown().min(row + 1),
            false => self.shown(),
        };
        let scores: Vec<f64> = (0..seen)
            .map(|col| self.scale() * dot(queries.row(row), keys.row(col)))
            .collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|score| (score - largest).exp()).sum();
        let [mut output, mut d_query] = [(); 2].map(|()| vec![0.0; self.problem.width]);
        let mut delta = 0.0;
        let terms: Vec<[f64; 2]> = scores
            .iter()
            .enumerate()
            .map(|(col, score)| {
                let probability = (score - largest).exp() / sum;
                let d_probability = dot(d_output, values.row(col));
                delta += probability * d_probability;
                add(&mut output, probability, values.row(col));
                [probability, d_probability]
            })
            .collect();
        for (col, [probability, d_probability]) in terms.into_iter().enumerate() {
            let d_score = probability * (d_probability - delta);
            add(&mut d_query, self.scale() * d_score, keys.row(col));
        }
        [output, d_query]
    }
}

/// The tensor `[batch, sequence, heads, width]` behind a view `[batch, heads, sequence, width]` of it.
fn in_rows(heads: &Tensor) -> Tensor {
    let mut rows = heads.clone();
    rows.metadata.swap(1, 2);
    rows
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    let products = a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b));
    products.sum()
}

fn add(sum: &mut [f64], factor: f64, row: &[f32]) {
    for (sum, &value) in sum.iter_mut().zip(row) {
        *sum += factor * f64::from(value);
    }
}
