//! The scores of a tile, and what follows from them in the backward pass: 4 x 4 in each unit.

use cubecl::prelude::*;

use crate::{
    rounding::{RandomStream, random_words},
    softmax::exp,
};

use super::tile::{ELEMENTS, Head, OWN, Strides4, TILE, head_of, unit_col, unit_row};

/// Queries, and keys, of a head: sums of four such numbers have 32 bits.
pub(super) const MAX_SEQUENCE: usize = 1 << 28;

/// The numbers of a problem.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Problem {
    pub batches: u32,
    pub heads: u32,
    /// Heads of queries that read one of keys.
    pub group: u32,
    pub queries: u32,
    pub keys: u32,
    pub width: u32,
    pub value_width: u32,
    /// Keys before and behind a query's own that it sees.
    pub before: u32,
    pub behind: u32,
    pub scale: f32,
    pub softcap: f32,
    pub dropout: DropoutNumbers,
    pub query: Strides4,
    pub key: Strides4,
    pub value: Strides4,
    pub mask: Strides4,
    pub bias: Strides4,
}

/// What dropout draws.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct DropoutNumbers {
    pub rate: f32,
    /// Multiplies what stays.
    pub kept: f32,
    pub random: RandomStream,
}

/// The constants that a kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Plan {
    pub has_mask: bool,
    pub has_bias: bool,
    pub has_softcap: bool,
    pub has_dropout: bool,
    /// True where the device multiplies to 64 bits.
    pub wide: bool,
    /// Panels of 64 features of a key, and of a value.
    pub panels: usize,
    pub value_panels: usize,
}

/// A tile of the scores of a head.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Place {
    pub batch: u32,
    pub head: u32,
    /// The first query and the first key.
    pub row: u32,
    pub col: u32,
}

/// The tile of queries of this number, of this head of all batches, beside the first tile of keys that they see.
#[cube]
pub(super) fn tile_of_queries(problem: &Problem, head: u32, tile: u32) -> Place {
    let row = tile * comptime!(TILE as u32);
    Place {
        batch: head / problem.heads,
        head: head % problem.heads,
        row,
        col: tile_of(first_key(problem, row)),
    }
}

/// The queries of a head.
#[cube]
pub(super) fn query_head(problem: &Problem, batch: u32, head: u32) -> Head {
    head_of(&problem.query, batch, head, problem.queries, problem.width)
}

/// The keys of a head of keys.
#[cube]
pub(super) fn key_head(problem: &Problem, batch: u32, kv_head: u32) -> Head {
    head_of(&problem.key, batch, kv_head, problem.keys, problem.width)
}

/// The values of a head of keys.
#[cube]
pub(super) fn value_head(problem: &Problem, batch: u32, kv_head: u32) -> Head {
    head_of(
        &problem.value,
        batch,
        kv_head,
        problem.keys,
        problem.value_width,
    )
}

/// The gradients of a head's outputs, which lie in memory by these strides.
#[cube]
pub(super) fn gradient_head(problem: &Problem, strides: &Strides4, batch: u32, head: u32) -> Head {
    head_of(strides, batch, head, problem.queries, problem.value_width)
}

/// Scores of a unit.
#[derive(CubeType)]
pub(super) struct Scores {
    /// The least number where a key is hidden.
    pub values: Array<f32>,
    /// Slopes of the soft cap, where there is one.
    pub slopes: Array<f32>,
    /// A bit for each score: 1 where the key is hidden.
    pub hidden: u32,
}

/// The first key that queries from `row` on see.
#[cube]
pub(super) fn first_key(problem: &Problem, row: u32) -> u32 {
    saturating_sub(row + problem.keys, problem.queries + problem.before)
}

/// The end of the keys that the queries up to `end` see.
#[cube]
pub(super) fn last_key(problem: &Problem, end: u32) -> u32 {
    let end = min(end, problem.queries);
    min(
        saturating_sub(end + problem.keys + problem.behind, problem.queries),
        problem.keys,
    )
}

/// The first query that sees one of the keys from `col` on.
#[cube]
pub(super) fn first_query(problem: &Problem, col: u32) -> u32 {
    saturating_sub(col + problem.queries, problem.keys + problem.behind)
}

