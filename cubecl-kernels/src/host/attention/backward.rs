//! The backward pass: a task for each part of the keys of each head, which holds the gradients of its keys and values
//! and adds to one of the queries; and one for each tile of the bias.

use std::ops::Range;

use rayon::prelude::*;

use crate::{
    attention::{AttentionGradients, AttentionOptions, AttentionProducts, Dropped},
    error::KernelError,
    reference::attention::{AttentionInputs, Broadcast, check_len},
};

use super::{
    HostAttention,
    exponential::exp,
    product::{Matrix, product},
    tile::{COLS, Problem, ROWS, Tile, pieces, sum},
};

const OPERATION: &str = "attention_backward";

/// Tasks that are enough for any machine, where heads alone are fewer.
const TASKS: usize = 64;
/// Keys that a part has at least: each part has gradients of all queries.
const PART: usize = 4 * COLS;

/// The gradients that are wanted, from the results of the forward pass and the gradient of the output; contiguous.
///
/// # Errors
///
/// When shapes, slices or options do not fit, or the gradient of a bias is wanted that is not there.
pub fn attention_backward(
    inputs: &AttentionInputs<'_, f32>,
    options: &AttentionOptions,
    forward: &HostAttention,
    gradient: &[f32],
    wanted: AttentionGradients<bool>,
) -> Result<AttentionGradients<Option<Vec<f32>>>, KernelError> {
    inputs.check(OPERATION, options)?;
    let shape = &inputs.shape;
    check_len(OPERATION, "output", &forward.output, &shape.output())?;
    check_len(
        OPERATION,
        "log_sum_exp",
        &forward.log_sum_exp,
        &shape.rows(),
    )?;
    check_len(OPERATION, "gradient", gradient, &shape.output())?;
    let delta = forward.output.par_chunks(shape.value_width);
    let delta = delta.zip(gradient.par_chunks(shape.value_width));
    let pass = Backward {
        problem: Problem { inputs, options },
        log_sum_exp: &forward.log_sum_exp,
        gradient,
        delta: delta
            .map(|(output, gradient)| dot(output, gradient))
            .collect(),
        wanted,
    };
    let bias = match (wanted.bias, &inputs.bias) {
        (false, _) => None,
        (true, Some(bias)) => Some(pass.of_bias(bias)),
        (true, None) => {
            return Err(KernelError::Unsupported {
                operation: OPERATION,
                reason: "the gradient of a bias is wanted, but there is none".into(),
                remedy: "pass the bias of the forward pass",
            });
        }
    };
    let [query, key, value] = match wanted.query || wanted.key || wanted.value {
        true => pass.of_inputs(),
        false => [Vec::new(), Vec::new(), Vec::new()],
    };
    Ok(AttentionGradients {
        query: wanted.query.then_some(query),
        key: wanted.key.then_some(key),
        value: wanted.value.then_some(value),
        bias,
    })
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let products: Vec<f32> = a.iter().zip(b).map(|(a, b)| a * b).collect();
    sum(&products)
}

struct Backward<'a> {
    problem: Problem<'a>,
    log_sum_exp: &'a [f32],
    gradient: &'a [f32],
    /// Of each row, the product of its output and the output's gradient.
    delta: Vec<f32>,
    wanted: AttentionGradients<bool>,
}

/// Gradients from a part of the keys of a head of queries; empty where they are not wanted.
struct Part {
    /// Of all queries of the head.
    query: Vec<f32>,
    /// Of the part's keys.
    key: Vec<f32>,
    /// Of the part's values.
    value: Vec<f32>,
}

/// Memory for the tiles of a task.
struct Tiles {
    /// Probabilities.
    p: Vec<f32>,
    /// Gradients of the products, but for the scale.
    ds: Vec<f32>,
    /// Slopes of the scores.
    slopes: Vec<f32>,
}

impl Tiles {
    fn new(problem: &Problem<'_>) -> Self {
        Self {
            p: vec![0.0; ROWS * COLS],
            ds: vec![0.0; ROWS * COLS],
            slopes: match problem.options.has_slopes() {
                true => vec![0.0; ROWS * COLS],
                false => Vec::new(),
            },
        }
    }
}

