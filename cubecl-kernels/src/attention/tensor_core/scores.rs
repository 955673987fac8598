//! The scores of a plane's rows, and what follows from them in the backward pass.

use cubecl::prelude::*;

use crate::{
    attention::scores::{
        Asked, Place, Problem, bias_of, dropout_words, factor, factor_slot, finite, gradient,
        is_masked, score, sees,
    },
    dropout::DRAWS,
    fast::exp2,
};

use super::staged::{MMA_N, OWN, plane_row, slot, unit_col, unit_row};

/// How a unit's scores lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Layout {
    /// The rows are keys, and the columns queries.
    pub swapped: bool,
    /// Rows of a cube.
    pub rows: usize,
    pub cols: usize,
}

impl Layout {
    /// Results of matrix instructions side by side.
    pub(super) const fn results(&self) -> usize {
        self.cols / MMA_N
    }

    /// Scores of a unit.
    const fn elements(&self) -> usize {
        self.results() * OWN
    }

    /// Queries of a cube.
    const fn queries(&self) -> usize {
        if self.swapped { self.cols } else { self.rows }
    }

    /// Keys of a cube.
    const fn keys(&self) -> usize {
        if self.swapped { self.rows } else { self.cols }
    }
}

/// Scores of a unit, as [`slot`] counts them.
#[derive(CubeType)]
pub(super) struct Scores {
    /// Negative infinity where a key is hidden.
    pub values: Array<f32>,
    /// Slopes of the scores, where they have some.
    pub slopes: Array<f32>,
}

/// The query and the key of a unit's element.
#[cube]
fn position(
    place: &Place,
    #[comptime] result: usize,
    #[comptime] half: usize,
    #[comptime] side: usize,
    #[comptime] layout: Layout,
) -> (u32, u32) {
    let row = plane_row() + unit_row() + comptime!((half * 8) as u32);
    let col = unit_col() + comptime!((result * MMA_N + side) as u32);
    if comptime!(layout.swapped) {
        (place.row + col, place.col + row)
    } else {
        (place.row + row, place.col + col)
    }
}

/// Scores of products of queries and keys.
#[cube]
pub(super) fn scores<F: Numeric, M: Numeric, P: Size>(
    products: &Sequence<Array<Vector<f32, P>>>,
    mask: &Array<M>,
    bias: &Array<F>,
    problem: &Problem,
    place: &Place,
    negative_infinity: f32,
    #[comptime] layout: Layout,
    #[comptime] asked: Asked,
) -> Scores {
    let mut values = Array::<f32>::new(comptime!(layout.elements()));
    let slopes = comptime!(if asked.has_slopes() {
        layout.elements()
    } else {
        1
    });
    let mut slopes = Array::<f32>::new(slopes);
    let drops = comptime!(asked.drops_scores());
    let factors = factors(problem, place, drops, layout, asked);
    #[unroll]
    for result in 0..comptime!(layout.results()) {
        #[unroll]
        for half in 0..2usize {
            let pair = products.index(result)[half];
            #[unroll]
            for side in 0..2usize {
                let slot = comptime!(slot(result, half, side));
                let factor = factors[comptime!(factor_slot(drops, slot))];
                let (of_product, slope) = score(pair[side], factor, problem, asked);
                let mut value = of_product;
                if comptime!(asked.has_slopes()) {
                    slopes[slot] = slope;
                }
                if comptime!(asked.has_bias || asked.has_mask) {
                    let (row, col) = position(place, result, half, side, layout);
                    // Scores that are not there are hidden below.
                    let row = min(row, problem.queries - 1);
                    let col = min(col, problem.keys - 1);
                    if comptime!(asked.has_bias) {
                        value += bias_of::<F>(bias, problem, place, row, col);
                    }
                    if comptime!(asked.has_mask) {
                        let hides = is_masked::<M>(mask, problem, place, row, col);
                        value = select(hides, negative_infinity, value);
                    }
                }
                values[slot] = value;
            }
        }
    }
    // Most tiles are seen as a whole.
    if !is_seen(problem, place, layout) {
        #[unroll]
        for result in 0..comptime!(layout.results()) {
            #[unroll]
            for half in 0..2usize {
                #[unroll]
                for side in 0..2usize {
                    let slot = comptime!(slot(result, half, side));
                    let (row, col) = position(place, result, half, side, layout);
                    let sees = sees(problem, row, col);
                    values[slot] = select(sees, values[slot], negative_infinity);
                }
            }
        }
    }
    Scores { values, slopes }
}

