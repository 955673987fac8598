//! The scores of a tile, and what follows from them in the backward pass: 4 x 4 in each unit.

use cubecl::prelude::*;

use crate::{
    attention::scores::{
        Asked, Place, Problem, bias_of, dropout_words, factor, factor_slot, finite, gradient,
        is_masked, score, sees,
    },
    dropout::DRAWS,
    fast,
};

use super::tile::{ELEMENTS, OWN, unit_col, unit_row};

/// Scores of a unit.
#[derive(CubeType)]
pub(super) struct Scores {
    /// The least number where a key is hidden.
    pub values: Array<f32>,
    /// Slopes of the scores, where they have some.
    pub slopes: Array<f32>,
    /// A bit for each score: 1 where the key is hidden.
    pub hidden: u32,
}

/// Scores of products of queries and keys.
#[cube]
pub(super) fn scores<F: Numeric, M: Numeric>(
    products: &Array<f32>,
    mask: &Array<M>,
    bias: &Array<F>,
    problem: &Problem,
    place: &Place,
    #[comptime] asked: Asked,
) -> Scores {
    let mut values = Array::<f32>::new(ELEMENTS);
    let mut slopes = Array::<f32>::new(comptime!(if asked.has_slopes() { ELEMENTS } else { 1 }));
    let drops = comptime!(asked.drops_scores());
    let factors = factors(problem, place, drops, asked);
    let mut hidden = 0u32.runtime();
    #[unroll]
    for i in 0..OWN {
        let row = place.row + unit_row() + comptime!(i as u32);
        #[unroll]
        for j in 0..OWN {
            let slot = comptime!(i * OWN + j);
            let col = place.col + unit_col() + comptime!(j as u32);
            let factor = factors[comptime!(factor_slot(drops, slot))];
            let (of_product, slope) = score(products[slot], factor, problem, asked);
            let mut score = of_product;
            if comptime!(asked.has_slopes()) {
                slopes[slot] = slope;
            }
            let sees = sees(problem, row, col);
            let mut hides = select(sees, 0u32, 1u32);
            if comptime!(asked.has_mask) {
                if sees {
                    let masked = is_masked::<M>(mask, problem, place, row, col);
                    hides = select(masked, 1u32, 0u32);
                }
            }
            if comptime!(asked.has_bias) {
                if hides == 0u32 {
                    score += bias_of::<F>(bias, problem, place, row, col);
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

/// The factors of a unit's elements where dropout drops them, each at its [`factor_slot`]; else 1.
#[cube]
pub(super) fn factors(
    problem: &Problem,
    place: &Place,
    #[comptime] drops: bool,
    #[comptime] asked: Asked,
) -> Array<f32> {
    let mut factors = Array::<f32>::new(comptime!(if drops { ELEMENTS } else { 1 }));
    if comptime!(drops) {
        let dropout = &problem.dropout;
        // Tiles start at multiples of four: a unit's neighbours share the words of one counter.
        let index = (place.col + unit_col()) / comptime!(DRAWS as u32);
        #[unroll]
        for i in 0..OWN {
            let row = place.row + unit_row() + comptime!(i as u32);
            let (b0, b1, b2, b3) = dropout_words(problem, place, row, index, asked);
            let first = comptime!(i * OWN);
            factors[first] = factor(b0, dropout);
            factors[comptime!(first + 1)] = factor(b1, dropout);
            factors[comptime!(first + 2)] = factor(b2, dropout);
            factors[comptime!(first + 3)] = factor(b3, dropout);
        }
    } else {
        factors[0] = 1.0f32;
    }
    factors
}

/// The numbers of a row in the backward pass.
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
            rows.log_sum_exp[i] = finite(log_sum_exp[(start + row) as usize]);
            rows.delta[i] = delta[(start + row) as usize];
        }
    }
    rows
}

/// The terms of the gradients, of a unit's scores.
#[derive(CubeType)]
pub(super) struct OfScores {
    /// Probabilities, with dropout.
    pub probabilities: Array<f32>,
    /// Gradients of the scores.
    pub gradients: Array<f32>,
    /// Gradients of the products, but for the scale.
    pub of_products: Array<f32>,
}

/// From the scores and the products of gradients and values.
#[cube]
pub(super) fn of_scores(
    scores: &Scores,
    of_probabilities: &Array<f32>,
    rows: &Rows,
    problem: &Problem,
    place: &Place,
    #[comptime] asked: Asked,
) -> OfScores {
    let mut result = OfScores {
        probabilities: Array::<f32>::new(ELEMENTS),
        gradients: Array::<f32>::new(ELEMENTS),
        of_products: Array::<f32>::new(ELEMENTS),
    };
    let drops = comptime!(asked.drops_probabilities());
    let factors = factors(problem, place, drops, asked);
    #[unroll]
    for i in 0..OWN {
        #[unroll]
        for j in 0..OWN {
            let slot = comptime!(i * OWN + j);
            let (probability, gradient) = gradient(
                fast::exp(scores.values[slot] - rows.log_sum_exp[i]),
                is_hidden(scores.hidden, slot),
                rows.delta[i],
                of_probabilities[slot],
                factors[comptime!(factor_slot(drops, slot))],
            );
            result.probabilities[slot] = probability;
            result.gradients[slot] = gradient;
            if comptime!(asked.has_slopes()) {
                result.of_products[slot] = gradient * scores.slopes[slot];
            } else {
                result.of_products[slot] = gradient;
            }
        }
    }
    result
}