impl<'a> Backward<'a> {
    /// Gradients of queries, keys and values.
    fn of_inputs(&self) -> [Vec<f32>; 3] {
        let shape = &self.problem.inputs.shape;
        let heads = shape.batch * shape.heads;
        let per_part = shape.keys.div_ceil(TASKS.div_ceil(heads.max(1)));
        let per_part = per_part.next_multiple_of(COLS).max(PART);
        let keys: Vec<Range<usize>> = pieces(0..shape.keys, per_part).collect();
        let tasks = (0..heads * keys.len()).into_par_iter();
        let parts: Vec<Part> = tasks
            .map(|index| self.part(index / keys.len(), keys[index % keys.len()].clone()))
            .collect();

        let mut query = vec![0.0; self.problem.inputs.query.len()];
        let mut key = vec![0.0; self.problem.inputs.key.len()];
        let mut value = vec![0.0; self.problem.inputs.value.len()];
        for (index, part) in parts.iter().enumerate() {
            let (head, cols) = (index / keys.len(), &keys[index % keys.len()]);
            let first_query = head * shape.queries;
            let first_key = head / shape.group() * shape.keys + cols.start;
            add(&mut query, first_query * shape.width, &part.query);
            add(&mut key, first_key * shape.width, &part.key);
            add(&mut value, first_key * shape.value_width, &part.value);
        }
        [query, key, value]
    }

    fn part(&self, head: usize, keys: Range<usize>) -> Part {
        let (shape, wanted) = (&self.problem.inputs.shape, self.wanted);
        let zeros = |wanted, rows: usize, width| vec![0.0; if wanted { rows * width } else { 0 }];
        let mut part = Part {
            query: zeros(wanted.query, shape.queries, shape.width),
            key: zeros(wanted.key, keys.len(), shape.width),
            value: zeros(wanted.value, keys.len(), shape.value_width),
        };
        let mut tiles = Tiles::new(&self.problem);
        for cols in pieces(keys.clone(), COLS) {
            for rows in pieces(self.problem.queries_of(&cols), ROWS) {
                let tile = Tile {
                    batch: head / shape.heads,
                    head: head % shape.heads,
                    rows,
                    cols: cols.clone(),
                };
                self.add_tile(&tile, keys.start, &mut tiles, &mut part);
            }
        }
        part
    }

    fn add_tile(&self, tile: &Tile, first_key: usize, tiles: &mut Tiles, part: &mut Part) {
        let (shape, wanted, problem) = (&self.problem.inputs.shape, self.wanted, &self.problem);
        self.of_products(tile, tiles);
        let (rows, cols) = (tile.rows.len(), tile.cols.len());
        let of_tile = |data: &'a [f32], width| problem.of_queries(data, tile, width);
        let key_rows = tile.cols.start - first_key..tile.cols.end - first_key;
        let p = Matrix::rows(&tiles.p[..rows * cols], [rows, cols]);
        let ds = Matrix::rows(&tiles.ds[..rows * cols], [rows, cols]);
        if wanted.value {
            let out = rows_of(&mut part.value, key_rows.clone(), shape.value_width);
            let gradient = of_tile(self.gradient, shape.value_width);
            product(out, p.t(), gradient, 1.0, true);
        }
        let scale = problem.options.scale;
        if wanted.key {
            let out = rows_of(&mut part.key, key_rows, shape.width);
            product(out, ds.t(), problem.query(tile), scale, true);
        }
        if wanted.query {
            let out = rows_of(&mut part.query, tile.rows.clone(), shape.width);
            product(out, ds, problem.key(tile), scale, true);
        }
    }

    /// Probabilities of a tile, with dropout, and gradients of its products, but for the scale.
    fn of_products(&self, tile: &Tile, tiles: &mut Tiles) {
        self.of_scores(tile, tiles);
        for (ds, slope) in tiles.ds.iter_mut().zip(&tiles.slopes) {
            *ds *= slope;
        }
    }