/// The end of the queries that see one of the keys up to `end`.
#[cube]
pub(super) fn last_query(problem: &Problem, end: u32) -> u32 {
    let end = min(end, problem.keys);
    min(
        saturating_sub(end + problem.queries + problem.before, problem.keys),
        problem.queries,
    )
}

#[cube]
fn saturating_sub(a: u32, b: u32) -> u32 {
    select(a > b, a - b, 0u32)
}

/// The start of the tile that holds a position.
#[cube]
pub(super) fn tile_of(position: u32) -> u32 {
    position / comptime!(TILE as u32) * comptime!(TILE as u32)
}

/// Scores of products of queries and keys.
#[cube]
pub(super) fn scores<F: Numeric, M: Numeric>(
    products: &Array<f32>,
    mask: &Array<M>,
    bias: &Array<F>,
    problem: &Problem,
    place: &Place,
    #[comptime] plan: Plan,
) -> Scores {
    let mut values = Array::<f32>::new(ELEMENTS);
    let mut slopes = Array::<f32>::new(comptime!(if plan.has_softcap { ELEMENTS } else { 1 }));
    let mut hidden = 0u32.runtime();
    let mask_start = place.batch * problem.mask.batch + place.head * problem.mask.head;
    let bias_start = place.batch * problem.bias.batch + place.head * problem.bias.head;
    #[unroll]
    for i in 0..OWN {
        let row = place.row + unit_row() + comptime!(i as u32);
        #[unroll]
        for j in 0..OWN {
            let slot = comptime!(i * OWN + j);
            let col = place.col + unit_col() + comptime!(j as u32);
            let mut score = products[slot] * problem.scale;
            if comptime!(plan.has_softcap) {
                let (tanh, slope) = tanh(score / problem.softcap);
                score = problem.softcap * tanh;
                slopes[slot] = slope;
            }
            let sees = row < problem.queries
                && col < problem.keys
                && col + problem.queries + problem.before >= row + problem.keys
                && col + problem.queries <= row + problem.keys + problem.behind;
            let mut hides = select(sees, 0u32, 1u32);
            if comptime!(plan.has_mask) {
                if sees {
                    let index = mask_start + row * problem.mask.row + col * problem.mask.col;
                    let flag = u32::cast_from(mask[index as usize]);
                    hides = select(flag == 0u32, 0u32, 1u32);
                }
            }
            if comptime!(plan.has_bias) {
                if hides == 0u32 {
                    let index = bias_start + row * problem.bias.row + col * problem.bias.col;
                    score += f32::cast_from(bias[index as usize]);
                }
            }
            values[slot] = select(hides == 0u32, score, f32::new(f32::MIN));
            hidden |= hides << comptime!(slot as u32);
        }
    }
    Scores {
        values,
        slopes,
        hidden,
    }
}

/// True where the key of a unit's score is hidden.
#[cube]
pub(super) fn is_hidden(hidden: u32, #[comptime] slot: usize) -> bool {
    (hidden >> comptime!(slot as u32)) & 1u32 != 0u32
}

/// The hyperbolic tangent and its slope, from one exponential; NaN stays NaN.
#[cube]
fn tanh(x: f32) -> (f32, f32) {
    let power = exp(select(x < 0.0f32, x, -x) * 2.0f32);
    let sum = 1.0f32 + power;
    let tanh = (1.0f32 - power) / sum;
    let slope = 4.0f32 * power / (sum * sum);
    (select(x < 0.0f32, -tanh, tanh), slope)
}

