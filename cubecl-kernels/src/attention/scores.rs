//! The common part of attention's CubeCL kernels: the numbers of a problem, the keys that a band shows, and the way
//! from a product of a query and a key to a score.

use cubecl::prelude::*;

use crate::{
    dropout::uniform24,
    fast,
    rounding::{RandomStream, random_words},
};

use super::{
    Dropped,
    heads::{Head, Strides4, head_of},
};

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

/// The random numbers of dropout.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct DropoutNumbers {
    pub rate: f32,
    /// Multiplies what stays.
    pub kept: f32,
    pub random: RandomStream,
}

/// The properties of a problem that a kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(super) struct Asked {
    pub has_mask: bool,
    pub has_bias: bool,
    pub has_softcap: bool,
    /// What dropout sets to 0, if there is dropout.
    pub dropped: Option<Dropped>,
    /// True where the device multiplies to 64 bits.
    pub wide: bool,
}

impl Asked {
    pub const fn drops_probabilities(&self) -> bool {
        matches!(self.dropped, Some(Dropped::Probabilities))
    }

    pub const fn drops_scores(&self) -> bool {
        matches!(self.dropped, Some(Dropped::Scores))
    }

    /// True where a score is not as steep as its product.
    pub const fn has_slopes(&self) -> bool {
        self.has_softcap || self.drops_scores()
    }
}

/// Where the factor of an element is: without dropout one serves all.
pub(super) const fn factor_slot(drops: bool, slot: usize) -> usize {
    if drops { slot } else { 0 }
}

/// Which gradients a launch computes that goes through the queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Wanted {
    pub key: bool,
    pub value: bool,
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

/// The queries from `row` on, of this head of all batches, beside the first tile of keys that they see.
#[cube]
pub(super) fn place_of_queries(
    problem: &Problem,
    head: u32,
    row: u32,
    #[comptime] keys: usize,
) -> Place {
    Place {
        batch: head / problem.heads,
        head: head % problem.heads,
        row,
        col: tile_of(first_key(problem, row), keys),
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

/// The start of the tile, of so many positions, that holds one.
#[cube]
pub(super) fn tile_of(position: u32, #[comptime] tile: usize) -> u32 {
    position / comptime!(tile as u32) * comptime!(tile as u32)
}

/// True where the query sees the key by its place, and both are there.
#[cube]
pub(super) fn sees(problem: &Problem, row: u32, col: u32) -> bool {
    row < problem.queries
        && col < problem.keys
        && col + problem.queries + problem.before >= row + problem.keys
        && col + problem.queries <= row + problem.keys + problem.behind
}

/// True where the mask hides the key from the query, both of which are there.
#[cube]
pub(super) fn is_masked<M: Numeric>(
    mask: &Array<M>,
    problem: &Problem,
    place: &Place,
    row: u32,
    col: u32,
) -> bool {
    let index = at(&problem.mask, place, row, col);
    u32::cast_from(mask[index as usize]) != 0u32
}

/// The bias of a score, whose query and key are there.
#[cube]
pub(super) fn bias_of<F: Numeric>(
    bias: &Array<F>,
    problem: &Problem,
    place: &Place,
    row: u32,
    col: u32,
) -> f32 {
    let index = at(&problem.bias, place, row, col);
    f32::cast_from(bias[index as usize])
}

#[cube]
fn at(strides: &Strides4, place: &Place, row: u32, col: u32) -> u32 {
    place.batch * strides.batch + place.head * strides.head + row * strides.row + col * strides.col
}

/// The score of a product of a query and a key before the bias, and its slope there; `factor` is that of dropout of
/// scores.
#[cube]
pub(super) fn score(
    product: f32,
    factor: f32,
    problem: &Problem,
    #[comptime] asked: Asked,
) -> (f32, f32) {
    let score = product * problem.scale;
    let (capped, slope) = if comptime!(asked.has_softcap) {
        let (tanh, slope) = tanh(score / problem.softcap);
        (problem.softcap * tanh, slope)
    } else {
        (score, 1.0f32.runtime())
    };
    if comptime!(asked.drops_scores()) {
        (capped * factor, slope * factor)
    } else {
        (capped, slope)
    }
}

/// A probability with dropout's factor, and the gradient of its score; 0 where the key is hidden.
#[cube]
pub(super) fn gradient(
    probability: f32,
    hidden: bool,
    delta: f32,
    of_probability: f32,
    factor: f32,
) -> (f32, f32) {
    let gradient = probability * (of_probability * factor - delta);
    (
        select(hidden, 0.0f32, probability * factor),
        select(hidden, 0.0f32, gradient),
    )
}

/// The log-sum-exp of a row from which something is taken away: 0 in place of the negative infinity of a row that sees
/// nothing.
#[cube]
pub(super) fn finite(log_sum_exp: f32) -> f32 {
    select(log_sum_exp < f32::new(f32::MIN), 0.0f32, log_sum_exp)
}

/// The hyperbolic tangent and its slope, from one exponential; NaN stays NaN.
#[cube]
fn tanh(x: f32) -> (f32, f32) {
    let power = fast::exp(select(x < 0.0f32, x, -x) * 2.0f32);
    let sum = 1.0f32 + power;
    let tanh = (1.0f32 - power) / sum;
    let slope = 4.0f32 * power / (sum * sum);
    (select(x < 0.0f32, -tanh, tanh), slope)
}

/// The words of the keys from `4 index` to `4 index + 3` of a query of this head.
#[cube]
pub(super) fn dropout_words(
    problem: &Problem,
    place: &Place,
    row: u32,
    index: u32,
    #[comptime] asked: Asked,
) -> (u32, u32, u32, u32) {
    let row = (place.batch * problem.heads + place.head) * problem.queries + row;
    random_words(row, index, &problem.dropout.random, asked.wide)
}

/// The factor of dropout of this word.
#[cube]
pub(super) fn factor(word: u32, dropout: &DropoutNumbers) -> f32 {
    select(uniform24(word) < dropout.rate, 0.0f32, dropout.kept)
}