    /// Probabilities of a tile, with dropout, and gradients of its scores.
    fn of_scores(&self, tile: &Tile, tiles: &mut Tiles) {
        let (problem, shape) = (&self.problem, &self.problem.inputs.shape);
        let size = tile.rows.len() * tile.cols.len();
        let (p, ds) = (&mut tiles.p[..size], &mut tiles.ds[..size]);
        problem.scores(tile, p, &mut tiles.slopes);
        let gradient = problem.of_queries(self.gradient, tile, shape.value_width);
        product(ds, gradient, problem.value(tile).t(), 1.0, false);
        let first = problem.query_head(tile) * shape.queries;
        let rows = p.chunks_exact_mut(tile.cols.len());
        let rows = rows.zip(ds.chunks_exact_mut(tile.cols.len()));
        for (row, (p, ds)) in tile.rows.clone().zip(rows) {
            let log_sum_exp = self.log_sum_exp[first + row];
            let delta = self.delta[first + row];
            // A row that sees nothing has no probability.
            let shift = if log_sum_exp == f32::NEG_INFINITY {
                0.0
            } else {
                log_sum_exp
            };
            match problem.options.products {
                AttentionProducts::Float => p.iter_mut().for_each(|x| *x = exp(*x - shift)),
                AttentionProducts::Int8 => {
                    // NaN stays NaN.
                    let at_most_0 = |x: f32| if x > 0.0 { 0.0 } else { x };
                    p.iter_mut().for_each(|x| *x = exp(at_most_0(*x - shift)));
                }
            }
            problem.drop(Dropped::Probabilities, tile, row, ds);
            for (ds, p) in ds.iter_mut().zip(p.iter()) {
                *ds = p * (*ds - delta);
            }
            problem.drop(Dropped::Probabilities, tile, row, p);
        }
    }

    /// The gradient of the bias: of each of its tiles, the sum over all scores that it is added to.
    fn of_bias(&self, bias: &Broadcast<'_, f32>) -> Vec<f32> {
        let [batches, heads, rows, cols] = bias.shape;
        let mut out = vec![0.0; bias.data.len()];
        if out.is_empty() {
            return out;
        }
        let stripes = out.par_chunks_mut(rows * cols).enumerate();
        stripes.for_each(|(index, out)| {
            debug_assert!(index < batches * heads);
            let of_head = (index / heads, index % heads);
            let stripes = out.par_chunks_mut(ROWS * cols).enumerate();
            stripes.for_each(|(index, out)| {
                let first = index * ROWS;
                self.bias_rows(bias.shape, of_head, first..first + out.len() / cols, out);
            });
        });
        out
    }

    /// That of some rows of the bias.
    fn bias_rows(
        &self,
        of_bias: [usize; 4],
        (batch, head): (usize, usize),
        rows: Range<usize>,
        out: &mut [f32],
    ) {
        let extents = self.problem.inputs.shape.scores();
        let along = |dim: usize, at: Range<usize>| match of_bias[dim] {
            1 => 0..extents[dim],
            _ => at,
        };
        let mut tiles = Tiles::new(&self.problem);
        for batch in along(0, batch..batch + 1) {
            for head in along(1, head..head + 1) {
                for rows in pieces(along(2, rows.clone()), ROWS) {
                    for cols in pieces(self.problem.keys_of(&rows), COLS) {
                        let tile = Tile {
                            batch,
                            head,
                            rows: rows.clone(),
                            cols,
                        };
                        self.of_scores(&tile, &mut tiles);
                        add_to_bias(&tile, &tiles.ds, [of_bias[2], of_bias[3]], out);
                    }
                }
            }
        }
    }
}

/// Adds a tile to the rows of a bias that start where the tile's do.
fn add_to_bias(tile: &Tile, ds: &[f32], [of_rows, of_cols]: [usize; 2], out: &mut [f32]) {
    for (row, ds) in (0..tile.rows.len()).zip(ds.chunks_exact(tile.cols.len())) {
        let out = &mut out[if of_rows == 1 { 0 } else { row * of_cols }..][..of_cols];
        match of_cols {
            1 => out[0] += sum(ds),
            _ => add(out, tile.cols.start, ds),
        }
    }
}

/// Adds `values` to `out`, from an index on.
fn add(out: &mut [f32], start: usize, values: &[f32]) {
    for (out, value) in out[start..].iter_mut().zip(values) {
        *out += value;
    }
}

/// Rows of a contiguous matrix.
fn rows_of(matrix: &mut [f32], rows: Range<usize>, width: usize) -> &mut [f32] {
    &mut matrix[rows.start * width..rows.end * width]
}