/// True where all queries of a cube's tile are there and see all keys.
#[cube]
fn is_seen(problem: &Problem, place: &Place, #[comptime] layout: Layout) -> bool {
    let last_row = place.row + comptime!(layout.queries() as u32 - 1);
    let last_col = place.col + comptime!(layout.keys() as u32 - 1);
    sees(problem, last_row, place.col) && sees(problem, place.row, last_col)
}

/// True where the key of a score is hidden.
#[cube]
pub(super) fn is_hidden(score: f32) -> bool {
    score < f32::new(f32::MIN)
}

/// `exp(score - reference)` in few instructions; NaN stays NaN.
#[cube]
pub(super) fn weight(score: f32, reference: f32) -> f32 {
    exp2((score - reference) * std::f32::consts::LOG2_E)
}

/// The factors of a unit's elements where dropout drops them, each at its [`factor_slot`]; else 1.
#[cube]
pub(super) fn factors(
    problem: &Problem,
    place: &Place,
    #[comptime] drops: bool,
    #[comptime] layout: Layout,
    #[comptime] asked: Asked,
) -> Array<f32> {
    let mut factors = Array::<f32>::new(comptime!(if drops { layout.elements() } else { 1 }));
    if comptime!(!drops) {
        factors[0] = 1.0f32;
    }
    #[unroll]
    for result in 0..comptime!(layout.results()) {
        #[unroll]
        for half in 0..2usize {
            if comptime!(drops && layout.swapped) {
                #[unroll]
                for side in 0..2usize {
                    let (row, col) = position(place, result, half, side, layout);
                    let word = dropout_word(problem, place, row, col, asked);
                    factors[comptime!(slot(result, half, side))] = factor(word, &problem.dropout);
                }
            } else if comptime!(drops) {
                let (row, col) = position(place, result, half, 0usize, layout);
                let index = col / comptime!(DRAWS as u32);
                let (b0, b1, b2, b3) = dropout_words(problem, place, row, index, asked);
                // Both neighbours share a counter.
                let is_first = col % comptime!(DRAWS as u32) == 0;
                let dropout = &problem.dropout;
                factors[comptime!(slot(result, half, 0))] =
                    factor(select(is_first, b0, b2), dropout);
                factors[comptime!(slot(result, half, 1))] =
                    factor(select(is_first, b1, b3), dropout);
            }
        }
    }
    factors
}

#[cube]
fn dropout_word(
    problem: &Problem,
    place: &Place,
    row: u32,
    col: u32,
    #[comptime] asked: Asked,
) -> u32 {
    let draws = comptime!(DRAWS as u32);
    let (b0, b1, b2, b3) = dropout_words(problem, place, row, col / draws, asked);
    let lane = col % draws;
    let low = select(lane == 0, b0, b1);
    let high = select(lane == 2, b2, b3);
    select(lane < 2, low, high)
}

/// The terms of the gradients, of a unit's scores.
#[derive(CubeType)]
pub(super) struct OfScores {
    /// Probabilities, with dropout.
    pub probabilities: Array<f32>,
    /// Gradients of the products, but for the scale.
    pub gradients: Array<f32>,
}

/// From the scores and the products of gradients and values.
#[cube]
pub(super) fn of_scores<P: Size>(
    scores: &Scores,
    of_probabilities: &Sequence<Array<Vector<f32, P>>>,
    log_sum_exp: &Array<f32>,
    delta: &Array<f32>,
    problem: &Problem,
    place: &Place,
    #[comptime] layout: Layout,
    #[comptime] asked: Asked,
) -> OfScores {
    let mut result = OfScores {
        probabilities: Array::<f32>::new(comptime!(layout.elements())),
        gradients: Array::<f32>::new(comptime!(layout.elements())),
    };
    let drops = comptime!(asked.drops_probabilities());
    let factors = factors(problem, place, drops, layout, asked);
    let start = (place.batch * problem.heads + place.head) * problem.queries;
    #[unroll]
    for of_result in 0..comptime!(layout.results()) {
        #[unroll]
        for half in 0..2usize {
            let pair = of_probabilities.index(of_result)[half];
            #[unroll]
            for side in 0..2usize {
                let slot = comptime!(slot(of_result, half, side));
                let (row, _col) = position(place, of_result, half, side, layout);
                // A query that is not there sees nothing.
                let row = (start + min(row, problem.queries - 1)) as usize;
                let score = scores.values[slot];
                let (probability, of_score) = gradient(
                    weight(score, finite(log_sum_exp[row])),
                    is_hidden(score),
                    delta[row],
                    pair[side],
                    factors[comptime!(factor_slot(drops, slot))],
                );
                result.probabilities[slot] = probability;
                result.gradients[slot] = of_score;
                if comptime!(asked.has_slopes()) {
                    result.gradients[slot] = of_score * scores.slopes[slot];
                }
            }
        }
    }
    result
}