/// The factors of dropout of a unit's scores; all 1 without dropout.
#[cube]
pub(super) fn factors(problem: &Problem, place: &Place, #[comptime] plan: Plan) -> Array<f32> {
    let mut factors = Array::<f32>::new(ELEMENTS);
    if comptime!(plan.has_dropout) {
        let dropout = &problem.dropout;
        let row =
            (place.batch * problem.heads + place.head) * problem.queries + place.row + unit_row();
        // Tiles start at multiples of four: a unit's neighbours share the words of one counter.
        let index = (place.col + unit_col()) / comptime!(crate::attention::DRAWS as u32);
        #[unroll]
        for i in 0..OWN {
            let (b0, b1, b2, b3) =
                random_words(row + comptime!(i as u32), index, &dropout.random, plan.wide);
            let first = comptime!(i * OWN);
            factors[first] = factor(b0, dropout);
            factors[comptime!(first + 1)] = factor(b1, dropout);
            factors[comptime!(first + 2)] = factor(b2, dropout);
            factors[comptime!(first + 3)] = factor(b3, dropout);
        }
    } else {
        #[unroll]
        for slot in 0..ELEMENTS {
            factors[slot] = 1.0f32;
        }
    }
    factors
}

#[cube]
fn factor(word: u32, dropout: &DropoutNumbers) -> f32 {
    select(uniform24(word) < dropout.rate, 0.0f32, dropout.kept)
}

/// [`philox::uniform24`](crate::philox::uniform24) in a kernel.
#[cube]
fn uniform24(word: u32) -> f32 {
    f32::cast_from(word >> 8) * (1.0 / 16_777_216.0)
}

/// What the backward pass has of a row.
#[derive(CubeType)]
pub(super) struct Rows {
    /// The log-sum-exp of the unit's rows; 0 where nothing is seen.
    log_sum_exp: Array<f32>,
    /// Products of output and gradient.
    delta: Array<f32>,
}

/// Those of a tile's rows that the unit has.
#[cube]
pub(super) fn rows_of(
    log_sum_exp: &Array<f32>,
    delta: &Array<f32>,
    problem: &Problem,
    place: &Place,
) -> Rows {
    let mut rows = Rows {
        log_sum_exp: Array::<f32>::new(OWN),
        delta: Array::<f32>::new(OWN),
    };
    let start = (place.batch * problem.heads + place.head) * problem.queries;
    #[unroll]
    for i in 0..OWN {
        let row = place.row + unit_row() + comptime!(i as u32);
        rows.log_sum_exp[i] = 0.0f32;
        rows.delta[i] = 0.0f32;
        if row < problem.queries {
            let of_row = log_sum_exp[(start + row) as usize];
            // Of negative infinity nothing can be taken away.
            rows.log_sum_exp[i] = select(of_row < f32::new(f32::MIN), 0.0f32, of_row);
            rows.delta[i] = delta[(start + row) as usize];
        }
    }
    rows
}

/// What the gradients are sums of, of a unit's scores.
#[derive(CubeType)]
pub(super) struct OfScores {
    /// Probabilities, with dropout.
    pub probabilities: Array<f32>,
    /// Gradients of the scores.
    pub gradients: Array<f32>,
    /// Gradients of the scores before the soft cap.
    pub before_cap: Array<f32>,
}

/// From the scores and the products of gradients and values.
#[cube]
pub(super) fn of_scores(
    scores: &Scores,
    of_probabilities: &Array<f32>,
    rows: &Rows,
    problem: &Problem,
    place: &Place,
    #[comptime] plan: Plan,
) -> OfScores {
    let mut result = OfScores {
        probabilities: Array::<f32>::new(ELEMENTS),
        gradients: Array::<f32>::new(ELEMENTS),
        before_cap: Array::<f32>::new(ELEMENTS),
    };
    let factors = factors(problem, place, plan);
    #[unroll]
    for i in 0..OWN {
        #[unroll]
        for j in 0..OWN {
            let slot = comptime!(i * OWN + j);
            let hidden = is_hidden(scores.hidden, slot);
            let probability = exp(scores.values[slot] - rows.log_sum_exp[i]);
            let gradient = probability * (of_probabilities[slot] * factors[slot] - rows.delta[i]);
            let gradient = select(hidden, 0.0f32, gradient);
            result.probabilities[slot] = select(hidden, 0.0f32, probability * factors[slot]);
            result.gradients[slot] = gradient;
            if comptime!(plan.has_softcap) {
                result.before_cap[slot] = gradient * scores.slopes[slot];
            } else {
                result.before_cap[slot] = gradient;
            }
        }
    }
    result
}
